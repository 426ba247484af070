"""All names of pre-tokenizers against llama.cpp: ids, added tokens and cleaned texts.

    python -m benchmarks.pretokenizers VOCAB.gguf SCORES.gguf [--texts 2000] [--every 1] [--seed 1] [--names NAME…]

VOCAB is a byte-level vocabulary: each name is written into a copy of it. For names of vocabularies without an alphabet
of bytes, SCORES, one of SentencePiece, gives the tokens and the merges. Each name also gets a vocabulary that merges
any two neighbours (tests/vocabularies.py). --record writes what llama.cpp says with those to a file in tests/goldens/.
llama.cpp comes as the package llama-cpp-python. Exit code 0 if nothing differs.
"""

import argparse
import ctypes
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.tokenizers import Theirs, texts
from packtrain import gguf
from packtrain.data.tokenizer import Tokenizer
from packtrain.data.tokenizer.split_rules import RULES, RULES_BY_NAMES
from tests.vocabularies import PIECES, checksum, merging_metadata, pieces_metadata, random_texts

GOLDEN, RECORDED = Path("tests/goldens/pretokenizers.json"), 24  # texts
WRITTEN = {
    "_id": "u32", "_type": "i32", "scores": "f32", "charsmap": "i8", "lowercase": "bool", "accents": "bool",
    "prefix": "bool", "whitespaces": "bool",
}  # fmt: skip
KEYS = ("tokens", "merges", "token_type")


def scored(path: Path) -> dict[str, Any]:
    """Tokens of a SentencePiece vocabulary, and all merges that make one, the best score first."""
    metadata = gguf.GGUF(path).metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    index = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        text = token.decode()
        for at in range(1, len(text)):
            left_part, right_part = text[:at].encode(), text[at:].encode()
            if (
                left_part in index
                and right_part in index
                and b" " not in token
                and b"\n" not in token
            ):
                merges.append((-float(scores[i]), i, left_part + b" " + right_part))
    listed = [merge for _, _, merge in sorted(merges)]
    return {
        f"tokenizer.ggml.{k}": metadata[f"tokenizer.ggml.{k}"] for k in ("tokens", "token_type")
    } | {"tokenizer.ggml.merges": listed}


def real(path: Path) -> dict[str, Any]:
    metadata = gguf.GGUF(path).metadata
    return {key: metadata[key] for key in (f"tokenizer.ggml.{k}" for k in KEYS)}


def written(path: Path, metadata: dict[str, Any]) -> Path:
    """A file with a vocabulary and nothing else."""
    said = {"general.architecture": gguf.MetadataValue("string", "llama")}
    for key, value in metadata.items():
        suffixes = (end for end in WRITTEN if key.endswith(end))
        said[key] = gguf.MetadataValue(next((WRITTEN[end] for end in suffixes), "string"), value)
    gguf.write_gguf(path, said, {})
    return path


def lines(seed: int, count: int, every: int) -> Iterator[tuple[str, bool]]:
    """Random texts, and those of benchmarks.tokenizers with one of `every` blocks of code points."""
    for n, text in enumerate(random_texts(seed, count)):
        yield text, n % 2 == 0
    for n, sample in enumerate(texts(random.Random(seed), 0, [])):
        if n % every == 0:
            yield sample


def cleaned(peer: Theirs, ids: list[int]) -> str:
    """The text of ids in llama.cpp."""
    id_array, buffer = (
        (llama_cpp.llama_token * len(ids))(*ids),
        ctypes.create_string_buffer(1 << 16),
    )
    size = llama_cpp.llama_detokenize(
        peer.vocab, id_array, len(ids), buffer, len(buffer), False, False
    )
    return buffer.raw[:size].decode(errors="replace")


def encode_with_special(peer: Theirs, text: bytes) -> list[int]:
    """The ids of a text in llama.cpp, with what it adds before and after."""
    buffer = (llama_cpp.llama_token * (len(text) + 4))()
    count = llama_cpp.llama_tokenize(peer.vocab, text, len(text), buffer, len(buffer), True, False)
    return list(buffer[:count])


def compare(path: Path, seed: int, count: int, every: int) -> tuple[int, int]:
    """How many texts there were, and how many differ in ids or in the text that comes back."""
    metadata, peer = gguf.GGUF(path).metadata, Theirs(path)
    sides = [
        Tokenizer(metadata, compile_threshold=sys.maxsize),
        Tokenizer(metadata, compile_threshold=0),
    ]
    wrong, done = int(sides[0].encode("ab", special=False) != encode_with_special(peer, b"ab")), 0
    # whose pieces are [UNK_BYTE_…] there
    spells = metadata.get("tokenizer.ggml.pre") != "whitespace"
    for text, special in lines(seed, count, every):
        done += 1
        expected = peer.encode(text, special)
        our_ids = [t.encode(text, bos=False, eos=False, special=special) for t in sides]
        is_equal = our_ids == [expected, expected]
        if done <= count and spells:
            is_equal &= sides[0].decode(expected, clean=True) == cleaned(peer, expected)
        if not is_equal:
            wrong += 1
            print(f"  {text[:60]!r} differs, special={special}")
    llama_cpp.llama_model_free(peer.model)
    return done, wrong


def record(folder: Path) -> None:
    """Write checksums of the ids that llama.cpp has for some texts, by rule."""
    checksums = {}
    joining_vocabs = {
        name: merging_metadata(name) for name in (names.split()[0] for names in RULES_BY_NAMES)
    }
    for name, metadata in (
        joining_vocabs | {name: pieces_metadata(name) for name in PIECES}
    ).items():
        peer = Theirs(written(folder / "vocab.gguf", metadata))
        checksums[name] = [checksum(peer.encode(text, False)) for text in random_texts(7, RECORDED)]
    rows = (f'  "{name}": {json.dumps(sums)}' for name, sums in checksums.items())
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("vocabulary", type=Path, metavar="VOCAB.gguf")
    parser.add_argument("scores", type=Path, metavar="SCORES.gguf")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--every", type=int, default=1, help="one of so many blocks of code points")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--names", nargs="+", default=[*RULES, *PIECES])
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    failed = total = 0
    merge_metadata, score_metadata = real(args.vocabulary), scored(args.scores)
    with tempfile.TemporaryDirectory() as folder:
        if args.record:
            record(Path(folder))
        for name in args.names:
            made_metadata = pieces_metadata(name) if name in PIECES else merging_metadata(name)
            sides = {"made": made_metadata}
            if name in RULES:
                sides["given"] = made_metadata | (
                    merge_metadata if RULES[name].byte_level else score_metadata
                )
            for kind, metadata in sides.items():
                path = written(Path(folder) / "vocab.gguf", metadata)
                done, wrong = compare(path, args.seed, args.texts, args.every)
                print(f"{name}, {kind}: {wrong} of {done:,} texts differ", flush=True)
                failed, total = failed + wrong, total + done
    print(f"{len(args.names)} names: {failed} of {total:,} texts differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
