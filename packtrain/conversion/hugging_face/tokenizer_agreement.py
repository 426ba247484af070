"""Checks on hard texts that a GGUF vocabulary gives the ids of the tokenizer files that it is made from."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.plain_checkpoint import as_list, as_object
from packtrain.conversion.hugging_face.tokenizer_steps import SPACE, TokenizerSteps
from packtrain.data.tokenizer import NORMAL, USER_DEFINED, Tokenizer
from packtrain.data.tokenizer.encoding import merge_parts

EncodeFunction = Callable[[str], list[int]]
SAMPLE_TEXTS = r"""Hello World, it's I'M we'll|na\xefve Gr\xf6\xdfe caf\xe9s|nai\u0308ve cafe\u0301 \u212b \u2126|
\u041f\u0440\u0438\u0432\u0435\u0442|\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5|\u05e9\u05dc\u05d5\u05dd|
\u0645\u0631\u062d\u0628\u0627 \u0661\u0662|\u0928\u092e\u0938\u094d\u0924\u0947|\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35|
\u4f60\u597d\uff0c\u4e16\u754c\u3002|\u3053\u3093\u306b \u30ab\u30ca|\uc548\ub155 \uc138\uacc4|th\u1ebf gi\u1edbi|
\uff21\uff42\uff43\u3000\uff11\uff12|\ufb01\ufb02 \xbd \xb2 \u2167|\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469|
3.14159 12345678 1,000|def f(x):\n\treturn x**2  # ok|XMLHttp fooBar|a_b-c/d\\e@f#g$h%^&*~`<>|a\u2581b \xa0c\u200b"""
FRAME_TEXTS = r"{}| {}|{} |  {}   {}|{}\n{}|\n\n{}\n|\t{}\r\n|{}{}|({})|{}."
PAIRED, MAX_SPECIAL_NAMES = 1000, 16


def check_agreement(
    path: Path, fast: Mapping[str, Any], steps: TokenizerSteps | None, encode_pieces: EncodeFunction | None,
    tokenizer: Tokenizer, joins_spaces: bool = False,
) -> None:  # fmt: skip
    """Raise InputError with the first text to which the tokenizer gives other ids than the files do. `fast`:
    tokenizer.json's content, {} without; `steps`: its steps. A tokenizer.json is read by the tokenizers package where
    it is installed, else by its merges; a tokenizer.model by `encode_pieces`, which `joins_spaces` runs of spaces.
    Without the package, byte-level vocabularies are not checked."""
    texts: Iterable[str] = _hard_texts(tokenizer)
    normalize = steps.normalize_text if steps else _join_spaces if joins_spaces else str
    source = "the tokenizers package"
    reference = _tokenizers_encoder(path) if fast else None
    if steps and reference:
        # the first and last added tokens, in frames
        added_tokens = map(as_object, as_list(fast.get("added_tokens")))
        names = [str(token.get("content")) for token in added_tokens]
        outer_names = names[:MAX_SPECIAL_NAMES] + names[-MAX_SPECIAL_NAMES:]
        frames = steps.special_frames
        texts = chain(texts, (f.replace("{}", name) for name in outer_names for f in frames))
    elif reference is None:
        source, reference = "sentencepiece", encode_pieces
        if steps and steps.use_pieces:
            source, reference = "its list of merges", _merges_encoder(fast["model"]["vocab"], steps)
        user_ids = (id for id, kind in enumerate(tokenizer.token_types) if kind == USER_DEFINED)
        user_names = [tokenizer.tokens[id].decode(errors="replace") for id in user_ids]
        texts = (text for text in texts if not any(name in text for name in user_names))
    if reference is None:
        return
    for text in map(normalize, texts):
        expected_ids, actual_ids = reference(text), tokenizer.encode(text, bos=False, eos=False)
        if expected_ids != actual_ids:
            raise InputError(
                f"{path}: the GGUF's vocabulary would be another: {source} encodes {text[:60]!r} as"
                f" {expected_ids[:20]}, the GGUF as {actual_ids[:20]}"
            )


def _join_spaces(text: str) -> str:
    """Return the text without spaces around it, and with single spaces inside."""
    return " ".join(filter(None, text.split(" ")))


def _hard_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield built-in texts of all scripts, each within several others, then texts of three random tokens."""
    samples, frames = (
        escaped_texts.replace("\n", "").encode("latin-1").decode("unicode_escape").split("|")
        for escaped_texts in (SAMPLE_TEXTS, FRAME_TEXTS)
    )
    yield from (frame.replace("{}", sample) for sample in samples for frame in frames)
    rng = random.Random(1)
    ids = [id for id, token_type in enumerate(tokenizer.token_types) if token_type == NORMAL]
    decoded = (tokenizer.decode(rng.choices(ids, k=3)) for _ in range(PAIRED if ids else 0))
    yield from (text for text in decoded if "\ufffd" not in text)


def _tokenizers_encoder(path: Path) -> EncodeFunction | None:
    if find_spec("tokenizers") is None:
        return None
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no other kind
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _merges_encoder(vocabulary: Mapping[str, int], steps: TokenizerSteps) -> EncodeFunction:
    """Return an encoder of SentencePiece's BPE by its merges, which a GGUF stores as scores."""
    ranks = {(a.encode(), b.encode()): i for i, (a, b) in reversed([*enumerate(steps.merges)])}

    def encode(text: str) -> list[int]:
        text = (SPACE if steps.adds_space and text else "") + text.replace(" ", SPACE)
        merged_parts = merge_parts([c.encode() for c in text], lambda a, b: ranks.get((a, b)))
        part_ids = ((part, vocabulary.get(part.decode())) for part in merged_parts)
        return [
            token_id for part, id in part_ids
            for token_id in ([vocabulary[f"<0x{b:02X}>"] for b in part] if id is None else [id])
        ]  # fmt: skip

    return encode
