"""One interface to all kinds of vocabulary: special tokens, BOS and EOS, streams of text and of ids."""

import codecs
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from packtrain.data.tokenizer import compiled, token_table
from packtrain.data.tokenizer.bpe import BytePairEncoding, WhitespaceEncoding
from packtrain.data.tokenizer.compiled import CompiledEncoder, EncodingTables, NameFinder
from packtrain.data.tokenizer.encoding import Encoding
from packtrain.data.tokenizer.spm import SentencePieceEncoding
from packtrain.data.tokenizer.token_table import BYTE, CONTROL, KEYS, UNKNOWN, TokenizerError, flag
from packtrain.data.tokenizer.unigram import UnigramEncoding
from packtrain.data.tokenizer.wordpiece import WordPieceEncoding

BATCH_CHARACTERS = 1 << 17  # characters encoded at a time, if the text can be cut
WHITESPACE = " \t\n\v\f\r"
NORMALIZER = f"{KEYS}normalizer."
EMPTY = np.empty(0, np.int32)
CLEANUP_RULES = [
    (re.compile(" (?=[?!.,])"), ""), (re.compile(" ' "), "'"), (re.compile(" (?='(?:s|m|re|ve))"), ""),
]  # fmt: skip
TextParts = list[str | int]  # text, and ids of special tokens


KINDS: dict[str, Callable[[Mapping[str, Any]], Encoding]] = {
    "llama": SentencePieceEncoding, "gpt2": BytePairEncoding, "gemma4": BytePairEncoding,
    "whitespace": WhitespaceEncoding, "bert": WordPieceEncoding, "t5": UnigramEncoding,
}  # fmt: skip


class Tokenizer:
    """Encodes and decodes text with the vocabulary of a file.

    tokens       texts by id, as in the file; empty ones are named [EMPTY_<id>]
    token_types  token types by id: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE
    bos          BOS id or None; likewise eos, unk and eot (end of a turn)
    eog_ids      ids that end generation
    fill_ids     ids of fill-in-the-middle tokens, by GGUF's names such as fim_pre
    rstrip_ids   ids of tokens that swallow the whitespace after them; `lstrip_ids`: before them
    """

    def __init__(
        self, metadata: Mapping[str, Any], compile_threshold: int = compiled.COMPILE_THRESHOLD
    ) -> None:
        """compile_threshold: characters that are encoded before compiled code is loaded."""
        model = token_table.read_required(metadata, "model")
        if not isinstance(model, str) or model not in KINDS:
            raise TokenizerError(f"{KEYS}model is {model!r}; these are known: {', '.join(KINDS)}")
        self._encoding = encoding = KINDS[model](metadata)
        for key in (k for k in metadata if k.startswith(NORMALIZER) and metadata[k] is not False):
            if not key.endswith(encoding.normalizers):
                fact = f"{key} is {metadata[key]!r}"
                raise TokenizerError(f"{fact}; no {model} vocabulary applies it")
        self._token_table = table = encoding.table
        self.tokens, self.token_types = table.tokens, table.token_types
        self.vocab_size = len(table.tokens)
        self.bos, self.eos, self.unk, self.eot = table.bos, table.eos, table.unk, table.eot
        self.eog_ids, self.fill_ids = table.eog_ids, table.fill_ids
        self.rstrip_ids, self.lstrip_ids = table.rstrip_ids, table.lstrip_ids
        adds_bos = flag(metadata, "add_bos_token", encoding.adds_bos)
        self.add_bos = adds_bos or encoding.always_adds_bos
        adds_eos = flag(metadata, "add_eos_token", encoding.adds_eos)
        self.add_eos = adds_eos or (encoding.adds_eos and encoding.always_adds_bos)
        self.end_id = table.sep if encoding.separated else table.eos
        self.add_space_prefix = encoding.adds_space
        self.strips_leading_space = encoding.strips_leading_space
        self._boundary_ids(None, None)
        self._characters_until_compiled = compile_threshold
        self._encoder: CompiledEncoder | None = None
        self._tables: EncodingTables | None = None
        self._name_finders: dict[bool, NameFinder] = {}
        self._user_defined = [
            (t, id) for t, id in table.specials if table.token_types[id] == token_table.USER_DEFINED
        ]

    # ---- text to ids

    def encode(
        self, text: str, bos: bool | None = None, eos: bool | None = None, special: bool = True
    ) -> list[int]:
        """Return the ids of a text; `bos` and `eos` add their ids, None: as the file says.

        special  text that spells a control or unknown token, such as `<s>`, becomes that token: pass False for
                 untrusted text. User-defined tokens are always matched.
        """
        bos_ids, eos_ids = self._boundary_ids(bos, eos)
        text_parts, _ = self._split_parts(_check_text(text), special, self.add_space_prefix)
        return bos_ids + self._encode_parts(text_parts) + eos_ids

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """Yield the ids of a long text that comes in pieces, as encode(text, bos=False, eos=False, special=False)."""
        marked_pieces = chain(((piece, False) for piece in pieces), [("", True)])
        for text_parts, _ in self.stretches(marked_pieces):
            yield self._encode_parts(text_parts)

    def stretches(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[TextParts, bool]]:
        """Regroup pieces (text, whether its text ends there) to (parts, likewise) whose ids depend on no others."""
        buffer, prefix = "", self.add_space_prefix
        for piece, is_last in pieces:
            old_length, buffer = len(buffer), buffer + _check_text(piece)
            cut = len(buffer) if is_last else self._find_cut(buffer, old_length)
            if cut or is_last:
                text_parts, prefix = self._split_parts(buffer[:cut], False, prefix)
                buffer = buffer[cut:]
                yield text_parts, is_last
            prefix = self.add_space_prefix if is_last else prefix

    @property
    def use_compiled(self) -> bool:
        """Whether so many characters have been encoded that compiled code is worth loading."""
        return self._characters_until_compiled <= 0 and self._encoding.has_tables

    def new_encoder(self) -> CompiledEncoder:
        """Return a compiled encoder for one thread."""
        if self._tables is None:
            self._tables = self._encoding.build_tables()
        return CompiledEncoder(self._tables)

    def arrays(
        self, batch: Sequence[TextParts], encoder: CompiledEncoder | None
    ) -> list[np.ndarray]:
        """Return the ids (i32) of each text, given as parts: strings, and ids of special tokens. Threads may call this
        at the same time, each with an encoder of its own."""
        texts = [part for parts in batch for part in parts if isinstance(part, str)]
        ids = iter(self._encode_texts(texts, encoder))
        id_parts = ([[p] if isinstance(p, int) else next(ids) for p in parts] for parts in batch)
        # unsafe, because an empty list is f64
        return [
            np.concatenate([EMPTY, *parts], dtype=np.int32, casting="unsafe") for parts in id_parts
        ]

    def _find_cut(self, text: str, min_position: int) -> int:
        """Return the last index from `min_position` on at which the text can be cut without changing ids, or 0."""
        positions = range(len(text) - 1, max(min_position, 1) - 1, -1)
        return next((at for at in positions if self._encoding.can_cut(text, at)), 0)

    def _split_parts(self, text: str, special: bool, prefix: bool) -> tuple[TextParts, bool]:
        """Split a text, a space before it if `prefix`, at special tokens; return (parts, `prefix` of the next text)."""
        self._characters_until_compiled -= len(text)
        text_parts: TextParts = []
        for part in self._split_specials(text, self._find_specials(text, special)):
            text_parts.append(part if isinstance(part, int) or not prefix else " " + part)
            prefix = self.add_space_prefix and isinstance(part, int)
        return text_parts, prefix

    def _encode_parts(self, text_parts: TextParts) -> list[int]:
        """Return the ids of parts (strings, and ids of special tokens), by compiled code once that is worth loading."""
        if self.use_compiled and self._encoder is None:
            self._encoder = self.new_encoder()
        ids: list[int] = []
        for batch in self._bounded_batches(text_parts):
            ids += self.arrays([batch], self._encoder)[0].tolist()
        return ids

    def _bounded_batches(self, text_parts: TextParts) -> Iterator[TextParts]:
        """Yield the parts in several lists, so that encoding a long text takes no more memory than a short one."""
        if sum(len(part) for part in text_parts if isinstance(part, str)) <= BATCH_CHARACTERS:
            yield text_parts
            return
        for part in text_parts:
            while isinstance(part, str) and len(part) > BATCH_CHARACTERS:
                cut = self._find_cut(part[:BATCH_CHARACTERS], 0)
                cut = cut or self._find_cut(part, BATCH_CHARACTERS)
                if not cut:
                    break
                yield [part[:cut]]
                part = part[cut:]
            yield [part]

    def _encode_texts(
        self, texts: list[str], encoder: CompiledEncoder | None
    ) -> Iterator[list[int] | np.ndarray]:
        """Return the ids of each text, by compiled code if there is an encoder."""
        ids_and_ends = (
            encoder.encode([self._encoding.raw(text) for text in texts]) if encoder else None
        )
        if ids_and_ends is None:
            return map(self._encoding.encode, texts)  # raises an error if a text has no ids
        return (ids_and_ends[0][s:end] for s, end in pairwise([0, *ids_and_ends[1].tolist()]))

    def _boundary_ids(self, bos: bool | None, eos: bool | None) -> tuple[list[int], list[int]]:
        """Return ([BOS id] or [], [EOS id] or []) around a text; None: as the file says. Raises TokenizerError."""
        bos, eos = self.add_bos if bos is None else bos, self.add_eos if eos is None else eos
        for is_requested, id, name in (
            (bos, self.bos, "bos"), (eos, self.end_id, "seperator" if self._encoding.separated else "eos"),
        ):  # fmt: skip
            if is_requested and id is None:
                raise TokenizerError(
                    f"{name} is to be added, but the vocabulary of {self.vocab_size} tokens has no {name} token;"
                    f" {KEYS}{name}_token_id must name one"
                )
        return (
            [self.bos] if bos and self.bos is not None else [],
            [self.end_id] if eos and self.end_id is not None else [],
        )

    def _find_specials(self, text: str, special: bool) -> list[tuple[str, int]]:
        """Return (text, id) of special tokens that may occur in a text, longest first; `special`: also control ones."""
        candidates = self._token_table.specials if special else self._user_defined
        if self._characters_until_compiled > 0 or not candidates:
            return candidates
        if special not in self._name_finders:
            self._name_finders[special] = NameFinder([token for token, _ in candidates])
        return [candidates[i] for i in self._name_finders[special].find(text)]

    def _split_specials(self, text: str, specials: list[tuple[str, int]]) -> list[str | int]:
        """Split a text into texts and special tokens; longer tokens are matched first."""
        text_parts: list[str | int] = [text] if text else []
        for token, id in specials:
            if token in text:
                previous, text_parts = text_parts, []
                for part in previous:
                    text_parts += [part] if isinstance(part, int) else self._cut(part, token, id)
        return text_parts

    def _cut(self, part: str, token: str, id: int) -> list[str | int]:
        """Split `part` at the special token `token` into texts and `id`; drops whitespace that the token swallows."""
        at = 0
        text_parts: list[str | int] = []
        while (match_start := part.find(token, at)) >= 0:
            text = part[at:match_start]
            text = text.rstrip(WHITESPACE) if id in self._token_table.lstrip_ids else text
            text_parts += [text, id] if text else [id]
            at = match_start + len(token)
            while id in self._token_table.rstrip_ids and at < len(part) and part[at] in WHITESPACE:
                at += 1
        return [*text_parts, part[at:]] if at < len(part) else text_parts

    # ---- ids to text

    def piece(self, id: int) -> bytes:
        """Return the bytes of a token, perhaps part of a character; a control token's name. Raises TokenizerError."""
        if not 0 <= operator.index(id) < self.vocab_size:
            raise TokenizerError(f"token id {id} is not in 0 to {self.vocab_size - 1}")
        token, kind = self.tokens[id], self.token_types[id]
        if kind == token_table.NORMAL:
            return self._encoding.piece(token)
        if kind in (CONTROL, token_table.USER_DEFINED, UNKNOWN):
            return token
        byte_match = token_table.BYTE_NAME.fullmatch(token) if kind == BYTE else None
        return bytes([int(byte_match[1], 16)]) if byte_match else b""

    def decode(self, ids: Iterable[int], special: bool = False, clean: bool = False) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD, see StreamDecoder. With `clean`, spaces before
        punctuation are removed if llama.cpp's llama_detokenize does so for this vocabulary."""
        stream = StreamDecoder(self, special)
        text = "".join([stream.feed(id) for id in ids]) + stream.flush()
        if clean and self._encoding.cleans_spaces:
            for pattern, replacement in CLEANUP_RULES:
                text = pattern.sub(replacement, text)
        return text


def _check_text(text: str) -> str:
    """Return the text. Raises TokenizerError if UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        fact = f"character {e.start} of the text is {text[e.start]!r}, half of a surrogate pair"
        raise TokenizerError(fact) from None
    return text


class StreamDecoder:
    """Decodes ids one by one to text in whole characters.

    Control and unknown tokens become their names if `special`, else nothing. The space that encode put before the
    text is removed from the first token that is no control token. (In llama.cpp's detokenize the BOS token counts as
    the first, so that the space stays.)
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._strips_space = tokenizer.strips_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """Return the text completed by a token; an incomplete character waits for its other bytes."""
        piece, kind = self._tokenizer.piece(id), self._tokenizer.token_types[id]
        if kind in (CONTROL, UNKNOWN) and not self._special:
            piece = b""
        if self._strips_space and kind != CONTROL:
            self._strips_space = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)
