"""The tokens of a file: their texts and types, the special tokens, and the tokens that end generation.

Reads GGUF metadata into a TokenTable, or raises a TokenizerError that names the key. Encodings only read it."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from packtrain.common.errors import InputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.h, enum llama_token_type
KEYS = "tokenizer.ggml."
NO_ID = 0xFFFFFFFF  # converters' id for "none", for which llama.cpp takes the default
BYTE_NAME = re.compile(rb"<0x([0-9A-Fa-f]{2})>")

# texts that make a token a control token, whatever its type in the file, by the ids that they name
EOT_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <end_of_utterance>"
)
END_TEXTS = (
    f"{EOT_TEXTS} </s> <|eom_id|> <|return|> <|call|> <|flush|> <|calls|> [EOS] <eos> <turn|> "
    "<|tool_response> [e~["
)
FILL_TEXTS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c>"
    " <PRE> \u2581<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c>"
    " <SUF> \u2581<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c>"
    " <MID> \u2581<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")
FORMER_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
PHI_3_KEEPS_SPACE = (b"<unk>", b"<s>", b"<|endoftext|>")
# tokens that swallow whitespace before them, by a part of the pre-tokenizer's name, the architecture or the name
MASK_TOKENS = (
    (f"{KEYS}pre", "jina-v2-de jina-v2-es jina-v2-code", b"<mask>"),
    ("general.architecture", "nomic-bert-moe jina-bert-v3", b"<mask>"), ("general.name", "modern-bert", b"[MASK]"),
)  # fmt: skip
# texts of gpt-oss that become user-defined tokens
CHANNEL_TEXTS = "<|channel|> <|message|> <|start|> <|constrain|>"


class TokenizerError(InputError):
    """A vocabulary that cannot be used, or text or ids that it does not accept; names the key or id."""


class TokenTable:
    """The tokens of a file.

    tokens       texts by id, as in the file; empty ones are named [EMPTY_<id>]
    token_types  token types by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    index        ids by text
    bos         BOS id or None; likewise eos, unk, sep (separator) and eot (end of a turn)
    eog_ids     ids that end generation
    fill_ids    ids of fill-in-the-middle tokens by GGUF's names: fim_pre, fim_suf, fim_mid, fim_rep, fim_sep, fim_pad
    specials    (text, id) of tokens that are matched before all others, the longest first
    rstrip_ids  special tokens that swallow the whitespace after them
    lstrip_ids  special tokens that swallow the whitespace before them
    """

    def __init__(
        self, metadata: Mapping[str, Any], requires_types: bool = False, **defaults: int
    ) -> None:
        """requires_types: the file must have types, else all are NORMAL; defaults: ids (bos=1) for missing keys."""
        tokens = read_strings(metadata, "tokens")
        token_types = np.full(len(tokens), NORMAL)
        if requires_types or f"{KEYS}token_type" in metadata:
            token_types = read_numbers(metadata, "token_type", len(tokens))
        self.tokens = [token or b"[EMPTY_%d]" % i for i, token in enumerate(tokens)]
        self.token_types: list[int] = token_types.astype(int).tolist()
        self.index = _index_tokens(self.tokens)
        for id in np.flatnonzero(token_types == BYTE).tolist():
            if not BYTE_NAME.fullmatch(self.tokens[id]):
                fact = f"token {id} is of type byte and {self.tokens[id]!r}"
                raise TokenizerError(f"{fact}; it must be <0x00> to <0xFF>")
        self.bos = self._id(metadata, "bos", defaults.get("bos"))
        self.eos = self._id(metadata, "eos", defaults.get("eos"))
        self.unk = self._id(metadata, "unknown", defaults.get("unk"))
        self.sep = self._id(metadata, "seperator", defaults.get("sep"))  # GGUF's spelling
        self.eot = self._id(metadata, "eot", None)
        self.fill_ids: dict[str, int] = {}
        self.eog_ids = self._find_eog_ids(metadata)
        is_special = np.isin(self.token_types, (CONTROL, USER_DEFINED, UNKNOWN))
        special_ids = is_special.nonzero()[0].tolist()
        special_ids.sort(key=lambda id: -len(self.tokens[id]))
        self.specials = [(self.tokens[id].decode(errors="replace"), id) for id in special_ids]
        self.rstrip_ids = self._find_rstrip_ids(metadata)
        self.lstrip_ids = self._find_lstrip_ids(metadata)

    def unknown_id(self, fact: str) -> int:
        """Return the unknown token's id. Raises TokenizerError, with the fact that calls for it, if there is none."""
        if self.unk is None:
            raise TokenizerError(f"{fact}; {KEYS}unknown_token_id must name one")
        return self.unk

    def may_span(self, text: str, at: int) -> bool:
        """Whether a special token may span text[at - 1 : at + 1], or swallow whitespace there: no place for a cut."""
        return bool(self.rstrip_ids or self.lstrip_ids) or text[at - 1] + text[at] in self._inside

    @cached_property
    def _inside(self) -> set[str]:
        """Return the pairs of adjacent characters within user-defined tokens, where a text must not be cut."""
        user_defined = (text for text, id in self.specials if self.token_types[id] == USER_DEFINED)
        return {a + b for text in user_defined for a, b in pairwise(text)}

    def _id(self, metadata: Mapping[str, Any], name: str, default: int | None) -> int | None:
        """Return the id of special token `name`, such as bos, else the default, if valid. Raises TokenizerError."""
        id, num_tokens = metadata.get(f"{KEYS}{name}_token_id", NO_ID), len(self.tokens)
        is_integer = isinstance(id, int) and not isinstance(id, bool)
        if is_integer and id == NO_ID:
            return default if default is None or default < num_tokens else None
        if not is_integer or not 0 <= id < num_tokens:
            fact = f"{KEYS}{name}_token_id is {id!r}; the vocabulary has ids 0 to {num_tokens - 1}"
            raise TokenizerError(fact)
        return int(id)

    def _find_eog_ids(self, metadata: Mapping[str, Any]) -> frozenset[int]:
        """Find the ids that end generation; they, and fill-in-the-middle tokens, become control tokens."""
        named_ids = self._find_ids(END_TEXTS)
        for eog_id in named_ids:
            self.token_types[eog_id] = CONTROL
        if self.eot is None:
            self.eot = next(iter(self._find_ids(EOT_TEXTS)), None)
        declared_ids = [self.eos, self.eot, self._id(metadata, "eom", None)]
        for name, fill_texts in FILL_TEXTS.items():
            id = self._id(metadata, FORMER_NAMES.get(name, name), self._id(metadata, name, None))
            if id is None and (fill_ids := self._find_ids(fill_texts)):
                id = fill_ids[0]
                self.token_types[id] = CONTROL
            if id is not None:
                self.fill_ids[name] = id
            if name in FILL_ENDS:
                declared_ids.append(id)
        eog_ids = frozenset(named_ids).union(id for id in declared_ids if id is not None)
        for id in self._find_ids(CHANNEL_TEXTS):
            self.token_types[id] = USER_DEFINED
        return self._without_other_meanings(eog_ids)

    def _without_other_meanings(self, eog_ids: frozenset[int]) -> frozenset[int]:
        """Return eog_ids less <|end|> if it ends a part of a turn, and </s> if it is text; changes their types."""
        end_texts = {self.tokens[id] for id in eog_ids}
        has_calls = bool(end_texts & {b"<|call|>", b"<|calls|>"})
        if has_calls and end_texts & {b"<|return|>", b"<|flush|>"}:
            eog_ids = self._without_eog_token(eog_ids, b"<|end|>", USER_DEFINED)
        if end_texts & {b"<|tool_response>", b"<|plamo:eos|>"}:
            eog_ids = self._without_eog_token(eog_ids, b"</s>", NORMAL)
        return eog_ids

    def _without_eog_token(self, eog_ids: frozenset[int], text: bytes, kind: int) -> frozenset[int]:
        """Return eog_ids without the token `text`; if it was among them, set its type to `kind`."""
        id = self.index.get(text)
        if id in eog_ids:
            self.token_types[id] = kind
        return eog_ids - {id}

    def _find_ids(self, names: str) -> list[int]:
        matching_ids = (self.index.get(text.encode()) for text in names.split())
        return [id for id in matching_ids if id is not None]

    def _find_rstrip_ids(self, metadata: Mapping[str, Any]) -> frozenset[int]:
        """Find Phi-3's special tokens, recognized by the model's name."""
        name = str(metadata.get("general.name", "")).lower()
        if "phi-3" not in name and "phi3" not in name:
            return frozenset()
        return frozenset(id for _, id in self.specials if self.tokens[id] not in PHI_3_KEEPS_SPACE)

    def _find_lstrip_ids(self, metadata: Mapping[str, Any]) -> frozenset[int]:
        """Find the mask tokens of some families, recognized as in llama.cpp, by the first entry that fits."""
        for key, name_parts, token in MASK_TOKENS:
            value = str(metadata.get(key, ""))
            value = value.lower() if key == "general.name" else value
            if any(part in value for part in name_parts.split()):
                return frozenset({self.index[token]} if token in self.index else ())
        return frozenset()


# ---- metadata


def read_required(metadata: Mapping[str, Any], name: str) -> Any:
    """Read a required value. Raises TokenizerError."""
    if KEYS + name not in metadata:
        raise TokenizerError(f"the metadata has no {KEYS}{name}, which a tokenizer needs")
    return metadata[KEYS + name]


def read_strings(metadata: Mapping[str, Any], name: str) -> list[bytes]:
    """Read an array of strings. Raises TokenizerError."""
    strings = read_required(metadata, name)
    is_sequence = isinstance(strings, Sequence) and not isinstance(strings, str | bytes)
    if not is_sequence or not all(isinstance(text, bytes) for text in strings):
        raise TokenizerError(f"{KEYS}{name} is no array of strings")
    return list(strings)


def read_numbers(metadata: Mapping[str, Any], name: str, num_tokens: int) -> np.ndarray:
    """Read an array with one number for each token. Raises TokenizerError."""
    values = np.asarray(read_required(metadata, name))
    if values.ndim != 1 or values.dtype.kind not in "iuf" or np.isnan(values).any():
        raise TokenizerError(f"{KEYS}{name} is no array of numbers")
    if len(values) != num_tokens:
        fact = f"{KEYS}{name} has {len(values)} values and {KEYS}tokens {num_tokens}"
        raise TokenizerError(f"{fact}; both must have one for each token")
    return values


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read a value that is true or false. Raises TokenizerError."""
    value = metadata.get(KEYS + name, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{KEYS}{name} is {value!r}; it must be true or false")
    return value


def _index_tokens(tokens: list[bytes]) -> dict[bytes, int]:
    index = {token: i for i, token in enumerate(tokens)}
    if len(index) == len(tokens):
        return index
    first_ids: dict[bytes, int] = {}
    i = next(i for i, token in enumerate(tokens) if first_ids.setdefault(token, i) != i)
    fact = f"tokens {first_ids[tokens[i]]} and {i} are both {tokens[i]!r}; each must be there once"
    raise TokenizerError(fact)
