"""Texts that the base writes before step 1, a part of which ends every row of a batch: see models.replay.

The base writes them from nothing, at temperature 1; rank 0 keeps them in the run folder with what the base finds likely
in them, where a resumed run reads them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from packtrain.context import Context
from packtrain.errors import DoesNotFit, Interrupted
from packtrain.events import Events
from packtrain.memory import settle
from packtrain.models.file import ModelFile
from packtrain.models.replay import ENTROPY, IDS, PARTS, Replay
from packtrain.ranks import here
from packtrain.samples import Samples
from packtrain.training import told
from packtrain.training.job import Job
from packtrain.training.samples import SampleBatches

FILE = "replay.npz"  # in the run folder
TOGETHER = 16, 4, 1  # texts written at once: the most that fit


class ReplayBatches(SampleBatches):
    """Like SampleBatches; `how.length` tokens of a text end each row, and a batch has inputs for the loss in addition.

    time   tokens of a row that are left for samples
    texts  how many; rows take them in turn
    known  of each text: its `tokens` (texts, length + 1), `logp` of each but the first, and the base's likeliest `ids`
           with their `logps` (texts, length, top); a first token of -1: it is not written yet
    """

    def __init__(
        self, samples: Samples, rows: int, time: int, how: Replay, texts: int, base: ModelFile, *,
        seed: int = 0, pack: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(samples, rows, time, seed=seed, pack=pack)
        self.time, self.how, self.base = time + how.length, how, base
        self.texts, shape = texts, (texts, how.length)
        self.known = {
            "tokens": np.full((texts, how.length + 1), -1, np.int32),
            "logp": np.zeros(shape, np.float32),
            "ids": np.zeros((*shape, how.top), np.int32),
            "logps": np.zeros((*shape, how.top), np.float32),
        }

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch, span = super().__getitem__(index), slice(-self.how.length, None)
        more = dict[str, list[np.ndarray]]({IDS: [], PARTS: [], ENTROPY: []})
        for row in range(self.rows):
            number = (index * self.rows + row) % len(self.known["tokens"])
            tokens, logp, ids, logps = (self.known[name][number] for name in self.known)
            *inputs, weights = self.how.targets(tokens[1:], ids, logps, logp)
            for name, value in zip(more, inputs, strict=True):
                more[name].append(value)
            share = self.how.weight * batch["weights"][row].sum() / self.how.length
            batch["tokens"][row, span], batch["targets"][row, span] = tokens[:-1], tokens[1:]
            batch["pos"][row, span] = np.arange(self.how.length)
            batch["seq"][row, span] = batch["seq"][row].max() + 1
            batch["weights"][row, span] = share * weights
        return batch | {name: np.stack(values) for name, values in more.items()}


def write_texts(
    job: Job, folder: Path, limit: int | None, events: Events, stopped: Callable[[], bool]
) -> None:
    """Let the base write the texts of a run.

    limit  most private bytes of the process
    Raises DoesNotFit, and Interrupted if `stopped()`.
    """
    train = job.train
    if not isinstance(train, ReplayBatches):
        return
    path, mark = folder / FILE, f"{job.fingerprint} {job.settings.seed} {train.how}"
    told.recall(path, mark, train.known)
    missing = np.flatnonzero(train.known["tokens"][:, 0] < 0)
    if missing.size:
        with events.counting("texts of the base", "text") as tell:
            for done in _fill(train, job, missing, limit):
                tell(done, len(missing))
                if here().any(stopped()):
                    raise Interrupted("stopped before step 1")
        settle()
        told.write(path, mark, train.known)


def _fill(train: ReplayBatches, job: Job, missing: np.ndarray, limit: int | None) -> Iterator[int]:
    """Write the missing texts; yields how many are done."""
    context, together = _context(train, limit, job)
    groups = [missing[at : at + together] for at in range(0, len(missing), together)]

    def write(index: int) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        return [(groups[index], _written(context, train, job, groups[index]))]

    done = 0
    for every in told.in_turn(len(groups), write):
        for group, texts in every:
            for name, values in texts.items():
                train.known[name][group] = values
            done += len(group)
        yield done


def _context(train: ReplayBatches, limit: int | None, job: Job) -> tuple[Context, int]:
    """A context for as many texts at once as fit, and how many these are."""
    for together in TOGETHER:
        cells, target = together * train.how.length, job.settings.target
        try:
            return Context(
                train.base, cells=cells, sequences=together, prompts=(), memory=limit, target=target
            ), together
        except DoesNotFit:
            if together == TOGETHER[-1]:
                raise
    raise AssertionError


def _written(
    context: Context, train: ReplayBatches, job: Job, which: np.ndarray
) -> dict[str, np.ndarray]:
    """Write some of the texts, see ReplayBatches.known; in full, because no text ends early."""
    vocabulary, how, seqs = train.base.tokenizer(), train.how, [*range(len(which))]
    draws = [np.random.default_rng([job.settings.seed, text]) for text in which.tolist()]
    first = vocabulary.eos if vocabulary.bos is None else vocabulary.bos
    made = {name: np.zeros_like(values[which]) for name, values in train.known.items()}
    made["tokens"][:, 0], ends = first or 0, [*vocabulary.ends]
    for seq in seqs:
        context.remove(seq)
    for at in range(how.length):
        logits = context.decode(made["tokens"][:, at].tolist(), seqs)
        for seq, row in enumerate(logits):
            row -= row.max()
            p = np.exp(row, dtype=np.float64)
            whole = np.log(p.sum())
            likely = np.argpartition(row, -how.top)[-how.top :]
            made["ids"][seq, at], made["logps"][seq, at] = likely, row[likely] - whole
            p[ends] = 0
            sums = np.cumsum(p)
            drawn = int(np.searchsorted(sums, draws[seq].random() * sums[-1], "right"))
            made["tokens"][seq, at + 1], made["logp"][seq, at] = drawn, row[drawn] - whole
    return made
