"""Check before the first step that the disk has room for what a run will write."""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from packtrain.common.errors import DiskFull
from packtrain.engine.memory_plan import size_text
from packtrain.planner.training_plans import Plans, nbytes_of
from packtrain.training.checkpoints import previous, step_of
from packtrain.training.training_job import HEAD_NBYTES, Job
from packtrain.training.training_loop import BEST, CHECKPOINT

LOGS_NBYTES = 4 << 20  # metrics, events, pictures and the plan
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_space(job: Job, plans: Plans, extra_files: Iterable[tuple[Path, str, int]] = ()) -> None:
    """Raise DiskFull, with the bytes needed in each folder, if a disk has less."""
    disks: dict[int, list[tuple[Path, str, int]]] = defaultdict(list)
    for path, description, nbytes in chain(written(job, plans), extra_files):
        folder = path.parent if path.parent.exists() else path.parent.parent
        disks[os.stat(folder).st_dev].append((folder, description, nbytes))
    for parts in disks.values():
        folder, needed = parts[0][0], sum(nbytes for *_, nbytes in parts)
        free = shutil.disk_usage(folder).free
        if needed > free:
            details = ", ".join(
                f"{description} {size_text(nbytes)}" for _, description, nbytes in parts
            )
            raise DiskFull(
                f"{folder.resolve()}: the run needs {size_text(needed)} of disk ({details}) and {size_text(free)} are"
                " free; make room, or give another --output"
            )


def written(job: Job, plans: Plans) -> Iterator[tuple[Path, str, int]]:
    """Files of a run: path, description, and an upper bound of the additional bytes."""
    folder = job.settings.folder
    checkpoint, best = folder / CHECKPOINT, folder / BEST
    saved_nbytes = nbytes_of(plans.saved.values())
    existing_nbytes = sum(_nbytes(path) for path in (checkpoint, previous(checkpoint)))
    yield checkpoint, "two checkpoints", max(2 * saved_nbytes - existing_nbytes, 0)
    s, weights = job.settings, nbytes_of(plans.kept[name] for name in plans.trained)
    saves = job.steps // s.save_every + 1 if s.save_every else 1
    if s.save_name:
        yield checkpoint, "numbered checkpoints", saves * saved_nbytes
    if s.save_model:
        yield checkpoint, "numbered models", saves * (weights + HEAD_NBYTES)
    if job.settings.patience:  # a better one is written before the old one is replaced
        yield best, "the best weights", max(2 * weights - _nbytes(best), 0)
    for path, nbytes in job.subject.files().items():
        yield path, path.name, nbytes
    yield folder / "logs", "logs", LOGS_NBYTES


def _nbytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def resumable(checkpoint: Path, command: str) -> Iterator[None]:
    """Turn a full disk into DiskFull, which names the last saved step and the command to resume."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        step = step_of(checkpoint)
        saved = f"step {step:,} is saved" if step else "no step is saved yet"
        reason = (error.strerror or "no space left").lower()
        raise DiskFull(
            f"{error.filename or checkpoint}: {reason}; {saved}; make room, then continue with: {command}"
        ) from error
