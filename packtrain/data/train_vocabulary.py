"""A vocabulary as GGUF tokenizer metadata: trained from text by SentencePiece, or taken from a model's file.

Returns the `tokenizer.*` keys of a GGUF file. This module knows no text files and no documents."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import BYTE, CONTROL, KEYS, NORMAL, UNKNOWN, Tokenizer
from packtrain.gguf import GGUF, MetadataValue

SAMPLED_NBYTES = 20_000_000  # of a large text for SentencePiece, which takes ten times the memory
STRETCH_CHARACTERS = 16_384  # texts are sampled in chunks of this length; a chunk ends a line, too
RESERVED_TOKENS = 256 + 3  # a token for each byte; unknown, begin and end
MIN_TOKENS = RESERVED_TOKENS + 3  # a space, a character, and the two together
SUPPORTED, VOCAB_STEP, TEXT_NBYTES_PER_TOKEN = 320, 64, 256
COVERAGE = 0.99995  # character coverage, as in Llama 2; other characters are spelled in bytes


def train_vocabulary(
    texts: Iterable[str], size: int, auto: bool, text_nbytes: int
) -> dict[str, MetadataValue]:
    """Train a vocabulary like Llama 2's and return its metadata: BPE with byte fallback, single digits.

    auto         `size` is an upper limit, like supported_size(text_nbytes); fewer tokens are no error
    text_nbytes  total size of the texts, to spread the sample over them
    Raises InputError if `size` is too small, or without `auto` larger than what the text yields, which it names.
    """
    target_size = min(size, supported_size(text_nbytes)) if auto else size
    if target_size < MIN_TOKENS:
        raise InputError(f"--vocab-size: {size} is too small; it must be {MIN_TOKENS} or more")
    processor = _train_sentencepiece(
        _sentences(list(_sample_texts(texts, text_nbytes)), target_size), target_size
    )
    num_pieces = processor.get_piece_size()
    if num_pieces < target_size and not auto:
        fact = f"--vocab-size: the text is too small for {size} tokens"
        raise InputError(f"{fact}; at most {num_pieces} would do")
    return _vocabulary_metadata(processor)


def supported_size(text_nbytes: int) -> int:
    """Return the vocabulary size that a text supports: one token per 256 bytes, in multiples of 64; at least 320."""
    return max(SUPPORTED, text_nbytes // TEXT_NBYTES_PER_TOKEN // VOCAB_STEP * VOCAB_STEP)


def _sample_texts(texts: Iterable[str], text_nbytes: int) -> Iterator[str]:
    """Yield chunks of the texts, of `text_nbytes` in all, evenly spread, at most SAMPLED_NBYTES in total."""
    sample_share = min(1.0, SAMPLED_NBYTES / max(text_nbytes, 1))
    seen_nbytes, used_nbytes = 0, 0
    for text in texts:
        for start in range(0, len(text), STRETCH_CHARACTERS):
            stretch = text[start : start + STRETCH_CHARACTERS]
            nbytes = len(stretch.encode())
            seen_nbytes += nbytes
            if used_nbytes + nbytes <= seen_nbytes * sample_share:
                used_nbytes += nbytes
                yield stretch


def _sentences(texts: list[str], size: int) -> Iterator[str]:
    """Yield lines without line breaks, which are byte tokens, as in Llama 2; rare characters end a line, too."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    counts.pop(" ", None)  # a space always has a token
    characters: set[str] = set()
    covered, min_covered = 0, COVERAGE * counts.total()
    for character, count in counts.most_common((size - RESERVED_TOKENS) // 2):
        if covered >= min_covered:
            break
        covered += count
        characters.add(character)
    # characters that get tokens of their own: at most half of the vocabulary
    breaks = str.maketrans(dict.fromkeys(counts.keys() - characters | {"\r", "\0"}, "\n"))
    for text in texts:
        yield from filter(None, text.translate(breaks).split("\n"))


def _train_sentencepiece(
    sentences: Iterator[str], size: int
) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, model_type="bpe", vocab_size=size,
        hard_vocab_limit=False,  # fewer tokens instead of an error if the text yields no more
        character_coverage=1.0,  # rare characters are already removed
        max_sentence_length=STRETCH_CHARACTERS * 4,  # in bytes; longer ones would be dropped
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
        allow_whitespace_only_pieces=True, split_digits=True, byte_fallback=True, unk_id=0, bos_id=1, eos_id=2,
        pad_id=-1,
        num_threads=1,  # the result must not depend on the machine
        minloglevel=4,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _vocabulary_metadata(trained: sentencepiece.SentencePieceProcessor) -> dict[str, MetadataValue]:
    ids = range(trained.get_piece_size())

    def kind(id: int) -> int:
        if trained.is_unknown(id):
            return UNKNOWN
        if trained.is_control(id):
            return CONTROL
        return BYTE if trained.is_byte(id) else NORMAL

    values = {
        "model": MetadataValue("string", "llama"),
        "tokens": MetadataValue("string", [trained.id_to_piece(id).encode() for id in ids]),
        "scores": MetadataValue("f32", np.array([trained.get_score(id) for id in ids], np.float32)),
        "token_type": MetadataValue("i32", np.array([kind(id) for id in ids], np.int32)),
        "bos_token_id": MetadataValue("u32", trained.bos_id()), "eos_token_id": MetadataValue("u32", trained.eos_id()),
        "unknown_token_id": MetadataValue("u32", trained.unk_id()), "add_bos_token": MetadataValue("bool", True),
        "add_eos_token": MetadataValue("bool", False), "add_space_prefix": MetadataValue("bool", True),
    }  # fmt: skip
    return {KEYS + name: value for name, value in values.items()}


def vocabulary_of(path: Path) -> dict[str, MetadataValue]:
    """Return the tokenizer metadata of a GGUF file. Raises InputError if Tokenizer does not accept it."""
    file = GGUF(path)
    try:
        Tokenizer(file.metadata)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return {key: value for key, value in file.values.items() if key.startswith("tokenizer.")}
