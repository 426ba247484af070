"""The vocabulary of a checkpoint folder as GGUF metadata: SentencePiece or byte-level BPE, special ids, chat template.

tokenizer.model has priority, as in llama.cpp's converter, over tokenizer.json. Missing ids become unused tokens.
"""

import string
import sys
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.checkpoint_folder import Checkpoint
from packtrain.conversion.hugging_face.plain_checkpoint import (
    as_list,
    as_object,
    read_json,
    read_text,
)
from packtrain.conversion.hugging_face.tokenizer_agreement import check_agreement
from packtrain.conversion.hugging_face.tokenizer_pieces import read_pieces
from packtrain.conversion.hugging_face.tokenizer_steps import SPACE, flattened, read_steps
from packtrain.data.tokenizer import BYTE, CONTROL, KEYS, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer
from packtrain.gguf import Value
from packtrain.models.arch.architecture import Family

UNUSED = 5
MODEL = "tokenizer.model"
FILLED_SCORE, ADDED_SCORE = -10_000.0, -1_000.0
# names in the checkpoint and in GGUF
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# of Gemma 4: special, but to be seen in answers, where thoughts and calls are read
SHOWN = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>',
)  # fmt: skip
STRIPS = ("lstrip", "rstrip", "single_word")
CONTROLS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")  # control tokens that some folders call normal


def vocabulary_of(
    checkpoint: Checkpoint, count: int, family: Family, report: Callable[[str], object]
) -> dict[str, Value]:
    """The tokenizer.* metadata of `count` tokens; says what readers of them do otherwise than the files.

    Raises InputError if the files have none, or one that a GGUF cannot have.
    """
    folder = checkpoint.folder
    table = _Table(folder, count)
    model, steps = table.model, table.steps
    values = _from_sentencepiece(table, family.blank) if model else _from_json(table, family.merged)
    for id, added in _added_tokens(table.about).items():
        if id < count and (model or id not in table.ids.values()):
            table.put_added("tokenizer_config.json", id, added, model is not None)
    values |= _special_ids(checkpoint, table, family)
    templates, notes = _templates(folder, table.about), [*(steps.notes if steps else ())]
    values |= _added(table, values, str(templates), notes)
    if family.merged:  # as llama.cpp takes it to be, whatever the folder says
        values["add_bos_token"] = Value("bool", True)
    space = _space(table, family)
    if space is not None:
        values["add_space_prefix"] = Value("bool", space)
    metadata = {KEYS + name: value for name, value in values.items()} | templates
    raw = {key: value.value for key, value in metadata.items()}
    try:
        tokenizer = Tokenizer(raw | {"general.name": folder.resolve().name}, few=sys.maxsize)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    table.check_strips(tokenizer)
    joins = model is not None and not model.unigram and model.joins
    if joins:
        notes.append(
            "remove_extra_whitespaces is true: runs of spaces count as one there, and readers of a GGUF keep them"
        )
    reference, path = model.encoder(tokenizer.leads) if model else None, table.path
    path = path if table.fast else folder / MODEL
    check_agreement(path, table.fast, steps, reference, tokenizer, joins)
    for note in notes:
        report(f"{path}: {note}")
    return metadata


def _space(table: "_Table", family: Family) -> bool | None:
    """Whether readers put a space before a text."""
    flag_value = table.about.get("add_prefix_space")
    by_family = family.space_prefix
    steps = table.steps
    if steps is None:
        configured = flag_value if by_family is None else by_family
        model = table.model
        if isinstance(configured, bool) or model is None:
            return configured
        return model.leads if model.unigram or not model.leads else None  # as readers take it to be
    if by_family is None and isinstance(flag_value, bool) and flag_value != steps.space:
        raise InputError(
            f"{table.folder / 'tokenizer_config.json'}: add_prefix_space is"
            f" {flag_value}, and the steps of tokenizer.json"
            f" put {'a' if steps.space else 'no'} space before a text; both must say the same"
        )
    return steps.space if steps.pieces else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


class _Table:
    """The files of a vocabulary, and tokens, scores and types by id; unused by default."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.path = folder, folder / "tokenizer.json"
        about, special = (
            folder / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map")
        )
        self.about, self.fast = _optional(special) | _optional(about), _optional(self.path)
        self.model = read_pieces(folder / MODEL) if (folder / MODEL).exists() else None
        unigram = self.model is not None and self.model.unigram
        self.steps = read_steps(self.path, self.fast) if self.fast and not unigram else None
        if self.model and self.steps and not self.steps.pieces:
            raise InputError(
                f"{self.path} is no SentencePiece BPE as {MODEL} is; one of them must go"
            )
        self.tokens = [f"[PAD{i}]".encode() for i in range(count)]
        self.scores = np.full(count, FILLED_SCORE, np.float32)
        self.kinds = np.full(count, UNUSED, np.int32)
        self.ids: dict[str, int] = {}
        self.strips: list[tuple[str, int, str]] = []

    def put(self, file: str, id: Any, text: Any, kind: int, score: float = ADDED_SCORE) -> None:
        if type(id) is not int or not isinstance(text, str) or not 0 <= id < len(self.tokens):
            raise InputError(
                f"{self.folder / file}: token {id!r}: {str(text)[:40]!r} must be a text with an id from 0 to"
                f" {len(self.tokens) - 1}, as config.json has vocab_size {len(self.tokens)}"
            )
        self.tokens[id], self.scores[id], self.kinds[id] = text.encode(), score, kind
        self.ids[text] = id

    def put_added(self, file: str, id: Any, about: Any, spaced: bool = True) -> None:
        """A token added to the vocabulary: control if special, else user-defined; `spaced`: U+2581 is a space."""
        about = as_object(about)
        text = about.get("content")
        self.strips += [(file, id, flag) for flag in STRIPS if about.get(flag) is True]
        special = about.get("special") is True or (isinstance(text, str) and _looks_special(text))
        special = special and text not in SHOWN
        self.put(file, id, text, CONTROL if special else USER_DEFINED)
        if not special and spaced and SPACE in text:
            self.tokens[id] = text.replace(SPACE, " ").encode()

    def check_strips(self, tokenizer: Tokenizer) -> None:
        """Refuse tokens that take the whitespace beside them, but for those of which readers of GGUF know it."""
        for file, id, flag in self.strips:
            if id not in {"lstrip": tokenizer.swallow_before, "rstrip": tokenizer.swallow}.get(
                flag, ()
            ):
                raise InputError(
                    f"{self.folder / file}: added token {self.tokens[id].decode()!r}: {flag} is true, which a GGUF"
                    " vocabulary has for Phi-3 only, by the folder's name; it must be false"
                )

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


def _from_sentencepiece(table: _Table, blank: str) -> dict[str, Value]:
    """The pieces of the model, then added tokens. Ids beyond the model's vocabulary are dropped."""
    model = table.model
    assert model is not None
    for id, (text, kind, score) in enumerate(model.pieces[: len(table.tokens)]):
        unused = blank and text.startswith(blank)
        text = text.replace(SPACE, " ") if kind == USER_DEFINED else text
        table.put(MODEL, id, text, UNUSED if unused else kind, score)
    for text, id in _optional(table.folder / "added_tokens.json").items():
        if id not in range(len(table.tokens), 1 << 31):
            table.put("added_tokens.json", id, text, USER_DEFINED)
    if not model.unigram:
        return table.values("llama", "default", scores=True)
    return table.values("t5", "default", scores=True) | {
        "remove_extra_whitespaces": Value("bool", model.joins),
        "precompiled_charsmap": Value("u8", np.frombuffer(model.replacements, np.uint8)),
        "add_bos_token": Value("bool", "bos" in model.special),
        "add_eos_token": Value("bool", False),
    }


def _added_tokens(about: Mapping[str, Any]) -> dict[int, Any]:
    listed = as_object(about.get("added_tokens_decoder"))
    return {int(id): added for id, added in listed.items() if id.isdecimal()}


# ---- tokenizer.json ------------------------------------------------------------------------------------------


def _from_json(table: _Table, merged: str) -> dict[str, Value]:
    """Byte-level BPE, or SentencePiece's BPE, whose scores come from the merges, unless its kind has these, too."""
    path, fast, steps = table.path, table.fast, table.steps
    if steps is None:
        raise InputError(
            f"{table.folder}: there is no tokenizer.model and no tokenizer.json; a model needs a vocabulary"
        )
    model = fast["model"]
    vocabulary, merges, pieces = model["vocab"], steps.merges, steps.pieces
    ranks = {left + right: -i for i, (left, right) in reversed(list(enumerate(merges)))}
    for text, id in vocabulary.items():
        kind = NORMAL
        if pieces:
            kind = BYTE if len(text) == 6 and text.startswith("<0x") else NORMAL
            kind = UNKNOWN if text == model.get("unk_token") else kind
        table.put(path.name, id, text, kind, float(ranks.get(text, 0)))
    for about in map(as_object, as_list(fast.get("added_tokens"))):
        text = str(about.get("content"))
        is_typed = about.get("special") or (about.get("normalized") and steps.replaces)
        spelled = pieces and SPACE in text and not is_typed
        if spelled and text not in vocabulary:
            raise InputError(
                f"{path}: added token {text!r} is not found where a text has spaces, as in a GGUF vocabulary; its"
                " normalized must be true, and normalizer have Replace"
            )
        if not spelled and not (pieces and text == model.get("unk_token")):
            table.put_added(path.name, about.get("id"), about, pieces)
    if pieces and not merged:
        if len([*groupby(map("".join, merges))]) > len(ranks):
            raise InputError(
                f"{path}: merges that make one token must be side by side, as by a score"
            )
        return table.values("llama", "default", scores=True)
    joined = Value(
        "string", [f"{_visible(left)} {_visible(right)}".encode() for left, right in merges]
    )
    if pieces:
        return table.values(merged, merged, scores=True) | {"merges": joined}
    return table.values("gpt2", steps.pre, scores=False) | {"merges": joined}


def _visible(text: str) -> str:
    """The text of a merge with spaces as byte-level vocabularies write them."""
    return text.replace(" ", "\u0120")


# ---- special ids and templates -------------------------------------------------------------------------------


def _text(token: Any) -> str | None:
    """A token's text, which may be in an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _special_ids(checkpoint: Checkpoint, table: _Table, family: Family) -> dict[str, Value]:
    """bos, eos and so on: by text in the tokenizer's config, else by id in the model's, else as its family or pieces
    have them."""
    values_by_key = {}
    for name, key in SPECIAL.items():
        config_id = checkpoint.config.get(f"{name}_token_id")
        config_id = config_id[0] if isinstance(config_id, list) and config_id else config_id
        id = table.ids.get(_text(table.about.get(f"{name}_token")) or "", config_id)
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
    for name, id in table.model.special.items() if table.model else ():
        values_by_key.setdefault(f"{SPECIAL[name]}_token_id", Value("u32", id))
    return values_by_key


def _added(
    table: _Table, values: Mapping[str, Value], templates: str, notes: list[str]
) -> dict[str, Value]:
    """Whether to add BOS and EOS: from the post-processor, else from the tokenizer's config."""
    post_steps = flattened(table.path, "post_processor", table.fast.get("post_processor"))
    added_texts = [
        [text for step in post_steps for text in _around(table.path, step)[at]] for at in (0, 1)
    ]
    flags: dict[str, bool] = {}
    for name, texts, place in zip(("bos", "eos"), added_texts, ("before", "after"), strict=True):
        configured, id = table.about.get(f"add_{name}_token"), values.get(f"{name}_token_id")
        expected_texts = [table.tokens[id.value].decode()] if id else []
        if texts not in ([], expected_texts) and not all(text in templates for text in texts):
            raise InputError(
                f"{table.path}: post_processor puts {' '.join(texts)} {place} a text; a GGUF vocabulary can only put"
                f" {name.upper()} there, {' '.join(expected_texts) or 'which this one does not have'}"
            )
        if post_steps:
            flags[name] = texts == expected_texts != []
        elif isinstance(configured, bool) or table.fast:
            flags[name] = configured is True
        if isinstance(configured, bool) and configured != flags[name]:
            notes.append(
                f"post_processor counts, not add_{name}_token {configured} of tokenizer_config.json"
            )
    return {f"add_{name}_token": Value("bool", value) for name, value in flags.items()}


def _around(path: Path, step: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The special tokens that a step of the post-processor puts before a text, and after."""
    if step["type"] not in ("ByteLevel", "TemplateProcessing"):
        raise InputError(f"{path}: post_processor is {step['type']}; it must be TemplateProcessing")
    listed = [as_object(item) for item in as_list(step.get("single"))]
    at = next((i for i, item in enumerate(listed) if "Sequence" in item), len(listed))
    texts = [str(as_object(item.get("SpecialToken")).get("id")) for item in listed]
    return texts[:at], texts[at + 1 :]


def _templates(folder: Path, about: Mapping[str, Any]) -> dict[str, Value]:
    """The chat template, and others by name; those in files of their own replace the tokenizer's config's."""
    chat_template = about.get("chat_template")
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        chat_template = [
            {"name": name, "template": read_text(path)} for name, path in files.items()
        ]
    elif chat_template is None:
        chat_template = _optional(folder / "chat_template.json").get("chat_template")
    listed = (
        chat_template
        if isinstance(chat_template, list)
        else [{"name": "default", "template": chat_template}]
    )
    values_by_key: dict[str, Value] = {}
    allowed = string.ascii_letters + string.digits
    for entry in map(as_object, listed):
        name, template = (_text(entry.get(key)) for key in ("name", "template"))
        if name and template is not None:
            name = "".join(c if c in allowed else "_" for c in name)
            values_by_key["" if name == "default" else f".{name}"] = Value("string", template)
    values = {f"tokenizer.chat_template{name}": value for name, value in values_by_key.items()}
    template_names = [name[1:].encode() for name in values_by_key if name]
    if template_names:
        values["tokenizer.chat_templates"] = Value("string", template_names)
    return values
