"""DRY ("don't repeat yourself"): a penalty on tokens that would extend a repetition, by p-e-w."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packtrain.inference.sampling.candidates import Candidates

MOST_LOG = 88.7228391  # log of the largest float32: llama.cpp's largest penalty
MOST_BYTES, MOST_TAIL = 40, 20
Breakers = Mapping[
    int, Sequence[tuple[int, ...]]
]  # a token, and what must follow for a breaker to be complete


def dry(
    c: Candidates,
    recent: Sequence[int],
    breakers: Breakers,
    multiplier: float,
    base: float,
    allowed: int,
) -> Candidates:
    """Subtract multiplier · base^(length − allowed) from tokens that extend a repetition of `length` tokens."""
    if not multiplier or base < 1 or len(recent) <= allowed:
        return c
    max_length = _unbroken(recent, breakers)
    if max_length < allowed:
        return c
    longest = max(int(MOST_LOG / math.log(base)), 1) if base > 1.000001 else 0
    logits = c.logits.copy()
    for id, length in _extended(recent, max_length).items():
        if length >= allowed and () not in breakers.get(id, ()):
            power = length - allowed
            power = min(power, longest) if longest else power
            logits[c.ids == id] -= multiplier * base**power
    return Candidates(c.ids, logits, False)


def _unbroken(recent: Sequence[int], breakers: Breakers) -> int:
    """How many of the last tokens lie after the last breaker."""
    count = len(recent)
    for back in range(count):
        at = count - 1 - back
        tails = [t for t in breakers.get(recent[at], ()) if len(t) <= back]
        fits = [len(t) for t in tails if tuple(recent[at + 1 : at + 1 + len(t)]) == t]
        if fits:
            return back - max(fits)
    return count


def _extended(recent: Sequence[int], max_length: int) -> dict[int, int]:
    """Tokens that followed an earlier copy of the end of the text, with the longest such copy, at most `max_length`."""
    lengths_by_id: dict[int, int] = {}
    text = np.asarray(recent)[::-1]
    for k, length in enumerate(_copies(text)):
        if k and length:
            id = int(text[k - 1])
            lengths_by_id[id] = max(lengths_by_id.get(id, 0), min(length, max_length))
    return lengths_by_id


def _copies(text: np.ndarray) -> list[int]:
    """For each place of a reversed text, how long it is equal to its beginning there: the Z function."""
    ids, count = text.tolist(), len(text)
    z, left, right = [0] * count, 0, 0
    for k in range(1, count):
        n = min(right - k, z[k - left]) if k < right else 0
        while k + n < count and ids[n] == ids[k + n]:
            n += 1
        z[k] = n
        if k + n > right:
            left, right = k, k + n
    return z


def find_breakers(
    texts: Iterable[str], pieces: Sequence[bytes], encode: Callable[[str], Sequence[int]]
) -> Breakers:
    """Tokens with which a breaker can begin or that have one inside, and the ids that complete it."""
    breakers_by_id: dict[int, tuple[tuple[int, ...], ...]] = {}
    shared = dict[Any, Any]()  # equal values are one: there are as many as tokens
    for text in texts:
        breaker, tails = text.encode()[:MOST_BYTES], dict[int, tuple[int, ...]]()
        for id, piece in enumerate(pieces):
            counts = range(1, min(len(breaker), len(piece) + 1))
            overlaps = (
                [0] if breaker in piece else [n for n in counts if piece.endswith(breaker[:n])]
            )
            for n in overlaps:
                if n not in tails:
                    rest = breaker[n:].decode(errors="ignore")
                    tails[n] = tuple(encode(rest)[:MOST_TAIL]) if n else ()
                extended_tails = (*breakers_by_id.get(id, ()), tails[n])
                breakers_by_id[id] = shared.setdefault(extended_tails, extended_tails)
    return breakers_by_id
