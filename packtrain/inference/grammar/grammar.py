"""A grammar that the text of one sequence follows: it says which tokens can come, and whether the text is over."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.grammar import vocabulary_table
from packtrain.inference.grammar.gbnf import parse_gbnf
from packtrain.inference.grammar.lark import to_lark
from packtrain.inference.grammar.schema import locate_fault, parse_schema, schema_to_lark
from packtrain.inference.grammar.vocabulary_table import DEAD_END, DIGITS, DigitTokens, table

MAX_DIGITS = 16  # of an integer, of decimals and of an exponent in JSON, as in llama.cpp
REASON_PREFIX = "error: "  # in llguidance's messages
TOO_DEEP_MESSAGES = "panic: ", "too deeply nested", "recursion limit exceeded"
POSITION_PREFIX = re.compile(r"^(at )?\d+\(\d+\): ")  # a position in text that no user wrote


class Grammar:
    """A grammar, and how far the text of one sequence has followed it; `copy` makes one for another sequence. A lazy
    grammar waits for a trigger, a word or a token: it allows all tokens until then, and begins with the trigger."""

    def __init__(
        self, tokenizer: Tokenizer, source: str, words: Sequence[str] = (), tokens: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """source: in llguidance's Lark notation; words, tokens: texts and ids from which on a lazy grammar holds; until
        one comes, any token may. Raises InputError."""
        self._tokenizer, self._token_table = tokenizer, table(tokenizer)
        self._words, self._trigger_ids = [word.encode() for word in words], frozenset(tokens)
        self._matcher = vocabulary_table.grammar_matcher(self._token_table, source)
        self._end_ids = np.array([*tokenizer.eog_ids], np.int64)
        self._digits = vocabulary_table.digit_tokens(tokenizer) if "%json" in source else None
        self._last_mask: tuple[tuple[bytes, bool, int], np.ndarray] = (b"", False, 0), np.empty(0)
        can_begin = self._token_mask(tokenizer.vocab_size).any()
        self._check_matcher("it cannot be used")
        if not self.is_complete and not can_begin:
            raise InputError("grammar: no token of this vocabulary can begin a text that it allows")
        self.awaits_trigger = bool(words or tokens)
        self._is_lazy, self._accepted_ids = self.awaits_trigger, list[int]()

    @classmethod
    def from_gbnf(
        cls, tokenizer: Tokenizer, text: str, words: Sequence[str] = (), tokens: Sequence[int] = ()
    ) -> "Grammar":
        """Create a grammar from GBNF; words, tokens: triggers, see __init__. Raises InputError with line and column."""
        names = {token.decode(errors="replace"): id for id, token in enumerate(tokenizer.tokens)}
        try:
            source = to_lark(parse_gbnf(text, names.get, tokenizer.vocab_size))
        except RecursionError:
            raise InputError("grammar: it is nested too deep") from None
        return cls(tokenizer, source, words, tokens)

    @classmethod
    def from_schema(cls, tokenizer: Tokenizer, schema_text: str) -> "Grammar":
        """Create the grammar of a JSON schema's documents. Raises InputError, which names property and keyword."""
        schema = parse_schema(schema_text)

        def build(part: Any) -> Grammar:
            return cls(tokenizer, schema_to_lark(part))

        try:
            return build(schema)
        except InputError as error:
            raise InputError(locate_fault(schema, str(error), build)) from None

    def copy(self) -> "Grammar":
        """Return an independent grammar in the same state."""
        duplicate = Grammar.__new__(Grammar)
        duplicate.__dict__ |= self.__dict__ | {
            "_matcher": self._matcher.deep_copy(), "_accepted_ids": [*self._accepted_ids],
        }  # fmt: skip
        return duplicate

    @property
    def over(self) -> bool:
        """Whether no more tokens can come."""
        return not self.awaits_trigger and bool(self._matcher.is_stopped())

    @property
    def is_complete(self) -> bool:
        """Whether the text can end here."""
        return bool(self._matcher.is_accepting())

    def allowed(self, size: int) -> np.ndarray | None:
        """Return the mask (size,) bool of tokens that can come next; None: all, before a trigger. Raises InputError."""
        if self.awaits_trigger:
            return None
        allowed = self._token_mask(size)
        self._check_matcher("it became too large")
        return self._limit_digits(allowed, self._digits) if self._digits else allowed

    def accept(self, id: int) -> None:
        """Advance the grammar by the token that the sequence got. Raises InputError if the token cannot come."""
        self._accepted_ids.append(id)
        if self.awaits_trigger:
            self._check_trigger(id)
        elif id < self._token_table.vocab_size:
            if self._matcher.is_stopped() and id not in self._tokenizer.eog_ids:
                raise InputError(f"grammar: token {id} cannot come, the text is over")
            self._matcher.consume_token(id)
            self._check_matcher(f"token {id} cannot come here")

    def _check_trigger(self, id: int) -> None:
        """If token `id` completes a trigger (token or word), stop waiting; the grammar reads the text from there on."""
        if id in self._trigger_ids:
            self.awaits_trigger = False
            self._matcher.consume_token(id)
        elif self._words:
            text = b"".join(map(self._tokenizer.piece, self._accepted_ids))
            match_offsets = [at for word in self._words if (at := text.find(word)) >= 0]
            if match_offsets:
                self.awaits_trigger = False
                began_text = text[min(match_offsets) :].decode(errors="replace")
                self._matcher.consume_tokens(self._token_table.greedy_tokenize(began_text))
        self._check_matcher("the text from the trigger on does not follow the grammar")

    def _limit_digits(self, allowed: np.ndarray, digits: DigitTokens) -> np.ndarray:
        """Return the mask without tokens that give a number of JSON more than MAX_DIGITS digits in a row. If the number
        cannot end yet, only zeros are taken out, or nothing: llguidance would read 0.000… without end."""
        is_text = digits.last_ids.isdisjoint(self._accepted_ids[-1:])
        num_digits = 0 if is_text else self._count_last_digits()
        if not num_digits:
            return allowed
        long_tokens = digits.counts > MAX_DIGITS - num_digits
        if not long_tokens.any() or allowed[digits.text_ids].any():
            return allowed
        for forbidden_ids in digits.ids[long_tokens], digits.ids[long_tokens & digits.are_zeros]:
            limited = allowed.copy()
            limited[forbidden_ids] = False
            if limited.any():
                return limited
        return allowed

    def _count_last_digits(self) -> int:
        """Return with how many digits the text ends; 0 if a quote stands before them: they begin a string."""
        num_digits = 0
        for id in reversed(self._accepted_ids):
            piece = self._tokenizer.piece(id)
            text_before = piece.rstrip(DIGITS)
            num_digits += len(piece) - len(text_before)
            if text_before:
                return 0 if text_before.endswith(b'"') else num_digits
        return num_digits

    def _token_mask(self, size: int) -> np.ndarray:
        """Return llguidance's mask (size,) bool, read-only. Inside strings it mostly repeats, and is unpacked once."""
        mask_key = self._matcher.compute_bitmask(), self.is_complete, size
        if mask_key != self._last_mask[0]:
            bits = np.unpackbits(np.frombuffer(mask_key[0], np.uint8), bitorder="little")
            mask = bits.view(bool)[: min(size, self._tokenizer.vocab_size)]
            mask = mask if len(mask) == size else np.pad(mask, (0, size - len(mask)))
            mask[self._end_ids] = mask_key[1]
            mask.flags.writeable = False
            self._last_mask = mask_key, mask
        return self._last_mask[1]

    def _check_matcher(self, fact: str) -> None:
        """Raise InputError if llguidance reports an error; `fact` says what failed."""
        if self._matcher.is_error():
            message: Any = self._matcher.get_error()
            lines = [line.strip() for line in str(message).splitlines() if line.strip()] or [""]
            if any(words in lines[0] for words in TOO_DEEP_MESSAGES):
                raise InputError(f"grammar: {fact}: it is too large or too deep for llguidance")
            if lines[0] == DEAD_END:
                raise InputError("grammar: no token of this vocabulary can come next")
            reasons = "".join(
                f" {line[len(REASON_PREFIX) :]}" for line in lines if line.startswith(REASON_PREFIX)
            )
            raise InputError(f"grammar: {fact}: {POSITION_PREFIX.sub('', lines[0])}{reasons}")
