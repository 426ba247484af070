"""Speculative decoding: drafters guess tokens ahead, by a small model or from the text itself; one run checks them.

generator.Reply accepts guesses up to the first that differs from the token its sampler chain chooses, so the text does
not change (Leviathan et al. 2022, arXiv 2211.17192, with drafts of one certain token each; llama.cpp's speculative).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from packtrain.inference.generator import Generator

NGRAM_LENGTHS = 4, 3, 2  # lengths of a text's ends that are looked up, the longest first


@dataclass(slots=True)
class NgramDrafter:
    """Guesses the tokens that followed the previous occurrence of the text's last few tokens."""

    ngram_ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    known_tokens: list[int] = field(default_factory=list)

    def propose(self, text: Sequence[int], max_tokens: int) -> list[int]:
        if [*text[: len(self.known_tokens)]] != self.known_tokens:
            self.ngram_ends.clear()
            self.known_tokens.clear()
        # the last token has no next token yet
        for ngram_end in range(len(self.known_tokens) + 1, len(text)):
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
    """Guesses the likeliest next tokens of another model, while each has a probability of at least `min_probability`.

    num_shared_ids  ids below this are the same tokens in both models; a text with others gets no guesses
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
        self.generator.context.release(self.generator.seq)  # others' texts may need its cells
        return draft_ids
