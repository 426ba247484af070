"""The vocabulary of a checkpoint folder as GGUF metadata: SentencePiece or byte-level BPE, special ids, chat template.

tokenizer.model has priority, as in llama.cpp's converter, over tokenizer.json. Missing ids become unused tokens.
"""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from packtrain.convert.checkpoint import Checkpoint
from packtrain.convert.plain import as_list, as_object, read_json, read_text
from packtrain.convert.pretokenizer import pretokenizer_name
from packtrain.errors import InputError
from packtrain.gguf import Value
from packtrain.models.arch.architecture import Family
from packtrain.tokenizer import BYTE, CONTROL, KEYS, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer

UNUSED = 5
FILLED_SCORE, ADDED_SCORE = -10_000.0, -1_000.0
SPACE = "\u2581"
# names in the checkpoint and in GGUF
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# of Gemma 4: special, but to be seen in answers, where thoughts and calls are read
SHOWN = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>',
)  # fmt: skip
CONTROLS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")  # control tokens that some folders call normal


def vocabulary_of(checkpoint: Checkpoint, count: int, family: Family) -> dict[str, Value]:
    """The tokenizer.* metadata of `count` tokens. Raises InputError if the files have none."""
    folder = checkpoint.folder
    about = _optional(folder / "tokenizer_config.json")
    fast = _optional(folder / "tokenizer.json")
    table = _Table(folder, count)
    space = about.get("add_prefix_space") if family.space_prefix is None else family.space_prefix
    if (folder / "tokenizer.model").exists():
        leads = _fill_from_sentencepiece(table, folder / "tokenizer.model", about, family.blank)
        values = table.values("llama", "default", scores=True)
        if space is None and not leads:
            space = False
    elif fast:
        values = _from_json(table, folder / "tokenizer.json", fast, family.merged)
    else:
        raise InputError(
            f"{folder}: there is no tokenizer.model and no tokenizer.json; a model needs a vocabulary"
        )
    values |= _special_ids(checkpoint, about, table, family)
    values |= _added(about, fast)
    if family.merged:  # as llama.cpp takes it to be, whatever the folder says
        values["add_bos_token"] = Value("bool", True)
    if isinstance(space, bool):
        values["add_space_prefix"] = Value("bool", space)
    metadata = {KEYS + name: value for name, value in values.items()} | _templates(folder, about)
    try:
        Tokenizer({key: value.value for key, value in metadata.items()})
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    return metadata


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class _Table:
    """Tokens, scores and types by id; unused by default."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.tokens = [f"[PAD{i}]".encode() for i in range(count)]
        self.scores = np.full(count, FILLED_SCORE, np.float32)
        self.kinds = np.full(count, UNUSED, np.int32)
        self.ids: dict[str, int] = {}

    def put(self, file: str, id: Any, text: Any, kind: int, score: float = ADDED_SCORE) -> None:
        if type(id) is not int or not isinstance(text, str) or not 0 <= id < len(self.tokens):
            raise InputError(
                f"{self.folder / file}: token {id!r}: {str(text)[:40]!r} must be a text with an id from 0 to"
                f" {len(self.tokens) - 1}, as config.json has vocab_size {len(self.tokens)}"
            )
        self.tokens[id], self.scores[id], self.kinds[id] = text.encode(), score, kind
        self.ids[text] = id

    def put_added(self, file: str, id: Any, about: Any) -> None:
        """A token that was added to the vocabulary: control if special, else user-defined."""
        about = as_object(about)
        text = about.get("content")
        special = about.get("special") is True or (isinstance(text, str) and _looks_special(text))
        special = special and text not in SHOWN
        self.put(file, id, text, CONTROL if special else USER_DEFINED)
        if not special and SPACE in text:
            self.tokens[id] = text.replace(SPACE, " ").encode()

    def values(self, model: str, pre: str, *, scores: bool) -> dict[str, Value]:
        values_by_key = {
            "model": Value("string", model),
            "pre": Value("string", pre),
            "tokens": Value("string", self.tokens),
            "scores": Value("f32", self.scores),
            "token_type": Value("i32", self.kinds),
        }
        return (
            values_by_key if scores else {k: v for k, v in values_by_key.items() if k != "scores"}
        )


def _looks_special(text: str) -> bool:
    marked = text.startswith(("<|", "<\uff5c")) and text.endswith(("|>", "\uff5c>"))
    return marked or text in CONTROLS or (text.startswith("<unused") and text.endswith(">"))


# ---- SentencePiece -------------------------------------------------------------------------------------------


def _fill_from_sentencepiece(
    table: _Table, path: Path, about: Mapping[str, Any], blank: str
) -> bool:
    """Add the pieces of the model, then added tokens. Ids beyond the model's vocabulary are dropped.

    Returns whether the model puts a space in front of a text.
    """
    pieces, leads = _pieces(path)
    for id, (text, kind, score) in enumerate(pieces[: len(table.tokens)]):
        unused = blank and text.startswith(blank)
        table.put(path.name, id, text, UNUSED if unused else kind, score)
    beside = _optional(path.parent / "added_tokens.json")
    for text, id in beside.items():
        if id not in range(len(table.tokens), 1 << 31):
            table.put("added_tokens.json", id, text, USER_DEFINED)
    for id, added in _added_tokens(about).items():
        if id < len(table.tokens):
            table.put_added("tokenizer_config.json", id, added)
    return leads


def _pieces(path: Path) -> tuple[list[tuple[str, int, float]], bool]:
    """Text, type and score of each piece of a model, and whether it puts a space in front of a text."""
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        pieces = [
            (model.id_to_piece(id), _kind(model, id), model.get_score(id))
            for id in range(model.get_piece_size())
        ]
        return pieces, model.normalize("a").startswith("\u2581")
    except (OSError, RuntimeError, UnicodeDecodeError):
        raise InputError(f"{path}: this is not a SentencePiece model") from None


def _kind(model: sentencepiece.SentencePieceProcessor, id: int) -> int:
    if model.is_unknown(id):
        return UNKNOWN
    if model.is_control(id):
        return CONTROL
    if model.is_byte(id):
        return BYTE
    return UNUSED if model.is_unused(id) else NORMAL


def _added_tokens(about: Mapping[str, Any]) -> dict[int, Any]:
    listed = as_object(about.get("added_tokens_decoder"))
    return {int(id): added for id, added in listed.items() if id.isdecimal()}


# ---- tokenizer.json ------------------------------------------------------------------------------------------


def _from_json(table: _Table, path: Path, fast: Mapping[str, Any], merged: str) -> dict[str, Value]:
    """Byte-level BPE, or SentencePiece's BPE, whose scores come from the merges, unless its kind has these, too."""
    model = as_object(fast.get("model"))
    vocabulary, merges = model.get("vocab"), _merges(model.get("merges"))
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or merges is None:
        raise InputError(f"{path}: model must be a BPE with vocab and merges")
    pieces = model.get("byte_fallback") is True
    ranks = {left + right: -i for i, (left, right) in reversed(list(enumerate(merges)))}
    for text, id in vocabulary.items():
        kind = NORMAL
        if pieces:
            kind = BYTE if len(text) == 6 and text.startswith("<0x") else NORMAL
            kind = UNKNOWN if text == model.get("unk_token") else kind
        table.put(path.name, id, text, kind, float(ranks.get(text, 0)))
    for about in map(as_object, as_list(fast.get("added_tokens"))):
        if not (pieces and about.get("content") == model.get("unk_token")):
            table.put_added(path.name, about.get("id"), about)
    if pieces and not merged:
        return table.values("llama", "default", scores=True)
    joined = Value(
        "string", [f"{_visible(left)} {_visible(right)}".encode() for left, right in merges]
    )
    if pieces:
        return table.values(merged, merged, scores=True) | {"merges": joined}
    name = pretokenizer_name(path, fast, model.get("ignore_merges") is True)
    return table.values("gpt2", name, scores=False) | {"merges": joined}


def _merges(listed: Any) -> list[tuple[str, str]] | None:
    """Pairs, as lists or as two words with a space between."""
    if not isinstance(listed, list):
        return None
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else m for m in listed]
    sound = all(
        isinstance(p, list | tuple) and len(p) == 2 and all(isinstance(t, str) for t in p)
        for p in pairs
    )
    return [(p[0], p[1]) for p in pairs] if sound else None


def _visible(text: str) -> str:
    """The text of a merge with spaces as byte-level vocabularies write them."""
    return text.replace(" ", "\u0120")


# ---- special ids and templates -------------------------------------------------------------------------------


def _text(token: Any) -> str | None:
    """A token's text, which may be in an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _special_ids(
    checkpoint: Checkpoint, about: Mapping[str, Any], table: _Table, family: Family
) -> dict[str, Value]:
    """bos, eos and so on: by text in the tokenizer's config, else by id in the model's, else as the family has them."""
    values_by_key = {}
    for name, key in SPECIAL.items():
        given = checkpoint.config.get(f"{name}_token_id")
        given = given[0] if isinstance(given, list) and given else given
        id = table.ids.get(_text(about.get(f"{name}_token")) or "", given)
        if type(id) is int and 0 <= id < len(table.tokens):
            values_by_key[f"{key}_token_id"] = Value("u32", id)
    document = checkpoint.config.get("eod_token_id")
    if (
        type(document) is int
        and 0 <= document < len(table.tokens)
        and "eos_token_id" in values_by_key
    ):
        values_by_key["eot_token_id"] = values_by_key["eos_token_id"]
        values_by_key["eos_token_id"] = Value("u32", document)
    for key, text in family.special.items():
        if text in table.ids:
            values_by_key.setdefault(f"{key}_token_id", Value("u32", table.ids[text]))
    return values_by_key


def _added(about: Mapping[str, Any], fast: Mapping[str, Any]) -> dict[str, Value]:
    """Whether to add BOS and EOS: from the post-processor's template, else from the config."""
    found: dict[str, bool] = {}
    after = as_object(fast.get("post_processor"))
    for step in map(as_object, as_list(after.get("processors")) or [after]):
        if step.get("type") == "ByteLevel":
            found = {"bos": False, "eos": False} | found
        single = as_list(step.get("single")) if step.get("type") == "TemplateProcessing" else []
        for name, at in (("bos", 0), ("eos", -1)) if len(single) > 1 else ():
            text = as_object(as_object(single[at]).get("SpecialToken")).get("id")
            if text:
                found[name] = text == _text(about.get(f"{name}_token"))
    for name in ("bos", "eos"):
        if isinstance(about.get(f"add_{name}_token"), bool):
            found.setdefault(name, about[f"add_{name}_token"])
    return {f"add_{name}_token": Value("bool", value) for name, value in found.items()}


def _templates(folder: Path, about: Mapping[str, Any]) -> dict[str, Value]:
    """The chat template, and others by name."""
    given = about.get("chat_template")
    if given is None and (folder / "chat_template.jinja").exists():
        given = read_text(folder / "chat_template.jinja")
    if given is None:
        given = _optional(folder / "chat_template.json").get("chat_template")
    listed = given if isinstance(given, list) else [{"name": "default", "template": given}]
    values_by_key: dict[str, Value] = {}
    allowed = string.ascii_letters + string.digits
    for one in map(as_object, listed):
        name, template = (_text(one.get(key)) for key in ("name", "template"))
        if name and template is not None:
            name = "".join(c if c in allowed else "_" for c in name)
            values_by_key["" if name == "default" else f".{name}"] = Value("string", template)
    values = {f"tokenizer.chat_template{name}": value for name, value in values_by_key.items()}
    others = [name[1:].encode() for name in values_by_key if name]
    if others:
        values["tokenizer.chat_templates"] = Value("string", others)
    return values
