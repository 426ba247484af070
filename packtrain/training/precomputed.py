"""Outputs of another model on samples: computed once, before step 1, and saved in the run folder for a resumed run.

Ranks share out the computation; each rank gets all results, and rank 0 saves them."""

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
from packtrain.common.memory import release_memory
from packtrain.data.conversations import TokenizedSamples
from packtrain.distributed import current_world
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import TrainingJob

SEND_NBYTES = 1 << 18  # bytes sent at a time
SAVE_SECONDS = 60.0  # between writes of the results so far

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleSubset:
    """A subset of the samples, with the interface of TokenizedSamples."""

    samples: TokenizedSamples
    sample_ids: list[int]

    @property
    def lengths(self) -> np.ndarray:
        return self.samples.lengths[self.sample_ids]

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.samples[self.sample_ids[i]]


def missing_samples(job: TrainingJob, batches: SampleBatches, unknown: np.ndarray) -> list[int]:
    """Return the ids of samples that the run's steps read and that are not computed yet: `unknown`, bool (samples,)."""
    num_batches = job.steps * job.settings.grad_accumulation_steps
    if batches is job.train and num_batches < len(batches):
        is_seen = np.zeros(len(unknown), bool)
        for index in range(num_batches):
            for row in batches.row_samples(index):
                is_seen[row] = True
        unknown = unknown & is_seen
    return np.flatnonzero(unknown).tolist()


def in_rank_order(num_items: int, read_item: Callable[[int], list[T]]) -> Iterator[list[T]]:
    """Compute lists read_item(i), i < num_items, one per rank and round; yield each round's, joined, on all ranks."""
    world = current_world()
    for first_index in range(world.rank, num_items + world.rank, world.world_size):
        gathered = world.gather(read_item(first_index) if first_index < num_items else [])
        yield [result for rank_results in gathered for result in rank_results]


def run_saved(
    progress: Iterator[int], num_total: int, events: Events, label: str, unit: str, stopped: Callable[[], bool],
    saved_arrays: tuple[Path, str, Mapping[str, np.ndarray]],
) -> None:  # fmt: skip
    """Run a computation to its end, and show its progress: `progress` yields how many of `num_total` parts are done.

    label, unit   the computation and one of its parts, in words
    saved_arrays  arguments of `write_arrays`, which saves the results every SAVE_SECONDS and at the end
    Raises Interrupted, after saving, if `stopped()` on any rank.
    """
    last_save_time = time.monotonic()
    with events.counting(label, unit) as counter:
        for num_done in progress:
            counter(num_done, num_total)
            stop_requested = current_world().any_rank(stopped())
            if stop_requested or time.monotonic() - last_save_time > SAVE_SECONDS:
                write_arrays(*saved_arrays)
                last_save_time = time.monotonic()
            if stop_requested:
                raise Interrupted("stopped before step 1")
    release_memory()  # the model that read the texts is gone
    write_arrays(*saved_arrays)


def restore_arrays(path: Path, mark: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Fill the arrays, on all ranks, from rank 0's file if it has this mark, see `write_arrays`; else leave them."""
    world = current_world()
    if world.rank == 0:
        read_arrays(path, mark, arrays)
    if world.world_size > 1:
        for array in arrays.values():
            chunk_rows = max(SEND_NBYTES // max(array[:1].nbytes, 1), 1)
            for at in range(0, len(array), chunk_rows):
                array[at : at + chunk_rows] = world.from_first(array[at : at + chunk_rows])


def write_arrays(path: Path, mark: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays on rank 0; `mark`, a text, identifies the data, model and settings that they belong to."""
    if current_world().rank:
        return
    named_arrays: dict[str, Any] = {"mark": np.array(mark), **arrays}
    with atomic_file(path) as file:
        np.savez(file, **named_arrays)


def read_arrays(path: Path, mark: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Fill the arrays from a file if it is complete and has this mark; otherwise leave them as they are."""
    try:
        with path.open("rb") as raw, np.load(raw) as file:  # npz has checksums
            if str(file["mark"]) != mark:
                return
            stored_arrays = {name: file[name] for name in arrays}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return
    if all(stored_arrays[name].shape == array.shape for name, array in arrays.items()):
        for name, array in arrays.items():
            array[...] = stored_arrays[name]
