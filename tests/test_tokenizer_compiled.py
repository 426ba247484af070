"""The compiled tokenizer against the encodings' own code: words of every rule, merges, special tokens, the cache."""

import random
import re
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest

from packtrain.data.tokenizer import Tokenizer, TokenizerError, batch_encoding, encode_all
from packtrain.data.tokenizer.automaton import build_automata
from packtrain.data.tokenizer.compiled import (
    CACHED_WORD_NBYTES,
    CACHED_WORDS,
    NameFinder,
    PatternSplitter,
)
from packtrain.data.tokenizer.split_rules import RULES
from packtrain.data.tokenizer.word_splitter import CharacterClasses, WordSplitter
from tests import test_tokenizer, test_tokenizer_bpe

UNITS = [
    *"aBcDez  \n\n\t\r0123456789.,!?/-_=$+<>^~|`\"'",
    *"\u4e2d\u6587\u3002\u65e5\ud55c\u00c4\u00df\u0391\u03b2\u0661\u2167",
    *"\u00a0\u2003\u3000\u0085\x0b\x1c\x00\u0301\u20e3\u0903\U0001f600\u200d\u20ac\u2581\U00031350",
    "'s", "'RE", " don't", "   ", "  \n ", "1234567", "HelloWorld", "hello\u00c4World ", "...\n", "<s>", "<x>", "abc",
    "<|end|>", "<|x|>", "aaaa", " world",
]  # fmt: skip


def random_texts(seed: int, count: int, max_units: int = 40) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(UNITS, k=draw.randint(0, max_units))) for _ in range(count)]


def words_of(words: PatternSplitter, text: str) -> list[str]:
    raw = text.encode()
    end_offsets, count = words.split(np.frombuffer(raw, np.uint8), np.array([len(raw)], np.int32))
    bounds = [0, *end_offsets[:count].tolist()]
    return [raw[a:b].decode() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_words_of_every_rule(rule: str):
    splitter = WordSplitter(RULES[rule])
    words = PatternSplitter(splitter.patterns, splitter.classes)
    for text in random_texts(1, 400):
        assert words_of(words, text) == [word for word in splitter.split(text) if word]


@pytest.mark.parametrize("rule", ["llama-bpe", "gpt-2", "tekken", "default"])
def test_words_of_every_code_point(rule: str):
    splitter = WordSplitter(RULES[rule])
    words = PatternSplitter(splitter.patterns, splitter.classes)
    assigned = [range(1, 0xD800), range(0xE000, 0x34000), range(0xE0000, 0xE0200)]
    points = [chr(c) for c in chain(*assigned, range(0x34000, 0x110000, 61))]
    text = "".join(f"a{c}1 {c}" for c in points)
    assert words_of(words, text) == splitter.split(text)


def test_patterns_as_python_matches_them():
    alphabet = "ab1 "
    for pattern in (
        "a|ab",
        "ab|a",
        "a?b+",
        "(?:a|b)*1",
        "a{2}",
        "a{1,3}b?",
        r"\s+(?!\S)|\s+|.",
        "[^a1]+|a(?:b|1)*",
    ):
        words = PatternSplitter([pattern], CharacterClasses())
        draw = random.Random(2)
        for _ in range(300):
            text = "".join(draw.choices(alphabet, k=12))
            at, expected = 0, []
            for match in re.finditer(pattern, text):
                expected += [
                    part for part in (text[at : match.start()], match[0]) if part and match[0]
                ]
                at = match.end() if match[0] else at
            expected += [text[at:]] * (at < len(text))
            assert words_of(words, text) == expected, (pattern, text)


@pytest.mark.parametrize("pattern", ["(?=a)", "a{", "[a", "a)"])
def test_a_pattern_that_cannot_be_read(pattern: str):
    with pytest.raises(ValueError, match="cannot be read"):
        build_automata([pattern], "ab")


def slow_and_fast(metadata: dict[str, Any]) -> tuple[Tokenizer, Tokenizer]:
    return Tokenizer(metadata, compile_threshold=1 << 60), Tokenizer(metadata, compile_threshold=0)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("special", [False, True])
def test_ids_of_every_rule(rule: str, special: bool):
    slow, fast = slow_and_fast(test_tokenizer_bpe.metadata(pre=rule, bos_token_id=0))
    for text in random_texts(3, 200):
        assert fast.encode(text, special=special) == slow.encode(text, special=special), repr(text)


def test_merges_in_any_order():
    draw = random.Random(4)
    for _ in range(40):
        vocab = {"".join(draw.choices("abc", k=draw.randint(2, 4))) for _ in range(12)}
        merges = [f"{word[:i]} {word[i:]}" for word in sorted(vocab) for i in range(1, len(word))]
        draw.shuffle(merges)
        metadata = test_tokenizer_bpe.metadata(";".join(dict.fromkeys(merges)))
        lost = metadata["tokenizer.ggml.tokens"].index(merges[0].replace(" ", "").encode())
        metadata["tokenizer.ggml.tokens"][lost] = b"\xff"  # what a merge makes may be no token
        slow, fast = slow_and_fast(metadata)
        for _ in range(30):
            text = "".join(draw.choices("abc", k=draw.randint(1, 60)))
            assert fast.encode(text) == slow.encode(text), (merges, text)


@pytest.mark.parametrize(
    "fields", [{}, {"add_space_prefix": False}, {"unknown_token_id": 3}, {"scores": "equal"}]
)
@pytest.mark.parametrize(
    "words", [{}, {"\u2581a\u2581b": (-0.5, 1), "\n\n": (-1.0, 1), "a b": (0.0, 1)}]
)
@pytest.mark.parametrize("bytes_known", [False, True])
def test_ids_of_scores(fields: dict[str, Any], words: dict[str, Any], bytes_known: bool):
    entries = test_tokenizer.SPECIAL | test_tokenizer.NORMAL | test_tokenizer.MINE | words
    tokenizer_metadata = test_tokenizer.metadata(
        entries | (test_tokenizer.BYTES if bytes_known else {}), **fields
    )
    if "scores" in fields:
        tokenizer_metadata["tokenizer.ggml.scores"] = np.zeros(
            len(tokenizer_metadata["tokenizer.ggml.tokens"]), np.float32
        )
    slow, fast = slow_and_fast(tokenizer_metadata)
    for special in (False, True):
        for text in random_texts(5, 200):
            expected = slow.encode(text, special=special)
            assert fast.encode(text, special=special) == expected, repr(text)


def test_a_space_without_a_token_is_spelled_in_bytes():
    entries = test_tokenizer.SPECIAL | test_tokenizer.BYTES | {"a": (0.0, 1)}
    slow, fast = slow_and_fast(test_tokenizer.metadata(entries))
    assert fast.encode("a a\u00e9") == slow.encode("a a\u00e9") != []


def test_a_character_without_a_token():
    full_metadata = test_tokenizer.metadata(
        {"\u2581": (0.0, 1), "a": (0.0, 1)}, add_bos_token=False
    )
    full_metadata["tokenizer.ggml.unknown_token_id"] = 0
    slow, fast = slow_and_fast(full_metadata)
    assert fast.encode("a\u00e9a") == slow.encode("a\u00e9a")
    small_metadata = test_tokenizer.metadata(
        {"a": (0.0, 1)}, add_bos_token=False, add_space_prefix=False
    )
    tokenizer = Tokenizer(small_metadata, compile_threshold=0)
    tokenizer._encoding.table.unk = None
    with pytest.raises(TokenizerError, match="unknown_token_id must name one"):
        tokenizer.encode("ab")


def test_more_words_than_are_kept_and_longer_ones():
    slow, fast = slow_and_fast(test_tokenizer_bpe.metadata("a b;b c;ab c;c a"))
    draw = random.Random(6)
    words = [
        "".join(draw.choices("abc", k=draw.randint(1, 2 * CACHED_WORD_NBYTES)))
        for _ in range(3 * CACHED_WORDS)
    ]
    words += draw.choices(words, k=CACHED_WORDS)
    text = " ".join(words)
    assert fast.encode(text) == slow.encode(text)
    assert fast.encode("") == [] and fast.encode("a") == slow.encode("a")


def test_the_switch_changes_no_ids():
    tokenizer_metadata, text = test_tokenizer_bpe.metadata(), "".join(random_texts(7, 300))
    expected = Tokenizer(tokenizer_metadata, compile_threshold=1 << 60).encode(text)
    switching = Tokenizer(tokenizer_metadata, compile_threshold=len(text) // 2)
    pieces = switching.encode_pieces(text[i : i + 50] for i in range(0, len(text), 50))
    parts = Tokenizer(tokenizer_metadata, compile_threshold=1 << 60).encode_pieces([text])
    assert [id for part in pieces for id in part] == [id for part in parts for id in part]
    assert switching.encode(text) == expected and switching._encoder is not None


@pytest.mark.parametrize("kind", ["scores", "merges"])
@pytest.mark.parametrize("min_compiled_length", [0, 3000, 1 << 60])
def test_many_texts_on_threads(
    kind: str, min_compiled_length: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_encoding, "BATCH_CHARACTERS", 500)
    tokenizer_metadata = test_tokenizer.metadata(test_tokenizer.TINY)
    tokenizer_metadata = (
        tokenizer_metadata
        if kind == "scores"
        else test_tokenizer_bpe.metadata(pre="llama-bpe", bos_token_id=0)
    )
    documents = random_texts(8, 300)
    slow = Tokenizer(tokenizer_metadata, compile_threshold=1 << 60)
    expected = [slow.encode(text, bos=False, special=False) for text in documents]
    for threads in (1, 2, 4):
        for size in (7, 50, 10**6):
            pieces = (
                (text[i : i + size], i + size >= len(text))
                for text in documents
                for i in range(0, max(len(text), 1), size)
            )
            results: list[list[int]] = [[]]
            for ids, num_ended in encode_all(
                Tokenizer(tokenizer_metadata, compile_threshold=min_compiled_length),
                pieces,
                threads,
            ):
                results[-1] += ids.tolist()
                results += [[]] * num_ended
            assert results[:-1] == expected and results[-1] == []


def test_a_text_without_ids_beside_others():
    tokenizer = test_tokenizer_bpe.tiny_tokenizer(pre="gemma4", bos_token_id=0)
    texts = [
        "\u3002\u4e2d",
        "a",
    ]  # without tokens for characters or bytes, nothing is left of the first
    chunks = encode_all(tokenizer, [(text, True) for text in texts], threads=1)
    expected = [tokenizer.encode(text, bos=False) for text in texts]
    assert [ids.tolist() for ids, _ in chunks] == expected and not expected[0]


def test_an_error_while_texts_are_read_ends_the_threads():
    def pieces():
        yield "abc" * 10_000, True
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        list(encode_all(Tokenizer(test_tokenizer_bpe.metadata(), compile_threshold=0), pieces(), 2))


def test_names_within_a_text():
    names = ["ab", "abc", "x", "\u4e2d\u6587", "bcd"]
    assert NameFinder(names).find("zab\u4e2d") == [0, 2]
    assert NameFinder(names).find("abcd\u4e2d\u6587") == [0, 1, 2, 3, 4]
    assert NameFinder(names).find("") == [2]
