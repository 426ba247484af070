"""KL divergence of a model's predictions from those of a reference, as llama-perplexity --kl-divergence reports it.

Models read through a KV cache; logits are computed from hidden states, of few tokens at a time."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from packtrain.common.errors import Interrupted
from packtrain.common.events import Counted, Events
from packtrain.engine.backends import Target
from packtrain.inference.kv_cache import Context
from packtrain.inference.kv_cache.decode_plans import HEAD_RUN
from packtrain.inference.kv_cache.results import head_logits
from packtrain.inference.sampling.samplers import log_probabilities
from packtrain.models.model_file import ModelFile, check_vocabularies
from packtrain.training.model_loss import MeanEstimate
from packtrain.workflows import saved_logits
from packtrain.workflows.saved_logits import MIN_LOGPROB, Batches, SavedLogits

Batch = Mapping[str, np.ndarray]
QUANTILES = 0.5, 0.99, 0.999


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model is from its reference at N scored positions.

    kl                (N,) f64  KL(reference || model) in nats: sum over tokens of p ln(p / q)
    has_same_top      (N,) bool  both models find the same token the likeliest
    losses            (N,) f64  of the model, in nats
    reference_losses  (N,) f64
    """

    kl: np.ndarray
    has_same_top: np.ndarray
    losses: np.ndarray
    reference_losses: np.ndarray

    @property
    def mean_kl(self) -> MeanEstimate:
        return MeanEstimate.of(self.kl)

    @property
    def quantiles(self) -> dict[float, float]:
        """The divergences' quantiles in nats, by the share that is below: 0.5 (the median), 0.99 and 0.999."""
        return dict(zip(QUANTILES, map(float, np.quantile(self.kl, QUANTILES)), strict=True))

    @property
    def same_top(self) -> MeanEstimate:
        """The share of positions where both models find the same token the likeliest."""
        return MeanEstimate.of(self.has_same_top)

    @property
    def perplexity_ratio(self) -> MeanEstimate:
        """The model's perplexity divided by the reference's, with the error of the mean difference of their losses."""
        return MeanEstimate.of(self.losses - self.reference_losses).exponential


class CachedPredictions:
    """A model that reads batches of texts through a KV cache of `num_cells` tokens, as it does when it writes."""

    def __init__(
        self, model: ModelFile, num_cells: int, device: Target, cache_type: str = "f32", *, swa_full: bool = True
    ) -> None:  # fmt: skip
        self._context = Context(
            model, cells=num_cells, cache=cache_type, checkpoints=0, swa_full=swa_full, has_hidden_states=True,
            target=device,
        )  # fmt: skip

    def rows(self, batch: Batch) -> Iterator[tuple[np.ndarray, int]]:
        """Yield log-probabilities (V,) f64 and the next token at each scored position; reads shared beginnings once."""
        context = self._context
        for ids, places, targets in scored_sequences(batch):
            num_cached = context.reuse(0, ids[: places[0] + 1])
            states = dict.fromkeys((places - num_cached).tolist(), np.empty(0, np.float32))
            context.choices(ids[num_cached:], [], wanted=[], hidden_states=states)
            logits = head_logits(context.runs[HEAD_RUN], [*states.values()])
            yield from zip(map(log_probabilities, logits), targets.tolist(), strict=True)

    def losses(self, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """Yield for each batch the losses (N,) f32 of the targets that have a weight, in order."""
        for batch in batches:
            yield np.array([-logprobs[id] for logprobs, id in self.rows(batch)], np.float32)


def scored_sequences(batch: Batch) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield for each scored sample of a batch: (token ids, positions (N,) in it that are scored, their next tokens)."""
    num_skipped = batch["tokens"].shape[1] - batch["targets"].shape[1]
    names = "tokens", "seq", "targets", "weights"
    for tokens, seq, targets, weights in zip(*(batch[name] for name in names), strict=True):
        scored = np.flatnonzero(weights > 0) + num_skipped
        for sample_id in dict.fromkeys(seq[scored].tolist()):
            positions = np.flatnonzero(seq == sample_id)
            places = scored[seq[scored] == sample_id]
            yield tokens[positions].tolist(), places - positions[0], targets[places - num_skipped]


def measure_divergence(
    base: ModelFile | SavedLogits, model: ModelFile, batches: Batches, cache_type: str, device: Target, events: Events
) -> Divergence:  # fmt: skip
    """Return how far a model is from its base on batches. Raises InputError if they do not match, and Interrupted."""
    if isinstance(base, SavedLogits):
        base.check(saved_logits.windows_of(batches, "--kl-base"), model.config.vocab_size)
    else:
        check_vocabularies(base, model, "--kl-base")
        saved_logits.check_same_size(base.config.vocab_size, model.config.vocab_size)
    predictions = CachedPredictions(model, batches.time, device, cache_type)
    with events.counting("comparing", "window") as progress, events.stopping() as stopped:
        rows = chain.from_iterable(map(predictions.rows, read_batches(batches, stopped, progress)))
        if isinstance(base, SavedLogits):
            return kl_divergence(base.predictions(), rows, MIN_LOGPROB)
        reference = CachedPredictions(base, batches.time, device)
        base_rows = chain.from_iterable(map(reference.rows, read_batches(batches, stopped)))
        return kl_divergence(base_rows, rows)


def read_batches(
    batches: Batches, is_stopped: Callable[[], bool], progress: Counted | None = None
) -> Iterator[Batch]:
    """Yield the batches, and call progress(windows done, all windows). Raises Interrupted once `is_stopped()`."""
    for i in range(len(batches)):
        if is_stopped():
            raise Interrupted(f"stopped after {i} of {len(batches)} batches, without a result")
        yield batches[i]
        if progress is not None:
            progress(min((i + 1) * batches.rows, batches.windows), batches.windows)


def kl_divergence(
    reference: Iterable[tuple[np.ndarray, int]], model: Iterable[tuple[np.ndarray, int]],
    min_logprob: float = -math.inf,
) -> Divergence:  # fmt: skip
    """Return how far the predictions of two models are apart, up to the end of the shorter ones: pairs of
    log-probabilities (V,) at a position, and the token that follows there.

    min_logprob  tokens that are no likelier by the reference do not count
    """
    rows = [
        row_divergence(log_p, log_q, target, min_logprob)
        for (log_p, _), (log_q, target) in zip(reference, model, strict=False)
    ]
    return Divergence(*map(np.array, zip(*rows, strict=True)))


def row_divergence(
    log_p: np.ndarray, log_q: np.ndarray, target: int, min_logprob: float = -math.inf
) -> tuple[float, bool, float, float]:
    """Return KL(p || q), whether the likeliest tokens are the same, -ln q(target) and -ln p(target).

    log_p, log_q  (V,) f64, of the reference and of the model; KL sums over tokens with log_p > min_logprob
    """
    likely = log_p > min_logprob
    kl = float(np.exp(log_p[likely]) @ (log_p[likely] - log_q[likely]))
    has_same_top = bool(log_p.argmax() == log_q.argmax())
    return kl, has_same_top, -float(log_q[target]), -float(log_p[target])
