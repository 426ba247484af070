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
from packtrain.planner.training_plans import TrainingPlans, leaves_nbytes
from packtrain.training.checkpoints import previous_path, saved_step
from packtrain.training.training_job import HEAD_NBYTES, TrainingJob
from packtrain.training.training_loop import BEST_FILE, CHECKPOINT

LOGS_NBYTES = 4 << 20  # metrics, events, pictures and the plan
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_space(
    job: TrainingJob, plans: TrainingPlans, extra_files: Iterable[tuple[Path, str, int]] = ()
) -> None:
    """Raise DiskFull, which lists bytes, if a disk lacks room for a run and `extra_files` (path, label, bytes)."""
    files_by_disk: dict[int, list[tuple[Path, str, int]]] = defaultdict(list)
    for path, description, nbytes in chain(run_files(job, plans), extra_files):
        folder = path.parent if path.parent.exists() else path.parent.parent
        files_by_disk[os.stat(folder).st_dev].append((folder, description, nbytes))
    for disk_files in files_by_disk.values():
        folder, needed = disk_files[0][0], sum(nbytes for *_, nbytes in disk_files)
        free = shutil.disk_usage(folder).free
        if needed > free:
            details = ", ".join(
                f"{description} {size_text(nbytes)}" for _, description, nbytes in disk_files
            )
            raise DiskFull(
                f"{folder.resolve()}: the run needs {size_text(needed)} of disk ({details}) and {size_text(free)} are"
                " free; make room, or give another --output"
            )


def run_files(job: TrainingJob, plans: TrainingPlans) -> Iterator[tuple[Path, str, int]]:
    """Yield the files that a run will write: path, description, and an upper bound of their additional bytes."""
    folder = job.settings.folder
    checkpoint, best_path = folder / CHECKPOINT, folder / BEST_FILE
    saved_nbytes = leaves_nbytes(plans.checkpoint_tensors.values())
    existing_nbytes = sum(_file_nbytes(path) for path in (checkpoint, previous_path(checkpoint)))
    yield checkpoint, "two checkpoints", max(2 * saved_nbytes - existing_nbytes, 0)
    s = job.settings
    weights_nbytes = leaves_nbytes(plans.resident_leaves[name] for name in plans.trained_names)
    num_saves = job.steps // s.save_every + 1 if s.save_every else 1
    if s.save_name:
        yield checkpoint, "numbered checkpoints", num_saves * saved_nbytes
    if s.save_model:
        yield checkpoint, "numbered models", num_saves * (weights_nbytes + HEAD_NBYTES)
    if job.settings.patience:  # a better one is written before the old one is replaced
        yield best_path, "the best weights", max(2 * weights_nbytes - _file_nbytes(best_path), 0)
    for path, nbytes in job.model.output_files().items():
        yield path, path.name, nbytes
    yield folder / "logs", "logs", LOGS_NBYTES


def _file_nbytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def resumable(checkpoint: Path, command: str) -> Iterator[None]:
    """Context manager: turn a full disk's OSError into DiskFull, with the last saved step and `command` to resume."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        last_step = saved_step(checkpoint)
        saved_text = f"step {last_step:,} is saved" if last_step else "no step is saved yet"
        reason = (error.strerror or "no space left").lower()
        raise DiskFull(
            f"{error.filename or checkpoint}: {reason}; {saved_text}; make room, then continue with: {command}"
        ) from error
