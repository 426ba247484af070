"""Tokens per second of reading a prompt and of writing after it, beside llama.cpp where its bench is given.

    python -m benchmarks.decode [MODEL.gguf …] [--types F32 Q8_0 Q4_K_M] [--prompt 512] [--count 64] [--rounds 3]
                                [--llama-bench PATH]

Without a model one of the 110m preset with random weights is made in each of the types. Both sides take turns in each
round, with as many threads; the figures are medians. The cache is f32 here and f16 there.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from packtrain import kernels
from packtrain.commands import quantize
from packtrain.generation import Generator
from packtrain.gguf import Value
from packtrain.models import transformer
from packtrain.models.config import PRESETS
from packtrain.models.file import open_model, save_model
from packtrain.tasks.quantize import Quantize
from tests.architectures import BYTE, NORMAL, UNKNOWN

Speeds = tuple[float, float]


def make_models(folder: Path, types: list[str]) -> list[Path]:
    """The 110m preset with random weights, in each type."""
    config, plain = PRESETS["110m"], folder / "F32.gguf"
    kinds = {"<unk>": UNKNOWN} | {f"<0x{b:02X}>": BYTE for b in range(256)}
    kinds |= {f"\u2581word{i}": NORMAL for i in range(config.vocab_size - len(kinds))}
    vocabulary = {
        "tokenizer.ggml.model": Value("string", "llama"),
        "tokenizer.ggml.tokens": Value("string", [text.encode() for text in kinds]),
        "tokenizer.ggml.scores": Value("f32", [-float(i) for i in range(len(kinds))]),
        "tokenizer.ggml.token_type": Value("i32", list(kinds.values())),
    }
    values = transformer.initial(config)
    save_model(plain, config, vocabulary, values.__getitem__, name="random")
    for name in types:
        if name != plain.stem:
            with contextlib.redirect_stdout(sys.stderr):
                quantize.run(Quantize(plain, folder / f"{name}.gguf", name))
    return [folder / f"{name}.gguf" for name in types]


class Ours:
    """One model, ready to read and write."""

    def __init__(self, path: Path, prompt: int, count: int) -> None:
        model = open_model(path)
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, prompt)
        self.ids, self.count = ids.tolist(), count
        self.generator = Generator.of(model, max(prompt, count) + 1)
        self.speeds()  # loads kernels and pages

    def speeds(self) -> Speeds:
        self.generator.forget()
        began = time.perf_counter()
        self.generator.feed(self.ids)
        read = time.perf_counter()
        self.generator.forget()
        logits = self.generator.feed(self.ids[:1])
        start = time.perf_counter()
        for _ in range(self.count):
            logits = self.generator.feed([int(logits.argmax())])
        return len(self.ids) / (read - began), self.count / (time.perf_counter() - start)


def theirs(bench: Path, path: Path, prompt: int, count: int) -> Speeds:
    sizes = ["-p", str(prompt), "-n", str(count), "-t", str(kernels.threads()), "-r", "1"]
    command = [str(bench), "-m", str(path), *sizes, "-o", "json"]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    read, written = (float(test["avg_ts"]) for test in json.loads(said))
    return read, written


def compare(path: Path, args: argparse.Namespace) -> None:
    ours = Ours(path, args.prompt, args.count)
    made: list[tuple[Speeds, Speeds]] = []
    for _ in range(args.rounds):
        other = (float("nan"), float("nan"))
        if args.llama_bench:
            other = theirs(args.llama_bench, path, args.prompt, args.count)
        made.append((ours.speeds(), other))
    for i, what in enumerate((f"reading {args.prompt}", f"writing {args.count}")):
        a, b = (statistics.median(pair[side][i] for pair in made) for side in (0, 1))
        print(f"{path.stem:12} {what:14} {a:10.1f} {b:10.1f} {a / b:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--types", nargs="+", default=["F32", "Q8_0", "Q4_K_M"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bench", type=Path)
    args = parser.parse_args()
    kernels.load_all()
    with tempfile.TemporaryDirectory() as folder:
        models = args.models or make_models(Path(folder), args.types)
        print(f"{kernels.threads()} threads; tokens a second, medians of {args.rounds}")
        print(f"{'model':12} {'':14} {'packtrain':>10} {'llama.cpp':>10} {'ratio':>6}")
        for path in models:
            compare(path, args)


if __name__ == "__main__":
    main()
