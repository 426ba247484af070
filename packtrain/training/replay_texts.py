"""Texts that the base writes before step 1; every row of a batch ends in one of them: see models.replay_loss.

The base writes them from nothing, at temperature 1; rank 0 saves them in the run folder with what the base finds likely
in them, where a resumed run reads them. Own texts of the base need no download. The divergence takes the whole
vocabulary: the likeliest 64 tokens plus the drawn one, though unbiased, were learned by heart within three passes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import DoesNotFit
from packtrain.common.events import Events
from packtrain.data.conversations import TokenizedSamples
from packtrain.distributed import current_world
from packtrain.engine import ops
from packtrain.engine.executor import Session
from packtrain.engine.graph import Graph
from packtrain.engine.placement import place
from packtrain.engine.tensor import input
from packtrain.inference.kv_cache import Context
from packtrain.inference.kv_cache.decode_plans import RunSizes, make_cache, place_runs
from packtrain.models import transformer
from packtrain.models.model_file import ModelFile
from packtrain.models.replay_loss import CONSTANTS, IDS, MEANS, ReplayLoss
from packtrain.models.tensor_shapes import HEAD_BIAS
from packtrain.planner.cost_model import BackendRates, graph_seconds
from packtrain.training import precomputed
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import TrainingJob

FILE = "replay.npz"  # in the run folder
TEXTS_AT_ONCE = 16, 4, 1  # texts written at once: the first number that fits
LOGIT_SECONDS = 5e-9  # per token of the vocabulary, to draw one token with NumPy on one core
# per text and token of the vocabulary, besides the context: logit, p, and p in the arena
LOGIT_NBYTES = 12


class ReplayBatches(SampleBatches):
    """SampleBatches whose rows end in `loss_settings.length` tokens of a text, with inputs for the replay loss.

    time         tokens of a row that are left for samples
    num_texts    number of texts; rows take them in turn
    text_arrays  `tokens` (texts, length + 1) of each text, -1 where it is not written yet; `means` (texts, length, C)
                 f16 of the head's rows by the base's probabilities, `constants` (texts, length), see models.replay_loss
    """

    def __init__(
        self, samples: TokenizedSamples, rows: int, time: int, loss_settings: ReplayLoss, base: ModelFile,
        **order: Any,
    ) -> None:  # fmt: skip
        super().__init__(samples, rows, time, **order)
        self.time, self.loss_settings = time + loss_settings.length, loss_settings
        self.base, self.num_texts = base, loss_settings.num_texts
        shape = loss_settings.num_texts, loss_settings.length
        self.text_arrays: dict[str, np.ndarray] = {
            "tokens": np.full((loss_settings.num_texts, loss_settings.length + 1), -1, np.int32),
            "means": np.zeros((*shape, loss_settings.head_width), np.float16), "constants": np.zeros(shape, np.float32),
        }  # fmt: skip

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch, span = super().__getitem__(index), slice(-self.loss_settings.length, None)
        text_indices = (index * self.rows + np.arange(self.rows)) % self.loss_settings.num_texts
        tokens, means, constants = (array[text_indices] for array in self.text_arrays.values())
        batch["tokens"][:, span], batch["targets"][:, span] = tokens[:, :-1], tokens[:, 1:]
        batch["pos"][:, span] = np.arange(self.loss_settings.length)
        batch["seq"][:, span] = batch["seq"].max(-1, keepdims=True) + 1
        target_weight = batch["weights"].sum(-1, keepdims=True)
        token_weight = self.loss_settings.weight / self.loss_settings.length
        batch["weights"][:, span] = target_weight * token_weight
        return batch | {IDS: tokens[:, 1:], MEANS: means.astype(np.float32), CONSTANTS: constants}


def write_texts(
    job: TrainingJob, folder: Path, limit: int | None, events: Events, stopped: Callable[[], bool]
) -> None:
    """Let the base write the replay texts that the run's steps read, unless `folder` has them; `limit`: most private
    bytes of the process, None: no limit. Raises DoesNotFit; Interrupted, after saving, if `stopped()`."""
    train = job.train
    if not isinstance(train, ReplayBatches):
        return
    mark = f"{job.fingerprint} {job.settings.seed} {train.loss_settings.mark}"
    saved_arrays = folder / FILE, mark, train.text_arrays
    precomputed.restore_arrays(*saved_arrays)
    missing_texts = np.flatnonzero(
        train.text_arrays["tokens"][: _num_used_texts(job, train), 0] < 0
    )
    if missing_texts.size:
        progress = _write_missing(train, job, missing_texts, limit)
        labels = "texts of the base", "text"
        precomputed.run_saved(progress, len(missing_texts), events, *labels, stopped, saved_arrays)


def writing_seconds(job: TrainingJob, rates: BackendRates) -> float:
    """Estimate the seconds that the base takes to write the run's replay texts at `rates`; 0 without --replay."""
    train, target = job.train, job.settings.target
    if not isinstance(train, ReplayBatches) or not (num_texts := _num_used_texts(job, train)):
        return 0.0
    base = train.base
    rows, length = min(TEXTS_AT_ONCE[0], num_texts), train.loss_settings.length
    cells, decode_sizes = rows * length, RunSizes((rows,), rows)
    cache = make_cache(base.config, cells, rows, "f16", rows, False, longest=cells)
    decoding = place_runs(base.config, cache, decode_sizes, base.matrix_dtypes(), target)[rows]
    graphs = decoding, place(_mean_hidden_graph(base, rows), target)
    seconds = sum(graph_seconds(graph, rates) for graph in graphs)
    seconds += rows * base.config.vocab_size * LOGIT_SECONDS  # to draw the tokens
    return -(-num_texts // (rows * current_world().world_size)) * length * seconds


def _num_used_texts(job: TrainingJob, train: ReplayBatches) -> int:
    """Return how many texts the run's rows read, rounded up to whole groups: a text's bits may depend on its group."""
    num_rows = job.steps * job.settings.grad_accumulation_steps * train.rows
    return min(-(-num_rows // TEXTS_AT_ONCE[0]) * TEXTS_AT_ONCE[0], train.loss_settings.num_texts)


def _write_missing(
    train: ReplayBatches, job: TrainingJob, missing: np.ndarray, limit: int | None
) -> Iterator[int]:
    """Let the base write the texts numbered `missing`; yield how many are done in all after each round of all ranks."""
    writer = _ReplayWriter(train, limit, job)
    groups = [missing[at : at + writer.together] for at in range(0, len(missing), writer.together)]

    def write(group_index: int) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        return [(groups[group_index], writer.generate(groups[group_index]))]

    num_done = 0
    for group_results in precomputed.in_rank_order(len(groups), write):
        for group, texts in group_results:
            for name, array in texts.items():
                train.text_arrays[name][group] = array
            num_done += len(group)
        yield num_done


class _ReplayWriter:
    """Samples texts from the base, `together` at a time: as many as fit `limit` bytes, or DoesNotFit is raised."""

    def __init__(self, train: ReplayBatches, limit: int | None, job: TrainingJob) -> None:
        self._batches, self._seed, base = train, job.settings.seed, train.base
        self._tokenizer, vocab_size = base.tokenizer(), base.config.vocab_size
        for self.together in TEXTS_AT_ONCE:
            try:
                self._context = Context(
                    base, cells=self.together * train.loss_settings.length, sequences=self.together, prompts=(),
                    memory=limit, beside=self.together * vocab_size * LOGIT_NBYTES, target=job.settings.target,
                )  # fmt: skip
                break
            except DoesNotFit:
                if self.together == TEXTS_AT_ONCE[-1]:
                    raise
        has_bias, session = HEAD_BIAS in base.gguf.entries, Session(job.settings.target.limits)
        self._head_bias = base.gguf.array(HEAD_BIAS) if has_bias else np.zeros(vocab_size)
        session.share(base.stored())
        placed = place(_mean_hidden_graph(base, self.together), job.settings.target)
        self._mean = session.executors({"mean": placed})["mean"]

    def generate(self, text_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Sample the texts with these numbers, at most `together`; returns arrays as ReplayBatches.text_arrays."""
        draws = [np.random.default_rng([self._seed, text_id]) for text_id in text_ids.tolist()]
        arrays = self._batches.text_arrays.items()
        outputs = {name: np.zeros_like(array[text_ids]) for name, array in arrays}
        tokenizer, seqs = self._tokenizer, [*range(len(text_ids))]
        outputs["tokens"][:, 0] = (tokenizer.eos if tokenizer.bos is None else tokenizer.bos) or 0
        for seq in seqs:
            self._context.remove(seq)
        p = np.zeros((self.together, self._batches.base.config.vocab_size), np.float32)
        for position in range(self._batches.loss_settings.length):
            logits = self._context.decode(outputs["tokens"][:, position].tolist(), seqs)
            logits -= logits.max(-1, keepdims=True)
            probs = np.exp(logits, out=p[: len(text_ids)])
            sums = probs.sum(-1, keepdims=True, dtype=np.float64)
            probs /= sums.astype(np.float32)
            outputs["means"][:, position] = self._mean({"p": p})["mean"][: len(text_ids)]
            # minus the entropy and the mean bias
            constants = np.vecdot(probs, logits) - np.log(sums[:, 0]) - probs @ self._head_bias
            probs[:, [*tokenizer.eog_ids]] = 0
            for seq, row in enumerate(probs):
                total = np.cumsum(row, dtype=np.float64)
                token = int(np.searchsorted(total, draws[seq].random() * total[-1], "right"))
                outputs["tokens"][seq, position + 1] = token
                constants[seq] += self._head_bias[token]
            outputs["constants"][:, position] = constants
        return outputs


def _mean_hidden_graph(base: ModelFile, rows: int) -> Graph:
    weights = transformer.weights(base.config, base.matrix_dtypes())
    p = input("p", (rows, base.config.vocab_size))
    return Graph({"mean": ops.matmul_back(p, transformer.head(weights))})
