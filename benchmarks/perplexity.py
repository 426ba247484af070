"""`packtrain eval` beside llama-perplexity on the same text: python -m benchmarks.perplexity --llama-perplexity PATH

    [MODEL.gguf … --text FILE [--nbytes 60000] [--ctx 512]]

Without a model, small ones of random weights: four architectures, with a BOS and without. The perplexities must be
within 0.1 % of each other for F32 files; within 0.5 % for others, for which llama.cpp rounds activations to 8 bits.
Exit code 1 if one is not.
"""

import argparse
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packtrain import kernels
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from tests.architectures import random_model

LIMITS = {True: 0.001, False: 0.005}  # of the relative difference, by whether all weights are f32
RANDOM = ("llama", "qwen2", "gemma3", "phi3")
TRIALS = (
    8  # llama-perplexity may end, most of all on a busy machine, before its last lines are written
)
OURS = re.compile(
    r"loss \S+ ± \S+ nats per token, perplexity ([\d.]+) ± ([\d.]+)\n.*?([\d,]+) windows"
)
THEIRS = re.compile(r"over (\d+) chunks.*PPL = ([\d.]+) \+/- ([\d.]+)", re.DOTALL)
CHUNKS = re.compile(r"over (\d+) chunks")
INTRODUCTION = """Perplexity of small models of random weights on a text of 4,000 bytes, windows of 128 tokens, by
llama-perplexity and by `packtrain eval`. llama.cpp keeps keys and values as f16 by default, packtrain as f32.

"""
HEADING = """| model | type | windows | llama-perplexity | packtrain | difference | limit |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    windows: int
    perplexity: float
    error: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.perplexity:.4f} ± {self.error:.4f}"


def peer_perplexity(tool: Path, model: Path, text: Path, context: int) -> PerplexityResult:
    """What llama-perplexity says, with its defaults but for the number of threads."""
    command = [
        str(tool),
        "-m",
        str(model),
        "-f",
        str(text),
        "-c",
        str(context),
        "-t",
        str(kernels.threads()),
    ]
    for _ in range(TRIALS):
        start_time = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        match = THEIRS.search(done.stderr + done.stdout)
        seconds = time.perf_counter() - start_time
        if match:
            return PerplexityResult(int(match[1]), float(match[2]), float(match[3]), seconds)
        chunks = CHUNKS.search(done.stderr)  # the running value after the last one is the result
        last = chunks and re.search(rf"\[{chunks[1]}\]([\d.]+),", done.stdout)
        if chunks and last:
            return PerplexityResult(int(chunks[1]), float(last[1]), math.nan, seconds)
    raise SystemExit(f"{tool} gave no result for {model}: {done.stderr[-500:]}")


def our_perplexity(model: Path, text: Path, context: int) -> PerplexityResult:
    flags = [str(model), "--data", str(text), "-c", str(context)]
    command = [sys.executable, "-m", "packtrain", "eval", *flags]
    start_time = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = OURS.search(done.stdout)
    if not match:
        raise SystemExit(f"packtrain eval gave no result for {model}: {done.stderr[-500:]}")
    seconds = time.perf_counter() - start_time
    windows = int(match[3].replace(",", ""))
    return PerplexityResult(windows, float(match[1]), float(match[2]), seconds)


def compared(tool: Path, model: Path, text: Path, context: int) -> tuple[bool, str]:
    """Whether both agree, and a row of the table."""
    types = {str(entry.dtype) for entry in GGUF(model).entries.values()}
    limit = LIMITS[types == {"f32"}]
    expected, actual = (
        peer_perplexity(tool, model, text, context),
        our_perplexity(model, text, context),
    )
    relative_change = actual.perplexity / expected.perplexity - 1
    good = abs(relative_change) <= limit and actual.windows == expected.windows
    windows = (
        actual.windows
        if actual.windows == expected.windows
        else f"{actual.windows}, not {expected.windows}"
    )
    row = (
        f"| {model.stem} | {', '.join(sorted(types))} | {windows} | {expected} | {actual} | {relative_change:+.4%}"
        f" | {limit:.1%}{'' if good else ' **no**'} |"
    )
    print(
        f"{model.stem}: {expected.seconds:.1f} s there, {actual.seconds:.1f} s here",
        file=sys.stderr,
    )
    return good, row


def rows(
    tool: Path, models: Iterable[Path], source: Path, nbytes: int, context: int
) -> Iterator[tuple[bool, str]]:
    """The rows of these models on the beginning of a text, cut between characters."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_bytes(source.read_bytes()[:nbytes].decode(errors="ignore").encode())
        for model in models:
            yield compared(tool, model, text, context)


def random_rows(tool: Path) -> Iterator[tuple[bool, str]]:
    """The rows of models whose vocabulary adds a BOS, and of the same ones with one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        yield from rows(tool, random_models(Path(folder)), Path(__file__), 4000, 128)


def random_models(folder: Path) -> Iterator[Path]:
    for name in RANDOM:
        random_model(folder / f"{name}.gguf", name)
        file = GGUF(folder / f"{name}.gguf")
        values = {**file.values, "tokenizer.ggml.add_bos_token": MetadataValue("bool", False)}
        bosless_path = folder / f"{name} without BOS.gguf"
        write_gguf(bosless_path, values, {tensor: file.array(tensor) for tensor in file.entries})
        yield from (file.path, bosless_path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL.gguf")
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="for models of your own")
    parser.add_argument("--nbytes", type=int, default=60_000, help="of the text, from its start")
    parser.add_argument("--ctx", type=int, default=512)
    args = parser.parse_args()
    if args.models and not args.text:
        parser.error("models need a --text")
    result_rows = random_rows(args.llama_perplexity)
    if args.models:
        result_rows = rows(args.llama_perplexity, args.models, args.text, args.nbytes, args.ctx)
    good = True
    print(HEADING, flush=True)
    for is_good, row in result_rows:
        good = good and is_good
        print(row, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
