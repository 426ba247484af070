"""Candidates, and llama.cpp's samplers as pure functions of them; DRY has a module of its own.

Candidates are ids that can come next with their logits, in f64 from the model's f32. A sampler takes Candidates and
returns Candidates; arrays are never changed in place."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

MAX_INFILL_CANDIDATES = 128
MAX_LOOKUPS = 1000  # fewer candidates are looked up one by one


class Candidates(NamedTuple):
    """Tokens that can come next.

    ids     (N,) int64
    logits  (N,) float64; −inf: this token cannot come
    sorted  whether logits fall; of equal ones the lower id is first
    """

    ids: np.ndarray
    logits: np.ndarray
    sorted: bool = False

    def select(self, index: np.ndarray | slice) -> "Candidates":
        """Select some candidates by index, in their order."""
        return Candidates(self.ids[index], self.logits[index], self.sorted)


def ranked(c: Candidates) -> Candidates:
    """Sort candidates by falling logits; of equal logits the lowest id comes first."""
    if c.sorted:
        return c
    sorted_indices = np.lexsort((c.ids, -c.logits))
    return Candidates(c.ids[sorted_indices], c.logits[sorted_indices], True)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return softmax(logits), summed from first to last, as kernels do."""
    e: np.ndarray = np.exp(logits - logits.max())
    e /= np.cumsum(e)[-1]
    return e


def log_sum_exp(logits: np.ndarray) -> float:
    """Return ln(Σ exp(logit)) of logits (V,): exponentials in their type, the sum in f64."""
    top = float(logits.max())
    return top + math.log(np.exp(logits - logits.max()).sum(dtype=np.float64))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the log-softmax of logits (V,), in f64."""
    log_probs = logits.astype(np.float64)
    log_probs -= log_probs.max()
    log_probs -= np.log(np.exp(log_probs).sum())
    return log_probs


def entropy(p: np.ndarray) -> float:
    """Return the entropy −Σ p log p of probabilities, in nats."""
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def logit_bias(c: Candidates, biases: Mapping[int, float]) -> Candidates:
    """Add biases[id] to the logit of each candidate id; returns new candidates."""
    if not biases:
        return c
    if len(c.ids) < MAX_LOOKUPS:
        return Candidates(c.ids, c.logits + [biases.get(id, 0.0) for id in c.ids.tolist()], False)
    added_bias = np.zeros(int(c.ids.max()) + 1)
    biased_ids = [id for id in biases if id < len(added_bias)]
    added_bias[biased_ids] = [biases[id] for id in biased_ids]
    return Candidates(c.ids, np.asarray(c.logits + added_bias[c.ids]), False)


def recent_penalties(
    c: Candidates, recent_ids: Sequence[int], repeat: float, frequency: float, presence: float
) -> Candidates:
    """Penalize each of `recent_ids`: logit / repeat (· repeat where negative) − its count · frequency − presence."""
    if not len(recent_ids) or (repeat, frequency, presence) == (1, 0, 0):
        return c
    seen_ids, counts = np.unique(np.asarray(recent_ids, np.int64), return_counts=True)
    at = np.minimum(np.searchsorted(seen_ids, c.ids), len(seen_ids) - 1)
    is_seen = seen_ids[at] == c.ids
    old, logits = c.logits[is_seen], c.logits.copy()
    repeated = np.where(old > 0, old / repeat, old * repeat)
    logits[is_seen] = repeated - counts[at[is_seen]] * frequency - presence
    return Candidates(c.ids, logits, False)


def top_k(c: Candidates, max_tokens: int) -> Candidates:
    """Keep the `max_tokens` greatest logits, greatest first, of equals the lowest ids; 0 keeps all."""
    if not max_tokens or (c.sorted and max_tokens >= len(c.ids)):
        return c
    if c.sorted:
        return c.select(slice(max_tokens))
    if max_tokens < len(c.ids):  # sort only those that can be among them
        # at least max_tokens logits reach this bound, and few more: a sort would take a hundred times as long
        span_width = max(len(c.logits) // (4 * max_tokens), 1)
        spans = c.logits[: len(c.logits) // span_width * span_width].reshape(-1, span_width)
        c = c.select(c.logits >= float(np.partition(spans.max(axis=1), -max_tokens)[-max_tokens]))
    return ranked(c).select(slice(max_tokens))


def top_p(c: Candidates, p: float) -> Candidates:
    """Keep the likeliest tokens until their probabilities reach p; 1 keeps all. Nucleus sampling, Holtzman 2020."""
    if p >= 1:
        return c
    c = ranked(c)
    return c.select(slice(int(np.searchsorted(np.cumsum(probabilities(c.logits)), p)) + 1))


def min_p(c: Candidates, p: float) -> Candidates:
    """Keep tokens at least p times as likely as the likeliest: logit ≥ max + log p (Nguyen et al. 2024); 0: all."""
    if p <= 0:
        return c
    return c.select(c.logits >= c.logits.max() + min(math.log(p), 0.0))


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Keep logits ≥ max − n · std of the finite ones; n ≤ 0 keeps all (top-nσ, Tang et al. 2024). llama.cpp keeps
    dropped tokens with a logit of -inf: typical sampling then computes 0 · log 0, and dynamic temperature counts them.
    """
    if n <= 0 or len(c.ids) <= 1:
        return c
    finite = c.logits[np.isfinite(c.logits)]
    return c.select(c.logits >= finite.max() - n * finite.std())


def typical(c: Candidates, p: float) -> Candidates:
    """Keep tokens with the least |−log p − entropy| up to a sum of p; 1 keeps all. Meister et al. 2022."""
    if p >= 1:
        return c
    c = ranked(c)
    c = c.select(np.isfinite(c.logits))
    token_probs = np.maximum(probabilities(c.logits), np.finfo(float).tiny)  # of finite surprise
    order = np.argsort(np.abs(-np.log(token_probs) - entropy(token_probs)), kind="stable")
    kept_indices = order[: int(np.searchsorted(np.cumsum(token_probs[order]), p, side="right")) + 1]
    return c.select(np.sort(kept_indices))


def tail_free(c: Candidates, z: float) -> Candidates:
    """Keep tokens until their normalized absolute second differences add up to more than z; 1 keeps all. Where the
    slope of the sorted probabilities stops changing, the tail begins (Phénix and Egan 2019)."""
    if z >= 1 or len(c.ids) <= 2:
        return c
    c = ranked(c)
    curvature = np.abs(np.diff(probabilities(c.logits), 2))
    total = curvature.sum()
    shares = curvature / total if total > 1e-6 else np.full(len(curvature), 1 / len(curvature))
    cut_indices = np.flatnonzero(np.cumsum(shares) > z)
    cut_indices = cut_indices[cut_indices > 0]
    return c.select(slice(int(cut_indices[0]))) if len(cut_indices) else c


def xtc(
    c: Candidates, probability: float, threshold: float, rng: np.random.Generator
) -> Candidates:
    """With this probability, drop tokens of at least `threshold` but the least likely: "exclude top choices"."""
    if probability <= 0 or threshold > 0.5 or len(c.ids) < 2 or rng.random() > probability:
        return c
    c = ranked(c)
    num_likely = int(np.count_nonzero(probabilities(c.logits) >= threshold))
    return c.select(slice(max(num_likely - 1, 0), None))


def infill(c: Candidates, piece: Callable[[int], bytes], end_ids: Sequence[int]) -> Candidates:
    """Keep tokens of a gap, of the 128 likeliest, if they are much likelier than its end: llama.cpp's sampler. A token
    and those that begin with it (by `piece`, a token's text) count as the likeliest of them. `end_ids`: tokens that end
    the gap, the first of which stands for all where no other token has a probability of 0.2."""
    c = top_k(c, MAX_INFILL_CANDIDATES)
    probs, is_end = probabilities(c.logits), np.isin(c.ids, end_ids)
    end_prob = float(probs[is_end].sum())
    if 3 * end_prob * len(c.ids) > 1 - end_prob:
        return c.select(is_end)
    pieces = [piece(id) for id in c.ids.tolist()]
    for i, j in product(range(len(pieces)), repeat=2):
        if i != j and pieces[i] and probs[i] and probs[j] and pieces[j].startswith(pieces[i]):
            target, source = (j, i) if probs[j] > probs[i] else (i, j)
            probs[target], probs[source] = probs[i] + probs[j], 0
    is_likely = probs >= 0.2
    num_likely = np.count_nonzero(is_likely & ~is_end)
    if not num_likely:
        return Candidates(np.array(end_ids[:1]), np.zeros(1), True) if end_ids else c
    is_kept = is_likely | is_end
    return c.select(is_end | (is_kept & (probs * (num_likely + 1) >= probs[is_kept].sum())))


def temperature(c: Candidates, temp: float) -> Candidates:
    """Divide logits by `temp`; 0 keeps only the likeliest token, of equals the lowest id."""
    if temp <= 0:
        return c.select(c.ids == c.ids[c.logits == c.logits.max()].min())
    with np.errstate(over="ignore"):  # −inf is correct below the largest logit, which is 0 then
        return Candidates(c.ids, (c.logits - c.logits.max()) / temp, c.sorted)


def dynamic_temperature(c: Candidates, temp: float, spread: float, exponent: float) -> Candidates:
    """Apply a temperature from temp − spread to temp + spread, by (entropy / its maximum) ** exponent (kalomaze)."""
    if spread <= 0:
        return temperature(c, temp)
    if len(c.ids) <= 1:
        return c
    c = ranked(c)
    entropy_share = max(entropy(probabilities(c.logits)) / math.log(len(c.ids)), 0.0)
    min_temp = max(temp - spread, 0.0)
    return temperature(c, min_temp + (temp + spread - min_temp) * entropy_share**exponent)


def token_rng(seed: int, index: int) -> np.random.Generator:
    """Create the random generator of token `index`: counter-based, independent of other tokens' draws. Results then
    depend on seed and index, not on how the text was split."""
    return np.random.Generator(np.random.Philox(key=seed, counter=index))


def draw_token(c: Candidates, rng: np.random.Generator) -> int:
    """Return an id drawn by probability: the first whose running sum of exp(logit − max) exceeds u · the total."""
    total = np.cumsum(np.exp(c.logits - c.logits.max()))
    drawn_index = int(np.searchsorted(total, rng.random() * total[-1], side="right"))
    return int(c.ids[min(drawn_index, len(c.ids) - 1)])


SLOPE_TOKENS = 100  # tokens from which the slope is estimated


def mirostat(c: Candidates, mu: float, vocab_size: int) -> Candidates:
    """Keep the k likeliest tokens, k from mu and the slope s of a Zipf law, estimated from the likeliest ones. Mirostat
    keeps the surprise of a text near a target (Basu et al. 2020): `update_mu` follows each drawn token."""
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
    """Return mirostat's k: how many tokens have less surprise than `mu` if probabilities follow Zipf's law."""
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
