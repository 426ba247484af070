"""Perplexity on a text, or loss on conversations, of one model or of several side by side."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import existing
from packtrain.common.options import COLUMNS, option, positional, required, unescaped
from packtrain.common.text import clock, plural
from packtrain.data.chat_template import template_named
from packtrain.data.conversations import Recipe, prepare
from packtrain.data.text.documents import END_OF_TEXT, TRAIN, VALID, file_called
from packtrain.data.text.text_streams import RECORDS, kind_of
from packtrain.dtypes import PRECISIONS
from packtrain.engine.backends import DEVICES, Target, target
from packtrain.inference.kv_cache.decode_plans import CACHES
from packtrain.kernels.runtime import cache_root, writable
from packtrain.models.activation_rounding import ACTIVATIONS, F32, PRECISION, Q8
from packtrain.models.attention_choice import AUTO, FLASH, MODES, with_flash
from packtrain.models.config import check_context
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, read_scaled, with_activations
from packtrain.planner.budget import Say
from packtrain.planner.kernel_memory import kernels_of
from packtrain.training.ineffective_settings import VAL_SPLIT, Rule, check_idle
from packtrain.training.model_loss import Mean, counted, losses_of
from packtrain.training.perplexity_windows import Windows, read_whole
from packtrain.training.sample_batches import SampleBatches, row_length
from packtrain.training.train_settings import CHAT_TEMPLATE, DEVICE, SKIP_BAD
from packtrain.training.training_job import check_precision
from packtrain.workflows.generation_settings import SWA_FULL, cache_dtype, check_cache
from packtrain.workflows.kv_cache_loss import Through

Losses = Callable[[Iterable[Mapping[str, np.ndarray]]], Iterator[np.ndarray]]
TEXT_CONTEXT, SAMPLE_CONTEXT = 512, 2048  # at most, without --ctx
BATCH_TOKENS = 2048
TEST = "test"
SPLITS = {TEST: (TEST,), VALID: (VALID, "val"), TRAIN: (TRAIN,)}  # and the names of their files

SWA: Rule = "swa_full", lambda s: s.cache_type is None, "without --cache-type"
SPLIT: Rule = "val_split", lambda s: s.split is None, "without --split"


@dataclass(frozen=True)
class Evaluate:
    """Measure models on a text or on conversations."""

    COMMON = "data split ctx lora compare skip_bad separator chat_template"

    model: tuple[Path, ...] = positional("the model, a GGUF file; several are compared")
    data: Path = required(
        "text or conversations, in any form that `packtrain data` reads; of a folder, the test file, else valid,"
        " else train"
    )
    split: str | None = option(
        None, "use this file of a folder; of a single file, the part that finetune would use",
        choices=tuple(SPLITS),
    )  # fmt: skip
    val_split: float = option(
        0.05, "with --split on a single file: finetune's --val-split", least=0.0001, most=0.5
    )
    ctx: int | None = option(
        None,
        f"tokens of a window; default: the model's context, up to {TEXT_CONTEXT} for text, {SAMPLE_CONTEXT:,} for"
        " conversations",
        flags="-c",
        least=3,
    )
    all_positions: bool = option(
        False,
        "score every token: also the first half of each window of a text, and the prompts of conversations",
    )
    lora: tuple[str, ...] = option(
        (), "an adapter for the first model, FILE or FILE:SCALE; several are added together"
    )
    compare: bool = option(False, "measure the first model alone, then with each --lora")
    batch_size: int | None = option(
        None, f"windows at a time (default: {BATCH_TOKENS:,} tokens)", least=1
    )
    separator: str | None = option(
        None,
        f"text between documents; {END_OF_TEXT} on its own line is recognized; '' for one text",
    )
    skip_bad: bool = option(False, SKIP_BAD)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE")
    cache_type: str | None = option(
        None,
        "read through a KV cache of this element type, as `generate` does, instead of all at once",
        choices=CACHES,
    )
    swa_full: bool = option(False, SWA_FULL)
    flash_attn: str = option(AUTO, FLASH, flags="-fa", choices=MODES)
    activations: str = option("f32", ACTIVATIONS, choices=(F32, Q8))
    precision: str = option("f32", PRECISION, choices=PRECISIONS)
    device: str = option("cpu", DEVICE, choices=tuple(DEVICES))


@dataclass(frozen=True, slots=True)
class Prepared:
    """The data as a model reads it: batches, their token ids, and a description of what is scored."""

    batches: Windows | SampleBatches
    ids: np.ndarray
    method: str

    @property
    def skipped(self) -> int:
        return self.batches.skipped if isinstance(self.batches, Windows) else 0


@dataclass(frozen=True, slots=True, repr=False)
class Measured:
    """Losses of models on the same data.

    losses  of each token that is scored, (N,) f32 in nats, by the name of the model: its path, with its adapters
    method  what was scored, as a sentence
    same    whether all models tokenize the data alike, so that their losses can be compared
    """

    losses: Mapping[str, np.ndarray]
    method: str
    same: bool

    def loss(self, name: str | None = None) -> Mean:
        """Mean and standard error of a model, by default the first; `loss().exponential` is the perplexity."""
        return Mean.of(self.losses[name or next(iter(self.losses))])

    def __repr__(self) -> str:
        scores = (f"{Path(name).name} {self.loss(name)}" for name in self.losses)
        return f"Measured({self.method}: {', '.join(scores)})"


def evaluate(settings: Evaluate, events: Events) -> Measured:
    """Losses and perplexities. Raises InputError, and Interrupted if it is stopped."""
    check_idle(settings, (SPLIT, VAL_SPLIT, SWA))
    subjects = _subjects(settings, events.message)
    context = min(model.config.context_length for _, model in subjects)
    datasets: dict[Path, Prepared] = {}
    losses, device = dict[str, np.ndarray](), target(settings.device)
    for name, model in subjects:
        path = model.gguf.path
        if path not in datasets:
            datasets[path] = _prepared(settings, model, context, events.message)
        run = _reader(settings, model, datasets[path], device)
        losses[name] = _measured(name, run, datasets[path], len(subjects) > 1, events)
    first, *other_sets = datasets.values()
    is_same = all(np.array_equal(first.ids, other.ids) for other in other_sets)
    through = settings.cache_type and f"; read through a cache in {settings.cache_type}"
    return Measured(losses, first.method + (through or ""), is_same)


def _opened(settings: Evaluate, path: Path, report: Say) -> ModelFile:
    check_precision(settings.precision, settings.device)
    model = with_activations(open_model(path), settings.activations)
    config = replace(model.config, precision=settings.precision)
    device, kind = target(settings.device), settings.cache_type
    cache = None if kind is None else cache_dtype(config, kind)
    return replace(model, config=with_flash(config, settings.flash_attn, device, report, cache))


def _subjects(settings: Evaluate, report: Say) -> list[tuple[str, ModelFile]]:
    """The models to measure, by their printed names."""
    if settings.compare and not settings.lora:
        raise InputError("--compare: there is no adapter to compare; name some with --lora")
    (path, base), *other_models = [
        (str(path), _opened(settings, path, report)) for path in settings.model
    ]
    scaled = read_scaled(settings.lora, base.gguf)
    subjects = [(" + ".join([path, *settings.lora]), adapted(base, scaled))]
    if settings.compare:
        pairs = zip(settings.lora, scaled, strict=True)
        subjects = [
            (path, base),
            *((f"{path} + {text}", adapted(base, [adapter])) for text, adapter in pairs),
        ]
    return list(dict([*subjects, *other_models]).items())  # a repeated name is measured once


# ---- the data ------------------------------------------------------------------------------------------------


def _prepared(settings: Evaluate, model: ModelFile, context: int, report: Say) -> Prepared:
    path, part = file_to_measure(settings.data, settings.split)
    text = not path.is_dir() and kind_of(path) not in RECORDS
    length = settings.ctx or min(context, TEXT_CONTEXT if text else SAMPLE_CONTEXT)
    check_context(model.config, length, report)
    if text and not part and not settings.all_positions:
        tokenizer = model.tokenizer()
        ids = read_whole(path, _separator(settings), tokenizer)
        if ids is not None:
            bos = tokenizer.bos if tokenizer.add_bos else None
            return _windows(settings, path, ids, bos, length, report)
        report(
            f"{path} has several documents, each scored from its start; --separator '' reads the file as one text, as"
            " llama-perplexity does"
        )
    return _samples(settings, model, path, part, length, report)


def _separator(settings: Evaluate) -> str | None:
    return settings.separator and unescaped(settings.separator)


def file_to_measure(data: Path, split: str | None) -> tuple[Path, str]:
    """The file or folder of texts to measure, and which split of it, as finetune splits it; "" is all."""
    existing(data, "--data")
    if not data.is_dir():
        if split == TEST:
            raise InputError(
                f"--split test: {data} is one file; give a folder with a test file, or no --split"
            )
        return data, split or ""
    files = {name: file_called(data, *names) for name, names in SPLITS.items()}
    split_files = {name: path for name, path in files.items() if path is not None}
    if split is None:
        return next(iter(split_files.values()), data), ""
    if TRAIN in split_files and VALID not in split_files and split != TEST:  # finetune splits it
        return split_files[TRAIN], split
    if split in split_files:
        return split_files[split], ""
    raise InputError(f"--split {split}: {data} has no {split}.jsonl, {split}.txt or the like")


def _windows(
    settings: Evaluate, path: Path, ids: np.ndarray, bos: int | None, length: int, report: Say
) -> Prepared:
    """A text in windows, as llama-perplexity reads it."""
    if len(ids) < 3:
        raise InputError(f"--data: {path} has {len(ids)} tokens; there must be 3 or more")
    if len(ids) < length:
        report(
            f"{path} has {len(ids):,} tokens, fewer than a window of {length:,}; it is one window"
        )
    length = min(length, len(ids))
    rows = _rows(settings, length, len(ids) // length)
    batches = Windows(ids, bos, rows, length)
    begin = "" if bos is None else ", each starting with BOS"
    count = batches.windows * (batches.time - batches.skipped)
    method = (
        f"{path}: {plural(batches.windows, 'window')} of {length:,} tokens{begin};"
        f" the second half of each window is scored ({count:,} tokens), as in llama-perplexity"
    )
    return Prepared(batches, ids, method)


def _samples(
    settings: Evaluate, model: ModelFile, path: Path, part: str, length: int, report: Say
) -> Prepared:
    """Documents or conversations, in rows as in finetune's validation."""
    recipe = Recipe(
        path,
        model.gguf.path,
        length,
        everything=settings.all_positions,
        separator=_separator(settings),
        val_split=settings.val_split if part else 0.0,
        skip_bad=settings.skip_bad,
        columns=settings.columns,
        template=settings.chat_template and template_named(settings.chat_template),
    )
    dataset = prepare(recipe, writable(cache_root() / "tokens"), report)
    for note in dataset.notes:
        report(note)
    if part == VALID and dataset.valid is None:
        raise InputError(f"--split valid: {path} has too few records; --val-split holds out none")
    samples = dataset.train if part != VALID or dataset.valid is None else dataset.valid
    time = row_length(length, SampleBatches.lengths_of(samples))
    rows = _rows(settings, time, SampleBatches(samples, 1, time, shuffle=False).windows)
    batches = SampleBatches(samples, rows, time, shuffle=False)
    method = (
        f"{path}{f' ({part} split)' if part else ''}: {samples.targets:,} of {samples.ids.size:,} tokens are scored,"
        f" in {len(samples):,} samples of up to {length:,} tokens, as in finetune's validation"
    )
    return Prepared(batches, samples.ids, method)


def _rows(settings: Evaluate, time: int, windows: int) -> int:
    return max(min(settings.batch_size or BATCH_TOKENS // time, windows), 1)


# ---- measuring -----------------------------------------------------------------------------------------------


def _reader(settings: Evaluate, model: ModelFile, data: Prepared, device: Target) -> Losses:
    """What gives the losses of batches, with its kernels loaded."""
    batches, cache = data.batches, settings.cache_type
    kernels.prepare((*kernels.WRITING, "loss", *kernels_of(model.config)))
    if cache is None:
        run = losses_of(model, batches.rows, batches.time, skipped=data.skipped, target=device)
        return partial(counted, run)
    check_cache(model, batches.time, cache)
    scored, full = batches.time - data.skipped, settings.swa_full
    return Through(model, batches.time, scored, cache, swa_full=full, target=device).losses


def _measured(
    name: str, run: Losses, data: Prepared, is_multiple: bool, events: Events
) -> np.ndarray:
    """The losses (N,) f32 of all scored tokens."""
    batches = data.batches
    batch_losses, total, count, start_time = list[np.ndarray](), 0.0, 0, time.monotonic()
    everything = f"{plural(batches.windows, 'window')}{f' of {name}' if is_multiple else ''}"
    events.message(f"measuring {everything} …")
    with (
        events.counting(name if is_multiple else "measuring", "window") as report_progress,
        events.stopping() as stopped,
    ):
        for losses in run(_until(stopped, batches)):
            batch_losses.append(losses)
            total, count = total + float(losses.sum(dtype=np.float64)), count + len(losses)
            if not math.isfinite(total):
                raise InputError(
                    f"{name}: the loss is {total}; the weights must give finite numbers"
                )
            so_far = Mean(total / max(count, 1), 0.0).exponential.value
            done = min(len(batch_losses) * batches.rows, batches.windows)
            report_progress(done, batches.windows, f"perplexity {so_far:.4f}")
    events.message(f"{everything} in {clock(time.monotonic() - start_time)}")
    return np.concatenate(batch_losses)


def _until(
    stopped: Callable[[], bool], batches: Windows | SampleBatches
) -> Iterator[dict[str, np.ndarray]]:
    for i in range(len(batches)):
        if stopped():
            raise Interrupted(f"stopped after {i} of {len(batches)} batches, without a result")
        yield batches[i]
