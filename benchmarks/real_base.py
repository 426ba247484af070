"""The parts of benchmarks.real: each runs commands on a real base and gives rows of the table."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.beside import log_softmax, logits, peer_logprobs, run_silently
from benchmarks.budget import MINIMUM, READING
from benchmarks.conformance import kind_of
from benchmarks.conformance_adapters import LIMITS as LOGARITHMS
from benchmarks.conformance_adapters import POSITIONS, SURE
from benchmarks.perplexity import LIMITS, our_perplexity, peer_perplexity
from benchmarks.watched import WatchedRun, run_packtrain
from packtrain.common.memory import parse_size
from packtrain.gguf import GGUF
from packtrain.models.model_file import open_model
from tests.kill import RunKind, survive_kills

MIB = 1 << 20
NUM_HELDOUT = 60  # conversations that neither a step nor a merge sees
WINDOWS, CONTEXT, TEXT_NBYTES = 28, 512, 60_000  # of the text whose perplexity is compared
MIN_KEPT_GAIN, MERGE_SECONDS = 0.97, 180
LOSS = re.compile(r"loss ([\d.]+)")
SHORT = "--ctx 128 --batch-size 1"
COMMON_FLAGS = "--steps-per-eval 0 --val-batches 2 --no-tensorboard --overwrite"


@dataclass(frozen=True, slots=True)
class Row:
    """What was looked at, what was found and wanted, and whether it is so."""

    label: str
    actual: str
    expected: str
    is_good: bool

    def __str__(self) -> str:
        return f"| {self.label} | {self.actual} | {self.expected} | {'yes' if self.is_good else '**no**'} |"


@dataclass(frozen=True, slots=True)
class Setup:
    """Where things are; `work` is kept from run to run, `short` takes less of everything."""

    base: Path
    data: Path
    text: Path
    stories: Path | None
    llama: Path
    work: Path
    short: bool

    def split(self) -> tuple[Path, Path]:
        """Conversations to learn, and others that are held out."""
        lines = self.data.read_text(encoding="utf-8").splitlines(keepends=True)
        num_heldout = NUM_HELDOUT if len(lines) > 4 * NUM_HELDOUT else len(lines) // 4
        num_train = 40 if self.short else len(lines)
        self.work.mkdir(parents=True, exist_ok=True)
        paths = self.work / "learn.jsonl", self.work / "held.jsonl"
        for path, part in zip(
            paths, (lines[:-num_heldout][:num_train], lines[-num_heldout:]), strict=True
        ):
            path.write_text("".join(part), encoding="utf-8")
        return paths


def failed(name: str, done: WatchedRun) -> Row:
    """A command that did not end well, by the last line that it said."""
    last = (done.said.strip().splitlines() or ["nothing"])[-1].replace("|", "/")
    return Row(name, f"exit {done.code}: {last[:160]}", "exit 0", False)


# ---- first -------------------------------------------------------------------------------------------------------


def first_reply_rows(setup: Setup) -> Iterator[Row]:
    """A reply counts if there are words in it."""
    done = run_packtrain("inspect", setup.base)
    name = str(GGUF(setup.base).metadata["general.architecture"])
    yield Row("inspect", f"exit {done.code}", f"names {name}", done.code == 0 and name in done.out)
    prompt = "The capital of France is"
    done = run_packtrain("generate", setup.base, "-p", prompt, "-n", "12", "--temp", "0")
    words = re.search(r"\w", done.out.strip().removeprefix(prompt)) is not None
    good = done.code == 0 and done.out.strip().startswith(prompt) and words
    yield Row("generate", repr(done.out.strip())[:60], "goes on", good)
    done = run_packtrain("chat", setup.base, "-n", "16", "--temp", "0", typed="What is 2 + 2?\n")
    words = re.search(r"\w", done.out) is not None
    yield Row("chat", f"exit {done.code}", "a reply", done.code == 0 and words)


# ---- eval --------------------------------------------------------------------------------------------------------


def run_eval(model: Path, data: Path, *flags: object) -> WatchedRun:
    return run_packtrain("eval", model, "--data", data, *flags)


def perplexity_rows(setup: Setup) -> Iterator[Row]:
    """Of the base, and of the same weights in F32."""
    text, windows = setup.work / "text.txt", 4 if setup.short else WINDOWS
    setup.work.mkdir(parents=True, exist_ok=True)
    nbytes = TEXT_NBYTES * windows // WINDOWS
    text.write_bytes(setup.text.read_bytes()[:nbytes].decode(errors="ignore").encode())
    yield perplexity_row(setup, setup.base, text, LIMITS[False])
    if setup.short:
        return
    with tempfile.TemporaryDirectory(dir=setup.work) as tmp_folder:
        unpacked = Path(tmp_folder) / "f32.gguf"
        done = run_packtrain("quantize", setup.base, unpacked, "F32")
        if done.code:
            yield failed("quantize to F32", done)
        else:
            yield perplexity_row(setup, unpacked, text, LIMITS[True])


def perplexity_row(setup: Setup, model: Path, text: Path, max_error: float) -> Row:
    """A perplexity beside llama-perplexity's; without it, one of a model that knows words."""
    got, name = (
        our_perplexity(model, text, CONTEXT),
        f"perplexity, {kind_of(model)}, {text.stat().st_size:,} bytes",
    )
    tool = setup.llama / "cpp/bin/llama-perplexity"
    if not tool.exists():
        return Row(f"{name}, without llama.cpp", str(got), "below 100", got.perplexity < 100)
    peer_result = peer_perplexity(tool, model, text, CONTEXT)
    off = got.perplexity / peer_result.perplexity - 1
    has_equal_windows = got.windows == peer_result.windows
    said = f"{got} in {got.windows} windows, llama-perplexity {peer_result} in {peer_result.windows}: {off:+.3%}"
    return Row(name, said, f"within {max_error:.1%}", abs(off) <= max_error and has_equal_windows)


# ---- memory ------------------------------------------------------------------------------------------------------


def run_finetune(
    base: Path, data: Path, output: Path, flags: str, cache: Path | None = None
) -> WatchedRun:
    """finetune; it begins with an empty cache where `cache` is a new folder."""
    variables: Mapping[str, str] = {"XDG_CACHE_HOME": str(cache)} if cache else {}
    command = ("finetune", base, "--data", data, "-o", output)
    return run_packtrain(*command, *flags.split(), variables=variables)


def memory_rows(setup: Setup) -> Iterator[Row]:
    """Runs inside their budgets, with kernels that are compiled and with an empty cache."""
    train_path, _ = setup.split()
    done = run_packtrain("compile")
    yield Row("compile", f"{done.seconds:.0f} s", "exit 0", done.code == 0)
    flags = f"{SHORT if setup.short else ''} {COMMON_FLAGS} --iters 2"
    refused = run_finetune(
        setup.base, train_path, setup.work / "refused.gguf", f"{flags} --memory 8MiB"
    )
    reading = READING.search(refused.said)  # the data must be read before the run is planned
    if reading:
        run_finetune(
            setup.base, train_path, setup.work / "refused.gguf", f"{flags} --memory {reading[1]}"
        )
        refused = run_finetune(
            setup.base, train_path, setup.work / "refused.gguf", f"{flags} --memory 8MiB"
        )
    minimum = MINIMUM.search(refused.said)
    if refused.code != 3 or not minimum:
        yield failed("--memory 8MiB is refused with the smallest budget", refused)
        return
    smallest = f"{minimum[1]}MiB"
    cost_text = f"smallest {smallest}, {refused.seconds:.1f} s"
    yield Row("refusal of 8 MiB", cost_text, "exit 3", True)
    for budget in (smallest,) if setup.short else ("1GiB", "700MiB", smallest):
        for empty_cache in (False,) if setup.short else (False, True):
            yield budget_row(setup, train_path, budget, empty_cache, flags)


def budget_row(setup: Setup, train_path: Path, budget: str, empty_cache: bool, flags: str) -> Row:
    with tempfile.TemporaryDirectory(dir=setup.work) as tmp_folder:
        folder = Path(tmp_folder)
        cache_folder = folder / "cache" if empty_cache else None
        result = folder / "tuned.gguf"
        done = run_finetune(
            setup.base, train_path, result, f"{flags} --memory {budget}", cache_folder
        )
    name = f"finetune --memory {budget}{', empty cache' if empty_cache else ''}"
    share = done.peak / parse_size(budget, "--memory")
    said = f"peak {done.peak / MIB:.0f} MiB, {share:.1%}, in {done.seconds:.0f} s"
    return Row(name, said, "≤ 100 %", share <= 1) if not done.code else failed(name, done)


# ---- tune --------------------------------------------------------------------------------------------------------


def tune_rows(base: Path, setup: Setup, name: str, flags: str) -> Iterator[Row]:
    """A tune and what is left of it in the merged file."""
    train_path, heldout_path = setup.split()
    folder = setup.work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    result = folder / "tuned.gguf"
    done = run_finetune(base, train_path, result, flags)
    if done.code:
        yield failed("finetune", done)
        return
    seconds = f"{done.seconds:.0f} s in all, peak {done.peak / MIB:.0f} MiB"
    yield Row("finetune", seconds, "exit 0", True)
    yield from validation_rows(folder / "tuned.run/metrics.jsonl")
    adapter = folder / "tuned.run/adapter.gguf"
    yield from kept_gain_rows(base, adapter, result, heldout_path)
    remerged = folder / "again.gguf"
    done = run_packtrain("merge", base, adapter, "--calibrate", train_path, "-o", remerged)
    remerged.unlink(missing_ok=True)
    good = not done.code and done.seconds <= MERGE_SECONDS
    cost_text = f"{done.seconds:.0f} s, peak {done.peak / MIB:.0f} MiB"
    yield (
        Row("merge --calibrate", cost_text, f"≤ {MERGE_SECONDS} s", good)
        if not done.code
        else failed("merge", done)
    )


def validation_rows(metrics: Path) -> Iterator[Row]:
    val_losses = [r["val_loss"] for r in map(json.loads, metrics.open()) if "val_loss" in r]
    if len(val_losses) > 1:
        said = " → ".join(f"{loss:.4f}" for loss in val_losses)
        yield Row("validation while tuning", said, "falls", val_losses[-1] < val_losses[0])


def kept_gain_rows(base: Path, adapter: Path, result: Path, heldout_path: Path) -> Iterator[Row]:
    """Losses on what is held out, how much of the gain is kept, and the size of the file."""
    losses = []
    for model, lora_flags in ((base, ()), (base, ("--lora", adapter)), (result, ())):
        done = run_eval(model, heldout_path, *lora_flags)
        loss_match = LOSS.search(done.out)
        if done.code or not loss_match:
            yield failed(f"eval {model.name} on held-out conversations", done)
            return
        losses.append(float(loss_match[1]))
    base_loss, adapter_loss, merged_loss = losses
    yield Row(
        "held-out loss: base → adapter",
        f"{base_loss:.4f} → {adapter_loss:.4f}",
        "falls",
        adapter_loss < base_loss,
    )
    share = (
        (base_loss - merged_loss) / (base_loss - adapter_loss) if adapter_loss < base_loss else 0.0
    )
    yield Row(
        "kept of it when merged",
        f"{merged_loss:.4f}: {share:.1%}",
        f"≥ {MIN_KEPT_GAIN:.0%}",
        share >= MIN_KEPT_GAIN,
    )
    sizes = [sum(e.nbytes for e in GGUF(path).entries.values()) for path in (base, result)]
    said = " → ".join(f"{nbytes:,}" for nbytes in sizes)
    yield Row("bytes of all tensors", said, "equal", sizes[0] == sizes[1])


def tune_few(setup: Setup) -> Iterator[Row]:
    flags = f"--lr 1e-3 --iters 2 --val-batches 1 {SHORT}"
    if not setup.short:
        flags = "--lr 1e-3 --iters 8 --val-batches 4"
    return tune_rows(setup.base, setup, "tune8", flags)


def tune_many(setup: Setup) -> Iterator[Row]:
    return tune_rows(
        setup.base, setup, "tune60", "--lr 1e-3 --iters 60 --steps-per-eval 30 --val-batches 4"
    )


def tutorial_rows(setup: Setup) -> Iterator[Row]:
    """The commands of the tutorial."""
    folder = setup.work / "tutorial"
    folder.mkdir(parents=True, exist_ok=True)
    unquantized = folder / "base.gguf"
    if not unquantized.exists():
        flags = ("--preset", "15m", "--iters", "300", "--overwrite")
        done = run_packtrain("train", "--data", setup.stories, "-o", unquantized, *flags)
        if done.code:
            yield failed("train", done)
            return
    for kind in ("Q8_0", "Q4_K_M"):
        base = folder / f"{kind}.gguf"
        base.unlink(missing_ok=True)
        done = run_packtrain("quantize", unquantized, base, kind)
        if done.code:
            yield failed(f"quantize {kind}", done)
            continue
        tuning_flags = "--memory 600MiB --lr 2e-3 --iters 60"
        for row in tune_rows(base, setup, f"tutorial/{kind}", tuning_flags):
            yield Row(f"{kind}: {row.label}", row.actual, row.expected, row.is_good)


# ---- llama.cpp, and kills ----------------------------------------------------------------------------------------


def llama_rows(setup: Setup) -> Iterator[Row]:
    """Logarithms of probabilities of the tokens of a text, and the likeliest token, wherever llama.cpp is sure of it.

    It computes quantized weights with activations rounded to 8 bits, which moves its results by more than two programs
    differ; so it is also asked with the same weights as F32, and must then agree as it does on F32 files.
    """
    python, base = setup.llama / "bin/python", open_model(setup.base)
    tokens = base.tokenizer().encode(setup.text.read_text()[:4000])[: POSITIONS + 1]
    for name in ("tune8", "tune60"):
        result = setup.work / name / "tuned.gguf"
        if not (result.exists() and python.exists()):
            missing = result if python.exists() else python
            yield Row(f"merged file of {name}", f"there is no {missing.name}", "to be there", False)
            continue
        with tempfile.TemporaryDirectory(dir=setup.work) as tmp_folder:
            unpacked = Path(tmp_folder) / "unpacked.gguf"
            run_silently("quantize", result, unpacked, "F32", "--allow-requantize")
            unpacked_scores, rounded_scores = (
                peer_logprobs(str(python), tokens[:-1], {"model": str(p)})
                for p in (unpacked, result)
            )
        our_scores = log_softmax(logits(open_model(result), tokens[:-1]))
        at = np.arange(len(tokens) - 1), np.array(tokens[1:])
        mean_difference, rounding_error = (
            float(np.abs(x[at] - unpacked_scores[at]).mean()) for x in (our_scores, rounded_scores)
        )
        second_best, top_score = np.sort(unpacked_scores, -1)[:, -2:].T
        differing = (top_score - second_best > SURE) & (
            our_scores.argmax(-1) != unpacked_scores.argmax(-1)
        )
        said = f"mean difference {mean_difference:.1e}, other likeliest token where sure: {differing.sum()}"
        limit = LOGARITHMS["F32"]
        good = mean_difference <= limit and not differing.any()
        yield Row(
            f"merged file of {name}, F32",
            f"{said}; llama.cpp's own rounding {rounding_error:.1e}",
            f"{limit}, 0",
            good,
        )


def resume_rows(setup: Setup) -> Iterator[Row]:
    train_path, _ = setup.split()

    def prepare(folder: Path) -> None:
        (folder / "base.gguf").symlink_to(setup.base.resolve())
        shutil.copy(train_path, folder / "chats.jsonl")

    def flags(folder: Path) -> list[str]:
        paths = [str(folder / "base.gguf"), "--data", str(folder / "chats.jsonl")]
        return ["finetune", *paths, "--batch-size", "1", "--ctx", "64", "--lora-dropout", "0.1"]

    results = "{}.gguf", "{}.run/checkpoint.gguf", "{}.run/adapter.gguf"
    with tempfile.TemporaryDirectory(dir=setup.work) as tmp_folder:
        steps = survive_kills(Path(tmp_folder), 5, 0, RunKind(prepare, flags, results))
    yield Row("5 kills", f"{steps} steps, weights and metrics equal", "bit for bit", True)
