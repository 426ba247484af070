"""All pre-tokenizers that llama.cpp names: its ids of recorded texts, what a name sets, and where texts can be cut."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.data.tokenizer import Tokenizer, TokenizerError
from packtrain.data.tokenizer.split_rules import RULES, RULES_BY_NAMES
from packtrain.data.tokenizer.word_splitter import WordSplitter
from tests.vocabularies import (
    PIECES,
    charsmap,
    checksum,
    merging_metadata,
    pieces_metadata,
    random_texts,
)

GOLDEN = json.loads((Path(__file__).parent / "goldens/pretokenizers.json").read_text())
LEADERS = [names.split()[0] for names in RULES_BY_NAMES]
VOCABULARIES = [*LEADERS, *PIECES]
# those in the source of llama.cpp, in its order
NAMES = (
    "default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
    "deepseek-llm deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de "
    "gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 granite-embed-multi-311m "
    "sarvam-moe jina-v1-en jina-v2-code roberta-bpe whitespace refact command-r qwen2 deepseek-r1-qwen kormo "
    "f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe glm4 glm5 viking jais tekken smollm "
    "codeshell bloom gpt3-finnish exaone exaone4 exaone-moe chameleon minerva-7b megrez gpt-4o llama4 kanana2 "
    "talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe trillion granite-docling bailingmoe "
    "bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2 ufakzeka grok-2 afmoe "
    "laguna minimax-m2 solar-open mellum2"
)


def test_all_names_are_known_once():
    assert sorted(NAMES.split()) == sorted(RULES) == sorted(" ".join(RULES_BY_NAMES).split())


def vocabulary_metadata(name: str) -> dict[str, Any]:
    return pieces_metadata(name) if name in PIECES else merging_metadata(name)


@pytest.mark.parametrize("min_compiled_length", [0, sys.maxsize])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_ids_of_llama_cpp(name: str, min_compiled_length: int):
    """`python -m benchmarks.pretokenizers --record` recorded them; the vocabulary joins any two neighbours."""
    tokenizer = Tokenizer(vocabulary_metadata(name), compile_threshold=min_compiled_length)
    texts = random_texts(7, len(GOLDEN[name]))
    for text, expected in zip(texts, GOLDEN[name], strict=True):
        assert checksum(tokenizer.encode(text, bos=False, eos=False, special=False)) == expected, (
            repr(text)
        )


@pytest.mark.parametrize("name", VOCABULARIES)
def test_pieces_give_the_ids_of_the_whole(name: str):
    tokenizer, draw = Tokenizer(vocabulary_metadata(name)), random.Random(5)
    for text in random_texts(8, 100, 60):
        size = draw.randint(1, 12)
        pieces = tokenizer.encode_pieces(text[i : i + size] for i in range(0, len(text), size))
        ids = [id for part in pieces for id in part]
        assert ids == tokenizer.encode(text, bos=False, eos=False, special=False), repr(text)


@pytest.mark.parametrize("name", LEADERS)
def test_a_long_text_is_cut_somewhere(name: str):
    text = "The year 1998, said he.\n" * 20
    parts = list(
        Tokenizer(merging_metadata(name)).encode_pieces(text[i : i + 24] for i in range(0, 480, 24))
    )
    assert len(parts) >= 19


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("deepseek-v3", "a12345 \u65e5\u672c(ab", ["a", "123", "45", " ", "\u65e5\u672c", "(ab"]),
        ("deepseek-llm", "\u65e5 a12 b  ", ["\u65e5", " a", "12", " b", "  "]),
        ("kimi-k2", "a\u4e2d\u6587b's 1234", ["a", "\u4e2d\u6587", "b's", " ", "123", "4"]),
        ("afmoe", "a 12345!", ["a", " ", "12", "345", "!"]),
        ("tiny_aya", "a1234567", ["a", "1", "234", "567"]),
        ("superbpe", "of the 12345", ["of the ", "12", "345"]),
        ("bloom", "Yes, a (b c) d", ["Yes", ",", " a", " (", "b", " c", ")", " d"]),
        ("exaone-moe", "big red 12\n\nx", ["big red", " ", "1", "2", "\n\n", "x"]),
        ("chameleon", "IMGIMGABZ <x   y", ["IMGIMGABZ", " ", "<", "x", "  ", " y"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", "    ", "  ", " b"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
        ("gpt-2", "a\u2028 b", ["a", "\u2028", " b"]),
    ],
)
def test_words(name: str, text: str, words: list[str]):
    assert WordSplitter(RULES[name]).split(text) == words


def test_gemma_4_always_begins_with_bos():
    metadata = merging_metadata("gemma4") | {"tokenizer.ggml.add_bos_token": False}
    assert Tokenizer(metadata).encode("ab")[0] == 1
    del metadata["tokenizer.ggml.pre"]
    named = Tokenizer(metadata | {"tokenizer.ggml.model": "gemma4"})
    assert named.encode("a b\n\n") == Tokenizer(merging_metadata("gemma4")).encode("a b\n\n")
    assert named.decode(named.encode("a b\n\n", bos=False)) == "a b\n\n"


def test_only_kimi_needs_no_merges():
    metadata = merging_metadata("kimi-k2")
    del metadata["tokenizer.ggml.merges"]
    assert len(Tokenizer(metadata).encode("abc")) == 3
    with pytest.raises(TokenizerError, match="merges"):
        Tokenizer(metadata | {"tokenizer.ggml.pre": "qwen2"})


def test_whitespace_has_no_tokens_where_it_only_parts_words():
    metadata = merging_metadata("whitespace")
    cased = Tokenizer(metadata)
    assert cased.encode("ab  cd\n") == cased.encode("ab\u2003cd") == [
        id for word in ("ab", "cd") for id in cased.encode(word)
    ]  # fmt: skip
    lower = Tokenizer(metadata | {"tokenizer.ggml.normalizer.lowercase": True})
    assert lower.encode("aB") == cased.encode("ab") != cased.encode("aB")


@pytest.mark.parametrize(
    ("name", "text", "cleaned"),
    [
        ("gpt-2", "a , b . c ' d 's 't 've", "a, b. c'd's 't've"),
        ("qwen2", "a , b . c ' d 's", "a , b . c ' d 's"),
    ],
)
def test_cleaned_texts(name: str, text: str, cleaned: str):
    tokenizer = Tokenizer(merging_metadata(name))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, clean=True) == cleaned


def special_tokenizer(texts: list[str], kinds: list[int], **fields: Any) -> Tokenizer:
    """A vocabulary with some special tokens."""
    metadata = merging_metadata(fields.pop("pre", "gpt-2"))
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + [
        t.encode() for t in texts
    ]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *kinds]
    return Tokenizer(metadata | {f"tokenizer.ggml.{key}": value for key, value in fields.items()})


def test_a_mask_swallows_the_space_before_it():
    for pre, count in (("jina-v2-code", 3), ("gpt-2", 4)):
        tokenizer = special_tokenizer(["<mask>"], [3], pre=pre)
        assert len(tokenizer.encode("a  <mask>b")) == count


def test_ends_that_are_none():
    harmony = special_tokenizer(["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], [3, 3, 3, 3])
    named = {harmony.tokens[id] for id in harmony.eog_ids}
    assert {b"<|return|>", b"<|call|>"} <= named and b"<|end|>" not in named
    assert harmony.encode("<|channel|>", special=False) == [harmony.vocab_size - 1]
    gemma = special_tokenizer(["</s>", "<|tool_response>"], [3, 3])
    named = {gemma.tokens[id] for id in gemma.eog_ids}
    assert b"<|tool_response>" in named and b"</s>" not in named
    assert len(gemma.encode("</s>")) > 1


# ---- WordPiece and Unigram


def token_texts(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.tokens[id].decode() for id in tokenizer.encode(text, **options)]


def scored_tokenizer(kind: str, tokens: dict[str, float], **fields: Any) -> Tokenizer:
    """A vocabulary of these tokens and scores; those in brackets are control tokens."""
    metadata = {
        "model": kind,
        "tokens": [token.encode() for token in tokens],
        "scores": np.array([*tokens.values()], np.float32),
        "token_type": np.array([3 if token[0] in "[<" else 1 for token in tokens], np.int32),
    } | fields
    return Tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


WORDS = ["\u2581the", "\u2581un", "aff", "able", "\u2581,", "\u2581cafe", "\u2581\u4e2d"]
BERT = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS], 0.0)
BERT_IDS = {"bos_token_id": 2, "unknown_token_id": 1, "seperator_token_id": 3}


def test_word_pieces():
    tokenizer = scored_tokenizer("bert", BERT, **BERT_IDS)
    assert token_texts(tokenizer, "The unaffable, Caf\u00e9\u4e2d") == ["[CLS]", *WORDS, "[SEP]"]
    assert token_texts(tokenizer, "unaffected [SEP] the", bos=False, eos=False) == [
        "[UNK]", "[SEP]", "\u2581the",
    ]  # fmt: skip
    cased = scored_tokenizer("bert", BERT, **BERT_IDS, **{"normalizer.lowercase": False})
    assert token_texts(cased, "The the caf\u00e9", bos=False) == [
        "[UNK]",
        "\u2581the",
        "[UNK]",
        "[SEP]",
    ]
    ids = tokenizer.encode("the, unaffable", bos=False, eos=False)
    assert tokenizer.decode(ids) == " the , unaffable"
    assert tokenizer.decode(ids, clean=True) == " the, unaffable"


T5 = {
    "<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "\u2581": -2.0, "a": -2.0, "b": -3.0, "ab": -4.0, "abb": -9.5,
    "\u2581a": -2.5,
}  # fmt: skip


def test_unigrams():
    tokenizer = scored_tokenizer("t5", T5, add_space_prefix=True)
    assert token_texts(tokenizer, "ab b") == ["\u2581a", "b", "\u2581", "b", "</s>"]
    assert token_texts(tokenizer, "bab") == ["\u2581", "b", "ab", "</s>"]
    assert token_texts(tokenizer, "axyb", eos=False) == ["\u2581a", "<unk>", "b"]
    assert tokenizer.decode(tokenizer.encode("ab b")) == "ab b"
    assert token_texts(scored_tokenizer("t5", T5), "ab") == ["ab", "</s>"]
    joined = scored_tokenizer("t5", T5, remove_extra_whitespaces=True)
    assert token_texts(joined, " a   a ", eos=False) == ["\u2581a", "\u2581a"]


def test_replacements_of_characters():
    mapped = np.frombuffer(charsmap({"x": "a", "xy": "ab", "z": ""}), np.int8)
    tokenizer = scored_tokenizer("t5", T5, precompiled_charsmap=mapped)
    assert token_texts(tokenizer, "xxyz", eos=False) == ["a", "ab"]
    for wrong in ("text", np.zeros(9, np.float32), 5):
        with pytest.raises(TokenizerError, match="precompiled_charsmap is no array of bytes"):
            scored_tokenizer("t5", T5, precompiled_charsmap=wrong)
    for end, said in ((3, "does not fit in"), (len(mapped) - 1, "no end of a replacement")):
        with pytest.raises(TokenizerError, match=said):
            scored_tokenizer("t5", T5, precompiled_charsmap=mapped[:end]).encode("z")


def test_pieces_without_an_unknown_token():
    vocab = {"\u2581the": 0.0, "b": 0.0}
    tokenizer = scored_tokenizer("bert", vocab, bos_token_id=0, seperator_token_id=1)
    with pytest.raises(TokenizerError, match="unknown_token_id must name one"):
        tokenizer.encode("of")
    with pytest.raises(TokenizerError, match="unknown_token_id must name one"):
        scored_tokenizer("t5", vocab)
    with pytest.raises(TokenizerError, match="seperator_token_id must name one"):
        scored_tokenizer("bert", vocab, bos_token_id=0)
