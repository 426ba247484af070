"""KL divergence of a model's predictions from those of a reference, as llama-perplexity --kl-divergence reports it.

Both models read each window through a KV cache in f32, CHUNK positions at a time: never are more logits in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from packtrain.common.errors import InputError, Interrupted
from packtrain.engine.backends import Target
from packtrain.inference.kv_cache import Context
from packtrain.inference.sampling.samplers import log_probabilities
from packtrain.models.model_file import ModelFile, check_vocabularies
from packtrain.training.model_loss import MeanEstimate
from packtrain.training.perplexity_windows import PerplexityWindows

CHUNK = 32  # positions whose logits are computed at once
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
        """The median of the divergences, and what 99 and 99.9 % of them are below."""
        return dict(zip(QUANTILES, map(float, np.quantile(self.kl, QUANTILES)), strict=True))

    @property
    def same_top(self) -> MeanEstimate:
        """The share of positions where both models find the same token the likeliest."""
        return MeanEstimate.of(self.has_same_top)

    @property
    def perplexity_ratio(self) -> MeanEstimate:
        """The model's perplexity divided by the reference's; its error counts what both have in common only once."""
        return MeanEstimate.of(self.losses - self.reference_losses).exponential


def kl_divergence(
    reference: ModelFile, model: ModelFile, batches: PerplexityWindows, device: Target, is_stopped: Callable[[], bool],
    report_progress: Callable[[int, int], None],
) -> Divergence:  # fmt: skip
    """Compare two models on the windows of a text. Raises InputError for different vocabularies, and Interrupted."""
    check_vocabularies(reference, model, "--kl-base")
    if reference.config.vocab_size != model.config.vocab_size:
        sizes = f"{reference.config.vocab_size:,} and {model.config.vocab_size:,}"
        raise InputError(
            f"--kl-base: the base and the model have {sizes} tokens", "their logits must match"
        )
    reference_context, context = (
        Context(
            m, cells=batches.context, cache="f32", rows=CHUNK, prompts=(CHUNK,), checkpoints=0,
            swa_full=True, target=device,
        )
        for m in (reference, model)
    )  # fmt: skip
    parts = list[tuple[np.ndarray, ...]]()
    for index in range(len(batches)):
        for row in window_rows(batches[index]):
            if is_stopped():
                raise Interrupted("stopped without a result")
            parts += window_divergences(reference_context, context, row)
        report_progress(min((index + 1) * batches.rows, batches.windows), batches.windows)
    return Divergence(*map(np.concatenate, zip(*parts, strict=True)))


def window_rows(batch: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens (T,) and targets (N,) of the rows of a batch that are no padding."""
    for tokens, targets, weights in zip(
        batch["tokens"], batch["targets"], batch["weights"], strict=True
    ):
        if weights.any():
            yield tokens, targets


def window_divergences(
    reference: Context, model: Context, row: tuple[np.ndarray, np.ndarray]
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield for each chunk of a window the arrays of a Divergence."""
    tokens, targets = row
    num_skipped = len(tokens) - len(targets)
    for context in (reference, model):
        context.remove(0)
        if num_skipped:
            context.decode(tokens[:num_skipped].tolist())
    for start in range(0, len(targets), CHUNK):
        chunk_tokens = tokens[num_skipped + start :][:CHUNK].tolist()
        rows = range(len(chunk_tokens))
        logits = [context.decode(chunk_tokens, wanted=rows) for context in (reference, model)]
        pairs = zip(*logits, targets[start:], strict=False)
        yield tuple(map(np.array, zip(*(row_divergence(*pair) for pair in pairs), strict=True)))


def row_divergence(
    reference_logits: np.ndarray, logits: np.ndarray, target: int
) -> tuple[float, bool, float, float]:
    """Return KL(p || q), whether the likeliest tokens are the same, -ln q(target) and -ln p(target).

    reference_logits, logits  (V,) f32
    """
    log_p, log_q = log_probabilities(reference_logits), log_probabilities(logits)
    kl = float(np.exp(log_p) @ (log_p - log_q))
    has_same_top = bool(log_p.argmax() == log_q.argmax())
    return max(kl, 0.0), has_same_top, -float(log_q[target]), -float(log_p[target])
