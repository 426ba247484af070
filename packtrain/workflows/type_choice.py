"""The smallest file that keeps what tuning gained: a tuned model written in each type, and its losses measured.

The gain of tuning is the loss of the base less that of the tuned model, on data that neither was trained on. A file
keeps the share of it that is left once its weights are rounded.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.events import Counted, Events
from packtrain.common.files import atomic_path, check_output, existing, remove_parts
from packtrain.common.options import COLUMNS, option, positional, required
from packtrain.data.text.text_streams import data_files
from packtrain.gguf import GGUF
from packtrain.models.quant_recipe import MIXES
from packtrain.training.ineffective_settings import Rule, check_idle
from packtrain.workflows.adapter_merge import Merge, merge
from packtrain.workflows.evaluation import Evaluate, evaluate
from packtrain.workflows.quantization import FILE_TYPE, Quantize, quantize

USUAL = "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"
AS_BASE = "as the base"
PLAIN, DATA, GIVEN, TUNED = "plain", "with data", "as it is", "aware"
MEMORY: Rule = "memory", lambda s: s.calibrate is None, "without --calibrate"

Make = Callable[[Path], object]  # writes the file


@dataclass(frozen=True)
class Choose:
    """Write a tuned model as the smallest file that keeps what tuning gained."""

    model: Path = positional("the base, a GGUF file")
    tuned: Path = positional("the tuned model, or an adapter of the base, a GGUF file")
    output: Path = required("the GGUF file to write", flags="-o")
    data: Path = required(
        "text or conversations that were not trained on, to measure the loss; of a folder, the test file, else valid,"
        " else train"
    )
    type: tuple[str, ...] = option(
        (), f"a type to try, repeatable (default: {', '.join(USUAL)})", metavar="TYPE"
    )
    calibrate: Path | None = option(
        None, "conversations or text like the training data: each type is tried with it, too"
    )
    also: tuple[Path, ...] = option((), "a file to measure as it is; repeatable", metavar="FILE")
    aware: tuple[Path, ...] = option(
        (),
        "a file that `finetune --aware` wrote, to measure as it is and show under its type; repeatable",
        metavar="FILE",
    )
    keep: float = option(0.98, "the share of the gain that must be kept", least=0, most=1)
    memory: str | None = option(
        None, "with --calibrate: limit of private memory while a file is written, such as 2GiB"
    )
    ctx: int | None = option(None, "tokens of a window, as in `eval`", flags="-c", least=3)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    svg: Path | None = option(
        None, "draw the sizes of the files against what they keep", metavar="FILE"
    )
    overwrite: bool = option(False, "replace the output if it exists")


@dataclass(frozen=True, slots=True)
class Try:
    """A file that was tried.

    name    its type, or its path
    how     rounded plainly, with data, trained as stored (aware), or a file as it is
    nbytes  of the whole file
    loss    nats per token
    kept    share of the gain
    """

    name: str
    how: str
    nbytes: int
    loss: float
    kept: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was tried, and the one that was written: the smallest that keeps enough, else the one that keeps most.

    base, tuned  losses, nats per token; the tuned model's before any rounding
    """

    output: Path
    base: float
    tuned: float
    keep: float
    best: Try
    tries: list[Try] = field(repr=False)

    @property
    def enough(self) -> bool:
        return self.best.kept >= self.keep


class Inside(Events):
    """What the tasks inside this one report: their progress."""

    def __init__(self, events: Events) -> None:
        self.events = events

    @contextmanager
    def counting(self, label: str, part: str) -> Iterator[Counted]:
        with self.events.counting(label, part) as counted:
            yield counted


def choose(settings: Choose, events: Events) -> Chosen:
    """Try each type and write the file. Raises InputError, DoesNotFit, Interrupted; nothing is written then."""
    _check(settings)
    output = settings.output.resolve()
    remove_parts(output.parent)
    trial, merged_path = (output.with_name(f".{output.name}.{n}.{os.getpid()}.part") for n in "ab")
    try:
        with atomic_path(output) as best:
            return _tried(settings, events, trial, best, merged_path)
    finally:
        for path in (trial, merged_path):
            path.unlink(missing_ok=True)


def _check(settings: Choose) -> None:
    """Checks that need no work."""
    check_idle(settings, (MEMORY,))
    read = [*GGUF(settings.model).paths, *GGUF(settings.tuned).paths]
    data_paths = [(settings.data, "--data")]
    data_paths += [(path, "--also") for path in settings.also]
    data_paths += [(path, "--aware") for path in settings.aware]
    if settings.calibrate is not None:
        data_paths.append((settings.calibrate, "--calibrate"))
    for path, flag in data_paths:
        existing(path, flag)
    for name in settings.type:
        if name.upper() not in MIXES:
            raise InputError(f"--type {name} is unknown; it must be one of {', '.join(MIXES)}")
    read += [file for path, _ in data_paths for file in data_files(path)]
    check_output(settings.output, "-o", read, settings.overwrite)


def _tried(settings: Choose, events: Events, trial: Path, best: Path, merged_path: Path) -> Chosen:
    """All tries; the file of the best one is left at `best`."""
    inside, tuned = Inside(events), settings.tuned
    if _is_adapter(tuned):
        merge(Merge(settings.model, (str(tuned),), merged_path, type="f32", overwrite=True), inside)
        tuned = merged_path
    loss = partial(_loss, settings, inside)
    before, after = loss(settings.model), loss(tuned)
    if not after < before:
        raise InputError(
            f"{settings.tuned}: its loss on {settings.data} is {after:.4f} and the base's {before:.4f}; without a gain"
            " there is nothing to keep"
        )
    events.message(f"loss: base {before:.4f}, tuned {after:.4f}")
    tries = list[Try]()
    for name, method, make in _candidates(settings, tuned, inside):
        make(trial)
        trial_loss = loss(trial)
        candidate = Try(
            name, method, trial.stat().st_size, trial_loss, (before - trial_loss) / (before - after)
        )
        events.row(line(candidate))
        tries.append(candidate)
        if min(tries, key=partial(_order, settings.keep)) is candidate:
            os.replace(trial, best)
    chosen = min(tries, key=partial(_order, settings.keep))
    return Chosen(settings.output, before, after, settings.keep, chosen, tries)


def _order(keep: float, trial: Try) -> tuple[bool, float]:
    """The best comes first."""
    return (False, trial.nbytes) if trial.kept >= keep else (True, -trial.kept)


def _is_adapter(path: Path) -> bool:
    return GGUF(path).metadata.get("general.type") == "adapter"


def _loss(settings: Choose, events: Events, path: Path) -> float:
    measured = Evaluate((path,), settings.data, ctx=settings.ctx, columns=settings.columns)
    return evaluate(measured, events).loss().value


def _candidates(settings: Choose, tuned: Path, events: Events) -> Iterator[tuple[str, str, Make]]:
    """Name, way and writer of each file to try."""
    methods: list[tuple[str, Path | None]] = [(PLAIN, None)]
    if settings.calibrate is not None:
        methods.append((DATA, settings.calibrate))
    in_blocks = any(entry.dtype.quantized for entry in GGUF(settings.model).entries.values())
    if _is_adapter(settings.tuned) and in_blocks:
        for method, data in methods:
            yield AS_BASE, method, partial(_merge, settings, data, events)
    for name in settings.type or USUAL:
        for method, data in methods:
            yield name.lower(), method, partial(_quantize, settings, tuned, name, data, events)
    for tuned_path in settings.aware:
        yield _type_of(tuned_path), TUNED, partial(_copy, tuned_path)
    for tuned_path in settings.also:
        yield str(tuned_path), GIVEN, partial(_copy, tuned_path)


def _type_of(path: Path) -> str:
    """The type that a file says it is written in, as --type takes it; of one that says nothing, its path."""
    number = GGUF(path).metadata.get(FILE_TYPE)
    return next((n.lower() for n, mix in MIXES.items() if mix.number == number), str(path))


def _merge(settings: Choose, data: Path | None, events: Events, path: Path) -> None:
    """The adapter merged into the base's own types."""
    args = settings.model, (str(settings.tuned),), path
    merge(Merge(*args, **_calibrating(settings, data)), events)


def _quantize(
    settings: Choose, tuned: Path, name: str, data: Path | None, events: Events, path: Path
) -> None:
    options = _calibrating(settings, data)
    quantize(Quantize(tuned, path, name, allow_requantize=True, **options), events)


def _calibrating(settings: Choose, data: Path | None) -> dict[str, Any]:
    """The settings of a file that may be written with data."""
    read = {"calibrate": data, "memory": settings.memory, "columns": settings.columns}
    return {"overwrite": True, **(read if data else {})}


def _copy(source_path: Path, path: Path) -> None:
    with open(source_path, "rb") as source, open(path, "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())


def line(trial: Try) -> str:
    """A row of the table."""
    size = f"{trial.nbytes / (1 << 20):10.2f} MiB"
    return f"{trial.name:12} {trial.how:10} {size}  loss {trial.loss:.4f}  keeps {trial.kept:.1%}"
