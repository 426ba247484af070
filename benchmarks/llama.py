"""Reading a prompt and writing after it, one token at a time, beside llama.cpp's own bench where that is installed."""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_process import PeerError
from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.data.tokenizer import BYTE, NORMAL, UNKNOWN
from packtrain.devtools.bench.bench_table import BenchTable, CellValue
from packtrain.devtools.bench.products import ProgressCounter
from packtrain.devtools.bench.timing import CLOCK, Clock, paired
from packtrain.dtypes import f16
from packtrain.gguf import MetadataValue as Entry
from packtrain.inference.generator import Generator
from packtrain.kernels.runtime.environment import has_cpu_feature
from packtrain.models.activation_rounding import F32, Q8
from packtrain.models.config import PRESETS
from packtrain.models.model_file import open_model, save_model
from packtrain.models.model_with_adapters import has_roundable_weights, with_activations
from packtrain.workflows.quantization import QuantizeSettings, quantize
from tests.models import initial_weights

PROGRAM = "llama-bench"
PRESET, TYPES = "110m", ("F16", "Q8_0", "Q4_0", "Q4_K_M")
READ, WRITTEN = 512, 64  # tokens
ROUNDED, HALF = "--activations q8", "--precision bf16"
PATIENCE = 30.0  # seconds for its help
COLUMNS = {"model": "", "what": "", "tokens/s": ".1f"}
PEER_COLUMNS = {"llama.cpp tokens/s": ".1f", "× llama.cpp": ".2f"}
NO_PEER_NOTE = "llama-bench was not found (--llama-bench), so nothing is compared with it."
UNLIMITED = "llama.cpp uses all that the processor has, and is not limited as packtrain is."


@dataclass(slots=True)
class Speeds:
    """Seconds of ours and of llama.cpp's for the same work, round by round."""

    tokens: int
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)


def find_llama_bench(bench_arg: Path | None) -> Path | None:
    """llama-bench: the one given, or the one on the PATH. Raises InputError if it is another program."""
    bench_path = shutil.which(PROGRAM) if bench_arg is None else bench_arg
    if bench_path is None:
        return None
    path = Path(bench_path).resolve()
    try:
        said = subprocess.run([path, "--help"], capture_output=True, timeout=PATIENCE).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = b""
    if b"--n-gen" not in said:
        raise InputError(f"--llama-bench: {bench_path} is not llama.cpp's llama-bench")
    return path


def tables(
    base: Path | None,
    bench: Path | None,
    rounds: int,
    counting: ProgressCounter,
    clock: Clock = CLOCK,
) -> Iterator[BenchTable]:
    """The model of the file; without one, random weights in each type. Raises PeerFailed, InputError."""
    rows, build_info = list[list[CellValue]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder, counting("llama.cpp", "model") as count:
        names = [base.stem] if base else [f"{PRESET} {name}" for name in TYPES]
        for i, name in enumerate(names):
            count(i + 1, len(names), name)
            path = base or write_random_preset(Path(folder), TYPES[i])
            runs = measured(path)
            for _ in range(rounds):
                if bench:
                    build_info, seconds = run_llama_bench(bench, path)
                for task, run, speeds in runs:
                    if bench:
                        speeds.theirs.append(seconds[task.startswith("writing")])
                    speeds.ours.append(run(clock))
            rows += [row(name, task, speeds) for task, _, speeds in runs]
    build = f"llama.cpp {build_info.get('build_number')} ({build_info.get('build_commit')})"
    notes = [f"{build}. The KV cache is f16 in both."] if bench else [NO_PEER_NOTE]
    notes += [UNLIMITED] if bench and os.environ.get("PACKTRAIN_CPU") else []
    yield BenchTable(
        "llama", "Reading and writing", COLUMNS | (PEER_COLUMNS if bench else {}), rows, notes
    )


def measured(path: Path) -> list[tuple[str, Callable[[Clock], float], Speeds]]:
    """What is timed: its name, a function that gives its seconds, and a place for them."""
    models = {"": Ours(path)}
    if has_cpu_feature("avx512bf16"):
        models[f", {HALF}"] = Ours(path, precision="bf16")
    if has_roundable_weights(open_model(path)):
        models[f", {ROUNDED}"] = Ours(path, Q8)
    reading = [
        (f"reading {READ}{variant}", peer.read, Speeds(READ)) for variant, peer in models.items()
    ]
    writing = [
        (f"writing {WRITTEN}{variant}", peer.write, Speeds(WRITTEN))
        for variant, peer in models.items()
        if HALF not in variant
    ]
    return [*reading, *writing]


def row(model: str, task: str, speeds: Speeds) -> list[CellValue]:
    our_seconds, their_seconds, tokens = speeds.ours, speeds.theirs, speeds.tokens
    comparison = (
        [tokens / statistics.median(their_seconds), paired(our_seconds, their_seconds)]
        if their_seconds
        else []
    )
    return [model, task, tokens / statistics.median(our_seconds), *comparison]


class Ours:
    """A model, ready to read and write."""

    def __init__(self, path: Path, activations: str = F32, precision: str = F32) -> None:
        model = with_activations(open_model(path), activations)
        model = replace(model, config=replace(model.config, precision=precision))
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, READ)
        self.ids: list[int] = ids.tolist()
        self.generator = Generator.from_model(model, max(READ, WRITTEN) + 1, f16)
        self.read(CLOCK)  # loads kernels and pages
        self.write(CLOCK)

    def read(self, clock: Clock) -> float:
        """Seconds for the prompt."""
        self.generator.truncate()
        start_time = clock()
        self.generator.feed(self.ids)
        return clock() - start_time

    def write(self, clock: Clock) -> float:
        """Seconds for the likeliest tokens, one after another."""
        self.generator.truncate()
        logits = self.generator.feed(self.ids[:1])
        start_time = clock()
        for _ in range(WRITTEN):
            logits = self.generator.feed([int(logits.argmax())])
        return clock() - start_time


def run_llama_bench(bench: Path, path: Path) -> tuple[dict[str, Any], list[float]]:
    """What llama-bench says of itself, and its seconds for reading and for writing. Raises PeerFailed."""
    sizes = ["-p", str(READ), "-n", str(WRITTEN), "-t", str(kernels.threads()), "-r", "1"]
    command = [str(bench), "-m", str(path), *sizes, "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
        tests = json.loads(done.stdout)
        rates = {bool(test["n_gen"]): float(test["avg_ts"]) for test in tests}
        return tests[0], [READ / rates[False], WRITTEN / rates[True]]
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise PeerError(f"{bench} failed: {''.join(lines) or error.returncode}") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PeerError(f"{bench} gave an answer that is not understood: {error!r}") from None


def write_random_preset(folder: Path, name: str, pure: bool = False) -> Path:
    """The preset with random weights, in this type; `pure`: all matrices in that of the mix's name."""
    f32_path, path = folder / "F32.gguf", folder / f"{name}.gguf"
    if not f32_path.exists():
        config = PRESETS[PRESET]
        values = initial_weights(config)
        save_model(
            f32_path, config, vocabulary(config.vocab_size), values.__getitem__, name="random"
        )
    if path != f32_path:
        quantize(QuantizeSettings(f32_path, path, name, pure=pure), Events())
    return path


def vocabulary(size: int) -> dict[str, Entry]:
    """A SentencePiece vocabulary of bytes and of words that mean nothing."""
    kinds = {"<unk>": UNKNOWN} | {f"<0x{b:02X}>": BYTE for b in range(256)}
    kinds |= {f"\u2581word{i}": NORMAL for i in range(size - len(kinds))}
    return {
        "tokenizer.ggml.model": Entry("string", "llama"),
        "tokenizer.ggml.tokens": Entry("string", [text.encode() for text in kinds]),
        "tokenizer.ggml.scores": Entry("f32", [-float(i) for i in range(len(kinds))]),
        "tokenizer.ggml.token_type": Entry("i32", list(kinds.values())),
    }
