"""Two contexts and a training run in three threads: python -m benchmarks.threads [--seconds 60]

All must come out as they do alone, bit for bit, and private memory must not grow after five seconds. Exit code 1 if
they do not.
"""

import argparse
import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import packtrain as pt
from packtrain.common.memory import private_nbytes, release_memory
from tests.architectures import random_model

# seconds until memory is measured, and bytes that arrays of other sizes may leave
SETTLED, GROWTH = 5.0, 2 << 20
NUM_REPEATS = 3  # times
TOKENS = 24
SIZES: dict[str, Any] = {
    "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128, "ctx": 64, "vocab_size": 270, "batch_size": 4,
}  # fmt: skip
RUN: dict[str, Any] = {
    "lr_scheduler": "constant", "warmup_ratio": 0.0, "val_split": 0.05, "steps_per_eval": 10**9,
    "save_every": 10**9, "tensorboard": False, **SIZES,
}  # fmt: skip


def rounds(model: Path, cache: str) -> Iterator[str]:
    """Digests of the logits of texts: two sequences, the second a copy of the first that goes on otherwise."""
    context = pt.Context(model, cells=256, sequences=2, cache=cache)
    for number in range(10**9):
        prompt = np.random.default_rng(number).integers(3, 250, 10 + number % 60).tolist()
        digest = hashlib.sha256()
        context.remove(0)
        logits = np.repeat(context.decode(prompt, 0), 2, axis=0)
        context.copy(0, 1)
        for _ in range(TOKENS):
            digest.update(logits.tobytes())
            tokens = [int(logits[0].argmax()), int(logits[1].argmin())]
            logits = context.decode(tokens, [0, 1])
        yield digest.hexdigest()


class Reading(threading.Thread):
    """Collects digests until it is told to stop."""

    def __init__(self, model: Path, cache: str) -> None:
        super().__init__()
        self.arguments, self.digests, self.stopped = (model, cache), list[str](), threading.Event()

    def run(self) -> None:
        for digest in rounds(*self.arguments):
            self.digests.append(digest)
            if self.stopped.is_set():
                return

    def has_equal_digests(self) -> bool:
        expected_digests = rounds(*self.arguments)
        return all(digest == next(expected_digests) for digest in self.digests)


def together(folder: Path, text: Path, seconds: float) -> tuple[list[Reading], Any, list[int]]:
    """The threads when they have ended, and private bytes at each time."""
    readers = [
        Reading(folder / f"{name}.gguf", cache) for name, cache in (("llama", "f16"), ("gemma3", "q8_0"))
    ]  # fmt: skip
    training = pt.start(pt.train, text, output=folder / "a.gguf", iters=10**7, **RUN)
    for reader in readers:
        reader.start()
    nbytes = list[int]()
    for wait in (SETTLED, *[(seconds - SETTLED) / NUM_REPEATS] * NUM_REPEATS):
        time.sleep(wait)
        release_memory()
        nbytes.append(private_nbytes())
    training.stop()
    for reader in readers:
        reader.stopped.set()
        reader.join()
    return readers, training.result(), nbytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in ("llama", "gemma3"):
            random_model(folder / f"{model}.gguf", model)
        text = folder / "text.txt"
        text.write_text("\n".join(f"the {i} cats see {i * 7 % 13} dogs." for i in range(2000)))
        readers, trained, nbytes = together(folder, text, args.seconds)
        ok = True
        for reader in readers:
            is_equal = reader.has_equal_digests()
            ok &= is_equal
            count = f"{len(reader.digests):,} texts of {TOKENS} tokens in two sequences"
            print(
                f"{reader.arguments[0].stem}, {reader.arguments[1]}: {count}: {'as' if is_equal else 'NOT as'} alone"
            )
        steps = len(trained.losses)
        single_run = pt.train(text, output=folder / "b.gguf", iters=steps, **RUN)
        is_equal = single_run.losses == trained.losses
        ok &= is_equal
        print(f"training: {steps:,} steps: losses {'as' if is_equal else 'NOT as'} alone")
        ok &= nbytes[-1] <= nbytes[0] + GROWTH
        sizes_text = ", ".join(f"{n / (1 << 20):.1f}" for n in nbytes)
        print(f"private memory from {SETTLED:.0f} to {args.seconds:.0f} s: {sizes_text} MiB")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
