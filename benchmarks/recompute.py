"""Time against memory: what is kept of the forward pass, planned, predicted and measured.

    python -m benchmarks.recompute [--shapes 110m 1b] [--time 512] [--rounds 5]

One step with plain SGD, one sequence; `1b` is four blocks of the Llama-3.2-1B shape with its vocabulary cut to 32,000.
Budgets are parts of the activations of the plan that keeps everything: what its arena has above the arena without
blocks. Extra time is over the step that keeps everything, median of paired rounds.
"""

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from packtrain import cost
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from packtrain.recompute import keep_all
from packtrain.run import Executor, Session
from packtrain.train.optim import SGD
from packtrain.train.plans import Shape
from packtrain.train.search import Setting, chain

BUDGETS = (80, 60, 50, 40, 30, 20, 10, 5)
MIB = 2**20
SHAPES = {
    "15m": PRESETS["15m"],
    "110m": PRESETS["110m"],
    "1b": Config(32_000, 512, 2048, 4, 8192, 32, 8, rope_freq_base=5e5),
}


def seconds(run: Executor, inputs: dict[str, np.ndarray]) -> float:
    began = time.perf_counter()
    run(inputs)
    return time.perf_counter() - began


def measure(name: str, time_: int, rounds: int) -> None:
    config = replace(SHAPES[name], context_length=time_)
    optimizer, shape = SGD(lr=0.0), Shape(config, 1, time_)
    setting = Setting(optimizer, cost.measured(), 0)
    blocks = chain(shape, setting)
    everything = blocks.plan(keep_all(config.block_count, len(blocks.values)))
    floor = blocks.head_work
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, time_ + 1), np.int32)
    inputs = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "seq": np.zeros((1, time_), np.int32),
        "weights": np.full((1, time_), 1 / time_, np.float32),
        "pos": np.arange(time_, dtype=np.int32)[None],
    } | optimizer.inputs(1)
    session = Session()
    whole = session.executor(everything.placed, everything.plan())
    transformer.initialise(config, 0, session.fill)
    expected = whole(inputs)
    activations = everything.arena - floor
    base = min(seconds(whole, inputs) for _ in range(3))
    print(f"{name}, 1 × {time_}: keeps everything in {everything.arena / MIB:.1f} MiB, of which activations "
          f"{activations / MIB:.1f} MiB; {base:.3f} s a step")  # fmt: skip
    print(
        f"{'budget':>7} {'planned MiB':>12} {'of keep-all':>12} {'decided in s':>13} {'predicted':>10} "
        f"{'measured':>9}  bits"
    )
    for percent in BUDGETS:
        began = time.perf_counter()
        found = blocks.within(floor + activations * percent // 100)
        decided = time.perf_counter() - began
        if found is None:
            print(f"{percent:>6}% {'does not fit':>12}")
            continue
        run = session.executor(found.placed, found.plan())
        same = all(np.array_equal(run(inputs)[k], expected[k]) for k in expected)
        ratios = [seconds(run, inputs) / seconds(whole, inputs) for _ in range(rounds)]
        predicted = found.seconds / cost.seconds(everything.placed, setting.rates)
        print(
            f"{percent:>6}% {found.arena / MIB:>12.1f} {(found.arena - floor) / activations:>12.1%} {decided:>13.2f} "
            f"{predicted:>+10.1%} {statistics.median(ratios) - 1:>+9.1%}  {'equal' if same else 'DIFFERENT'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["110m", "1b"], choices=SHAPES)
    parser.add_argument("--time", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for name in given.shapes:
        measure(name, given.time, given.rounds)


if __name__ == "__main__":
    main()
