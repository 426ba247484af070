"""`packtrain eval` beside llama-perplexity on the same text: python -m benchmarks.perplexity --llama-perplexity PATH

    [MODEL.gguf …] [--text FILE] [--nbytes 60000] [--ctx 512]

Without a model, small ones of random weights: four architectures, with a BOS and without. The perplexities must be
within 0.1 % of each other for F32 files; within 0.5 % for others, for which llama.cpp rounds activations to 8 bits.
Exit code 1 if one is not.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packtrain import kernels
from packtrain.gguf import GGUF, Value, write
from tests.architectures import random_model

LIMITS = {True: 0.001, False: 0.005}  # of the relative difference, by whether all weights are f32
RANDOM = ("llama", "qwen2", "gemma3", "phi3")
TRIALS = 4  # llama-perplexity sometimes ends before its last line is written
OURS = re.compile(
    r"loss \S+ ± \S+ nats per token, perplexity ([\d.]+) ± ([\d.]+)\n.*?([\d,]+) windows"
)
THEIRS = re.compile(r"over (\d+) chunks.*PPL = ([\d.]+) \+/- ([\d.]+)", re.DOTALL)
HEADING = """| model | type | windows | llama-perplexity | packtrain | difference | limit | seconds of each |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Found:
    windows: int
    perplexity: float
    error: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.perplexity:.4f} ± {self.error:.4f}"


def theirs(tool: Path, model: Path, text: Path, context: int) -> Found:
    """What llama-perplexity says, with its defaults but for the number of threads."""
    command = [tool, "-m", model, "-f", text, "-c", str(context), "-t", str(kernels.threads())]
    for _ in range(TRIALS):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = THEIRS.search(done.stderr + done.stdout)
        if found:
            seconds = time.perf_counter() - began
            return Found(int(found[1]), float(found[2]), float(found[3]), seconds)
    raise SystemExit(f"{tool} gave no result for {model}: {done.stderr[-500:]}")


def ours(model: Path, text: Path, context: int) -> Found:
    command = [sys.executable, "-m", "packtrain", "eval", model, "--data", text, "-c", str(context)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = OURS.search(done.stdout)
    if not found:
        raise SystemExit(f"packtrain eval gave no result for {model}: {done.stderr[-500:]}")
    seconds = time.perf_counter() - began
    windows = int(found[3].replace(",", ""))
    return Found(windows, float(found[1]), float(found[2]), seconds)


def compared(tool: Path, model: Path, text: Path, context: int) -> tuple[bool, str]:
    """Whether both agree, and a row of the table."""
    types = {str(entry.dtype) for entry in GGUF(model).entries.values()}
    limit = LIMITS[types == {"f32"}]
    want, got = theirs(tool, model, text, context), ours(model, text, context)
    off = got.perplexity / want.perplexity - 1
    good = abs(off) <= limit and got.windows == want.windows
    windows = got.windows if got.windows == want.windows else f"{got.windows}, not {want.windows}"
    row = (
        f"| {model.stem} | {', '.join(sorted(types))} | {windows} | {want} | {got} | {off:+.4%}"
        f" | {limit:.1%}{'' if good else ' **no**'} | {want.seconds:.1f}, {got.seconds:.1f} |"
    )
    return good, row


def random_models(folder: Path) -> Iterator[Path]:
    """Models whose vocabulary adds a BOS, and the same ones with one that does not."""
    for name in RANDOM:
        random_model(folder / f"{name}.gguf", name)
        file = GGUF(folder / f"{name}.gguf")
        values = {**file.values, "tokenizer.ggml.add_bos_token": Value("bool", False)}
        bare = folder / f"{name} without BOS.gguf"
        write(bare, values, {tensor: file.array(tensor) for tensor in file.entries})
        yield from (file.path, bare)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL.gguf")
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--nbytes", type=int, default=60_000, help="of the text, from its start")
    parser.add_argument("--ctx", type=int)
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        text = folder / "text.txt"
        start = args.text.read_bytes()[: args.nbytes]
        text.write_bytes(start.decode(errors="ignore").encode())
        context = args.ctx or (512 if args.models else 128)
        print(HEADING, flush=True)
        for model in args.models or random_models(folder):
            fine, row = compared(args.llama_perplexity, model, text, context)
            good = good and fine
            print(row, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
