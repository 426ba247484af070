"""The tokenizer: llama.cpp's own test vectors, its rules on a small vocabulary, and a line for each bad file."""

import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.data.tokenizer import NO_ID, StreamDecoder, Tokenizer, TokenizerError
from packtrain.gguf import GGUF

SHARED = Path(__file__).parent.parent.parent / "shared/data"
VECTORS = SHARED / "tokenizers/ggml-vocab"
STORIES = SHARED / "models/stories260K"
needs_shared = pytest.mark.shared
real = pytest.mark.parametrize("name", ["llama-spm", "phi-3"])

SPECIAL = {"<unk>": (0.0, 2), "<s>": (0.0, 3), "</s>": (0.0, 3)}
BYTES = {f"<0x{b:02X}>": (0.0, 6) for b in range(256)}
WORDS = {"\u2581": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "\u00e4": -9.0, "ab": -1.0, "bc": -2.0, "\u2581a": -3.0,
         "abc": -4.0, "\u2581ab": -1.0, "aa": -5.0, "\u2581\u2581": -6.0, "aaaa": -7.0}  # fmt: skip
MINE = {"<x>": (0.0, 4), "<xy>": (0.0, 4), "y><x": (0.0, 3), "<|im_end|>": (0.0, 1)}


def metadata(entries: dict[str, tuple[float, int]], **fields: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text.encode() for text in entries],
        "tokenizer.ggml.scores": np.array([score for score, _ in entries.values()], np.float32),
        "tokenizer.ggml.token_type": np.array([kind for _, kind in entries.values()], np.int32),
    } | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


NORMAL = {text: (score, 1) for text, score in WORDS.items()}
TINY = SPECIAL | BYTES | NORMAL | MINE


def tiny_tokenizer(**fields: Any) -> Tokenizer:
    return Tokenizer(metadata(TINY, **fields))


def token_texts(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    """The tokens of a text without bos, written as in the vocabulary."""
    return [
        tokenizer.tokens[id].decode()
        for id in tokenizer.encode(text, bos=False, eos=False, **options)
    ]


def real_tokenizer(name: str) -> Tokenizer:
    return Tokenizer(GGUF(VECTORS / f"ggml-vocab-{name}.gguf").metadata)


@pytest.mark.parametrize("name", ["lowercase", "strip_accents", "nfc"])
def test_a_normalizer_that_is_not_applied_is_refused(name: str):
    key = f"normalizer.{name}"
    with pytest.raises(TokenizerError, match=f"{key} is True; no llama vocabulary applies it"):
        tiny_tokenizer(**{key: True})
    assert tiny_tokenizer(**{key: False}).encode("ab")
    if name != "nfc":
        bert = metadata(
            SPECIAL | {"\u2581a": (0.0, 1)}, model="bert", bos_token_id=1, seperator_token_id=2
        )
        assert Tokenizer(bert | {f"tokenizer.ggml.{key}": True}).encode("A")


# ---- real vocabularies


@needs_shared
@real
def test_the_vectors_of_llama_cpp(name: str):
    tokenizer = real_tokenizer(name)
    input_text = (VECTORS / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode()
    expected_lines = (VECTORS / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    inputs = input_text.split("\n__ggml_vocab_test__\n")
    assert len(inputs) == len(expected_lines) == 47
    for text, line in zip(inputs, expected_lines, strict=True):
        ids = [int(id) for id in line.split()]
        assert tokenizer.encode(text, bos=False, special=False) == ids, repr(text)
        assert tokenizer.encode(text) == [tokenizer.bos, *ids], repr(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_shared
@real
def test_whole_files_come_back(name: str):
    tokenizer = real_tokenizer(name)
    for file in ("tinyshakespeare.txt", "wikitext-2-raw/wiki.test.raw"):
        text = (SHARED / "text" / file).read_bytes()[:200_000].decode(errors="ignore")
        assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_shared
def test_special_tokens_of_phi_3():
    tokenizer = real_tokenizer("phi-3")
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.unk) == (
        32064,
        1,
        32000,
        0,
    )
    assert tokenizer.tokens[tokenizer.eot] == b"<|end|>"
    assert {tokenizer.tokens[id] for id in tokenizer.eog_ids} == {
        b"</s>",
        b"<|end|>",
        b"<|endoftext|>",
    }
    # the whitespace after most of them goes with them
    chat = token_texts(tokenizer, "<|user|>\n Hello <|end|>\n<|endoftext|>\n")
    assert chat == [
        "<|user|>",
        "\u2581Hello",
        "\u2581",
        "<|end|>",
        "<|endoftext|>",
        "\u2581",
        "<0x0A>",
    ]
    assert "<|user|>" not in token_texts(tokenizer, "<|user|>", special=False)


@needs_shared
def test_the_vocabulary_of_stories_against_sentencepiece():
    sentencepiece = pytest.importorskip("sentencepiece")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(STORIES / "tok512.model"))
    tokenizer = Tokenizer(GGUF(STORIES / "stories260K.gguf").metadata)
    stories = (
        (SHARED / "text/tinystories_sample.txt").read_bytes()[:300_000].decode(errors="ignore")
    )
    for text in stories.split("\n<|endoftext|>\n"):
        # this model also drops extra spaces, a rule that llama.cpp does not have
        text = " ".join(filter(None, text.split(" ")))
        assert tokenizer.encode(text, bos=False) == theirs.encode(text), text


# ---- text to ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" ", ["\u2581\u2581"]),
        ("abc", ["\u2581ab", "c"]),  # "ab" and "_ab" before "bc"
        ("cabc", ["\u2581", "c", "abc"]),
        ("caaa", ["\u2581", "c", "aa", "a"]),  # of equal scores the leftmost
        ("\u00e4b", ["\u2581", "\u00e4", "b"]),
        ("\u00e9", ["\u2581", "<0xC3>", "<0xA9>"]),
        ("\U0001f600a", ["\u2581", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "a"]),
        ("\0", ["\u2581", "<0x00>"]),
    ],
)
def test_merging_and_bytes(text: str, expected: list[str]):
    assert token_texts(tiny_tokenizer(), text) == expected


def test_what_is_added():
    ab = list(TINY).index("\u2581ab")
    assert tiny_tokenizer().encode("ab") == [1, ab]
    assert tiny_tokenizer().encode("") == [1]
    assert tiny_tokenizer().encode("ab", bos=False, eos=True) == [ab, 2]
    assert tiny_tokenizer(add_bos_token=False, add_eos_token=True).encode("ab") == [ab, 2]
    assert tiny_tokenizer(add_bos_token=False).encode("ab", bos=True) == [1, ab]
    assert token_texts(tiny_tokenizer(add_space_prefix=False), "ab c") == ["ab", "\u2581", "c"]


def test_special_tokens_are_found_before_words():
    tokenizer = tiny_tokenizer()
    assert token_texts(tokenizer, "a<s>a</s>") == ["\u2581a", "<s>", "\u2581a", "</s>"]
    assert token_texts(tokenizer, "<s>", special=False) == ["\u2581", "<0x3C>", "<0x73>", "<0x3E>"]
    assert token_texts(tokenizer, "a<x>a", special=False) == ["\u2581a", "<x>", "\u2581a"]
    assert token_texts(tokenizer, "a<x>a")[2] == "\u2581a"
    assert token_texts(tiny_tokenizer(add_space_prefix=False), "a<x>a") == ["a", "<x>", "a"]
    # the longest first, wherever it is; of equals the first in the vocabulary
    assert token_texts(tokenizer, "<xy><x>") == ["<xy>", "<x>"]
    assert token_texts(tokenizer, "<xy><x>", special=False) == ["<xy>", "<x>"]
    assert token_texts(tokenizer, "<x>y><x>") == ["<x>", "y><x", "\u2581", "<0x3E>"]


def test_texts_that_end_generation_are_control_tokens():
    tokenizer = tiny_tokenizer()
    end = list(TINY).index("<|im_end|>")
    assert (tokenizer.eot, tokenizer.eog_ids) == (end, frozenset({2, end}))
    assert token_texts(tokenizer, "a<|im_end|>") == ["\u2581a", "<|im_end|>"]
    assert "<|im_end|>" not in token_texts(tokenizer, "a<|im_end|>", special=False)
    assert tokenizer.decode([end]) == ""
    assert tiny_tokenizer(eot_token_id=1).eot == 1


def test_ids_that_files_leave_out():
    tokenizer = tiny_tokenizer(bos_token_id=NO_ID, eos_token_id=1)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.unk) == (1, 1, 0)
    minimal = Tokenizer(metadata({"\u2581": (0.0, 1), "a": (0.0, 1)}, add_bos_token=False))
    assert (minimal.bos, minimal.eos, minimal.unk, minimal.eot) == (1, None, 0, None)
    with pytest.raises(TokenizerError, match="no eos token"):
        minimal.encode("a", eos=True)


def test_without_byte_tokens_a_character_is_unknown_once():
    tokenizer = Tokenizer(metadata(SPECIAL | NORMAL))
    assert token_texts(tokenizer, "ca\u20acb") == ["\u2581", "c", "a", "<unk>", "b"]
    assert tokenizer.decode(tokenizer.encode("ca\u20acb")) == "cab"
    assert tokenizer.decode(tokenizer.encode("ca\u20acb"), special=True) == "<s>ca<unk>b"
    # a byte may also be spelled as itself
    assert token_texts(
        Tokenizer(metadata({**SPECIAL, "\u2581": (0.0, 1), "<": (0.0, 1)})), "<"
    ) == [
        "\u2581",
        "<",
    ]


def merge_slowly(scores: dict[str, float], text: str) -> list[str]:
    """The rule word by word: of all neighbours that make a token join the best pair, the leftmost of equals."""
    parts = list(f" {text}".replace(" ", "\u2581"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_pieces_and_cache_change_no_result():
    draw = random.Random(5)
    for _ in range(30):
        words = {
            "".join(draw.choices("abc\u2581\n\u00e4", k=draw.randint(2, 5))) for _ in range(12)
        }
        entries = SPECIAL | dict.fromkeys("abc\u2581\n\u00e4", (-9.0, 1))
        entries |= {word: (float(draw.randint(-6, 0)), 1) for word in sorted(words)}
        tokenizer = Tokenizer(metadata(entries))
        scores = {token: score for token, (score, _) in entries.items()}
        for _ in range(20):
            text = "".join(draw.choices("abc \n\u00e4", k=draw.randint(1, 40)))
            assert token_texts(tokenizer, text) == merge_slowly(scores, text)
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_that_reach_across_words():
    across = TINY | {"\n": (-9.0, 1), "b\n": (-2.0, 1)}
    assert token_texts(Tokenizer(metadata(across)), "cb\nc") == ["\u2581", "c", "b\n", "c"]
    across = TINY | {"c\u2581": (-0.5, 1)}
    assert token_texts(Tokenizer(metadata(across)), "c ab") == ["\u2581", "c\u2581", "ab"]


@pytest.mark.parametrize("name", ["", "phi-3"])  # whose special tokens swallow whitespace
def test_pieces_of_a_text_give_the_ids_of_the_whole(name: str):
    entries = TINY | {"<a b>": (0.0, 4), "\n": (-9.0, 1), "a\n": (-2.0, 1), "b\u2581": (-2.0, 1)}
    tokenizer = Tokenizer(metadata(entries) | {"general.name": name})
    draw = random.Random(6)
    for _ in range(300):
        text = "".join(draw.choices(["a", "b", "c", " ", "\n", "<x>", "<a b>", "\u00e9"], k=20))
        size = draw.randint(1, 8)
        pieces = tokenizer.encode_pieces(text[i : i + size] for i in range(0, len(text), size))
        ids = tokenizer.encode(text, bos=False, special=False)
        assert [id for part in pieces for id in part] == ids, repr(text)


@pytest.mark.parametrize("unit", ["a", " ", "ab c", "\u00e9"])
def test_long_texts_take_little_more_than_their_length(unit: str):
    tokenizer, text = tiny_tokenizer(), unit * (200_000 // len(unit))
    start_time = time.thread_time()
    ids = tokenizer.encode(text)
    # one second here; with quadratic time it would be an hour
    assert time.thread_time() - start_time < 10
    assert tokenizer.decode(ids) == text


# ---- ids to text


def test_pieces():
    tokenizer = tiny_tokenizer()
    by_text = {text: tokenizer.piece(id) for id, text in enumerate(TINY)}
    assert (
        by_text["\u2581ab"] == b" ab" and by_text["<s>"] == b"<s>" and by_text["<0xE2>"] == b"\xe2"
    )
    assert by_text["<x>"] == b"<x>"
    unused = Tokenizer(metadata({**SPECIAL, "old": (0.0, 5), "": (0.0, 1)}))
    assert (unused.piece(3), unused.piece(4)) == (b"", b"[EMPTY_4]")


@pytest.mark.parametrize(
    "text",
    ["", " ", "  a", "abc", "a b", "\n a\t", "\u00e4\u20ac\U0001f600", "a\u0301", "\r\n\0", "<s"],
)
def test_what_is_encoded_is_decoded(text: str):
    for tokenizer in (
        tiny_tokenizer(),
        tiny_tokenizer(add_space_prefix=False),
        tiny_tokenizer(add_eos_token=True),
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(np.array(ids)) == text


def test_control_tokens_are_shown_on_request():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("ab<x>", eos=True)
    assert tokenizer.decode(ids) == "ab<x>"
    assert tokenizer.decode(ids, special=True) == "<s>ab<x></s>"


@pytest.mark.parametrize("text", ["a\U0001f600b", "\u20ac\u00e9", "\U0001f468\u200d\U0001f469 \n"])
def test_a_stream_never_splits_a_character(text: str):
    tokenizer = tiny_tokenizer()
    stream = StreamDecoder(tokenizer)
    parts = [stream.feed(id) for id in tokenizer.encode(text)]
    assert "".join(parts) == text and stream.flush() == ""
    assert "\ufffd" not in parts and set(parts) <= {"", *text}


def test_a_stream_says_what_was_not_finished():
    tokenizer = tiny_tokenizer()
    stream = StreamDecoder(tokenizer)
    ids = tokenizer.encode("\U0001f600", bos=False)
    assert [stream.feed(id) for id in ids[:-1]] == [""] * 4
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")
    assert tokenizer.decode([*ids[:-1], *tokenizer.encode("ab", bos=False)]) == "\ufffd ab"


# ---- what is refused


@pytest.mark.parametrize("id", [-1, len(TINY)])
def test_ids_out_of_range(id: int):
    with pytest.raises(TokenizerError, match=f"token id {id} is not in 0 to {len(TINY) - 1}"):
        tiny_tokenizer().decode([1, id])


def test_ids_are_whole_numbers():
    with pytest.raises(TypeError):
        tiny_tokenizer().decode([1.5])  # type: ignore[list-item]


def test_half_a_surrogate_pair():
    with pytest.raises(TokenizerError, match="character 1 of the text"):
        tiny_tokenizer().encode("a\ud800")


@pytest.mark.parametrize("key", ["model", "tokens", "scores", "token_type"])
def test_missing_keys(key: str):
    incomplete = metadata(TINY)
    del incomplete[f"tokenizer.ggml.{key}"]
    with pytest.raises(TokenizerError, match=rf"the metadata has no tokenizer\.ggml\.{key}"):
        Tokenizer(incomplete)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"model": "mine"},
            r"tokenizer\.ggml\.model is 'mine'; these are known: llama, gpt2, gemma4, ",
        ),
        ({"scores": np.zeros(5)}, rf"scores has 5 values and tokenizer\.ggml\.tokens {len(TINY)}"),
        ({"token_type": np.zeros(5)}, rf"token_type has 5 values .* {len(TINY)}"),
        ({"scores": np.full(len(TINY), np.nan)}, "scores is no array of numbers"),
        ({"scores": 1.0}, "scores is no array of numbers"),
        ({"tokens": "abc"}, "tokens is no array of strings"),
        ({"tokens": [b"a"] * len(TINY)}, "tokens 0 and 1 are both b'a'"),
        ({"token_type": np.full(len(TINY), 6)}, "token 0 is of type byte and b'<unk>'"),
        ({"bos_token_id": len(TINY)}, f"bos_token_id is {len(TINY)}; .* ids 0 to {len(TINY) - 1}"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"unknown_token_id": 1.5}, "unknown_token_id is 1.5"),
        ({"eot_token_id": 99_999}, "eot_token_id is 99999"),
        ({"add_bos_token": 1}, "add_bos_token is 1; it must be true or false"),
    ],
)
def test_bad_metadata(fields: dict[str, Any], said: str):
    with pytest.raises(TokenizerError, match=said) as raised:
        tiny_tokenizer(**fields)
    assert "\n" not in str(raised.value)


def test_a_vocabulary_without_what_it_adds():
    with pytest.raises(
        TokenizerError, match="bos is to be added, but the vocabulary of 1 tokens has no bos"
    ):
        Tokenizer(metadata({"\u2581": (0.0, 1)}))
