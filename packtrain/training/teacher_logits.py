"""Teacher logits: a teacher's likeliest tokens, with their logits, at every target that a run will see.

Computed once, before the memory of the run is taken, each sample by one of several ranks; rank 0 saves them in the run
folder, where a resumed run reads them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.events import Events
from packtrain.common.memory import private_nbytes
from packtrain.data.conversations import TokenizedSamples
from packtrain.engine.backends import Target
from packtrain.engine.executor import Session
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import make_plan, size_text
from packtrain.engine.placement import place
from packtrain.models import distillation_loss, transformer
from packtrain.models.model_file import ModelFile
from packtrain.training import precomputed
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import TrainingJob

TEACHER_FILE = "teacher.npz"  # in the run folder
CHUNK_TOKENS = 32  # tokens whose logits are computed at a time


class TeacherBatches(SampleBatches):
    """SampleBatches whose batches also have inputs for the loss of `models.distillation_loss`.

    teacher_ids    (rows, top + 1, time)  i32, the target, then the teacher's tokens
    teacher_parts  (rows, top + 1, time)  f32, see distillation_loss.DistillationLoss.row_weights

    known_logits  (targets,)  records of the teacher's ids and logits; an id of -1: not computed yet
    mark          identifies the teacher and the number of its top tokens
    """

    def __init__(
        self, samples: TokenizedSamples, rows: int, time: int, loss_settings: distillation_loss.DistillationLoss,
        teacher: ModelFile, mark: str, **order: Any,
    ) -> None:  # fmt: skip
        super().__init__(samples, rows, time, **order)
        self.loss_settings, self.teacher = loss_settings, teacher
        self.mark = f"{mark} {loss_settings.top}"
        self._check_teacher(samples)
        target_counts = [int(samples[i][1][1:].sum()) for i in range(len(samples))]
        self.target_starts = np.append(0, np.cumsum(target_counts))
        self.known_logits = unknown_records(int(self.target_starts[-1]), loss_settings.top)

    def _check_teacher(self, samples: TokenizedSamples) -> None:
        """Raise InputError if the teacher cannot read a sample."""
        name, config = self.teacher.gguf.path.name, self.teacher.config
        if config.traits.learned_positions and self.max_sample_length > config.context_length:
            raise InputError(
                f"--teacher: {name} has learned {config.context_length:,} positions, and the longest sample takes"
                f" {self.max_sample_length:,}; give --ctx {config.context_length}"
            )
        last = max(int(samples[i][0].max()) for i in range(len(samples)))
        if last >= config.vocab_size:
            raise InputError(
                f"--teacher: {name} has {config.vocab_size:,} tokens, and the data has token {last:,}; give a teacher"
                " with all tokens of the data"
            )

    @property
    def is_unknown(self) -> np.ndarray:
        """(samples,) bool: whether the teacher has not read all targets of a sample."""
        missing_counts = np.append(0, np.cumsum(self.known_logits["ids"][:, 0] < 0))
        return np.asarray(np.diff(missing_counts[self.target_starts]) > 0)

    def _make_row(self, items: list[int]) -> dict[str, np.ndarray]:
        row = super()._make_row(items)
        ids = np.zeros((self.loss_settings.top + 1, self.time), np.int32)
        parts = np.zeros((self.loss_settings.top + 1, self.time), np.float32)
        ids[0] = row["targets"]
        positions = np.flatnonzero(row["weights"])
        spans = [np.arange(self.target_starts[i], self.target_starts[i + 1]) for i in items]
        if spans:
            records = self.known_logits[np.concatenate(spans)]
            ids[1:, positions] = records["ids"].T
            parts[:, positions] = self.loss_settings.row_weights(records["logits"]).T
        return {**row, distillation_loss.TEACHER_IDS: ids, distillation_loss.TEACHER_PARTS: parts}


def unknown_records(count: int, num_top: int) -> np.ndarray:
    """Create `count` records of a teacher's `num_top` ids and logits; ids of -1 mark them as not computed yet."""
    records = np.zeros(count, [("ids", "<i4", (num_top,)), ("logits", "<f4", (num_top,))])
    records["ids"] = -1
    return records


class TeacherReader:
    """Runs a teacher, whose weights stay in its file, on one row of `time` tokens after the other."""

    def __init__(
        self, model: ModelFile, time: int, logit_sizes: tuple[int, int], limit: int | None, target: Target,
    ) -> None:  # fmt: skip
        """logit_sizes: (number of top tokens, number of first ids that both vocabularies share); limit: most private
        bytes of the process. Raises DoesNotFit."""
        w = transformer.weights(model.config, model.matrix_dtypes())
        self._session = Session(target.limits)
        self._session.share(model.stored())
        outputs = distillation_loss.teacher_graphs(
            model.config, w, time, CHUNK_TOKENS, *logit_sizes
        )
        placed = {name: place(Graph(named), target) for name, named in outputs.items()}
        plans = {name: make_plan(graph) for name, graph in placed.items()}
        needed = private_nbytes() + sum(plan.arena().nbytes for plan in plans.values())
        if limit is not None and needed > limit:
            raise DoesNotFit(
                f"--teacher: reading the data with it needs {size_text(needed)}, and --memory is {size_text(limit)};"
                " give more, or a smaller --ctx"
            )
        self._run = self._session.executors(placed, plans)

    def read_targets(self, batch: Mapping[str, np.ndarray], num_top: int) -> np.ndarray:
        """Return, for weighted targets of a one-row batch, `num_top` likeliest ids and logits; see unknown_records."""
        inputs = {name: batch[name] for name in ("tokens", "pos", "seq")}
        hidden = self._run["read"](inputs)["hidden"][0]
        positions = np.flatnonzero(batch["weights"][0])
        records = unknown_records(len(positions), num_top)
        for chunk_start in range(0, len(positions), CHUNK_TOKENS):
            chunk_positions = positions[chunk_start : chunk_start + CHUNK_TOKENS]
            padded = np.resize(chunk_positions, CHUNK_TOKENS)
            outputs = self._run["likely"]({"hidden": np.ascontiguousarray(hidden[padded])})
            chunk_records = records[chunk_start : chunk_start + CHUNK_TOKENS]
            for name in ("ids", "logits"):
                chunk_records[name] = outputs[name][: len(chunk_positions)]
        return records


def compute_teacher_logits(
    job: TrainingJob, folder: Path, limit: int | None, events: Events, stopped: Callable[[], bool]
) -> None:
    """Compute the teacher's logits for the batches that the run will see, unless `folder` has them; `limit`: most
    private bytes of the process, None: no limit. Raises DoesNotFit; Interrupted, after saving, if `stopped()`."""
    train = job.train
    if not isinstance(train, TeacherBatches):
        return
    arrays = {name: train.known_logits[name] for name in ("ids", "logits")}
    saved_arrays = folder / TEACHER_FILE, f"{job.fingerprint} {train.mark}", arrays
    precomputed.restore_arrays(*saved_arrays)
    missing = precomputed.missing_samples(job, train, train.is_unknown)
    if missing:
        num_shared = min(job.config.vocab_size, train.teacher.config.vocab_size)
        logit_sizes = train.loss_settings.top, num_shared
        reader = TeacherReader(train.teacher, train.time, logit_sizes, limit, job.settings.target)
        progress = _compute(train, reader, missing)
        precomputed.run_saved(
            progress, len(missing), events, "teacher", "sample", stopped, saved_arrays
        )


def _compute(train: TeacherBatches, reader: TeacherReader, sample_ids: list[int]) -> Iterator[int]:
    """Compute samples' teacher logits and store them in `train`; yields how many samples are done after each round."""
    subset: Any = precomputed.SampleSubset(train.samples, sample_ids)
    batches = SampleBatches(subset, 1, train.time, shuffle=False)
    num_done = 0

    def read(index: int) -> list[tuple[list[int], np.ndarray]]:
        targets = reader.read_targets(batches[index], train.loss_settings.top)
        return [(batches.row_items(index)[0], targets)]

    for batch_results in precomputed.in_rank_order(len(batches), read):
        for row_items, records in batch_results:
            at = 0
            for i in row_items:
                span = slice(*train.target_starts[sample_ids[i] : sample_ids[i] + 2])
                train.known_logits[span] = records[at : at + span.stop - span.start]
                at += span.stop - span.start
            num_done += len(row_items)
        yield num_done
