"""Checkpoints: everything that a run needs to resume bit for bit, in one GGUF file with a checksum.

Progress and leaves are stored by name. The previous checkpoint is kept as `.previous`, and loading takes the newest
valid one, so that a kill at any moment leaves a valid checkpoint."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.version import __version__
from packtrain.gguf import GGUF, DeferredTensor, GGUFError, MetadataValue, write_gguf

FORMAT = 1
KEY = "packtrain.checkpoint."


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a run. Counters are 64-bit; the data position and all randomness follow from `step`.

    step      steps done          tokens   trained on so far      seconds  spent training
    best      lowest validation loss, after step `best_step`, and `stale`, validations since then
    recent    training losses of the last good steps, as many as --past needs, and the gradient norm of the last one
    lowest    lowest training loss, and `unimproved`, steps since then
    shuffled  key of the order of the data: the step at which it was shuffled again, or 0
    last      validation loss of the last validation; `base` that before step 1, both over `batches` batches
    ends      answer ends in the result's validation, see ValidationResult.eog_counts
    since     the step after which the optimizer began, with zero moments
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = float("inf")
    stale: int = 0
    best_step: int = 0
    last: float = float("inf")
    base: float = float("inf")
    batches: int = 0
    recent: tuple[float, ...] = ()
    norm: float = float("inf")
    lowest: float = float("inf")
    unimproved: int = 0
    shuffled: int = 0
    ends: tuple[int, int] = (0, 0)
    since: int = 0

    def after_step(self, tokens: int, seconds: float) -> "TrainingProgress":
        return replace(
            self, step=self.step + 1, tokens=self.tokens + tokens, seconds=self.seconds + seconds
        )

    def with_train_loss(self, loss: float, norm: float, num_past: int) -> "TrainingProgress":
        """Return the progress after a step of finite loss and gradient `norm`; `recent` keeps num_past + 1 losses."""
        recent = (*self.recent, loss)[-1 - num_past :]
        is_better = loss < self.lowest
        lowest, unimproved = (loss, 0) if is_better else (self.lowest, self.unimproved + 1)
        return replace(self, recent=recent, norm=norm, lowest=lowest, unimproved=unimproved)

    def validated(
        self, loss: float, eog_counts: tuple[int, int] = (0, 0), best: bool = False
    ) -> "TrainingProgress":
        """Return the progress after a validation with this mean loss; `eog_counts` as in ValidationResult. With `best`
        (the run's result is its best step, not its last), `ends` stays that of the best step."""
        if loss < self.best:
            return replace(
                self, best=loss, stale=0, best_step=self.step, last=loss, ends=eog_counts
            )
        eog_counts = self.ends if best else eog_counts
        return replace(self, stale=self.stale + 1, last=loss, ends=eog_counts)


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """A loaded checkpoint: `about` describes the run, `array(name)` returns a leaf mapped from the file."""

    path: Path
    progress: TrainingProgress
    about: dict[str, Any]
    gguf: GGUF

    def array(self, name: str) -> np.ndarray:
        return self.gguf.array(name)


def previous_path(path: Path) -> Path:
    return path.with_suffix(".previous.gguf")


def save(
    path: Path, progress: TrainingProgress, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray],
) -> None:  # fmt: skip
    """Write a synced checkpoint; `about` describes the run; an old file becomes the previous one. Raises OSError."""
    json_texts = {KEY + "progress": json.dumps(asdict(progress)), KEY + "about": json.dumps(about)}
    metadata = {
        "general.architecture": MetadataValue("string", "packtrain-checkpoint"),
        KEY + "format": MetadataValue("u32", FORMAT), KEY + "version": MetadataValue("string", __version__),
        KEY + "sha256": MetadataValue("string", _digest(json_texts, arrays)),
        **{key: MetadataValue("string", text) for key, text in json_texts.items()},
    }  # fmt: skip
    if path.exists():
        link_file(path, previous_path(path))
    tensors = {n: DeferredTensor.from_reader(arrays.__getitem__, n) for n in arrays}
    write_gguf(path, metadata, tensors)


def link_file(path: Path, target: Path) -> None:
    """Give the file at `path` a second name, `target`, by a hard link or a copy; the next save replaces only `path`."""
    temporary_path = path.with_suffix(".keep.part")
    temporary_path.unlink(missing_ok=True)
    try:
        os.link(path, temporary_path)
    except OSError:  # file systems without hard links
        shutil.copyfile(path, temporary_path)
    os.replace(temporary_path, target)


def copy(path: Path, target: Path) -> None:
    """Copy a file to `target`, which appears only once it is complete."""
    temporary_path = target.with_name(f".{target.name}.part")
    shutil.copyfile(path, temporary_path)
    os.replace(temporary_path, target)


def _digest(json_texts: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of a checkpoint: JSON texts of progress and description, weights and moments, all by name."""
    digest = hashlib.sha256()
    for key, text in json_texts.items():
        digest.update(f"{key}={text}\n".encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def load_checkpoint(path: Path, report: Callable[[str], None]) -> TrainingCheckpoint | None:
    """Load the newest valid checkpoint at `path`: the file, or with a message the previous one; None if there is none.
    Raises InputError for a checkpoint of a newer format, and if there are files but none is valid."""
    problems = []
    for checkpoint_path in (path, previous_path(path)):
        if not checkpoint_path.exists():
            continue
        try:
            checkpoint = _read_checkpoint(checkpoint_path)
        except GGUFError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            report(f"{problem}; resuming from {checkpoint_path.name}")
        return checkpoint
    if problems:
        raise InputError("; ".join(problems))
    return None


def saved_step(path: Path) -> int:
    """Return the number of steps in the newest checkpoint at `path`, unverified; 0 if there is none."""
    for checkpoint_path in (path, previous_path(path)):
        with suppress(InputError, ValueError, KeyError, TypeError):
            return int(json.loads(GGUF(checkpoint_path).metadata[KEY + "progress"])["step"])
    return 0


def _read_checkpoint(path: Path) -> TrainingCheckpoint:
    gguf = GGUF(path)
    values = gguf.metadata
    required_types = {"format": int, "sha256": str, "progress": str, "about": str}
    if not all(isinstance(values.get(KEY + name), kind) for name, kind in required_types.items()):
        raise GGUFError(f"{path}: this is not a checkpoint of packtrain")
    if values[KEY + "format"] > FORMAT:
        raise InputError(
            f"{path}: checkpoint format {values[KEY + 'format']}, which packtrain"
            f" {values.get(KEY + 'version', 'of a later version')} reads; this is {__version__}, which reads up to"
            f" {FORMAT}"
        )
    texts = {KEY + name: values[KEY + name] for name in ("progress", "about")}
    if _digest(texts, {name: gguf.array(name) for name in gguf.entries}) != values[KEY + "sha256"]:
        raise GGUFError(f"{path}: the checksum does not match; the file is damaged")
    try:
        progress, run_info = (json.loads(texts[KEY + name]) for name in ("progress", "about"))
    except (ValueError, RecursionError):
        raise GGUFError(f"{path}: its description of the run is not JSON") from None
    if not _is_progress(progress) or not isinstance(run_info, dict) or "steps" not in run_info:
        raise GGUFError(f"{path}: its description of the run is not one that packtrain writes")
    for name in {"recent", "ends"} & progress.keys():
        progress[name] = tuple(progress[name])
    return TrainingCheckpoint(path, TrainingProgress(**progress), run_info, gguf)


def _is_progress(value: Any) -> bool:
    """Return whether JSON from a checkpoint has valid fields of TrainingProgress; older versions lack some of them."""
    kinds = {
        f.name: list if type(f.default) is tuple else type(f.default)
        for f in fields(TrainingProgress)
    }
    return (
        isinstance(value, dict)
        and {"step", "tokens", "seconds", "best", "stale"} <= value.keys() <= kinds.keys()
        and all(type(field_value) is kinds[name] for name, field_value in value.items())
        and all(v >= 0 for name, v in value.items() if name not in ("recent", "lowest", "ends"))
        and all(type(loss) is float for loss in value.get("recent", ()))
        and [type(count) for count in value.get("ends", (0, 0))] == [int, int]
        and value["step"] < 1 << 63
    )
