"""Speculative decoding: tokens are guessed ahead, by a small model or from the text itself, and checked in one run.

What is written does not change: the model chooses every token as it would alone (Leviathan et al. 2022, arXiv
2211.17192, where the guess is always a single token; llama.cpp's speculative example).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from packtrain.inference.generator import Generator

NGRAMS = 4, 3, 2  # lengths of the ends that are looked up, the longest first


@dataclass(slots=True)
class Lookup:
    """What followed the last time that the text had its last few tokens."""

    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    known: list[int] = field(default_factory=list)

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        if [*text[: len(self.known)]] != self.known:
            self.seen.clear()
            self.known.clear()
        for end in range(len(self.known) + 1, len(text)):  # the last token has no next one yet
            for n in NGRAMS:
                if n <= end:
                    self.seen[tuple(text[end - n : end])] = end
        self.known = [*text[:-1]]
        for n in NGRAMS:
            at = self.seen.get(tuple(text[-n:]))
            if at is not None and n <= len(text):
                return [*text[at : at + count]]
        return []


@dataclass(slots=True)
class SmallModel:
    """The likeliest next tokens of another model, as long as each has at least the probability `least`.

    shared  ids below this are the same tokens in both models
    """

    generator: Generator
    least: float
    shared: int

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        draft_ids, room = list[int](), self.generator.size - len(text)
        if max(text) >= self.shared:
            return draft_ids
        while len(draft_ids) < min(count, room):
            logits = self.generator.feed(self.generator.resume([*text, *draft_ids]))
            token = int(logits.argmax())
            likely = 1 / np.exp(logits - logits[token], dtype=np.float64).sum()
            if likely < self.least or token >= self.shared:
                break
            draft_ids.append(token)
        return draft_ids
