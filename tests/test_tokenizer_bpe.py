"""Byte-level vocabularies: llama.cpp's test vectors, words of each rule, merges, and texts in pieces."""

import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.data.tokenizer import Tokenizer, TokenizerError
from packtrain.data.tokenizer.bpe import ALPHABET
from packtrain.data.tokenizer.split_rules import RULES
from packtrain.data.tokenizer.word_splitter import WordSplitter
from packtrain.gguf import GGUF

SHARED = Path(__file__).parent.parent.parent / "shared/data"
VECTORS = SHARED / "tokenizers/ggml-vocab"
needs_shared = pytest.mark.shared

MERGES = "h e;l l;he ll;hell o;\u0120 w;o r;\u0120w or;l d;\u0120wor ld;\u0120 \u0120;a b;b c;a a;aa aa;\u00c3 \u00a4"
CONTROLS = {"<|end|>": 3, "<|x|>": 4, "<|begin|>": 3}


def metadata(rules: str = MERGES, /, **fields: Any) -> dict[str, Any]:
    """A vocabulary with all bytes, what the merges make, and some special tokens."""
    listed = [merge.encode() for merge in rules.split(";")]
    tokens = [character.encode() for character in ALPHABET.values()]
    tokens += dict.fromkeys(merge.replace(b" ", b"") for merge in listed)
    kinds = [1] * len(tokens) + list(CONTROLS.values())
    tokens += [name.encode() for name in CONTROLS]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": listed,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    } | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def tiny_tokenizer(rules: str = MERGES, /, **fields: Any) -> Tokenizer:
    return Tokenizer(metadata(rules, **fields))


def token_texts(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [
        tokenizer.piece(id).decode(errors="replace") for id in tokenizer.encode(text, **options)
    ]


# ---- real vocabularies


@needs_shared
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
def test_the_vectors_of_llama_cpp(name: str):
    tokenizer = Tokenizer(GGUF(VECTORS / f"ggml-vocab-{name}.gguf").metadata)
    input_text = (VECTORS / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode()
    expected_lines = (VECTORS / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    inputs = input_text.split("\n__ggml_vocab_test__\n")
    assert len(inputs) == len(expected_lines) == 47
    for text, line in zip(inputs, expected_lines, strict=True):
        ids = [int(id) for id in line.split()]
        assert tokenizer.encode(text, bos=False, special=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.add_bos == (name == "llama-bpe")


@needs_shared
def test_a_whole_file_comes_back_by_pieces_too():
    tokenizer = Tokenizer(GGUF(VECTORS / "ggml-vocab-llama-bpe.gguf").metadata)
    text = (SHARED / "text/wikitext-2-raw/wiki.test.raw").read_bytes()[:300_000].decode()
    ids = tokenizer.encode(text, bos=False, special=False)
    assert tokenizer.decode(ids) == text
    pieces = tokenizer.encode_pieces(text[i : i + 1000] for i in range(0, len(text), 1000))
    parts = list(pieces)
    assert [id for part in parts for id in part] == ids and len(parts) > 250


@needs_shared
def test_a_vocabulary_of_128k_tokens_opens_fast_and_small():
    code = """if True:
        import sys, time
        from packtrain.gguf import GGUF
        from packtrain.common.memory import private_nbytes
        from packtrain.data.tokenizer import Tokenizer
        before, times = private_nbytes(), [time.process_time()]
        Tokenizer(GGUF(sys.argv[1]).metadata)
        taken, times = private_nbytes() - before, [*times, time.process_time()]
        sum(i * i for i in range(2_000_000))
        times.append(time.process_time())
        print((times[1] - times[0]) / (times[2] - times[1]), taken)
    """
    path = VECTORS / "ggml-vocab-llama-bpe.gguf"
    said = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    ratio, nbytes = said.stdout.split()
    # 1.2 to 2.4: the machine's own speed counts in both
    assert float(ratio) <= 4 and int(nbytes) <= 45 << 20


# ---- words


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("gpt-2", "Hello  world's 1234!?\n\n x", ["Hello", " ", " world", "'s", " 1234", "!?", "\n\n", " x"]),
        ("llama-bpe", "Hello  world'S 1234!?\n\n x", ["Hello", " ", " world", "'S", " ", "123", "4", "!?\n\n", " x"]),
        ("qwen2", "a 12 \u0905\u0301x\r\n\t", ["a", " ", "1", "2", " \u0905", "\u0301x", "\r\n", "\t"]),
        ("qwen35", "a 12 \u0905\u0301x", ["a", " ", "1", "2", " \u0905\u0301x"]),
        ("tekken", "HTTPServer isOn 12", ["HTTPServer", " is", "On", " ", "1", "2"]),
        ("gpt-4o", "HTTPServer's isOn 1234", ["HTTPServer's", " is", "On", " ", "123", "4"]),
        ("smollm", "ab 12.5", ["ab", " ", "1", "2", ".", "5"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("llama-bpe", "\u4e2d\u6587\u3002 \u0663\u0664\u00bd\u3000x\u2003",
         ["\u4e2d\u6587", "\u3002", " ", "\u0663\u0664\u00bd", "\u3000x", "\u2003"]),
        # letters and numbers of Unicode 15, which Python 3.11 does not know
        ("llama-bpe", "a\U00031350 \U00011f50", ["a\U00031350", " ", "\U00011f50"]),
    ],
)  # fmt: skip
def test_words(rule: str, text: str, words: list[str]):
    assert WordSplitter(RULES[rule]).split(text) == words


@pytest.mark.parametrize("rule", sorted(RULES))
def test_words_are_all_of_the_text(rule: str):
    draw, splitter = random.Random(1), WordSplitter(RULES[rule])
    for _ in range(200):
        text = "".join(
            draw.choices("aB '\n\r\t.,-+12\u00e9\u4e2d\u0301\u3000\u2167\U0001f600\0", k=20)
        )
        assert "".join(splitter.split(text)) == text


# ---- merges


def merge_slowly(merges: list[str], word: str) -> list[str]:
    """The rule word by word: the pair that comes first in the list is joined, the leftmost of equals."""
    parts = list(word)
    while True:
        pairs = [
            (merges.index(f"{a} {b}"), i)
            for i, (a, b) in enumerate(pairwise(parts))
            if f"{a} {b}" in merges
        ]
        if not pairs:
            return parts
        i = min(pairs)[1]
        parts[i : i + 2] = ["".join(parts[i : i + 2])]  # fmt: skip


def test_merges_in_their_order():
    tokenizer = tiny_tokenizer()
    assert token_texts(tokenizer, "hello world") == ["hello", " world"]
    assert token_texts(tokenizer, "abc") == ["ab", "c"]
    assert token_texts(tokenizer, "aaaaa") == ["aaaa", "a"]
    assert [tokenizer.piece(id) for id in tokenizer.encode("\u00e4\u00e9")] == [
        b"\xc3\xa4",
        b"\xc3",
        b"\xa9",
    ]
    draw = random.Random(2)
    for _ in range(50):
        words = {"".join(draw.choices("abc", k=2)) for _ in range(4)}
        listed = [
            f"{w[:i]} {w[i:]}" for w in sorted(words | {"abc", "cab"}) for i in range(1, len(w))
        ]
        listed = list(dict.fromkeys(draw.sample(listed, len(listed))))
        tokenizer = tiny_tokenizer(";".join(listed))
        for _ in range(20):
            text = "".join(draw.choices("abc", k=draw.randint(1, 30)))
            assert token_texts(tokenizer, text) == merge_slowly(listed, text)


def test_a_word_that_is_a_token_counts_before_merges_where_llama_cpp_says_so():
    listed = (
        "c d;x y;xyz w"  # nothing makes xyz, so the word xyzw is a token that merges do not reach
    )
    assert token_texts(tiny_tokenizer(listed), "xyzw") == ["xy", "z", "w"]
    assert token_texts(
        tiny_tokenizer(listed, pre="llama-bpe", bos_token_id=0, add_bos_token=False), "xyzw"
    ) == ["xyzw"]


def test_the_first_of_two_equal_merges_counts():
    assert token_texts(tiny_tokenizer("a b;b c;a b"), "abc") == ["ab", "c"]


# ---- special tokens, bytes, pieces


def test_special_tokens():
    tokenizer = tiny_tokenizer()
    assert token_texts(tokenizer, "ab<|end|>ab") == ["ab", "<|end|>", "ab"]
    assert "<|end|>" not in token_texts(tokenizer, "ab<|end|>", special=False)
    assert token_texts(tokenizer, "ab<|x|>", special=False) == ["ab", "<|x|>"]
    assert tokenizer.eog_ids == {tokenizer.eot} == {tokenizer.tokens.index(b"<|end|>")}
    assert tokenizer.decode(tokenizer.encode("ab<|end|> ab<|x|>")) == "ab ab<|x|>"
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (None, None, False)
    begin = tokenizer.tokens.index(b"<|begin|>")
    assert tiny_tokenizer(pre="llama-bpe", bos_token_id=begin).encode("ab")[0] == begin


def test_every_byte_comes_back():
    text = "".join(map(chr, range(256))) + "\u4e2d\U0001f600 \r\n\0"
    assert tiny_tokenizer().decode(tiny_tokenizer().encode(text)) == text


def test_a_vocabulary_without_types_and_some_bytes():
    vocab_metadata = metadata()
    del vocab_metadata["tokenizer.ggml.token_type"]
    assert token_texts(Tokenizer(vocab_metadata), "ab<|x|>")[0] == "ab"
    vocab_metadata["tokenizer.ggml.tokens"] = [*vocab_metadata["tokenizer.ggml.tokens"]]
    vocab_metadata["tokenizer.ggml.tokens"][ord("c") - 33] = (
        b"other"  # as in llama.cpp, what has no token is left out
    )
    assert token_texts(Tokenizer(vocab_metadata), "abcab") == ["ab", "ab"]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_pieces_of_a_text_give_the_ids_of_the_whole(rule: str):
    vocab_metadata = metadata(pre=rule, bos_token_id=0)
    vocab_metadata["tokenizer.ggml.tokens"][-2] = b"b a\n"  # a user-defined token across words
    tokenizer, draw = Tokenizer(vocab_metadata), random.Random(6)
    units = [
        "a",
        "B",
        "'s",
        " ",
        " ",
        "\n",
        "b a\n",
        "/",
        "1",
        ".",
        "\u3002",
        "\u4e2d",
        "\u0301",
        "\t",
        "+",
    ]
    for _ in range(300):
        text, size = "".join(draw.choices(units, k=25)), draw.randint(1, 8)
        pieces = tokenizer.encode_pieces(text[i : i + size] for i in range(0, len(text), size))
        ids = tokenizer.encode(text, bos=False, special=False)
        assert [id for part in pieces for id in part] == ids, repr(text)


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "tekken", "smollm", "default"])
@pytest.mark.parametrize("unit", ["a", " ", "\n ", "aB", "\u4e2d", "+"])
def test_long_texts_take_little_more_than_their_length(rule: str, unit: str):
    tokenizer, text = tiny_tokenizer(pre=rule, bos_token_id=0), unit * (100_000 // len(unit))
    start_time = time.thread_time()
    ids = tokenizer.encode(text, bos=False)
    # half a second here; with quadratic time it would be minutes
    assert time.thread_time() - start_time < 10
    assert tokenizer.decode(ids) == text


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"pre": "mine"},
            r"tokenizer\.ggml\.pre is 'mine'; these are known: .*llama-bpe, .*qwen2,",
        ),
        ({"merges": "a b"}, "merges is no array of strings"),
        ({"merges": [1]}, "merges is no array of strings"),
        ({"token_type": np.zeros(2)}, "token_type has 2 values"),
        ({"pre": "llama-bpe"}, "no bos token"),
        ({"eos_token_id": 9999}, "eos_token_id is 9999"),
    ],
)
def test_bad_metadata(fields: dict[str, Any], said: str):
    with pytest.raises(TokenizerError, match=said) as raised:
        tiny_tokenizer(**fields).encode("abc")
    assert "\n" not in str(raised.value)
