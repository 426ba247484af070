"""Vocabularies against llama.cpp: ids of random texts and of every code point, pieces, ends.

    python -m benchmarks.tokenizers VOCAB.gguf… [--texts 2000] [--seed 1]

llama.cpp comes as the package llama-cpp-python, which this project does not install. Exit code 0 if nothing differs.
"""

import argparse
import ctypes
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import llama_cpp

from packtrain.data.tokenizer import NORMAL, Tokenizer
from packtrain.gguf import GGUF

UNITS = (
    *"aBcDeZ  \n\t\r0123456789.,!?/-_=$+<>^~|`\"'",
    *"\u4e2d\u6587\u3002\u3001\u65e5\ud55c\u00c4\u00df\u00f1\u0391\u03b2\u0416\u0434\u0905\u0661\u2167\u00bd\u00b2",
    *"\u00a0\u2003\u3000\u0085\x0b\x1c\x00\u0301\u20e3\u0903\U0001f600\u200d\u20ac\u2581",
    "'s", "'RE", " don't", "\n\n", "   ", "  \n ", "1234567", "HelloWorld", "hello\u00c4World ", "...\n", "://",
)  # fmt: skip
BLOCK = 500  # code points in a text
COUNT = 1 << 16  # ids that a text may have


class Theirs:
    """The vocabulary of a file in llama.cpp."""

    def __init__(self, path: Path) -> None:
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self._ids = (llama_cpp.llama_token * COUNT)()

    def encode(self, text: str, special: bool) -> list[int]:
        raw = text.encode()
        count = llama_cpp.llama_tokenize(
            self.vocab, raw, len(raw), self._ids, COUNT, False, special
        )
        return list(self._ids[:count])

    def piece(self, id: int) -> bytes:
        buffer = ctypes.create_string_buffer(1024)
        size = llama_cpp.llama_token_to_piece(self.vocab, id, buffer, 1024, 0, True)
        return buffer.raw[:size]

    def eog_ids(self, count: int) -> set[int]:
        return {id for id in range(count) if llama_cpp.llama_vocab_is_eog(self.vocab, id)}


def texts(draw: random.Random, count: int, names: list[str]) -> Iterator[tuple[str, bool]]:
    """Letters of many scripts, spaces of all kinds, names of special tokens; every code point; and what names are."""
    points = [c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000]
    common = points[:0x3000]
    for _ in range(count):
        units = draw.choices(UNITS, k=draw.randint(1, 30))
        units += draw.choices(names, k=draw.randint(0, 2)) if names else []
        units += map(chr, draw.choices(draw.choice((common, points)), k=4))
        draw.shuffle(units)
        yield "".join(units), True
        yield "".join(units), False
    for i in range(0, len(points), BLOCK):
        yield "".join(f"a{c}a{c}{c}. {c}\n" for c in map(chr, points[i : i + BLOCK])), False


def compare(path: Path, draw: random.Random, count: int) -> tuple[int, int]:
    """How many texts and tokens there were, and how many of them differ."""
    metadata, peer = GGUF(path).metadata, Theirs(path)
    tokenizer, compiled = (
        Tokenizer(metadata, compile_threshold=sys.maxsize),
        Tokenizer(metadata, compile_threshold=0),
    )
    names = [
        t.decode()
        for t, kind in zip(tokenizer.tokens, tokenizer.token_types, strict=True)
        if kind != NORMAL
    ]
    wrong, done = 0, 0
    for text, special in texts(draw, count, names[:300]):
        done += 1
        expected = peer.encode(text, special)
        our_ids = [
            t.encode(text, bos=False, eos=False, special=special) for t in (tokenizer, compiled)
        ]
        if our_ids != [expected, expected]:
            wrong += 1
            print(f"{path.name}: {text[:60]!r} differs, special={special}")
    wrong += sum(tokenizer.piece(id) != peer.piece(id) for id in range(tokenizer.vocab_size))
    wrong += peer.eog_ids(tokenizer.vocab_size) != set(tokenizer.eog_ids)
    return done + tokenizer.vocab_size, wrong


def vectors(path: Path) -> tuple[int, int]:
    """How many of the vectors beside a file there are, and how many give other ids."""
    input_path, expected_path = Path(f"{path}.inp"), Path(f"{path}.out")
    if not input_path.exists() or not expected_path.exists():
        return 0, 0
    inputs = input_path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    tokenizer, lines = Tokenizer(GGUF(path).metadata), expected_path.read_text().split("\n")
    wrong = 0
    for text, line in zip(inputs, lines, strict=False):
        wrong += tokenizer.encode(text, bos=False, eos=False, special=False) != [
            *map(int, line.split())
        ]
    return len(inputs), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("vocabularies", nargs="+", type=Path, metavar="VOCAB.gguf")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    failed = 0
    for path in args.vocabularies:
        done, wrong = compare(path, random.Random(args.seed), args.texts)
        listed, failures = vectors(path)
        print(
            f"{path.name}: {wrong} of {done:,} texts and pieces differ, {failures} of {listed} vectors"
        )
        failed += wrong + failures
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
