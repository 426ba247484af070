"""Vocabularies: trained ones agree with SentencePiece token by token, and what is impossible is said in one line."""

import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from packtrain import gguf
from packtrain.common.errors import InputError
from packtrain.data import train_vocabulary as vocabulary
from packtrain.data.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, Tokenizer
from packtrain.data.train_vocabulary import supported_size, train_vocabulary, vocabulary_of
from packtrain.gguf import MetadataValue

FOX = "The quick brown fox jumps over the lazy dog, 1234 times; größer, naïve, Ελλάδα.\n"
DRAW = random.Random(3)
WORDS = [
    "".join(DRAW.choices("abcdefghijklmnoprstuvwöλ", k=DRAW.randint(2, 9))) for _ in range(300)
]
VARIED = "".join(
    f"{FOX}{' '.join(DRAW.choices(WORDS, k=9))}.  Two spaces\tand a tab {n}\r\n" for n in range(300)
)
HARD = [
    "", " ", "   ", "The fox", "  two spaces   three", " a\n\nb\r\n\tc ", "007 12345", "größer Ελλάδα",
    "\U0001f600 \U0001f468\u200d\U0001f469 日本語", "<s></s><unk>", "a" * 300, "▅ \0 \x7f", FOX * 3,
]  # fmt: skip


def tokenizer_of(metadata: dict[str, MetadataValue]) -> Tokenizer:
    return Tokenizer({key: value.value for key, value in metadata.items()})


@pytest.fixture(scope="module")
def trained() -> dict[str, MetadataValue]:
    return train_vocabulary([VARIED], 512, False, len(VARIED.encode()))


@pytest.mark.parametrize("text", HARD)
def test_ids_are_those_of_sentencepiece(text: str, monkeypatch: pytest.MonkeyPatch):
    models: list[sentencepiece.SentencePieceProcessor] = []
    train = vocabulary._train_sentencepiece
    monkeypatch.setattr(
        vocabulary, "_train_sentencepiece", lambda *args: models.append(train(*args)) or models[0]
    )
    tokenizer = tokenizer_of(train_vocabulary([VARIED], 512, False, len(VARIED.encode())))
    ids = tokenizer.encode(text, bos=False, special=False)
    assert ids == models[0].encode(text)
    assert tokenizer.decode(ids) == text


def test_the_metadata(trained: dict[str, MetadataValue]):
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in trained.items()}
    scalars = {key: value.value for key, value in values.items() if np.ndim(value.value) == 0}
    assert scalars == {
        "model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
        "add_bos_token": True, "add_eos_token": False, "add_space_prefix": True,
    }  # fmt: skip
    kinds = values["token_type"].value
    assert len(values["tokens"].value) == len(values["scores"].value) == len(kinds) == 512
    assert kinds.tolist() == [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 253]
    tokens = values["tokens"].value
    assert tokens[:3] == [b"<unk>", b"<s>", b"</s>"] and tokens[3] == b"<0x00>"
    assert not any(len(t) > 1 and any(d in t for d in b"0123456789") for t in tokens[259:])
    assert not any(b"\n" in t for t in tokens)


def test_training_again_gives_the_same_and_says_nothing(
    trained: dict[str, MetadataValue], capfd: pytest.CaptureFixture[str]
):
    retrained = train_vocabulary([VARIED], 512, False, len(VARIED.encode()))
    assert retrained.keys() == trained.keys()
    assert all(np.array_equal(retrained[key].value, trained[key].value) for key in trained)
    assert capfd.readouterr() == ("", "")


def test_how_many_tokens_a_text_supports():
    assert [supported_size(n) for n in (0, 81_919, 98_304, 98_303, 1 << 20)] == [
        320, 320, 384, 320, 4096,
    ]  # fmt: skip


def test_automatic_sizes():
    def trained_size(text: str, requested_size: int, nbytes: int) -> int:
        return tokenizer_of(train_vocabulary([text], requested_size, True, nbytes)).vocab_size

    assert trained_size(VARIED, 4096, 100_000) == 384  # as the size of the text allows
    assert trained_size(VARIED, 330, 100_000) == 330  # not more than wanted
    assert trained_size("ab", 4096, 2) == 265  # a, b, space, and what they join to


def test_a_text_too_small_for_a_size_names_the_largest_that_would_do():
    text = "some words, some more words"
    with pytest.raises(InputError, match=r"too small for 4000 tokens; at most \d+ would") as raised:
        train_vocabulary([text], 4000, False, len(text))
    max_size = int(str(raised.value).split("at most ")[1].split()[0])
    assert tokenizer_of(train_vocabulary([text], max_size, False, len(text))).vocab_size == max_size
    with pytest.raises(InputError, match=f"at most {max_size} would do"):
        train_vocabulary([text], max_size + 1, False, len(text))


def test_sizes_below_the_least():
    with pytest.raises(InputError, match="--vocab-size: 261 is too small; it must be 262 or more"):
        train_vocabulary([VARIED], 261, True, len(VARIED))
    for text in (VARIED, "a", "a b c", "   ab"):
        assert tokenizer_of(train_vocabulary([text], 262, False, len(text))).vocab_size == 262


def test_more_characters_than_tokens_are_spelled_in_bytes():
    text = "".join(chr(0x4E00 + i * i % 3001) for i in range(20_000))
    tokenizer = tokenizer_of(train_vocabulary([text], 400, False, 60_000))
    characters = sum(len(token.decode()) == 1 for token in tokenizer.tokens[259:])
    assert 0 < characters <= (400 - 259) // 2 + 1  # with the space
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_lines_are_learned_from_too():
    line = "wonderful " * (vocabulary.STRETCH_CHARACTERS // 2)
    tokens = tokenizer_of(train_vocabulary([line], 320, True, len(line))).tokens
    assert "\u2581wonderful".encode() in tokens


def test_a_sample_is_spread_over_the_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vocabulary, "SAMPLED_NBYTES", 100_000)
    sample = list(
        vocabulary._sample_texts((chr(0x100 + i) * 10_000 for i in range(150)), 3_000_000)
    )
    assert 70_000 <= sum(len(text.encode()) for text in sample) <= 100_000
    sampled = [ord(text[0]) - 0x100 for text in sample]
    assert max(np.diff([0, *sampled, 149])) <= 40
    assert list(vocabulary._sample_texts(["abc", "d"], 4)) == ["abc", "d"]


# ---- from a file


def test_the_vocabulary_of_a_file(tmp_path: Path, trained: dict[str, MetadataValue]):
    path = tmp_path / "model.gguf"
    gguf.write_gguf(path, {"general.name": MetadataValue("string", "x"), **trained}, {})
    loaded = vocabulary_of(path)
    assert loaded.keys() == trained.keys()
    assert tokenizer_of(loaded).encode(FOX) == tokenizer_of(trained).encode(FOX)


def test_files_without_a_usable_vocabulary(tmp_path: Path):
    path = tmp_path / "model.gguf"
    with pytest.raises(InputError, match=r"model\.gguf: cannot be read: no such"):
        vocabulary_of(path)
    gguf.write_gguf(path, {"general.name": MetadataValue("string", "x")}, {})
    with pytest.raises(
        InputError, match=r"model\.gguf: the metadata has no tokenizer\.ggml\.model"
    ):
        vocabulary_of(path)
    gguf.write_gguf(path, {"tokenizer.ggml.model": MetadataValue("string", "mine")}, {})
    with pytest.raises(InputError, match=r"model\.gguf: .*'mine'; these are known: llama, gpt2"):
        vocabulary_of(path)
    path.write_bytes(b"nothing that could be a model")
    with pytest.raises(
        InputError, match=r"model\.gguf: this is not a GGUF file: it begins with 'noth'"
    ):
        vocabulary_of(path)
