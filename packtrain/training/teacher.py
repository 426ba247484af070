"""What a teacher finds likely: its logits of the likeliest tokens at every target that a run will see.

Computed once, before the memory of the run is taken, and kept in the run folder; a resumed run reads it there.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from packtrain.backends import Target
from packtrain.errors import DoesNotFit, Interrupted
from packtrain.events import Events
from packtrain.files import atomic_file
from packtrain.graph import Graph
from packtrain.memory import private_nbytes, settle
from packtrain.models import transformer
from packtrain.models.distill import IDS, PARTS, Distill, reading
from packtrain.models.file import ModelFile
from packtrain.placing import place
from packtrain.planning import make_plan, size_text
from packtrain.run import Session
from packtrain.samples import Samples
from packtrain.training.job import Job
from packtrain.training.reference import Some
from packtrain.training.samples import SampleBatches

FILE = "teacher.npz"  # in the run folder
TOKENS = 32  # whose logits are computed at a time


class TeacherBatches(SampleBatches):
    """Like SampleBatches; a batch has inputs for the loss of `models.distill` in addition.

    teacher_ids    (rows, top + 1, time)  i32, the target, then the teacher's tokens
    teacher_parts  (rows, top + 1, time)  f32, see Distill.parts

    known  (targets,)  records of ids and logits of the teacher; an id of -1: nothing is known yet
    mark   identifies the teacher, and what is known of it
    """

    def __init__(
        self, samples: Samples, rows: int, time: int, how: Distill, teacher: ModelFile, mark: str, *,
        seed: int = 0, pack: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(samples, rows, time, seed=seed, pack=pack)
        self.how, self.teacher, self.mark = how, teacher, f"{mark} {how.top}"
        counts = [int(samples[i][1][1:].sum()) for i in range(len(samples))]
        self.first = np.append(0, np.cumsum(counts))
        self.known = nothing(int(self.first[-1]), how.top)

    def _row(self, chosen: list[int]) -> dict[str, np.ndarray]:
        row = super()._row(chosen)
        ids = np.zeros((self.how.top + 1, self.time), np.int32)
        parts = np.zeros((self.how.top + 1, self.time), np.float32)
        ids[0] = row["targets"]
        here = np.flatnonzero(row["weights"])
        spans = [np.arange(self.first[i], self.first[i + 1]) for i in chosen]
        if spans:
            known = self.known[np.concatenate(spans)]
            ids[1:, here], parts[:, here] = known["ids"].T, self.how.parts(known["logits"]).T
        return {**row, IDS: ids, PARTS: parts}


def nothing(count: int, top: int) -> np.ndarray:
    known = np.zeros(count, [("ids", "<i4", (top,)), ("logits", "<f4", (top,))])
    known["ids"] = -1
    return known


class Reader:
    """A teacher with mapped weights, which reads rows of `time` tokens."""

    def __init__(
        self, model: ModelFile, time: int, how: tuple[int, int], limit: int | None, target: Target
    ) -> None:
        """how: Distill.top, and how many tokens both vocabularies have; limit: most private bytes of the process.

        Raises DoesNotFit.
        """
        w = transformer.weights(model.config, model.types())
        self._session = Session(target.limits)
        self._session.share(model.stored())
        outputs = reading(model.config, w, time, TOKENS, *how)
        placed = {name: place(Graph(named), target) for name, named in outputs.items()}
        plans = {name: make_plan(one) for name, one in placed.items()}
        needed = private_nbytes() + sum(plan.arena().nbytes for plan in plans.values())
        if limit is not None and needed > limit:
            raise DoesNotFit(
                f"--teacher: reading the data with it needs {size_text(needed)}, and --memory is {size_text(limit)};"
                " give more, or a smaller --ctx"
            )
        self._run = self._session.executors(placed, plans)

    def likeliest(self, batch: Mapping[str, np.ndarray], top: int) -> np.ndarray:
        """Records of the targets of a batch of one row that count, in order."""
        given = {name: batch[name] for name in ("tokens", "pos", "seq")}
        hidden = self._run["read"](given)["hidden"][0]
        at = np.flatnonzero(batch["weights"][0])
        found = nothing(len(at), top)
        for start in range(0, len(at), TOKENS):
            here = at[start : start + TOKENS]
            padded = np.resize(here, TOKENS)
            got = self._run["likely"]({"hidden": np.ascontiguousarray(hidden[padded])})
            part = found[start : start + TOKENS]
            part["ids"], part["logits"] = (got[name][: len(here)] for name in ("ids", "logits"))
        return found


def teach(
    job: Job, folder: Path, limit: int | None, events: Events, stopped: Callable[[], bool]
) -> None:
    """Fill in what the teacher finds likely in the batches that the run will see.

    limit  most private bytes of the process
    Raises DoesNotFit, and Interrupted if `stopped()`.
    """
    train = job.train
    if not isinstance(train, TeacherBatches):
        return
    path, mark = folder / FILE, f"{job.fingerprint} {train.mark}"
    _read(path, mark, train)
    missing = _missing(job, train)
    if missing:
        shared = min(job.config.vocab_size, train.teacher.config.vocab_size)
        how = train.how.top, shared
        reader = Reader(train.teacher, train.time, how, limit, job.settings.target)
        with events.counting("teacher", "sample") as told:
            for done in _fill(train, reader, missing):
                told(done, len(missing))
                if stopped():
                    _write(path, mark, train)
                    raise Interrupted("stopped before step 1")
        del reader
        settle()
        _write(path, mark, train)


def _missing(job: Job, train: TeacherBatches) -> list[int]:
    """The samples that the run will see, and of which nothing is known."""
    asked = job.steps * job.settings.grad_accumulation_steps
    unknown = np.add.reduceat(train.known["ids"][:, 0] < 0, train.first[:-1]) > 0
    if asked < len(train) and not job.settings.resume:
        rows = [row for index in range(asked) for row in train.chosen(index)]
        seen = np.zeros(len(unknown), bool)
        seen[[i for row in rows for i in row]] = True
        unknown &= seen
    return np.flatnonzero(unknown).tolist()


def _fill(train: TeacherBatches, reader: Reader, which: list[int]) -> Iterator[int]:
    """Compute them; yields how many are done."""
    batches = SampleBatches(Some(train.samples, which), 1, train.time, shuffle=False)  # type: ignore[arg-type]
    done = 0
    for index in range(len(batches)):
        found, at = reader.likeliest(batches[index], train.how.top), 0
        for i in batches.chosen(index)[0]:
            span = slice(*train.first[which[i] : which[i] + 2])
            train.known[span] = found[at : at + span.stop - span.start]
            at += span.stop - span.start
            done += 1
        yield done


def _write(path: Path, mark: str, train: TeacherBatches) -> None:
    with atomic_file(path) as file:
        known = train.known
        np.savez(file, mark=np.array(mark), ids=known["ids"], logits=known["logits"])


def _read(path: Path, mark: str, train: TeacherBatches) -> None:
    """What is in the file, if it is of the same data, teacher and number of tokens; else it is computed again."""
    try:
        with np.load(path) as file:
            found = file["ids"], file["logits"]
            same = str(file["mark"]) == mark
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return
    if same and all(part.shape == train.known["ids"].shape for part in found):
        train.known["ids"], train.known["logits"] = found
