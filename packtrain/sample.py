"""Sampling the next token from logits: llama.cpp's sampler chain, as pure functions on NumPy arrays.

Takes logits (V,) and recent ids, returns an id. Token i of a text has its own random generator, so that results
depend on the seed and on i, not on how the text was split. It knows no models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtrain.errors import InputError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings; defaults, meanings and order (penalties, top-k, top-p, min-p, temperature) are llama.cpp's.

    temp            divides the logits; 0 takes the likeliest token
    top_k           keep the k likeliest tokens; 0 keeps all
    top_p           keep the likeliest tokens that together have this probability; 1 keeps all
    min_p           keep tokens at least this likely, relative to the likeliest; 0 keeps all
    repeat_penalty  makes recent tokens less likely; 1 does nothing
    repeat_last_n   how many tokens count as recent; -1 is all of them
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64


def draws(seed: int, index: int) -> np.random.Generator:
    """The random generator of token `index`: counter-based, independent of the draws of other tokens."""
    return np.random.Generator(np.random.Philox(key=seed, counter=index))


def choose(
    logits: np.ndarray, recent: Sequence[int], sampling: Sampling, rng: np.random.Generator
) -> int:
    """The id of the next token; of equal logits the lowest id wins. Raises InputError if any is not finite."""
    if not np.isfinite(logits).all():
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise InputError(
            f"the logit of token {bad} is {logits[bad]}; the model's weights must give finite numbers"
        )
    logits = _penalised(logits.astype(np.float64), recent, sampling)
    if sampling.temp <= 0:
        return int(logits.argmax())
    ids = _likeliest(logits, sampling.top_k)
    ids = ids[: _within(_softmax(logits[ids]), sampling.top_p)]
    likely = _softmax(logits[ids])
    ids = ids[likely >= sampling.min_p * likely[0]]
    with np.errstate(over="ignore"):  # -inf is correct below the largest logit, which is 0 then
        total = np.cumsum(_softmax((logits[ids] - logits[ids[0]]) / sampling.temp))
    return int(ids[np.searchsorted(total, rng.random() * total[-1], side="right")])


def _penalised(logits: np.ndarray, recent: Sequence[int], sampling: Sampling) -> np.ndarray:
    last = sampling.repeat_last_n
    counted = recent if last < 0 else recent[max(len(recent) - last, 0) :]
    if sampling.repeat_penalty != 1 and len(counted):
        ids = np.unique(np.asarray(counted, np.int64))
        penalty = np.where(logits[ids] > 0, 1 / sampling.repeat_penalty, sampling.repeat_penalty)
        logits[ids] *= penalty
    return logits


def _likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` greatest logits, greatest first; all of them if count is 0."""
    few = 0 < count < len(logits)  # sort only candidates
    ids = np.flatnonzero(logits >= _bound(logits, count)) if few else np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order][: count or None]


def _bound(logits: np.ndarray, count: int) -> float:
    """A number that at least `count` logits reach, and few more: from the maxima of spans, a hundredth of a sort."""
    width = max(len(logits) // (4 * count), 1)
    spans = logits[: len(logits) // width * width].reshape(-1, width)
    return float(np.partition(spans.max(axis=1), -count)[-count])


def _within(probabilities: np.ndarray, top_p: float) -> int:
    """How many of the sorted probabilities are needed to reach top_p; at least one."""
    if top_p >= 1:
        return len(probabilities)
    return int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1


def _softmax(logits: np.ndarray) -> np.ndarray:
    e: np.ndarray = np.exp(logits - logits.max())
    e /= e.sum()
    return e
