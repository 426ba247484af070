"""Check that a run can resume from a checkpoint; if not, name the flags or files that have changed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.options import WITH_OPTIMIZER, flag, resumable_names
from packtrain.common.text import plural
from packtrain.engine.optim import OPTIMIZERS
from packtrain.training.checkpoints import TrainingCheckpoint
from packtrain.training.training_job import SOURCES, TrainingJob

# values in checkpoints that lack a setting, where those are not its default
LEGACY_VALUES = {"shuffle_samples": False}
ORDER_FIELDS = "rows", "chunk", "layered", "tiles"  # of floating-point additions


def check_compatible(
    job: TrainingJob, checkpoint: TrainingCheckpoint, report: Callable[[str], None]
) -> None:
    """Raise InputError, with the changed flags, for a checkpoint of another run; report another number of steps."""
    current = job.about()
    changed_names = differences(checkpoint.about, current, type(job.settings))
    if changed_names:
        raise InputError(
            f"--resume: {checkpoint.path.parent} cannot continue: {'; '.join(changed_names)};"
            " give the original ones, or start over with --overwrite"
        )
    if checkpoint.about.get("ranks", 1) != current["ranks"]:
        report(
            f"the run had {plural(checkpoint.about.get('ranks', 1), 'process', 'processes')} and has {current['ranks']}"
            " now: its sums are added in another order"
        )
    if checkpoint.about["steps"] != current["steps"]:
        report(
            f"the run had {plural(checkpoint.about['steps'], 'step')} and has {current['steps']} now: "
            f"its learning rates differ from step {checkpoint.progress.step + 1} on"
        )


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], settings: type) -> list[str]:
    """Return messages on how `saved` (a checkpoint's `about`) and `current` differ; `settings`: the settings' class."""
    changed_settings = [*_changed_settings(saved, current, settings)]
    messages = [line for _, line in changed_settings]
    is_read_otherwise = any(field.metadata["group"] == "data" for field, _ in changed_settings)
    messages += _changed_files(saved, current, is_read_otherwise)
    if messages:
        return messages
    # no setting explains these, for example another version of packtrain
    setting_names = {f.name for f in fields(settings)}
    compared_fields = {*current} - {"steps", "lora", "data", "sources", "ranks"} - setting_names
    if saved.get("ranks", 1) != current.get("ranks", 1) or _changed_optimizer(saved, current):
        compared_fields -= {*ORDER_FIELDS}
    return [
        f"{'its order of additions' if name in ORDER_FIELDS else 'the model'} ({name}) was"
        f" {saved[name]} and is {current[name]}"
        for name in sorted(compared_fields & {*saved})
        if saved[name] != current[name]
    ]


def _changed_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], settings: type
) -> Iterator[tuple["Field[Any]", str]]:
    """Yield each changed setting's field and a message; a setting that `saved` lacks had its default."""
    changeable = resumable_names(settings)
    if _changed_optimizer(saved, current):
        optimizer_names = {f.name for kind in OPTIMIZERS.values() for f in fields(kind)}
        changeable |= resumable_names(settings, WITH_OPTIMIZER) | optimizer_names
    for field in fields(settings):
        # `data` is a checksum in the checkpoint
        if field.name not in current or field.name in changeable:
            continue
        default = LEGACY_VALUES.get(field.name, field.default)
        default = [*default] if isinstance(default, tuple) else default
        old_value, is_ = saved.get(field.name, default), current[field.name]
        if old_value != is_:
            yield field, f"{flag(field.name)} was {_shown(old_value)} and is {_shown(is_)}"


def _changed_files(
    saved: Mapping[str, Any], current: Mapping[str, Any], is_read_otherwise: bool
) -> list[str]:
    """Return messages about changed base or data, by checksums; `is_read_otherwise`: other flags explain the data's."""
    (data, *base), (data_now, *base_now) = str(saved.get("data")).split(), current["data"].split()
    was, is_ = saved.get("sources", {}), current["sources"]
    if base != base_now:
        return [f"the base {Path(is_['model']).name} is not the file it began with"]
    if data == data_now or is_read_otherwise:
        return []
    changed_sources = [name for name in SOURCES if name in was and was[name] != is_.get(name)]
    if changed_sources:
        return [
            f"{flag(n)} was {_shown(was[n])} and is {_shown(is_.get(n))}" for n in changed_sources
        ]
    vocab_text = f" or the vocabulary {Path(is_['vocab']).name}" if is_.get("vocab") else ""
    return [f"the data {Path(is_['data']).name}{vocab_text} has changed since it began"]


def _changed_optimizer(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    return bool(saved.get("optimizer", current.get("optimizer")) != current.get("optimizer"))


def _shown(value: Any) -> str:
    """Format a setting as on the command line."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "not given"
    return f"{value:g}" if isinstance(value, float) else str(value)
