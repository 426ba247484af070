"""Texts that the base writes before step 1; every row of a batch ends in one of them: see models.replay_loss.

The base writes them from nothing, at temperature 1; rank 0 keeps them in the run folder with what the base finds likely
in them, where a resumed run reads them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from packtrain.common.errors import DoesNotFit
from packtrain.common.events import Events
from packtrain.data.conversations import Samples
from packtrain.distributed import here
from packtrain.engine import ops
from packtrain.engine.backends import Target
from packtrain.engine.executor import Executor, Session
from packtrain.engine.graph import Graph
from packtrain.engine.placement import place
from packtrain.engine.tensor import input
from packtrain.inference.kv_cache import Context
from packtrain.inference.kv_cache.decode_plans import Sizes, cache_of, placements
from packtrain.models import transformer
from packtrain.models.model_file import ModelFile
from packtrain.models.replay_loss import CONSTANTS, IDS, MEANS, Replay
from packtrain.models.tensor_shapes import HEAD_BIAS
from packtrain.planner.cost_model import Rates, seconds
from packtrain.training import precomputed
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import Job

FILE = "replay.npz"  # in the run folder
TOGETHER = 16, 4, 1  # texts written at once: the most that fit
LOGIT_SECONDS = 5e-9  # on one core, to draw a token, for each of the vocabulary: NumPy's
LOGIT_NBYTES = (
    12  # beside the context, of a text and a token of the vocabulary: logit, p, and p in the arena
)


class ReplayBatches(SampleBatches):
    """Like SampleBatches; `how.length` tokens of a text end each row, and a batch has inputs for the loss in addition.

    time   tokens of a row that are left for samples
    texts  how many; rows take them in turn
    known  of each text its `tokens` (texts, length + 1), and of each but the first `means` (texts, length, C) f16 of
           the head's rows by the base's probabilities and `constants` (texts, length), see models.replay_loss;
           a first token
           of -1: it is not written yet
    """

    def __init__(
        self, samples: Samples, rows: int, time: int, how: Replay, base: ModelFile, *,
        seed: int = 0, pack: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(samples, rows, time, seed=seed, pack=pack)
        self.time, self.how, self.base, self.texts = time + how.length, how, base, how.texts
        shape = how.texts, how.length
        self.known: dict[str, np.ndarray] = {
            "tokens": np.full((how.texts, how.length + 1), -1, np.int32),
            "means": np.zeros((*shape, how.width), np.float16),
            "constants": np.zeros(shape, np.float32),
        }

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch, span = super().__getitem__(index), slice(-self.how.length, None)
        chosen = (index * self.rows + np.arange(self.rows)) % self.how.texts
        tokens, means, constants = (values[chosen] for values in self.known.values())
        batch["tokens"][:, span], batch["targets"][:, span] = tokens[:, :-1], tokens[:, 1:]
        batch["pos"][:, span] = np.arange(self.how.length)
        batch["seq"][:, span] = batch["seq"].max(-1, keepdims=True) + 1
        counted = batch["weights"].sum(-1, keepdims=True)
        batch["weights"][:, span] = counted * (self.how.weight / self.how.length)
        return batch | {IDS: tokens[:, 1:], MEANS: means.astype(np.float32), CONSTANTS: constants}


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
    precomputed.recall(path, mark, train.known)
    missing = np.flatnonzero(train.known["tokens"][:, 0] < 0)
    if missing.size:
        progress = _fill(train, job, missing, limit)
        save = partial(precomputed.write, path, mark, train.known)
        names = "texts of the base", "text"
        precomputed.follow(progress, len(missing), events, *names, stopped, save)


def writing_seconds(job: Job, rates: Rates) -> float:
    """Expected time of writing all texts of a run."""
    train, target = job.train, job.settings.target
    if not isinstance(train, ReplayBatches) or not train.how.texts:
        return 0.0
    base, rows = train.base, min(TOGETHER[0], train.how.texts)
    cells, sizes = rows * train.how.length, Sizes((rows,), rows)
    cache = cache_of(base.config, cells, rows, "f16", rows, False, longest=cells)
    placed = placements(base.config, cache, sizes, base.types(), target)[rows]
    mean = place(_graph_of_mean(base, rows), target)
    drawing = rows * base.config.vocab_size * LOGIT_SECONDS
    each = seconds(placed, rates) + seconds(mean, rates) + drawing
    runs = -(-train.how.texts // (rows * here().size)) * train.how.length
    return runs * each


def _fill(train: ReplayBatches, job: Job, missing: np.ndarray, limit: int | None) -> Iterator[int]:
    """Write the missing texts; yields how many are done."""
    writer = _Writer(train, limit, job)
    groups = [missing[at : at + writer.together] for at in range(0, len(missing), writer.together)]

    def write(index: int) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        return [(groups[index], writer.texts(groups[index]))]

    done = 0
    for written in precomputed.in_turn(len(groups), write):
        for group, texts in written:
            for name, values in texts.items():
                train.known[name][group] = values
            done += len(group)
        yield done


class _Writer:
    """The base with a cache for as many texts at once as fit: `together`."""

    def __init__(self, train: ReplayBatches, limit: int | None, job: Job) -> None:
        self._train, self._seed, base = train, job.settings.seed, train.base
        self._vocabulary, size = base.tokenizer(), base.config.vocab_size
        for self.together in TOGETHER:
            try:
                self._context = Context(
                    base, cells=self.together * train.how.length, sequences=self.together, prompts=(),
                    memory=limit, beside=self.together * size * LOGIT_NBYTES, target=job.settings.target,
                )  # fmt: skip
                break
            except DoesNotFit:
                if self.together == TOGETHER[-1]:
                    raise
        self._mean, self._bias = _mean_of_head(base, job.settings.target, self.together)

    def texts(self, text_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Some of the texts, see ReplayBatches.known; none ends early. As many as fit, or fewer."""
        draws = [np.random.default_rng([self._seed, text]) for text in text_ids.tolist()]
        outputs = {
            name: np.zeros_like(values[text_ids]) for name, values in self._train.known.items()
        }
        words, seqs = self._vocabulary, [*range(len(text_ids))]
        outputs["tokens"][:, 0] = (words.eos if words.bos is None else words.bos) or 0
        for seq in seqs:
            self._context.remove(seq)
        p = np.zeros((self.together, self._train.base.config.vocab_size), np.float32)
        for at in range(self._train.how.length):
            logits = self._context.decode(outputs["tokens"][:, at].tolist(), seqs)
            logits -= logits.max(-1, keepdims=True)
            likely = np.exp(logits, out=p[: len(text_ids)])
            sums = likely.sum(-1, keepdims=True, dtype=np.float64)
            likely /= sums.astype(np.float32)
            outputs["means"][:, at] = self._mean({"p": p})["mean"][: len(text_ids)]
            # less entropy and bias
            constants = np.vecdot(likely, logits) - np.log(sums[:, 0]) - likely @ self._bias
            likely[:, [*words.ends]] = 0
            for seq, row in enumerate(likely):
                total = np.cumsum(row, dtype=np.float64)
                drawn = int(np.searchsorted(total, draws[seq].random() * total[-1], "right"))
                outputs["tokens"][seq, at + 1] = drawn
                constants[seq] += self._bias[drawn]
            outputs["constants"][:, at] = constants
        return outputs


def _mean_of_head(base: ModelFile, target: Target, rows: int) -> tuple[Executor, np.ndarray]:
    """What gives the `mean` (rows, C) of the head's rows by probabilities `p` (rows, V); and the head's bias (V,)."""
    session, bias = Session(target.limits), np.zeros(base.config.vocab_size)
    session.share(base.stored())
    if HEAD_BIAS in base.gguf.entries:
        bias = base.gguf.array(HEAD_BIAS)
    return session.executors({"mean": place(_graph_of_mean(base, rows), target)})["mean"], bias


def _graph_of_mean(base: ModelFile, rows: int) -> Graph:
    weights = transformer.weights(base.config, base.types())
    p = input("p", (rows, base.config.vocab_size))
    return Graph({"mean": ops.matmul_back(p, transformer.head(weights))})
