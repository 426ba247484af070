"""Speculative decoding: tokens are guessed ahead, by a small model or from the text itself, and checked in one run.

What is written does not change: the model chooses every token as it would alone (Leviathan et al. 2022, arXiv
2211.17192, where the guess is always a single token; llama.cpp's speculative example).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from packtrain.inference.generator import Generator

NGRAM_LENGTHS = 4, 3, 2  # lengths of the ends that are looked up, the longest first


@dataclass(slots=True)
class NgramDrafter:
    """What followed the last time that the text had its last few tokens."""

    ngram_ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    known_tokens: list[int] = field(default_factory=list)

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        if [*text[: len(self.known_tokens)]] != self.known_tokens:
            self.ngram_ends.clear()
            self.known_tokens.clear()
        for ngram_end in range(
            len(self.known_tokens) + 1, len(text)
        ):  # the last token has no next one yet
            for ngram_length in NGRAM_LENGTHS:
                if ngram_length <= ngram_end:
                    self.ngram_ends[tuple(text[ngram_end - ngram_length : ngram_end])] = ngram_end
        self.known_tokens = [*text[:-1]]
        for ngram_length in NGRAM_LENGTHS:
            match_end = self.ngram_ends.get(tuple(text[-ngram_length:]))
            if match_end is not None and ngram_length <= len(text):
                return [*text[match_end : match_end + max_tokens]]
        return []


@dataclass(slots=True)
class ModelDrafter:
    """The likeliest next tokens of another model, as long as each has at least the probability `min_probability`.

    num_shared_ids  ids below this are the same tokens in both models
    """

    generator: Generator
    min_probability: float
    num_shared_ids: int

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        draft_ids, num_free_tokens = list[int](), self.generator.size - len(text)
        if max(text) >= self.num_shared_ids:
            return draft_ids
        while len(draft_ids) < min(max_tokens, num_free_tokens):
            logits = self.generator.feed(self.generator.reuse_prefix([*text, *draft_ids]))
            next_token = int(logits.argmax())
            token_prob = 1 / np.exp(logits - logits[next_token], dtype=np.float64).sum()
            if token_prob < self.min_probability or next_token >= self.num_shared_ids:
                break
            draft_ids.append(next_token)
        return draft_ids
