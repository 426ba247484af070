"""Text to token ids and back with the vocabulary of a GGUF file of the SentencePiece kind ("llama").

In go `GGUF(path).metadata` and text; out come the ids that llama.cpp gives (src/llama-vocab.cpp, functions load,
tokenize, token_to_piece). It knows no chat templates and no models. TokenizerError says what is wrong with a file.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from packtrain.errors import InputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.h, enum llama_token_type
SPACE = "\u2581".encode()
WHITESPACE = b" \t\n\v\f\r"
KEYS = "tokenizer.ggml."
NO_ID = 0xFFFFFFFF  # what converters write for "there is none"; llama.cpp then takes the default
# characters by their first byte, as llama.cpp reads them: never more bytes than are left, never an error
CHARACTER = re.compile(
    rb"[\x00-\xbf]|[\xc0-\xdf].{0,1}|[\xe0-\xef].{0,2}|[\xf0-\xff].{0,3}", re.DOTALL
)
BYTE_NAME = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
WORD = re.compile(rb" *[^ \n]+|\n| +")
CACHED_TEXTS, CACHED_NBYTES = 1 << 16, 64

# Texts that make a token a control token whatever the file calls it, and the id that they are found for.
EOT_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <end_of_utterance>"
)
END_TEXTS = (
    f"{EOT_TEXTS} </s> <|eom_id|> <|return|> <|call|> <|flush|> <|calls|> [EOS] <eos> <turn|> "
    "<|tool_response> [e~["
)
FILL_TEXTS = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> \u2581<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> \u2581<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <MID> \u2581<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")
FORMER_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
PHI_3_KEEPS_SPACE = (b"<unk>", b"<s>", b"<|endoftext|>")


class TokenizerError(InputError):
    """A vocabulary that cannot be used, or text or ids that it cannot take: the key or id, and what it must be."""


class Tokenizer:
    """The vocabulary of a file and its rules.

    tokens            texts by id, as in the file; empty ones are named [EMPTY_<id>]
    kinds             token types by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    bos eos unk eot   ids, None where there is none; eot is the end of a turn
    ends              ids at which generation ends
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = _wanted(metadata, "model")
        if model != "llama":
            raise TokenizerError(
                f"{KEYS}model is {model!r}; only 'llama' (SentencePiece with scores) is supported"
            )
        self.tokens = _tokens(metadata)
        self.vocab_size = len(self.tokens)
        self.kinds = [int(kind) for kind in _numbers(metadata, "token_type", self.vocab_size)]
        # negated: a heap gives the smallest first
        self._costs = [-float(s) for s in _numbers(metadata, "scores", self.vocab_size)]
        self._index = _indexed(self.tokens)
        self.bos = self._id(metadata, "bos", 1)
        self.eos = self._id(metadata, "eos", 2)
        self.unk = self._id(metadata, "unknown", 0)
        self.eot = self._id(metadata, "eot", None)
        self.add_bos = _flag(metadata, "add_bos_token", True)
        self.add_eos = _flag(metadata, "add_eos_token", False)
        self.add_space_prefix = _flag(metadata, "add_space_prefix", True)
        self._added(None, None)
        self.ends = self._find_ends(metadata)
        self._specials = sorted(
            (i for i, kind in enumerate(self.kinds) if kind in (CONTROL, USER_DEFINED, UNKNOWN)),
            key=lambda i: -len(self.tokens[i]),
        )
        self._swallow = self._swallowing(metadata)
        self._pieces = [self._piece(i) for i in range(self.vocab_size)]
        self._bytes = [
            self._index.get(b"<0x%02X>" % b, self._index.get(bytes([b]))) for b in range(256)
        ]
        # neighbours that stand side by side in some token; between all others no merge can ever happen
        self._joins = {
            a + b
            for token in self.tokens
            for a, b in pairwise(CHARACTER.findall(token.replace(b" ", SPACE)))
        }
        self._has_words = not any(
            b"\n" in pair or (pair.endswith(SPACE) and pair != SPACE * 2) for pair in self._joins
        )
        self._cache: dict[bytes, list[int]] = {}

    # ---- text to ids

    def encode(
        self, text: str, bos: bool | None = None, eos: bool | None = None, special: bool = True
    ) -> list[int]:
        """The ids of a text; bos and eos add their ids, None does as the file says.

        special  also texts of control and unknown tokens, as `<s>`, become these tokens: say False for text that
                 nobody has checked. User-defined tokens are always found.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as e:
            raise TokenizerError(
                f"character {e.start} of the text is {text[e.start]!r}, half of a surrogate pair"
            ) from None
        first, last = self._added(bos, eos)
        ids, _ = self._stretch(raw, special, self.add_space_prefix)
        return first + ids + last

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """The ids of a long text that comes in pieces, as `encode(text, bos=False, eos=False, special=False)`."""
        rest, prefix = "", self.add_space_prefix
        for piece in pieces:
            before, rest = len(rest), rest + piece
            border = self._border(rest, before)
            if border:
                ids, prefix = self._stretch(rest[:border].encode(), False, prefix)
                rest = rest[border:]
                yield ids
        yield self._stretch(rest.encode(), False, prefix)[0]

    def _border(self, text: str, since: int) -> int:
        """The last place from `since` on that no token reaches across; 0 if none. Special tokens swallow whitespace."""
        for i in range(len(text) - 1, max(since, 1) - 1, -1):
            pair = text[i - 1 : i + 1].replace(" ", "\u2581")
            if not text[i].isspace() and pair.encode() not in self._joins:
                return i
        return 0

    def _stretch(self, raw: bytes, special: bool, prefix: bool) -> tuple[list[int], bool]:
        """Ids of a text that gets a space before it if `prefix`, and whether text that follows would get one."""
        ids: list[int] = []
        for part in self._split(raw, special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode(b" " + part if prefix else part)
            prefix = self.add_space_prefix and isinstance(part, int)
        return ids, prefix

    def _added(self, bos: bool | None, eos: bool | None) -> tuple[list[int], list[int]]:
        """What stands before and after the ids of a text; None does as the file says."""
        bos, eos = self.add_bos if bos is None else bos, self.add_eos if eos is None else eos
        for wanted, id, name in ((bos, self.bos, "bos"), (eos, self.eos, "eos")):
            if wanted and id is None:
                raise TokenizerError(
                    f"{name} is to be added, but the vocabulary of {self.vocab_size} tokens has no {name} token;"
                    f" {KEYS}{name}_token_id must name one"
                )
        return (
            [self.bos] if bos and self.bos is not None else [],
            [self.eos] if eos and self.eos is not None else [],
        )

    def _split(self, raw: bytes, special: bool) -> list[bytes | int]:
        """Text and special tokens in turn: the longest token takes its places first, wherever they are."""
        parts: list[bytes | int] = [raw] if raw else []
        for id in self._specials:
            if (special or self.kinds[id] == USER_DEFINED) and self.tokens[id] in raw:
                now, parts = parts, []
                for part in now:
                    parts += [part] if isinstance(part, int) else self._cut(part, id)
        return parts

    def _cut(self, part: bytes, id: int) -> list[bytes | int]:
        """A stretch of text with one special token taken out."""
        token, at = self.tokens[id], 0
        parts: list[bytes | int] = []
        while (found := part.find(token, at)) >= 0:
            parts += [part[at:found], id] if found > at else [id]
            at = found + len(token)
            while id in self._swallow and at < len(part) and part[at] in WHITESPACE:
                at += 1
        return [*parts, part[at:]] if at < len(part) else parts

    def _encode(self, text: bytes) -> list[int]:
        """Ids of a stretch of text, word by word where no token reaches across words; they come again and again."""
        if not self._has_words:
            return self._word(text)
        ids: list[int] = []
        for word in WORD.findall(text.replace(SPACE, b" ")):
            known = self._cache.get(word)
            ids += self._kept(word, self._word(word)) if known is None else known
        return ids

    def _word(self, word: bytes) -> list[int]:
        """Ids of a text, done in pieces that cannot merge with each other."""
        characters, ids = CHARACTER.findall(word.replace(b" ", SPACE)), []
        cuts = [i for i, (a, b) in enumerate(pairwise(characters), 1) if a + b not in self._joins]
        for start, end in pairwise([0, *cuts, len(characters)]):
            piece = b"".join(characters[start:end])
            known = self._cache.get(piece)
            ids += self._kept(piece, self._merge(characters[start:end])) if known is None else known
        return ids

    def _kept(self, text: bytes, ids: list[int]) -> list[int]:
        if len(text) <= CACHED_NBYTES and len(self._cache) < CACHED_TEXTS:
            self._cache[text] = ids
        return ids

    def _merge(self, parts: list[bytes]) -> list[int]:
        """Join neighbours into tokens, the best score first and of equals the leftmost, until no two make one; ids."""
        index, costs, count = self._index, self._costs, len(parts)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        heap = [
            (costs[index[a + b]], i, i + 1, len(a) + len(b))
            for i, (a, b) in enumerate(pairwise(parts))
            if a + b in index
        ]
        heapify(heap)
        while heap:
            _, left, right, size = heappop(heap)
            a, b = parts[left], parts[right]
            if not a or not b or len(a) + len(b) != size:
                continue  # one of them has been joined to another since
            parts[left], parts[right] = a + b, b""
            after[left] = after[right]
            if after[left] < count:
                before[after[left]] = left
            for i, j in ((before[left], left), (left, after[left])):
                if i >= 0 and j < count:
                    joined = parts[i] + parts[j]
                    id = index.get(joined)
                    if id is not None:
                        heappush(heap, (costs[id], i, j, len(joined)))
        return [id for part in parts if part for id in self._ids(part)]

    def _ids(self, part: bytes) -> list[int]:
        """The token of a merged part; else the tokens of its bytes; else it is unknown."""
        id = self._index.get(part)
        if id is not None:
            return [id]
        ids = [id for b in part if (id := self._bytes[b]) is not None]
        if len(ids) == len(part):
            return ids
        if self.unk is None:
            raise TokenizerError(
                f"no token for {part.decode(errors='replace')!r}, none for its bytes {part.hex(' ')}, and no"
                f" unknown token; {KEYS}unknown_token_id must name one"
            )
        return [self.unk]

    # ---- ids to text

    def piece(self, id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character; control tokens give their name."""
        if not 0 <= id < self.vocab_size:
            raise TokenizerError(f"token id {id} is not in 0 to {self.vocab_size - 1}")
        return self._pieces[id]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. See Stream for the rules."""
        stream = Stream(self, special)
        return "".join([stream.feed(id) for id in ids]) + stream.flush()

    def _piece(self, id: int) -> bytes:
        token, kind = self.tokens[id], self.kinds[id]
        if kind == NORMAL:
            return token.replace(SPACE, b" ")
        if kind in (CONTROL, USER_DEFINED, UNKNOWN):
            return token
        if kind != BYTE:
            return b""
        named = BYTE_NAME.fullmatch(token)
        if named is None:
            raise TokenizerError(
                f"token {id} is of type byte and {token!r}; it must be <0x00> to <0xFF>"
            )
        return bytes([int(named[1], 16)])

    # ---- special tokens

    def _id(self, metadata: Mapping[str, Any], name: str, default: int | None) -> int | None:
        id = metadata.get(f"{KEYS}{name}_token_id", NO_ID)
        if id == NO_ID:
            return default if default is None or default < self.vocab_size else None
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < self.vocab_size:
            raise TokenizerError(
                f"{KEYS}{name}_token_id is {id!r}; the vocabulary has ids 0 to {self.vocab_size - 1}"
            )
        return id

    def _find_ends(self, metadata: Mapping[str, Any]) -> frozenset[int]:
        """Ids that end generation; they, and the tokens for filling in the middle, become control tokens."""
        ends = self._named(END_TEXTS)
        for end in ends:
            self.kinds[end] = CONTROL
        if self.eot is None:
            self.eot = next(iter(self._named(EOT_TEXTS)), None)
        given = [self.eos, self.eot, self._id(metadata, "eom", None)]
        for name, texts in FILL_TEXTS.items():
            id = self._id(metadata, FORMER_NAMES.get(name, name), self._id(metadata, name, None))
            if id is None and (named := self._named(texts)):
                id = named[0]
                self.kinds[id] = CONTROL
            if name in FILL_ENDS:
                given.append(id)
        return frozenset(ends).union(id for id in given if id is not None)

    def _named(self, texts: str) -> list[int]:
        return [
            self._index[text.encode()] for text in texts.split() if text.encode() in self._index
        ]

    def _swallowing(self, metadata: Mapping[str, Any]) -> frozenset[int]:
        """Special tokens that take the whitespace after them with them: Phi-3's, known by the model's name."""
        name = str(metadata.get("general.name", "")).lower()
        if "phi-3" not in name and "phi3" not in name:
            return frozenset()
        return frozenset(id for id in self._specials if self.tokens[id] not in PHI_3_KEEPS_SPACE)


class Stream:
    """Text from ids as they come, in whole characters.

    Control and unknown tokens give their names if `special`, else nothing. The space that encode put before the
    text is taken away again from the first token that is no control token. (llama.cpp's detokenize lets the bos
    token use that up, so that with it the space stays.)
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._leading = tokenizer.add_space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """The text that is complete with this token; an unfinished character waits for its other bytes."""
        piece, kind = self._tokenizer.piece(id), self._tokenizer.kinds[id]
        if kind in (CONTROL, UNKNOWN) and not self._special:
            piece = b""
        if self._leading and kind != CONTROL:
            self._leading = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._utf8.decode(b"", final=True)


# ---- metadata


def _wanted(metadata: Mapping[str, Any], name: str) -> Any:
    if KEYS + name not in metadata:
        raise TokenizerError(f"the metadata has no {KEYS}{name}, which a tokenizer needs")
    return metadata[KEYS + name]


def _tokens(metadata: Mapping[str, Any]) -> list[bytes]:
    tokens = _wanted(metadata, "tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, bytes) for token in tokens):
        raise TokenizerError(f"{KEYS}tokens is no array of strings")
    return [token or b"[EMPTY_%d]" % i for i, token in enumerate(tokens)]


def _numbers(metadata: Mapping[str, Any], name: str, count: int) -> np.ndarray:
    """An array with one number for each token."""
    values = np.asarray(_wanted(metadata, name))
    if values.ndim != 1 or values.dtype.kind not in "iuf" or np.isnan(values).any():
        raise TokenizerError(f"{KEYS}{name} is no array of numbers")
    if len(values) != count:
        raise TokenizerError(
            f"{KEYS}{name} has {len(values)} values and {KEYS}tokens {count}; both must have one for each token"
        )
    return values


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(KEYS + name, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{KEYS}{name} is {value!r}; it must be true or false")
    return value


def _indexed(tokens: list[bytes]) -> dict[bytes, int]:
    index: dict[bytes, int] = {}
    for i, token in enumerate(tokens):
        if index.setdefault(token, i) != i:
            raise TokenizerError(
                f"tokens {index[token]} and {i} are both {token!r}; each must be there once"
            )
    return index
