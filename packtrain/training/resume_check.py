"""Whether a run can resume from a checkpoint, and if not, which flag or file has changed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.options import flag
from packtrain.common.text import plural
from packtrain.engine.optim import OPTIMIZERS
from packtrain.training.checkpoints import Checkpoint
from packtrain.training.train_settings import FREE
from packtrain.training.training_job import SOURCES, Job

# settings that determine how the data is tokenized
READING = ("ctx", "separator", "sample_start", "val_split", "mask_prompt", "train_on", "truncate")
ORDER = ("rows", "chunk", "layered")
# settings that may change together with the optimizer
RATES = """lr lr_min lr_scheduler lr_cycles lr_cycle_growth lr_half_every warmup_ratio warmup_lr
optimizer max_grad_norm max_grad_value"""
UPDATE = {*RATES.split(), *(f.name for kind in OPTIMIZERS.values() for f in fields(kind))}


def check_compatible(job: Job, found: Checkpoint, say: Callable[[str], None]) -> None:
    """Raise InputError for a checkpoint of another run; report a changed number of steps."""
    now = job.about()
    other = differences(found.about, now, type(job.settings))
    if other:
        raise InputError(
            f"--resume: {found.path.parent} cannot continue: {'; '.join(other)};"
            " give the original ones, or start over with --overwrite"
        )
    if found.about.get("ranks", 1) != now["ranks"]:
        say(
            f"the run had {plural(found.about.get('ranks', 1), 'process', 'processes')} and has {now['ranks']} now:"
            " its sums are added in another order"
        )
    if found.about["steps"] != now["steps"]:
        say(
            f"the run had {plural(found.about['steps'], 'step')} and has {now['steps']} now: "
            f"its learning rates differ from step {found.progress.step + 1} on"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], settings: type) -> list[str]:
    """The differences between a checkpoint and the job, as flags and file names."""
    changed = [*_flags(before, now, settings)]
    names = [name for name, _ in changed]
    found = [line for _, line in changed]
    found += _files(before, now, read_otherwise=any(name in READING for name in names))
    if found:
        return found
    # no setting explains these, for example another version of packtrain
    told = (
        {*now} - {"steps", "lora", "data", "sources", "ranks"} - {f.name for f in fields(settings)}
    )
    if before.get("ranks", 1) != now.get("ranks", 1) or _switched(before, now):
        told -= {*ORDER}
    return [
        f"{'its order of additions' if name in ORDER else 'the model'} ({name}) was {before[name]} and is {now[name]}"
        for name in sorted(told & {*before})
        if before[name] != now[name]
    ]


def _flags(
    before: Mapping[str, Any], now: Mapping[str, Any], settings: type
) -> Iterator[tuple[str, str]]:
    """Changed settings, each with a message; settings unknown to an old checkpoint had their defaults."""
    free = FREE | (UPDATE if _switched(before, now) else set())
    for field in fields(settings):
        if field.name not in now or field.name in free:  # `data` is a checksum in the checkpoint
            continue
        default = [*field.default] if isinstance(field.default, tuple) else field.default
        was, is_ = before.get(field.name, default), now[field.name]
        if was != is_:
            yield field.name, f"{flag(field.name)} was {_shown(was)} and is {_shown(is_)}"


def _files(before: Mapping[str, Any], now: Mapping[str, Any], read_otherwise: bool) -> list[str]:
    """Messages about changed files: `data` holds the checksum of the data and, when fine-tuning, that of the base."""
    (data, *base), (data_now, *base_now) = str(before.get("data")).split(), now["data"].split()
    was, is_ = before.get("sources", {}), now["sources"]
    if base != base_now:
        return [f"the base {Path(is_['model']).name} is not the file it began with"]
    if data == data_now or read_otherwise:
        return []
    given = [name for name in SOURCES if name in was and was[name] != is_.get(name)]
    if given:
        return [f"{flag(n)} was {_shown(was[n])} and is {_shown(is_.get(n))}" for n in given]
    vocab = f" or the vocabulary {Path(is_['vocab']).name}" if is_.get("vocab") else ""
    return [f"the data {Path(is_['data']).name}{vocab} has changed since it began"]


def _switched(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return bool(before.get("optimizer", now.get("optimizer")) != now.get("optimizer"))


def _shown(value: Any) -> str:
    """A setting as written on the command line."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "not given"
    return f"{value:g}" if isinstance(value, float) else str(value)
