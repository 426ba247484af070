"""Low-rank tuning of large and of quantized models: python -m benchmarks.lora

Plan   the 8B shape in Q4_K (rank 8, 2,048 tokens, one sequence): the smallest budget, the mapped base counted.
Step   the 110m shape, all matrices in Q8_0 and in Q4_K: private memory and time of a step, beside PyTorch tuning the
       same model in f32 with the same additions, its base frozen. Every side runs in a process of its own; the better
       of some steps counts. Only ratios mean something on a busy machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import torch_peer
from benchmarks.llama import PRESET, write_random_preset
from benchmarks.torch_llama import Tuned
from packtrain import kernels
from packtrain.common.memory import MemoryPeak, release_memory
from packtrain.devtools.bench import training
from packtrain.devtools.bench.timing import time_call
from packtrain.dtypes import BLOCK_TYPES
from packtrain.engine.optim import AdamW
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from packtrain.models.lora import Lora
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import PlanSearch
from packtrain.planner.speed_probe import measure_rates
from packtrain.planner.step_shape import BaseModel, StepShape
from tests.models import initial_weights

GIB, MIB = 2**30, 2**20
LLAMA_8B = Config(128_256, 2048, 4096, 32, 14_336, 32, 8, rope_freq_base=5e5, tied=False)
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
RANK, STEPS = 16, 3
SIDES = ("Q8_0", "Q4_K_M", "torch")


def plan() -> None:
    """The smallest plan of the 8B shape: additions to every matrix of the blocks, all matrices in Q4_K."""
    ranks = tuple((f"blk.*.{part}.weight", 8) for part in PARTS)
    matrices = (n for n, leaf in transformer.weights(LLAMA_8B).items() if len(leaf.shape) > 1)
    base = BaseModel(tuple((name, BLOCK_TYPES["q4_K"]) for name in matrices))
    tuned = replace(LLAMA_8B, lora=Lora(ranks, alpha=16.0))
    shape = StepShape(tuned, 1, 2048, max_norm=1.0, evaluate=False, base=base)
    request = PlanRequest(AdamW(), measure_rates()[0], 150 * MIB)
    candidate = PlanSearch(request).smallest_of([replace(shape, chunk=16)])
    plans = request.make_plans(candidate.shape)
    total = request.peak_nbytes(plans) + plans.mapped_nbytes
    print(
        f"8B in Q4_K, rank 8, 1 × 2,048 tokens: {total / GIB:.2f} GiB with its base of {plans.mapped_nbytes / GIB:.2f}"
        f" GiB; arena {plans.arena_nbytes / GIB:.2f} GiB, expected {plans.step_seconds(request.rates):.0f} s a step"
    )


# ---- steps ---------------------------------------------------------------------------------------------------


def ours(mix: str) -> dict[str, float]:
    """Private bytes beside what the process had, and seconds of the best step."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_preset(Path(folder), mix, pure=True)
        kernels.load_all()
        release_memory()
        with MemoryPeak() as peak:
            seconds = best_seconds(training.of_base(path).step)
    return {"bytes": peak.nbytes - peak.baseline, "seconds": seconds}


def theirs() -> dict[str, float]:
    """PyTorch's eager mode: the base in f32 and frozen, additions as PEFT computes them."""
    config = PRESETS[PRESET]
    batch = training.batch_of(config, 1, training.FILE_CONTEXT)
    release_memory()
    with MemoryPeak() as peak:
        model = Tuned(config, initial_weights(config), RANK, 2.0)
        seconds = best_seconds(torch_peer.training(model, batch, False, False))
    return {"bytes": peak.nbytes - peak.baseline, "seconds": seconds}


def best_seconds(step: Callable[[], object]) -> float:
    return min(time_call(step) for _ in range(STEPS))


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
    peer = results["torch"]
    for name, got in results.items():
        print(
            f"{PRESET}, 1 × {training.FILE_CONTEXT} tokens, {name}: {got['bytes'] / MIB:.0f} MiB"
            f" ({got['bytes'] / peer['bytes']:.2f} of PyTorch's), {got['seconds']:.2f} s a step"
            f" ({got['seconds'] / peer['seconds']:.2f} of PyTorch's)"
        )


if __name__ == "__main__":
    main()
