"""Sequences written together against one alone: python -m benchmarks.eight [MODEL.gguf] [--sequences 8] [--rounds 5]

Without a model: `110m` with random weights in Q4_K_M. Each sequence of a context gets one token a run, 64 times; prints
tokens/s of one sequence and of all together, medians of rounds that take turns, with activations in f32 and rounded
to 8 bits. Only a quiet machine means anything.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.llama import write_random_preset
from packtrain.inference.kv_cache import Context
from packtrain.models.activation_rounding import F32, Q8
from packtrain.models.model_file import open_model
from packtrain.models.model_with_adapters import has_roundable_weights, with_activations

WRITTEN = 64  # tokens of a sequence


def seconds(context: Context, count: int) -> float:
    """Of writing with `count` sequences."""
    seqs = [*range(count)]
    for seq in seqs:
        context.remove(seq)
    ids = [3 + seq for seq in seqs]
    context.decode(ids, seqs)
    start_time = time.perf_counter()
    for _ in range(WRITTEN):
        ids = [int(row.argmax()) for row in context.decode(ids, seqs)]
    return time.perf_counter() - start_time


def compare(path: Path, activations: str, sequences: int, rounds: int) -> None:
    model = with_activations(open_model(path), activations)
    context = Context(model, cells=sequences * (WRITTEN + 1), sequences=sequences)
    counts = 1, sequences
    took = np.array([[seconds(context, n) for n in counts] for _ in range(rounds + 1)])[1:]
    one, all_ = (n * WRITTEN / took[:, i] for i, n in enumerate(counts))
    times = statistics.median(all_ / one)
    print(
        f"activations {activations}: {np.median(one):.1f} tokens/s alone, {np.median(all_):.1f} tokens/s of"
        f" {sequences} sequences, {times:.2f} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or write_random_preset(Path(folder), "Q4_K_M")
        for activations in (F32, Q8) if has_roundable_weights(open_model(path)) else (F32,):
            compare(path, activations, args.sequences, args.rounds)


if __name__ == "__main__":
    main()
