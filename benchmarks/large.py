"""Large shapes: how long the decision takes, and one step within a budget: python -m benchmarks.large

    python -m benchmarks.large [--run 110m 1b] [--decide 1b 8b]

A run is one step of f32 AdamW on random weights and tokens at 512 tokens, `110m` clipped within 2.2 GiB, `1b` (the
Llama-3.2-1B shape) not clipped within 17 GiB; private memory is sampled throughout. A decision is the whole search for
a budget of 0.6 of what the arena would take if everything were kept.
"""

import argparse
import time

import numpy as np

from packtrain import kernels
from packtrain.common.memory import MemoryPeak, private_nbytes, release_memory
from packtrain.engine.optim import AdamW
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from packtrain.planner import cost_model
from packtrain.planner.budget import plan_within_limits
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import find_fastest_shape
from packtrain.planner.plan_table import choice_texts
from packtrain.planner.speed_probe import measure_rates
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training.training_engine import TrainingEngine

GIB = 2**30
TIME = 512
SHAPES = {
    "110m": PRESETS["110m"],
    "1b": Config(128_256, TIME, 2048, 16, 8192, 32, 8, rope_freq_base=5e5),
    "8b": Config(128_256, TIME, 4096, 32, 14_336, 32, 8, rope_freq_base=5e5, tied=False),
}
LIMITS = {"110m": (2.2, 1.0), "1b": (17.0, None)}


def decide(name: str, rates: cost_model.BackendRates) -> None:
    shape, request = StepShape(SHAPES[name], 1, TIME, evaluate=False), PlanRequest(AdamW(), rates)
    start_time = time.perf_counter()
    full_plans = make_plans(shape, request.optimizer)
    planning = time.perf_counter() - start_time
    limit = request.peak_nbytes(full_plans) - int(0.4 * full_plans.arena_nbytes)
    start_time = time.perf_counter()
    answer = find_fastest_shape(shape, request.with_limit(limit))
    elapsed = time.perf_counter() - start_time
    print(
        f"{name}: {request.peak_nbytes(full_plans) / GIB:.2f} GiB keeping everything (planned in {planning:.2f} s); "
        f"{limit / GIB:.2f} GiB {'fits' if answer.is_within_limits else 'does not fit'}, decided in {elapsed:.2f} s"
    )


def run(name: str, rates: cost_model.BackendRates) -> None:
    limit, max_norm = LIMITS[name]
    config, optimizer = SHAPES[name], AdamW()
    release_memory()
    request = PlanRequest(optimizer, rates, private_nbytes()).with_limit(int(limit * GIB))
    shape = StepShape(config, 1, TIME, max_norm=max_norm, evaluate=False)
    plans = plan_within_limits(shape, request)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, TIME + 1), np.int32)
    batch = {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": np.ones((1, TIME), np.float32),
        "pos": np.arange(TIME, dtype=np.int32)[None],
        "seq": np.zeros((1, TIME), np.int32),
    }
    with MemoryPeak() as peak:
        engine = TrainingEngine(plans, optimizer)
        transformer.initialize_weights(config, 0, engine.session.fill)
        losses, seconds = [], []
        for number in (1, 2):
            start_time = time.perf_counter()
            losses.append(engine.step([batch], number, 1e-3).loss)
            seconds.append(time.perf_counter() - start_time)
    print(
        f"{name}: {'; '.join(['one step', *choice_texts(plans)])}: planned {plans.total_nbytes / GIB:.2f} GiB, peak "
        f"{peak.nbytes / GIB:.2f} GiB of {limit} GiB; loss {losses[0]:.3f}, {losses[1]:.3f}; "
        f"{min(seconds):.1f} s a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--run", nargs="*", default=["110m", "1b"], choices=LIMITS)
    parser.add_argument("--decide", nargs="*", default=["1b", "8b"], choices=SHAPES)
    args = parser.parse_args()
    kernels.load_all()
    rates = measure_rates()[0]
    for name in args.decide:
        decide(name, rates)
    for name in args.run:
        run(name, rates)


if __name__ == "__main__":
    main()
