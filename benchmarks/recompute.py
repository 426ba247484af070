"""Time against memory: what is kept of the forward pass, planned, predicted and measured.

    python -m benchmarks.recompute [--shapes 110m 1b] [--time 512] [--rounds 5]

One step with plain SGD, one sequence; `1b` is four blocks of the Llama-3.2-1B shape with its vocabulary cut to 32,000.
Budgets are parts of the activations of the plan that keeps everything: what of its peak the blocks' forward pass keeps;
the rest, such as gradients, every budget has, and what is computed again has to fit into the budget as well. Extra time
is over the step that keeps everything, median of paired rounds. Over 20 budgets, a smaller one never plans a larger
peak nor expects less time.
"""

import argparse
import statistics
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np

from packtrain.engine.executor import Executor, Session
from packtrain.engine.memory_plan import Buffer, Plan, make_plan
from packtrain.engine.optim import SGD
from packtrain.engine.placement import Placed, place
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from packtrain.planner import cost_model
from packtrain.planner.checkpointing import RecomputeChoice
from packtrain.planner.drafts import chain
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.speed_probe import measure_rates
from packtrain.planner.step_shape import StepShape
from tests.search_checks import smallest_planned

BUDGETS = (80, 60, 50, 40, 30, 20, 10, 5)
MIB = 2**20
SHAPES = {
    "15m": PRESETS["15m"],
    "110m": PRESETS["110m"],
    "1b": Config(32_000, 512, 2048, 4, 8192, 32, 8, rope_freq_base=5e5),
}


def seconds(run: Executor, inputs: dict[str, np.ndarray]) -> float:
    start_time = time.perf_counter()
    run(inputs)
    return time.perf_counter() - start_time


def of_blocks(buffer: Buffer) -> bool:
    """Whether it is kept of the forward pass; the head works in its own buffers."""
    return buffer.category == "activation" and buffer.op != "linear_cross_entropy"


def ratio(run: Executor, full_run: Executor, inputs: dict[str, np.ndarray], turn: int) -> float:
    """Of one pair of steps, each of them first in every other pair."""
    pair = [run, full_run] if turn % 2 else [full_run, run]
    durations = {executor: seconds(executor, inputs) for executor in pair}
    return durations[run] / durations[full_run]


def measure(name: str, time_: int, rounds: int) -> None:
    config = replace(SHAPES[name], context_length=time_)
    optimizer, shape = SGD(lr=0.0), StepShape(config, 1, time_)
    request = PlanRequest(optimizer, measure_rates()[0])
    blocks = chain(shape, request)

    def planned(choice: RecomputeChoice | None) -> tuple[Placed, Plan]:
        placed = place(blocks.build(config.block_count, choice).graph)
        return placed, make_plan(placed)

    full_placement, plan = planned(None)
    keeping = plan.arena().nbytes
    activations = sum(buffer.nbytes for buffer in plan.peak() if of_blocks(buffer))
    floor = keeping - activations
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, time_ + 1), np.int32)
    inputs = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "seq": np.zeros((1, time_), np.int32),
        "weights": np.full((1, time_), 1 / time_, np.float32),
        "pos": np.arange(time_, dtype=np.int32)[None],
    } | optimizer.inputs(1)
    session = Session()
    full_run = session.executor(full_placement, plan)
    transformer.initialize_weights(config, 0, session.fill)
    expected = full_run(inputs)
    step_seconds = cost_model.graph_seconds(full_placement, request.rates)
    base = min(seconds(full_run, inputs) for _ in range(3))
    print(f"{name}, 1 × {time_}: keeps everything in {keeping / MIB:.1f} MiB, of which activations "
          f"{activations / MIB:.1f} MiB; {base:.3f} s a step")  # fmt: skip
    print(
        f"{'budget':>7} {'planned MiB':>12} {'of keep-all':>12} {'decided in s':>13} {'predicted':>10} "
        f"{'measured':>9}  bits"
    )
    for percent in BUDGETS:
        start_time = time.perf_counter()
        solution = blocks.fastest_within(floor + activations * percent // 100)
        decided = time.perf_counter() - start_time
        if solution is None:
            min_nbytes = smallest_planned(blocks).arena - floor
            print(f"{percent:>6}% does not fit: the least is {min_nbytes / activations:.1%}")
            continue
        placed, plan = planned(solution.choice)
        arena, run = plan.arena().nbytes, session.executor(placed, plan)
        is_equal = all(np.array_equal(run(inputs)[k], expected[k]) for k in expected)
        ratios = [ratio(run, full_run, inputs, turn) for turn in range(rounds)]
        predicted = solution.seconds / step_seconds
        print(
            f"{percent:>6}% {arena / MIB:>12.1f} {(arena - floor) / activations:>12.1%} {decided:>13.2f} "
            f"{predicted:>+10.1%} {statistics.median(ratios) - 1:>+9.1%}  {'equal' if is_equal else 'DIFFERENT'}"
        )
    steps = [blocks.fastest_within(floor + activations * k // 20) for k in range(20, 0, -1)]
    fitting = [solution for solution in steps if solution is not None]
    peaks, times = [f.arena for f in fitting], [f.seconds for f in fitting]
    falls = all(a >= b for a, b in pairwise(peaks)) and all(
        f is None for f in steps[len(fitting) :]
    )
    rises = all(a <= b for a, b in pairwise(times))
    print(
        f"{len(fitting)} of 20 budgets fit; as they fall the peak {'never rises' if falls else 'RISES'}, "
        f"the expected time {'never falls' if rises else 'FALLS'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["110m", "1b"], choices=SHAPES)
    parser.add_argument("--time", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in args.shapes:
        measure(name, args.time, args.rounds)


if __name__ == "__main__":
    main()
