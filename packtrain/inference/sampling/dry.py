"""DRY ("don't repeat yourself"): a penalty on tokens that would extend a repetition, by p-e-w."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packtrain.inference.sampling.samplers import Candidates

MAX_LOG_PENALTY = 88.7228391  # log of the largest float32: llama.cpp's largest penalty
MAX_BREAKER_NBYTES, MAX_TAIL_TOKENS = 40, 20
# a token, and the ids that must follow for a breaker to be complete
Breakers = Mapping[int, Sequence[tuple[int, ...]]]


def dry_penalty(
    c: Candidates, recent_ids: Sequence[int], breakers: Breakers, multiplier: float, base: float, allowed_length: int,
) -> Candidates:  # fmt: skip
    """Lower logits by multiplier · base^(length − allowed_length) where a token extends a repetition of `length`."""
    if not multiplier or base < 1 or len(recent_ids) <= allowed_length:
        return c
    max_length = _unbroken_length(recent_ids, breakers)
    if max_length < allowed_length:
        return c
    max_power = max(int(MAX_LOG_PENALTY / math.log(base)), 1) if base > 1.000001 else 0
    logits = c.logits.copy()
    for id, length in _repetition_lengths(recent_ids, max_length).items():
        if length >= allowed_length and () not in breakers.get(id, ()):
            power = min(length - allowed_length, max_power or length)
            logits[c.ids == id] -= multiplier * base**power
    return Candidates(c.ids, logits, False)


def _unbroken_length(recent_ids: Sequence[int], breakers: Breakers) -> int:
    """Return how many tokens the text has after its last breaker: repetitions are not followed beyond one."""
    num_tokens = len(recent_ids)
    for num_back in range(num_tokens):
        at = num_tokens - 1 - num_back
        tails = [t for t in breakers.get(recent_ids[at], ()) if len(t) <= num_back]
        fits = [len(t) for t in tails if tuple(recent_ids[at + 1 : at + 1 + len(t)]) == t]
        if fits:
            return num_back - max(fits)
    return num_tokens


def _repetition_lengths(recent_ids: Sequence[int], max_length: int) -> dict[int, int]:
    """Return {token: length of the longest earlier copy of the text's end that it followed, at most max_length}."""
    lengths_by_id: dict[int, int] = {}
    reversed_ids = np.asarray(recent_ids)[::-1]
    for k, length in enumerate(_z_lengths(reversed_ids)):
        if k and length:
            id = int(reversed_ids[k - 1])
            lengths_by_id[id] = max(lengths_by_id.get(id, 0), min(length, max_length))
    return lengths_by_id


def _z_lengths(reversed_ids: np.ndarray) -> list[int]:
    """Return the Z function of a reversed text: at each position, the length of its prefix that recurs there."""
    ids, num_tokens = reversed_ids.tolist(), len(reversed_ids)
    match_lengths, window_start, window_end = [0] * num_tokens, 0, 0
    for k in range(1, num_tokens):
        match_length = min(window_end - k, match_lengths[k - window_start]) if k < window_end else 0
        while k + match_length < num_tokens and ids[match_length] == ids[k + match_length]:
            match_length += 1
        match_lengths[k] = match_length
        if k + match_length > window_end:
            window_start, window_end = k, k + match_length
    return match_lengths


def find_breakers(
    texts: Iterable[str], token_pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]]
) -> Breakers:
    """Return {token id: tuples of ids} of tokens that contain one of `texts`, at which `dry_penalty` ends repetitions,
    or end with a beginning of one; each tuple completes such a text: () if the token has all of it."""
    breakers_by_id: dict[int, tuple[tuple[int, ...], ...]] = {}
    shared_tails = dict[Any, Any]()  # equal values are one: there are as many as tokens
    for text in texts:
        breaker, tails = text.encode()[:MAX_BREAKER_NBYTES], dict[int, tuple[int, ...]]()
        for id, piece in enumerate(token_pieces):
            counts = range(1, min(len(breaker), len(piece) + 1))
            partial_counts = [n for n in counts if piece.endswith(breaker[:n])]
            overlaps = [0] if breaker in piece else partial_counts
            for n in overlaps:
                if n not in tails:
                    breaker_rest = breaker[n:].decode(errors="ignore")
                    tails[n] = tuple(encode(breaker_rest)[:MAX_TAIL_TOKENS]) if n else ()
                extended_tails = (*breakers_by_id.get(id, ()), tails[n])
                breakers_by_id[id] = shared_tails.setdefault(extended_tails, extended_tails)
    return breakers_by_id
