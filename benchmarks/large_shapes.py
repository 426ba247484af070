"""Tunes models of public shapes with random weights within a budget: python -m benchmarks.large_shapes [--tokens N …]

    python -m benchmarks.large_shapes --shape llama-3.2-3b --tokens 1024 --memory 450MiB
    python -m benchmarks.large_shapes --shape llama-3.2-1b --tokens 512 --memory 6GiB --full
    python -m benchmarks.large_shapes --shape llama-3.1-8b --tokens 512 --resident 3GiB
    python -m benchmarks.large_shapes --shape qwen3-30b-a3b --rank 8 --modules attn --resident 8GiB

The file has the shape and types of a public model in Q4_K, with random blocks, so that nothing need be fetched: memory
and time of a step do not depend on values. Each run is `packtrain finetune` with --memory, watched from outside with
its children; printed are its peak, the budget, seconds of a step and losses. With --resident, the peak is that of
private memory and of the file's pages in memory, as mincore counts them, together.
"""

import argparse
import json
import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.watched import run_packtrain
from packtrain.dtypes import DTYPES, f32
from packtrain.gguf.gguf_format import MetadataValue
from packtrain.gguf.gguf_writer import DeferredTensor, write_gguf
from packtrain.kernels.quant.quantized_arrays import quantize
from packtrain.models import transformer
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.config import Config
from packtrain.models.model_metadata import model_metadata
from packtrain.training.monitoring import metrics_file
from tests.architectures import TOKENS, vocabulary

SHAPES = {
    "llama-3.2-1b": Config(128_256, 131_072, 2_048, 16, 8_192, 32, 8),
    "llama-3.2-3b": Config(128_256, 131_072, 3_072, 28, 8_192, 24, 8),
    "llama-3.1-8b": Config(128_256, 131_072, 4_096, 32, 14_336, 32, 8, tied=False),
    "qwen3-30b-a3b": Config(
        151_936,
        40_960,
        2_048,
        48,
        6_144,
        32,
        4,
        tied=False,
        architecture="qwen3moe",
        key_length=128,
        expert_count=128,
        expert_used_count=8,
        expert_feed_forward_length=768,
    ),
}
FULL = "--full --masters bf16 --optimizer adamw8bit"
QUIET = "--check-answers 0 --no-tensorboard --overwrite --val-split 0"
UNUSED = 5  # token type of tokens that no text has
ROWS_OF_BLOCKS = 64  # random rows of a matrix, which repeat


def padded_vocabulary(size: int) -> Mapping[str, MetadataValue]:
    fillers = {f"<unused{n}>": UNUSED for n in range(size - len(TOKENS))}
    return vocabulary({**TOKENS, **fillers})


def write_model(path: Path, config: Config) -> None:
    """Write a file of Q4_K matrices whose products keep the size of what they multiply."""
    rng, q4_k = np.random.default_rng(0), DTYPES["q4_K"]

    def tensor(name: str, shape: tuple[int, ...]) -> DeferredTensor:
        *counts, width = shape
        if not is_matrix(name, shape):  # a router's rows differ, so that all experts are chosen
            values = (
                rng.standard_normal(shape, np.float32) * width**-0.5
                if counts
                else np.ones(shape, np.float32)
            )
            return DeferredTensor(f32, shape, lambda: [values])
        values = rng.standard_normal((ROWS_OF_BLOCKS, width), np.float32) * width**-0.5
        blocks, rows = quantize(values, q4_k), math.prod(counts)
        starts = range(0, rows, ROWS_OF_BLOCKS)
        return DeferredTensor(q4_k, shape, lambda: (blocks[: rows - at] for at in starts))

    tensors = {
        leaf.label: tensor(leaf.label, leaf.shape) for leaf in transformer.weights(config).values()
    }
    metadata = {**model_metadata(config, "random", "q4_K"), **padded_vocabulary(config.vocab_size)}
    write_gguf(path, metadata, tensors)


def run(
    base: Path, num_tokens: int, memory: str, limit: str, steps: int, trained: list[str], folder: Path,
) -> str:  # fmt: skip
    """Tune on rows of `num_tokens` tokens within a limit, `memory` or `resident`; return a row of the table."""
    rng, data, result = random.Random(0), folder / "rows.txt", folder / "tuned.gguf"
    letters = [token for token in TOKENS if len(token) == 1 and token.isalpha()]
    data.write_text("".join(rng.choice(letters) for _ in range(4 * num_tokens)))
    options = (
        f"--ctx {num_tokens} --batch-size 1 --iters {steps} --{limit} {memory} {QUIET}".split()
    )
    done = run_packtrain(
        "finetune", base, "--data", data, "-o", result, *options, *trained, mapped=base
    )
    if done.code:
        return f"| {base.stem} | {num_tokens:,} | {memory} | - | - | {done.said.strip().splitlines()[-1]} |"
    records = [r for r in metrics_file.read(folder / "tuned.run/metrics.jsonl") if "loss" in r]
    plan = json.loads((folder / "tuned.run/plan.json").read_text())
    losses = ", ".join(f"{record['loss']:.3f}" for record in records)
    seconds, peak = done.seconds / steps, done.resident if limit == "resident" else done.peak
    pages = f", {done.pages / 2**20:,.0f} MiB of pages" if limit == "resident" else ""
    return (
        f"| {base.stem} | {num_tokens:,} | {memory} | {peak / 2**20:,.0f} | {seconds:,.0f}"
        f" | loss {losses}; {plan['total_bytes'] / 2**20:,.0f} MiB planned{pages} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-3b")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--memory", default="450MiB")
    parser.add_argument("--resident", help="limit on private memory and pages of the base together")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", default="all", help="finetune's --lora-modules")
    parser.add_argument(
        "--full", action="store_true", help="bf16 weights, moments in 8 bits; no LoRA"
    )
    parser.add_argument("--folder", type=Path, help="where the file stays; else it is removed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        base = folder / f"{args.shape}.gguf"
        if not base.exists():
            write_model(base, SHAPES[args.shape])
        adapter = f"--lora-rank {args.rank} --lora-modules {args.modules} --merge none"
        trained = (FULL if args.full else adapter).split()
        print("| model | tokens | budget | peak MiB | seconds a step, start included | result |")
        print("|---|---|---|---|---|---|")
        limit = (args.resident, "resident") if args.resident else (args.memory, "memory")
        print(run(base, args.tokens, *limit, args.steps, trained, folder), flush=True)


if __name__ == "__main__":
    main()
