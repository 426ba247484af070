"""llguidance, an optional dependency, and its table of a vocabulary, built once per vocabulary."""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.data.tokenizer.token_table import CONTROL, UNKNOWN, UNUSED


def llguidance() -> Any:
    """Import and return the module llguidance. Raises InputError if it is not installed."""
    if find_spec("llguidance") is None:
        fact = "grammars and JSON schemas need llguidance"
        raise InputError(f"{fact}: pip install llguidance (or packtrain with its extra grammar)")
    return import_module("llguidance")


LARK_HEADER = '%llguidance {"no_forcing": true}\n'  # allow all tokens that spell a text
DIGITS = b"0123456789"
DEAD_END = "NoExtensionBias"  # in llguidance's messages: no text can follow
# patterns of tokens whose masks are cached: text in JSON, text in a line, words
TOKEN_SLICES = (
    r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}', r'[^"\\\x00-\x1F\x7F]+',
    r"[^\x00-\x1F\x7F\x85\u2028\u2029]+",
)  # fmt: skip


class _GuidanceTokenizer:
    """A tokenizer with llguidance's interface. Only `<name>` and `<[id]>` in a grammar allow control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        count = tokenizer.vocab_size
        self.tokens = [tokenizer.piece(id) for id in range(count)]
        kinds = enumerate(tokenizer.token_types)
        special = {id for id, kind in kinds if kind in (CONTROL, UNKNOWN, UNUSED)}
        self.eos_ids = sorted(tokenizer.eog_ids)
        if not self.eos_ids:  # llguidance wants one
            self.eos_ids = [count]
            self.tokens.append(b"<end>")
        self.special_token_ids = sorted(special.union(self.eos_ids))
        self.eos_token_id, self.bos_token_id = self.eos_ids[0], None
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        decoded = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, bos=False, eos=False, special=False)


@lru_cache(maxsize=2)
def table(tokenizer: Tokenizer) -> Any:
    """Return the LLTokenizer of a vocabulary, from which llguidance computes masks; cached, as building it is slow."""
    library, words = llguidance(), _GuidanceTokenizer(tokenizer)
    return library.LLTokenizer(
        library.TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.eos_ids, slices=[*TOKEN_SLICES]
    )  # fmt: skip


class DigitTokens(NamedTuple):
    """Tokens that begin with digits, how many, whether all zeros; ids that begin with x; ids that end with a digit."""

    ids: np.ndarray
    counts: np.ndarray
    are_zeros: np.ndarray
    text_ids: np.ndarray  # tokens that only text can go on with: they begin with x
    last_ids: frozenset[int]  # tokens that end with a digit


@lru_cache(maxsize=2)
def digit_tokens(tokenizer: Tokenizer) -> DigitTokens:
    """Return the tokens of a vocabulary that begin with digits; cached."""
    pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
    ids = np.array([id for id, piece in enumerate(pieces) if piece[:1].isdigit()], np.int64)
    counts = np.array([len(pieces[id]) - len(pieces[id].lstrip(DIGITS)) for id in ids], np.int64)
    are_zeros = np.array([not pieces[id].strip(b"0") for id in ids], bool)
    text_ids = np.array([id for id, piece in enumerate(pieces) if piece[:1] == b"x"], np.int64)
    last_ids = frozenset(id for id, piece in enumerate(pieces) if piece[-1:].isdigit())
    return DigitTokens(ids, counts, are_zeros, text_ids, last_ids)


def grammar_matcher(token_table: Any, source: str) -> Any:
    """Create llguidance's LLMatcher, the state of one text; source: the grammar in Lark notation."""
    library = llguidance()
    return library.LLMatcher(token_table, library.LLMatcher.grammar_from_lark(source), log_level=0)
