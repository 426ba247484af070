"""A grammar that the text of one sequence follows: the tokens that can come, what came, whether it is over."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.grammar.gbnf import parse
from packtrain.inference.grammar.lark import to_lark
from packtrain.inference.grammar.schema import of_schema
from packtrain.inference.grammar.token_masks import matcher, table

DEAD_END, REASON = "NoExtensionBias", "error: "  # in what llguidance says
DEEP = "panic: ", "too deeply nested", "recursion limit exceeded"
PLACE = re.compile(r"^(at )?\d+\(\d+\): ")  # in llguidance's notation, which nobody wrote


class Grammar:
    """The grammar of one sequence; `copy` one for another sequence.

    Lazy ones wait for a trigger, a word or a token: until it comes, all tokens can; the grammar begins with it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        words: Sequence[str] = (),
        tokens: Sequence[int] = (),
    ) -> None:
        """source: in llguidance's notation; words, tokens: triggers. Raises InputError."""
        self._tokenizer, self._table = tokenizer, table(tokenizer)
        self._words, self._triggers = [word.encode() for word in words], frozenset(tokens)
        self._matcher = matcher(self._table, source)
        self._check("it cannot be used")
        can_begin = self._mask().any()
        self._check("it cannot be used")
        if not self.complete and not can_begin:
            raise InputError("grammar: no token of this vocabulary can begin a text of it")
        self._fresh = self._matcher.deep_copy()
        self.awaits = bool(words or tokens)
        self._lazy, self._ids = self.awaits, list[int]()

    @classmethod
    def from_gbnf(
        cls, tokenizer: Tokenizer, text: str, words: Sequence[str] = (), tokens: Sequence[int] = ()
    ) -> "Grammar":
        """A grammar in llama.cpp's notation. Raises InputError with line and column."""
        names = {token.decode(errors="replace"): id for id, token in enumerate(tokenizer.tokens)}
        try:
            source = to_lark(parse(text, names.get, tokenizer.vocab_size))
        except RecursionError:
            raise InputError("grammar: it is nested too deep") from None
        return cls(tokenizer, source, words, tokens)

    @classmethod
    def from_schema(cls, tokenizer: Tokenizer, text: str) -> "Grammar":
        """The documents of a JSON schema. Raises InputError."""
        return cls(tokenizer, of_schema(text))

    def copy(self) -> "Grammar":
        """A grammar in the same state that goes its own way."""
        duplicate = Grammar.__new__(Grammar)
        duplicate.__dict__ |= self.__dict__ | {
            "_matcher": self._matcher.deep_copy(),
            "_ids": [*self._ids],
        }
        return duplicate

    @property
    def over(self) -> bool:
        """Whether nothing more can come."""
        return not self.awaits and bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the text can end here."""
        return bool(self._matcher.is_accepting())

    def allowed(self, size: int) -> np.ndarray | None:
        """(size,) bool: the tokens that can come; None: all. Raises InputError."""
        if self.awaits:
            return None
        allowed = np.zeros(size, bool)
        mask = self._mask()[:size]
        allowed[: len(mask)] = mask
        allowed[[*self._tokenizer.ends]] = self.complete
        self._check("it became too large")
        return allowed

    def accept(self, id: int) -> None:
        """The token that came. Raises InputError if it cannot."""
        self._ids.append(id)
        if self.awaits:
            self._await(id)
        elif id < self._table.vocab_size:
            if self._matcher.is_stopped() and id not in self._tokenizer.ends:
                raise InputError(f"grammar: token {id} cannot come, the text is over")
            self._matcher.consume_token(id)
            self._check(f"token {id} cannot come here")

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        if not count:
            return
        retained_ids = self._ids[:-count]
        self._ids = [*retained_ids]
        if not self._lazy:
            self._matcher.rollback(count)
            return
        self._matcher, self.awaits, self._ids = self._fresh.deep_copy(), True, []
        for id in retained_ids:
            self.accept(id)

    def _await(self, id: int) -> None:
        """Begin with the trigger, if it has come."""
        if id in self._triggers:
            self.awaits = False
            self._matcher.consume_token(id)
        elif self._words:
            text = b"".join(map(self._tokenizer.piece, self._ids))
            places = [at for word in self._words if (at := text.find(word)) >= 0]
            if places:
                self.awaits = False
                self._matcher.consume_tokens(
                    self._table.greedy_tokenize(_text(text[min(places) :]))
                )
        self._check("what began with the trigger does not follow it")

    def _mask(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little").view(bool)[: self._tokenizer.vocab_size]

    def _check(self, fact: str) -> None:
        if self._matcher.is_error():
            message: Any = self._matcher.get_error()
            lines = [line.strip() for line in str(message).splitlines() if line.strip()] or [""]
            if any(words in lines[0] for words in DEEP):
                raise InputError(f"grammar: {fact}: it is too large or too deep for llguidance")
            if lines[0] == DEAD_END:
                raise InputError("grammar: no token of this vocabulary can come next")
            reasons = "".join(
                f" {line[len(REASON) :]}" for line in lines if line.startswith(REASON)
            )
            raise InputError(f"grammar: {fact}: {PLACE.sub('', lines[0])}{reasons}")


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
