"""What another model says of samples: told once, before step 1, and kept in the run folder for a resumed run.

Several ranks share out what is to be told; all know all of it, and rank 0 keeps it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np

from packtrain.common.errors import Interrupted
from packtrain.common.events import Events
from packtrain.common.files import atomic_file
from packtrain.common.memory import settle
from packtrain.data.conversations import Samples
from packtrain.distributed import here
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import Job

PART = 1 << 18  # bytes that are sent at a time
SAVE_SECONDS = 60.0  # between writes of what is known so far

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Some:
    """Some of the samples."""

    samples: Samples
    which: list[int]

    @property
    def lengths(self) -> np.ndarray:
        return self.samples.lengths[self.which]

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.samples[self.which[i]]


def missing(job: Job, part: SampleBatches, unknown: np.ndarray) -> list[int]:
    """The samples of a part that the run will see, of those that are unknown: (samples,) bool."""
    num_batches = job.steps * job.settings.grad_accumulation_steps
    if part is job.train and num_batches < len(part):
        seen = np.zeros(len(unknown), bool)
        for index in range(num_batches):
            for row in part.answers(index):
                seen[row] = True
        unknown = unknown & seen
    return np.flatnonzero(unknown).tolist()


def in_turn(count: int, read: Callable[[int], list[T]]) -> Iterator[list[T]]:
    """What `read` says of each number below `count`, in their order; each rank reads every k-th of them."""
    world = here()
    for first in range(world.rank, count + world.rank, world.size):
        gathered = world.gather(read(first) if first < count else [])
        yield [result for rank_results in gathered for result in rank_results]


def follow(
    progress: Iterator[int], total: int, events: Events, title: str, part: str, stopped: Callable[[], bool],
    save: Callable[[], None],
) -> None:  # fmt: skip
    """Go through `progress`, which yields how many parts of `total` are done; save now and then, at a stop, and at the
    end. Raises Interrupted if `stopped()` on any rank."""
    saved = time.monotonic()
    with events.counting(title, part) as tell:
        for done in progress:
            tell(done, total)
            stops = here().any(stopped())
            if stops or time.monotonic() - saved > SAVE_SECONDS:
                save()
                saved = time.monotonic()
            if stops:
                raise Interrupted("stopped before step 1")
    settle()  # what read the texts is gone
    save()


def recall(path: Path, mark: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Fill the arrays with what rank 0 finds in its file, see `read`."""
    world = here()
    if world.rank == 0:
        read(path, mark, arrays)
    if world.size > 1:
        for array in arrays.values():
            step = max(PART // max(array[:1].nbytes, 1), 1)
            for at in range(0, len(array), step):
                array[at : at + step] = world.from_first(array[at : at + step])


def write(path: Path, mark: str, arrays: Mapping[str, np.ndarray]) -> None:
    """mark  identifies the data, the model and the settings that these arrays are of"""
    if here().rank:
        return
    contents: dict[str, Any] = {"mark": np.array(mark), **arrays}
    with atomic_file(path) as file:
        np.savez(file, **contents)


def read(path: Path, mark: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Fill the arrays from the file if it is whole and has this mark; else they are computed again."""
    try:
        with path.open("rb") as raw, np.load(raw) as file:  # which has checksums
            if str(file["mark"]) != mark:
                return
            stored = {name: file[name] for name in arrays}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return
    if all(stored[name].shape == array.shape for name, array in arrays.items()):
        for name, array in arrays.items():
            array[...] = stored[name]
