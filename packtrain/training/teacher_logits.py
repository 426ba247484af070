"""What a teacher finds likely: its logits of the likeliest tokens at every target that a run will see.

Computed once, before the memory of the run is taken, each sample by one of several ranks; rank 0 keeps it in the run
folder, where a resumed run reads it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.events import Events
from packtrain.common.memory import private_nbytes
from packtrain.data.conversations import Samples
from packtrain.engine.backends import Target
from packtrain.engine.executor import Session
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import make_plan, size_text
from packtrain.engine.placement import place
from packtrain.models import transformer
from packtrain.models.distillation_loss import IDS, PARTS, Distill, reading
from packtrain.models.model_file import ModelFile
from packtrain.training import precomputed
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import Job

FILE = "teacher.npz"  # in the run folder
TOKENS = 32  # whose logits are computed at a time


class TeacherBatches(SampleBatches):
    """Like SampleBatches; a batch has inputs for the loss of `models.distillation_loss` in addition.

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
        self._check(samples)
        counts = [int(samples[i][1][1:].sum()) for i in range(len(samples))]
        self.first = np.append(0, np.cumsum(counts))
        self.known = nothing(int(self.first[-1]), how.top)

    def _check(self, samples: Samples) -> None:
        """Raise InputError if the teacher cannot read a sample."""
        name, config = self.teacher.gguf.path.name, self.teacher.config
        if config.traits.learned_positions and self.longest > config.context_length:
            raise InputError(
                f"--teacher: {name} has learned {config.context_length:,} positions, and the longest sample takes"
                f" {self.longest:,}; give --ctx {config.context_length}"
            )
        last = max(int(samples[i][0].max()) for i in range(len(samples)))
        if last >= config.vocab_size:
            raise InputError(
                f"--teacher: {name} has {config.vocab_size:,} tokens, and the data has token {last:,}; give a teacher"
                " with all tokens of the data"
            )

    @property
    def unknown(self) -> np.ndarray:
        """Of which samples the teacher has not read a target, (samples,) bool."""
        missing_counts = np.append(0, np.cumsum(self.known["ids"][:, 0] < 0))
        return np.asarray(np.diff(missing_counts[self.first]) > 0)

    def _row(self, chosen: list[int]) -> dict[str, np.ndarray]:
        row = super()._row(chosen)
        ids = np.zeros((self.how.top + 1, self.time), np.int32)
        parts = np.zeros((self.how.top + 1, self.time), np.float32)
        ids[0] = row["targets"]
        positions = np.flatnonzero(row["weights"])
        spans = [np.arange(self.first[i], self.first[i + 1]) for i in chosen]
        if spans:
            records = self.known[np.concatenate(spans)]
            ids[1:, positions], parts[:, positions] = (
                records["ids"].T,
                self.how.parts(records["logits"]).T,
            )
        return {**row, IDS: ids, PARTS: parts}


def nothing(count: int, top: int) -> np.ndarray:
    records = np.zeros(count, [("ids", "<i4", (top,)), ("logits", "<f4", (top,))])
    records["ids"] = -1
    return records


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
        plans = {name: make_plan(graph) for name, graph in placed.items()}
        needed = private_nbytes() + sum(plan.arena().nbytes for plan in plans.values())
        if limit is not None and needed > limit:
            raise DoesNotFit(
                f"--teacher: reading the data with it needs {size_text(needed)}, and --memory is {size_text(limit)};"
                " give more, or a smaller --ctx"
            )
        self._run = self._session.executors(placed, plans)

    def likeliest(self, batch: Mapping[str, np.ndarray], top: int) -> np.ndarray:
        """Records of the targets of a batch of one row that count, in order."""
        inputs = {name: batch[name] for name in ("tokens", "pos", "seq")}
        hidden = self._run["read"](inputs)["hidden"][0]
        at = np.flatnonzero(batch["weights"][0])
        records = nothing(len(at), top)
        for start in range(0, len(at), TOKENS):
            chunk_positions = at[start : start + TOKENS]
            padded = np.resize(chunk_positions, TOKENS)
            outputs = self._run["likely"]({"hidden": np.ascontiguousarray(hidden[padded])})
            part = records[start : start + TOKENS]
            part["ids"], part["logits"] = (
                outputs[name][: len(chunk_positions)] for name in ("ids", "logits")
            )
        return records


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
    arrays = {name: train.known[name] for name in ("ids", "logits")}
    precomputed.recall(path, mark, arrays)
    missing = precomputed.missing(job, train, train.unknown)
    if missing:
        shared = min(job.config.vocab_size, train.teacher.config.vocab_size)
        sizes = train.how.top, shared
        progress = _fill(
            train, Reader(train.teacher, train.time, sizes, limit, job.settings.target), missing
        )
        save = partial(precomputed.write, path, mark, arrays)
        precomputed.follow(progress, len(missing), events, "teacher", "sample", stopped, save)


def _fill(train: TeacherBatches, reader: Reader, sample_ids: list[int]) -> Iterator[int]:
    """Compute them; yields how many are done."""
    some: Any = precomputed.Some(train.samples, sample_ids)
    batches = SampleBatches(some, 1, train.time, shuffle=False)
    done = 0

    def read(index: int) -> list[tuple[list[int], np.ndarray]]:
        return [(batches.chosen(index)[0], reader.likeliest(batches[index], train.how.top))]

    for results in precomputed.in_turn(len(batches), read):
        for row, records in results:
            at = 0
            for i in row:
                span = slice(*train.first[sample_ids[i] : sample_ids[i] + 2])
                train.known[span] = records[at : at + span.stop - span.start]
                at += span.stop - span.start
            done += len(row)
        yield done
