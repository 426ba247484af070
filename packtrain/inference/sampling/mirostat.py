"""Mirostat 1 and 2: keep the surprise of a text near a target (Basu et al. 2020).

Each returns the candidates to draw from; `update_mu` then updates mu from the surprise of the drawn token.
"""

import math

import numpy as np

from packtrain.inference.sampling.samplers import Candidates, probabilities, ranked, top_k

SLOPE_TOKENS = 100  # tokens from which the slope is estimated


def mirostat(c: Candidates, mu: float, vocab_size: int) -> Candidates:
    """Keep the k likeliest tokens, k from mu and the slope s of a Zipf law, estimated from the likeliest ones."""
    c = ranked(c)
    probs = probabilities(c.logits)[:SLOPE_TOKENS]
    probs = probs[probs > 0]
    if len(probs) < 2:
        return c.select(slice(1))
    ranks = np.arange(1, len(probs))
    log_ratios = np.log((ranks + 1) / ranks)
    s = float((log_ratios * np.log(probs[:-1] / probs[1:])).sum() / (log_ratios * log_ratios).sum())
    return top_k(c, _estimate_k(s, mu, vocab_size))


def _estimate_k(zipf_slope: float, mu: float, vocab_size: int) -> int:
    excess = zipf_slope - 1
    try:
        k = (excess * 2**mu / (1 - vocab_size**-excess)) ** (1 / zipf_slope)
    except (OverflowError, ZeroDivisionError):
        return vocab_size  # as many as there are
    is_usable = not isinstance(k, complex) and math.isfinite(k)
    return max(min(int(k), vocab_size), 1) if is_usable else vocab_size


def mirostat_2(c: Candidates, mu: float) -> Candidates:
    """Keep tokens whose surprise is at most mu bits, at least one."""
    c = ranked(c)
    with np.errstate(divide="ignore"):
        surprise = -np.log2(probabilities(c.logits))
    too_surprising = np.flatnonzero(surprise > mu)
    return c.select(slice(max(int(too_surprising[0]), 1))) if len(too_surprising) else c


def update_mu(c: Candidates, id: int, mu: float, target: float, learning_rate: float) -> float:
    """Return mu after `id` was drawn: mu − learning_rate · (surprise − target)."""
    token_prob = probabilities(c.logits)[np.flatnonzero(c.ids == id)[0]]
    return mu - learning_rate * (-math.log2(token_prob) - target)
