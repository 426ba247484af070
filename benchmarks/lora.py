"""Low-rank tuning of large and of quantized models: python -m benchmarks.lora

Plan   the 8B shape in Q4_K (rank 8, 2,048 tokens, one sequence): the smallest budget, the mapped base counted.
Step   the 110m shape in Q8_0 and Q4_K: private memory and time of a step, beside PyTorch tuning the same model in f32
       with the same additions, its base frozen. Every side runs in a process of its own; the better of some steps
       counts. Only ratios mean something on a busy machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.torch_llama import Trained, optimizer
from benchmarks.torch_tuned import Tuned
from packtrain import kernels
from packtrain.common.memory import MemoryPeak, release_memory
from packtrain.dtypes import BLOCK_TYPES, Dtype
from packtrain.engine.optim import AdamW
from packtrain.engine.tensor import Tensor
from packtrain.gguf import GGUF, DeferredTensor, write_gguf
from packtrain.kernels.quantized_arrays import quantize
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from packtrain.models.lora import Lora
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import PlanSearch
from packtrain.planner.speed_probe import measure_rates
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training.training_engine import TrainingEngine

GIB, MIB = 2**30, 2**20
LLAMA_8B = Config(128_256, 2048, 4096, 32, 14_336, 32, 8, rope_freq_base=5e5, tied=False)
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
RANK, ROWS, TIME, STEPS = 16, 1, 512, 3
SIDES = ("q8_0", "q4_K", "torch")


def shape_of(
    config: Config, dtype: Dtype, rank: int, rows: int, time: int, strict: bool
) -> StepShape:
    """Low-rank additions to every matrix of the blocks; all matrices stored as `dtype`."""
    ranks = tuple((f"blk.*.{part}.weight", rank) for part in PARTS)
    stored = (name for name, leaf in transformer.weights(config).items() if len(leaf.shape) > 1)
    base = BaseModel(tuple((name, dtype) for name in stored), strict=strict)
    tuned = replace(config, lora=Lora(ranks, alpha=2.0 * rank))
    return StepShape(tuned, rows, time, max_norm=1.0, evaluate=False, base=base)


def plan() -> None:
    shape = shape_of(LLAMA_8B, BLOCK_TYPES["q4_K"], 8, 1, 2048, strict=True)
    request = PlanRequest(AdamW(), measure_rates()[0], 150 * MIB)
    candidate = PlanSearch(request).smallest_of([replace(shape, chunk=16)])
    plans = request.make_plans(candidate.shape)
    total = request.peak_nbytes(plans)
    print(
        f"8B in Q4_K, rank 8, 1 × 2,048 tokens: {total / GIB:.2f} GiB with its base of {plans.mapped_nbytes / GIB:.2f}"
        f" GiB; arena {plans.arena_nbytes / GIB:.2f} GiB, expected {plans.step_seconds(request.rates):.0f} s a step"
    )


# ---- steps ---------------------------------------------------------------------------------------------------


def batch_of(config: Config) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, TIME + 1), np.int32)
    pos = np.tile(np.arange(TIME, dtype=np.int32), (ROWS, 1))
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "pos": pos,
        "seq": np.zeros_like(pos),
        "weights": np.ones((ROWS, TIME), np.float32),
    }


def ours(name: str) -> dict[str, float]:
    """Private bytes beside what the process had, and seconds of the best step."""
    config, dtype, update = PRESETS["110m"], BLOCK_TYPES[name], AdamW()
    shape = shape_of(config, dtype, RANK, ROWS, TIME, strict=False)
    kernels.load_all()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.gguf"
        leaves = transformer.weights(config, dict(shape.base.types if shape.base else ()))
        write_gguf(path, {}, {n: _random(leaf, random) for n, leaf in leaves.items()})
        base = GGUF(path)
        release_memory()
        with MemoryPeak() as peak:
            plans = make_plans(shape, update)
            engine = TrainingEngine(plans, update, {n: base.array(n) for n in base.entries})
            for leaf in plans.trained_names:
                engine.session.fill(leaf, lambda array: array.fill(1e-3))
            seconds = _best(lambda: engine.step([batch_of(config)], 1, 1e-4))
    return {"bytes": peak.nbytes - peak.baseline, "seconds": seconds}


def _random(leaf: Tensor, random: np.random.Generator) -> DeferredTensor:
    """A weight of the base, made when it is written."""

    def make() -> list[np.ndarray]:
        values = random.standard_normal(leaf.shape, np.float32) * np.float32(0.02)
        return [quantize(values, leaf.dtype)]

    return DeferredTensor(leaf.dtype, leaf.shape, make)


def theirs() -> dict[str, float]:
    """PyTorch's eager mode: the base in f32 and frozen, additions as PEFT computes them."""
    config = PRESETS["110m"]
    release_memory()
    with MemoryPeak() as peak:
        model = Tuned(config, transformer.initial_weights(config), RANK, 2.0)
        trained = Trained(model, optimizer(model, 1e-4), 1.0)
        seconds = _best(lambda: trained.step([batch_of(config)], 1e-4))
    return {"bytes": peak.nbytes - peak.baseline, "seconds": seconds}


def _best(step: Callable[[], object]) -> float:
    times = []
    for _ in range(STEPS):
        start_time = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_time)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", choices=SIDES, help="one side of the step, as JSON")
    side = parser.parse_args().side
    if side:
        print(json.dumps(theirs() if side == "torch" else ours(side)))
        return
    plan()
    results = {}
    for name in SIDES:
        command = [sys.executable, "-m", "benchmarks.lora", "--side", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results[name] = json.loads(done.stdout)
    for name, got in results.items():
        share = got["bytes"] / results["torch"]["bytes"]
        print(
            f"110m, {ROWS} × {TIME} tokens, {name}: {got['bytes'] / MIB:.0f} MiB ({share:.2f} of PyTorch's),"
            f" {got['seconds']:.2f} s a step ({got['seconds'] / results['torch']['seconds']:.2f} of PyTorch's)"
        )


if __name__ == "__main__":
    main()
