"""Log-probabilities of answers by the reference model: the base as training finds it, before step 1.

An adapter adds nothing then, so that the evaluation plan of the run computes them and no second model is needed. Each
answer is read once; the numbers are kept in the run folder, and a resumed run reads them there.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.design.plans import EVALUATE
from packtrain.errors import Interrupted
from packtrain.events import Events
from packtrain.files import atomic_file
from packtrain.models.preference import Preference
from packtrain.samples import Samples
from packtrain.training.engine import Engine, with_targets
from packtrain.training.job import Job
from packtrain.training.pairs import PairBatches
from packtrain.training.samples import SampleBatches

FILE = "reference.npz"  # in the run folder


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


def refers(how: Preference | None) -> bool:
    return how is not None and how.reference


def refer(
    job: Job, engine: Engine, folder: Path, events: Events, stopped: Callable[[], bool]
) -> None:
    """Fill in what the reference model says of the pairs that the run will see. Leaves get their initial values.

    Raises Interrupted if `stopped()`.
    """
    if not refers(job.shape.preference):
        return
    parts = {"train": job.train, "valid": job.valid}
    found = {name: part for name, part in parts.items() if isinstance(part, PairBatches)}
    mark, path = f"{job.fingerprint} {job.shape.base} {job.shape.config.precision}", folder / FILE
    _read(path, mark, found)
    missing = {name: _missing(job, part) for name, part in found.items()}
    count = sum(map(len, missing.values()))
    if not count:
        return
    job.subject.begin(engine.session)
    with events.counting("reference model", "answer") as tell:
        done = 0
        for name, part in found.items():
            for number in _fill(job, engine, part, missing[name]):
                done += number
                tell(done, count)
                if stopped():
                    _write(path, mark, found)
                    raise Interrupted("stopped before step 1")
    _write(path, mark, found)


def _missing(job: Job, part: PairBatches) -> list[int]:
    """The samples of a part that the run will see, and of which nothing is known."""
    wanted = np.ones(len(part.known), bool)
    asked = job.steps * job.settings.grad_accumulation_steps
    if part is job.train and asked < len(part) and not job.settings.resume:
        rows = [row for index in range(asked) for row in part.answers(index)]
        wanted[:] = False
        wanted[[sample for row in rows for sample in row]] = True
    return np.flatnonzero(wanted & np.isnan(part.known)).tolist()


def _fill(job: Job, engine: Engine, part: PairBatches, which: list[int]) -> Iterator[int]:
    """Compute them; yields how many at a time."""
    if not which:
        return
    some, run = Some(part.samples, which), engine.run[EVALUATE]
    batches = SampleBatches(some, job.shape.rows, part.time, shuffle=False)  # type: ignore[arg-type]
    for index in range(len(batches)):
        batch, done = batches[index], 0
        losses = run({**batch, **with_targets(batch)})["losses"].astype(np.float64)
        for at, row in enumerate(batches.chosen(index)):
            for number, i in enumerate(row):
                here = batch["weights"][at] * (batch["seq"][at] == number)
                part.known[which[i]] = -(losses[at] @ here) / (
                    here.sum() if part.how.divides else 1
                )
                done += 1
        yield done


def _write(path: Path, mark: str, parts: dict[str, PairBatches]) -> None:
    arrays = {name: part.known for name, part in parts.items()}
    kept: dict[str, Any] = {"mark": np.array(mark), "check": np.array(_check(arrays)), **arrays}
    with atomic_file(path) as file:
        np.savez(file, **kept)


def _read(path: Path, mark: str, parts: dict[str, PairBatches]) -> None:
    """What is in the file, if it is of the same data, model and settings; else it is computed again."""
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in parts}
            same = str(file["mark"]) == mark and int(file["check"]) == _check(arrays)
    except (OSError, ValueError, KeyError, EOFError):
        return
    if same and all(len(arrays[name]) == len(part.known) for name, part in parts.items()):
        for name, part in parts.items():
            part.known[:] = arrays[name]


def _check(arrays: dict[str, np.ndarray]) -> int:
    sum = 0
    for array in arrays.values():
        sum = zlib.crc32(array.tobytes(), sum)
    return sum
