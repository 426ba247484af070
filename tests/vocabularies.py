"""Vocabularies that merge any two neighbours, so that ids show where words end, and texts that are hard to split."""

import random
from functools import cache
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np

from packtrain.data.tokenizer import BYTE, CONTROL, NORMAL, USER_DEFINED
from packtrain.data.tokenizer.bpe import ALPHABET
from packtrain.data.tokenizer.split_rules import RULES
from packtrain.data.tokenizer.token_table import UNUSED

UNITS = [
    *"aBcDeZ  \n\t\r0123456789.,!?/-_=$+<>^~|`\"'()",
    *"\u4e2d\u6587\u3002\u3001\u65e5\ud55c\u00c4\u00df\u00f1\u0391\u03b2\u0416\u0434\u0905\u0661\u2167\u00bd\u00b2",
    *"\u00a0\u2003\u3000\u0085\x0b\x1c\x00\u0301\u20e3\u0903\U0001f600\u200d\u20ac\u2581\u01c5\u02b0\u212a\u3105",
    *"\U00020000\U0002a6df\U00031350\U00011f50\U0001e08f\U0001fae8\uf900\u3007\ufb01\U0001e900\u1f00\u2fff\uff66",
    "'s", "'RE", " don't", "\n\n", "   ", "  \n ", "1234567", "HelloWorld", "hello\u00c4World ", "...\n", "://",
    "IMGIMGABCZ", "<sentinel:12>", "12345678901", "\n\n\n", "    ", "a b c", "\u0905\u094d\u0915 \u0905",
    "\u0e01\u0e34", "\uac00\ud7a3\u3131", "\u201c\u2026", "\u0661\u0662\u0663\u0664", "\u00bd12", " ,", " .", " 's",
    "\uff01\uff0c", " 't", " ' ", " 've", "\u0085\u2028", "\u0627\u0644 \u0639",
]  # fmt: skip


def random_texts(seed: int, count: int, max_units: int = 40) -> list[str]:
    """Random texts of the units."""
    draw = random.Random(seed)
    return ["".join(draw.choices(UNITS, k=draw.randint(1, max_units))) for _ in range(count)]


def checksum(ids: list[int]) -> int:
    """Of the ids of a text, for tests/goldens/pretokenizers.json."""
    return crc32(np.array(ids, np.int32).tobytes())


def merging_metadata(name: str) -> dict[str, Any]:
    """The metadata of a vocabulary for the pre-tokenizer of this name."""
    spelled = RULES[name].byte_level
    tokens, merges = _letters() if spelled else _characters()
    kinds = [BYTE if token.startswith(b"<0x") else NORMAL for token in tokens]
    return {
        "tokenizer.ggml.model": "whitespace" if name == "whitespace" else "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@cache
def _letters() -> tuple[list[bytes], list[bytes]]:
    """All bytes and all pairs of bytes, the merges in any order."""
    letters = [letter.encode() for letter in ALPHABET.values()]
    pairs = list(product(letters, letters))
    random.Random(1).shuffle(pairs)
    return [*letters, *(a + b for a, b in pairs)], [a + b" " + b for a, b in pairs]


@cache
def _characters() -> tuple[list[bytes], list[bytes]]:
    """Most characters of the units and all pairs of them, words of line breaks, and most bytes."""
    characters = sorted({c for unit in UNITS for c in unit} - set(" \n\0"))
    vocab_chars = [c.encode() for n, c in enumerate(characters) if n % 7 or c == "\u2581"]
    pairs = list(product(vocab_chars, vocab_chars))
    random.Random(1).shuffle(pairs)
    named = [b"<0x%02X>" % b for b in range(256) if b % 5]
    tokens = [*named, *vocab_chars, *(a + b for a, b in pairs), b"\n\n", b"\n\n\n"]
    return list(dict.fromkeys(tokens)), [a + b" " + b for a, b in pairs]


# ---- WordPiece and Unigram

PIECES = {
    "bert": {},
    "bert cased": {"normalizer.lowercase": False},
    "bert accents": {"normalizer.strip_accents": False},
    "t5": {},
    "t5 spaces": {"add_space_prefix": True, "remove_extra_whitespaces": True},
    "t5 one space": {"add_space_prefix": True},
}
REPLACED = {
    "\ufb01": "fi", "\u00c4": "A", "\u3000": " ", "\u00a0": " ", "hello": "HI", "he": "Z", "\u0905\u094d": "\u0905",
    "\u0301": "", "\uff0c": ",", "'R": "'r", "\U0001f600": ":)",
}  # fmt: skip


def pieces_metadata(name: str) -> dict[str, Any]:
    """The metadata of a WordPiece or Unigram vocabulary of characters and some sequences of them."""
    kind, draw = name.split()[0], random.Random(3)
    characters = sorted({c for unit in UNITS for c in unit + unit.lower()} - set(" \n\0\u2581"))
    vocab_chars = [c for n, c in enumerate(characters) if n % 7]
    words = vocab_chars + [
        "".join(draw.choices(vocab_chars, k=draw.randint(2, 4))) for _ in range(4000)
    ]
    words += ["".join(draw.choices("abcdez's12.", k=draw.randint(2, 6))) for _ in range(2000)]
    words += [f"\u2581{word}" for word in words if draw.random() < 0.7]
    words += (
        ["\u2581", "\u2581\u2581", "hel", "hello", "IMGIMG", "12345", "don't"]
        if kind == "t5"
        else []
    )
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if kind == "bert" else ["<pad>", "</s>", "<unk>"]
    tokens = [word.encode() for word in dict.fromkeys(special + words)]
    kinds = [CONTROL] * len(special) + [NORMAL] * (len(tokens) - len(special))
    keys: dict[str, Any] = {"model": kind, "tokens": tokens, "token_type": kinds} | PIECES[name]
    if kind == "bert":
        keys |= {"bos_token_id": 2, "unknown_token_id": 1, "seperator_token_id": 3}
    else:
        for token, of in ((b"IMGIMG", USER_DEFINED), (b"12345", USER_DEFINED), (b"don't", UNUSED)):
            kinds[tokens.index(token)] = of
        scores = [-2.0 * draw.random() * len(token) ** 0.7 for token in tokens]
        keys |= {"scores": np.array(scores, np.float32)}
        keys |= {"precompiled_charsmap": np.frombuffer(charsmap(REPLACED), np.int8)}
    keys["token_type"] = np.array(kinds, np.int32)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def charsmap(replaced: dict[str, str]) -> bytes:
    """SentencePiece's precompiled map: the size of a double array, the array, and the replacements."""
    texts, text_offsets = b"", dict[bytes, int]()
    for key, replacement in replaced.items():
        text_offsets[key.encode()] = len(texts)
        texts += replacement.encode() + b"\0"
    nodes = [0] * 256
    used_slots, waiting = {0}, [(0, b"")]
    while waiting:
        node, prefix = waiting.pop()
        after = {
            key[len(prefix)] for key in text_offsets if key.startswith(prefix) and key != prefix
        }
        after |= {0} if prefix in text_offsets else set()  # 0 leads to the value
        base = next(b for b in range(256, 1 << 20) if not any(b ^ c in used_slots for c in after))
        offset = base if node == 0 else base ^ node
        assert offset < 1 << 21
        nodes += [0] * max(0, (base | 255) + 1 - len(nodes))
        nodes[node] |= offset << 10 | (0 in after) << 8
        for c in sorted(after):
            used_slots.add(base ^ c)
            nodes[base ^ c] = c if c else 1 << 31 | text_offsets[prefix]
            if c:
                waiting.append((base ^ c, prefix + bytes([c])))
    return len(nodes * 4).to_bytes(4, "little") + np.array(nodes, "<u4").tobytes() + texts
