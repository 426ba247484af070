"""Translates the vocabulary of a checkpoint folder into GGUF metadata: tokens, special ids, chat template.

tokenizer.model has priority over tokenizer.json, as in llama.cpp's converter. Missing ids become unused tokens."""

import string
import sys
from collections.abc import Callable, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import plain_checkpoint
from packtrain.conversion.hugging_face.checkpoint_folder import CheckpointFolder
from packtrain.conversion.hugging_face.plain_checkpoint import as_list, as_object, read_json
from packtrain.conversion.hugging_face.tokenizer_agreement import check_agreement
from packtrain.conversion.hugging_face.tokenizer_pieces import read_pieces
from packtrain.conversion.hugging_face.tokenizer_steps import SPACE, flatten_steps, read_steps
from packtrain.data.tokenizer import BYTE, CONTROL, KEYS, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer
from packtrain.gguf import MetadataValue
from packtrain.models.arch.architecture import Family

UNUSED_TYPE = 5
MODEL = "tokenizer.model"
FILLED_SCORE, ADDED_SCORE = -10_000.0, -1_000.0
# GGUF's name of each special token, by the checkpoint's name
SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# special tokens of Gemma 4 that stay visible in answers, where thoughts and calls are parsed
VISIBLE_TOKENS = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>',
)  # fmt: skip
STRIP_FLAGS = ("lstrip", "rstrip", "single_word")
CONTROLS = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")  # control tokens that some folders call normal


def vocabulary_metadata(
    checkpoint: CheckpointFolder, vocab_size: int, family: Family, report: Callable[[str], object]
) -> dict[str, MetadataValue]:
    """Return the tokenizer.* metadata of `vocab_size` tokens; report where GGUF readers will differ from the files.
    Raises InputError if the folder has no vocabulary, or one that a GGUF cannot store."""
    folder, table = checkpoint.folder, _VocabularyFiles(checkpoint.folder, vocab_size)
    model, steps = table.piece_model, table.steps
    values = _from_sentencepiece(table, family.blank) if model else _from_json(table, family.merged)
    chat_templates, notes = _chat_templates(folder, table.about), [*(steps.notes if steps else ())]
    table.put_config_tokens(notes)
    values |= _special_ids(checkpoint, table, family)
    values |= _bos_eos_flags(table, values, str(chat_templates), notes)
    if family.merged:  # llama.cpp assumes it, whatever the folder says
        values["add_bos_token"] = MetadataValue("bool", True)
    if (space_prefix := _space_prefix(table, family)) is not None:
        values["add_space_prefix"] = MetadataValue("bool", space_prefix)
    metadata = {KEYS + name: value for name, value in values.items()} | chat_templates
    raw = {k: v.value for k, v in metadata.items()} | {"general.name": folder.resolve().name}
    try:
        tokenizer = Tokenizer(raw, compile_threshold=sys.maxsize)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    table.check_strips(tokenizer)
    metadata |= _extra_ends(checkpoint, tokenizer, raw, notes)
    joins_spaces = model is not None and not model.unigram and model.joins_spaces
    if joins_spaces:
        fact = "remove_extra_whitespaces is true: runs of spaces count as one there"
        notes.append(f"{fact}, and readers of a GGUF keep them")
    encode_reference = model.encoder(tokenizer.strips_leading_space) if model else None
    path = table.path if table.fast else folder / MODEL
    check_agreement(path, table.fast, steps, encode_reference, tokenizer, joins_spaces)
    for note in notes:
        report(f"{path}: {note}")
    return metadata


def _space_prefix(table: "_VocabularyFiles", family: Family) -> bool | None:
    """Return GGUF's add_space_prefix: whether a space is put before a text; None: no key. Raises InputError."""
    flag_value = table.about.get("add_prefix_space")
    by_family = family.space_prefix
    steps = table.steps
    if steps is None:
        configured = flag_value if by_family is None else by_family
        model = table.piece_model
        if isinstance(configured, bool) or model is None:
            return configured
        return model.leads if model.unigram or not model.leads else None  # None: readers assume one
    if by_family is None and isinstance(flag_value, bool) and flag_value != steps.adds_space:
        raise InputError(
            f"{table.folder / 'tokenizer_config.json'}: add_prefix_space is"
            f" {flag_value}, and the steps of tokenizer.json"
            f" put {'a' if steps.adds_space else 'no'} space before a text; both must say the same"
        )
    return steps.adds_space if steps.use_pieces else None


def _optional(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file; {} if it does not exist."""
    return read_json(path) if path.exists() else {}


class _VocabularyFiles:
    """The files of a vocabulary, and its tokens, scores and types by id; ids without a token are unused."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder, self.path = folder, folder / "tokenizer.json"
        about, special_path = (
            folder / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map")
        )
        self.about, self.fast = _optional(special_path) | _optional(about), _optional(self.path)
        self.piece_model = read_pieces(folder / MODEL) if (folder / MODEL).exists() else None
        is_unigram = self.piece_model is not None and self.piece_model.unigram
        self.steps = read_steps(self.path, self.fast) if self.fast and not is_unigram else None
        if self.piece_model and self.steps and not self.steps.use_pieces:
            fact = f"{self.path} is no SentencePiece BPE as {MODEL} is; one of them must go"
            raise InputError(fact)
        self.tokens = [f"[PAD{i}]".encode() for i in range(vocab_size)]
        self.scores = np.full(vocab_size, FILLED_SCORE, np.float32)
        self.token_types = np.full(vocab_size, UNUSED_TYPE, np.int32)
        self.ids: dict[str, int] = {}
        self.strip_flags: list[tuple[str, int, str]] = []

    def put(self, file: str, id: Any, text: Any, kind: int, score: float = ADDED_SCORE) -> None:
        """Store token `id` with its text, type (`kind`) and score. InputError names `file` for a bad id or text."""
        if type(id) is not int or not isinstance(text, str) or not 0 <= id < len(self.tokens):
            raise InputError(
                f"{self.folder / file}: token {id!r}: {str(text)[:40]!r} must be a text with an id from 0 to"
                f" {len(self.tokens) - 1}, as config.json has vocab_size {len(self.tokens)}"
            )
        self.tokens[id], self.scores[id], self.token_types[id] = text.encode(), score, kind
        self.ids[text] = id

    def put_added_token(self, file: str, id: Any, about: Any, restores_spaces: bool = True) -> None:
        """Store the added token that `about`, its entry in `file`, describes: control if special, else user-defined;
        with `restores_spaces`, U+2581 is a space."""
        about = as_object(about)
        text = about.get("content")
        self.strip_flags += [(file, id, flag) for flag in STRIP_FLAGS if about.get(flag) is True]
        special = about.get("special") is True or (isinstance(text, str) and _is_special_text(text))
        special = special and text not in VISIBLE_TOKENS
        self.put(file, id, text, CONTROL if special else USER_DEFINED)
        if not special and restores_spaces and SPACE in text:
            self.tokens[id] = text.replace(SPACE, " ").encode()

    def put_config_tokens(self, notes: list[str]) -> None:
        """Store tokens that tokenizer_config.json adds or makes special; notes others. InputError if files differ."""
        file, about, has_pieces = "tokenizer_config.json", self.about, self.piece_model is not None
        listed = {t.get("id"): t for t in map(as_object, as_list(self.fast.get("added_tokens")))}
        added_ids, ids = _optional(self.folder / "added_tokens.json"), self.ids
        decoded = {str(i): {"content": t} for t, i in added_ids.items() if t not in ids}
        decoded |= as_object(about.get("added_tokens_decoder"))
        texts = dict(zip(ids.values(), ids, strict=True))
        for id, token in ((int(i), as_object(decoded[i])) for i in decoded if i.isdecimal()):
            stored_token = listed.get(id, {**token, "content": texts.get(id, token.get("content"))})
            for name in ("content", "special", *STRIP_FLAGS) if not has_pieces else ():
                if (stored_token.get(name) or False) != (token.get(name) or False):
                    fact = f"{self.folder / file}: added token {id}: {name} is {token.get(name)!r}"
                    raise InputError(
                        fact, f"it must be {stored_token.get(name)!r}, as in tokenizer.json"
                    )
            if id < len(self.tokens) and (has_pieces or id not in listed):
                self.put_added_token(file, id, token, has_pieces)
        special_tokens = [token for name, token in about.items() if name.endswith("_token")]
        special_tokens += as_list(about.get("additional_special_tokens"))
        extra_tokens = about.get("extra_special_tokens")  # a list since transformers 5
        special_tokens += [*as_list(extra_tokens), *as_object(extra_tokens).values()]
        for token in (t for t in special_tokens if _text(t) in ids):
            id, flags = ids[str(_text(token))], as_object(token)
            self.strip_flags += [(file, id, n) for n in STRIP_FLAGS if flags.get(n) is True]
            if self.token_types[id] == NORMAL:
                self.token_types[id] = CONTROL
        names = dict.fromkeys(filter(None, map(_text, special_tokens)))
        if missing_names := [repr(name) for name in names if name not in ids]:
            fact = f"the vocabulary has no tokens {', '.join(missing_names)}"
            notes.append(f"{fact}, as {file} says; ids in config.json count, if any")
        if about.get("split_special_tokens"):
            fact = "split_special_tokens is true: special tokens are split there"
            notes.append(f"{fact}, and not in a GGUF")

    def check_strips(self, tokenizer: Tokenizer) -> None:
        """Raise InputError for tokens that take whitespace beside them, except those for which `tokenizer` does."""
        known_ids = {"lstrip": tokenizer.lstrip_ids, "rstrip": tokenizer.rstrip_ids}
        for file_name, id, flag in self.strip_flags:
            if id not in known_ids.get(flag, ()):
                raise InputError(
                    f"{self.folder / file_name}: added token {self.tokens[id].decode()!r}: {flag} is true, which a GGUF"
                    " vocabulary has for Phi-3 only, by the folder's name; it must be false"
                )

    def values(self, model_name: str, pre: str, *, scores: bool) -> dict[str, MetadataValue]:
        """Return the metadata tokenizer.ggml.* of the vocabulary; `pre` names the pre-tokenizer."""
        values_by_key = {
            "model": MetadataValue("string", model_name), "pre": MetadataValue("string", pre),
            "tokens": MetadataValue("string", self.tokens), "scores": MetadataValue("f32", self.scores),
            "token_type": MetadataValue("i32", self.token_types),
        }  # fmt: skip
        return {k: v for k, v in values_by_key.items() if scores or k != "scores"}


def _is_special_text(text: str) -> bool:
    is_marked = text.startswith(("<|", "<\uff5c")) and text.endswith(("|>", "\uff5c>"))
    return is_marked or text in CONTROLS or (text.startswith("<unused") and text.endswith(">"))


# ---- SentencePiece -------------------------------------------------------------------------------------------


def _from_sentencepiece(table: _VocabularyFiles, unused_prefix: str) -> dict[str, MetadataValue]:
    """Return tokenizer.* metadata of a tokenizer.model: pieces (unused ones get the prefix), then added tokens."""
    model = table.piece_model
    assert model is not None
    for id, (token_text, token_type, score) in enumerate(model.pieces[: len(table.tokens)]):
        is_unused = unused_prefix and token_text.startswith(unused_prefix)
        token_text = token_text.replace(SPACE, " ") if token_type == USER_DEFINED else token_text
        table.put(MODEL, id, token_text, UNUSED_TYPE if is_unused else token_type, score)
    for token_text, id in _optional(table.folder / "added_tokens.json").items():
        if id not in range(len(table.tokens), 1 << 31):
            table.put("added_tokens.json", id, token_text, USER_DEFINED)
    if not model.unigram:
        return table.values("llama", "default", scores=True)
    return table.values("t5", "default", scores=True) | {
        "remove_extra_whitespaces": MetadataValue("bool", model.joins_spaces),
        "precompiled_charsmap": MetadataValue("u8", np.frombuffer(model.character_map, np.uint8)),
        "add_bos_token": MetadataValue("bool", "bos" in model.special_ids),
        "add_eos_token": MetadataValue("bool", False),
    }


# ---- tokenizer.json ------------------------------------------------------------------------------------------


def _from_json(table: _VocabularyFiles, merged_model: str) -> dict[str, MetadataValue]:
    """Return tokenizer.* metadata of a tokenizer.json: byte-level BPE, or SentencePiece's BPE with scores or merges."""
    path, tokenizer_json, steps = table.path, table.fast, table.steps
    if steps is None:
        fact = f"{table.folder}: there is no tokenizer.model and no tokenizer.json"
        raise InputError(f"{fact}; a model needs a vocabulary")
    bpe_model = tokenizer_json["model"]
    vocabulary, merges, use_pieces = bpe_model["vocab"], steps.merges, steps.use_pieces
    texts = {str(id): text for text, id in vocabulary.items()}
    # scores are the ranks of merges, so that merges survive; llama.cpp's converter writes -1000 for all
    ranks = {left + right: -i for i, (left, right) in reversed(list(enumerate(merges)))}
    for token_text, id in vocabulary.items():
        if texts[str(id)] != token_text:
            raise InputError(f"{path}: model.vocab has id {id} twice; each text needs its own")
        token_type = NORMAL
        if use_pieces:
            token_type = BYTE if len(token_text) == 6 and token_text.startswith("<0x") else NORMAL
            token_type = UNKNOWN if token_text == bpe_model.get("unk_token") else token_type
        table.put(path.name, id, token_text, token_type, float(ranks.get(token_text, 0)))
    for added_token in map(as_object, as_list(tokenizer_json.get("added_tokens"))):
        token_text = str(added_token.get("content"))
        is_typed = added_token.get("special") or (added_token.get("normalized") and steps.replaces)
        has_spaces = use_pieces and SPACE in token_text and not is_typed
        if has_spaces and token_text not in vocabulary:
            raise InputError(
                f"{path}: added token {token_text!r} is not found where a text has spaces, as in a GGUF vocabulary; its"
                " normalized must be true, and normalizer have Replace"
            )
        if not has_spaces and not (use_pieces and token_text == bpe_model.get("unk_token")):
            table.put_added_token(path.name, added_token.get("id"), added_token, use_pieces)
    if use_pieces and not merged_model:
        if len([*groupby(map("".join, merges))]) > len(ranks):
            raise InputError(f"{path}: merges of one token must be side by side, as by a score")
        return table.values("llama", "default", scores=True)
    # spaces as byte-level vocabularies write them
    merge_texts = [" ".join(part.replace(" ", "\u0120") for part in merge) for merge in merges]
    merges_value = MetadataValue("string", [text.encode() for text in merge_texts])
    if use_pieces:
        return table.values(merged_model, merged_model, scores=True) | {"merges": merges_value}
    return table.values("gpt2", steps.pre, scores=False) | {"merges": merges_value}


# ---- special ids and templates -------------------------------------------------------------------------------


def _text(token: Any) -> str | None:
    """Return a token's text, which may be in an object; None if there is none."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _special_ids(
    checkpoint: CheckpointFolder, table: _VocabularyFiles, family: Family
) -> dict[str, MetadataValue]:
    """Return the ids of bos, eos, …: by text in the tokenizer's config, else the model's, the family's, the pieces'."""
    values_by_key = {}
    for name, key in SPECIAL_NAMES.items():
        config_id = checkpoint.config.get(f"{name}_token_id")
        config_id = config_id[0] if isinstance(config_id, list) and config_id else config_id
        id = table.ids.get(_text(table.about.get(f"{name}_token")) or "\0", config_id)
        if type(id) is int and 0 <= id < len(table.tokens):
            values_by_key[f"{key}_token_id"] = MetadataValue("u32", id)
    document_id = checkpoint.config.get("eod_token_id")
    is_valid = type(document_id) is int and 0 <= document_id < len(table.tokens)
    if is_valid and "eos_token_id" in values_by_key:
        values_by_key["eot_token_id"] = values_by_key["eos_token_id"]
        values_by_key["eos_token_id"] = MetadataValue("u32", document_id)
    for key, text in family.special.items():
        if text in table.ids:
            values_by_key.setdefault(f"{key}_token_id", MetadataValue("u32", table.ids[text]))
    for name, id in table.piece_model.special_ids.items() if table.piece_model else ():
        values_by_key.setdefault(f"{SPECIAL_NAMES[name]}_token_id", MetadataValue("u32", id))
    return values_by_key


def _extra_ends(
    checkpoint: CheckpointFolder, tokenizer: Tokenizer, metadata: Mapping[str, Any], notes: list[str]
) -> dict[str, MetadataValue]:  # fmt: skip
    """Return metadata of up to two end-of-answer ids that readers of a GGUF would not know; may add to `notes`."""
    configs = checkpoint.config.json_values, _optional(checkpoint.folder / "generation_config.json")
    end_lists = (x if isinstance(x := c.get("eos_token_id"), list) else [x] for c in configs)
    ids = [i for i in chain(*end_lists) if type(i) is int and 0 <= i < tokenizer.vocab_size]
    other_ids = [id for id in dict.fromkeys(ids) if id not in tokenizer.eog_ids]
    is_free = {"eom": f"{KEYS}eom_token_id" not in metadata, "eot": tokenizer.eot is None}
    free_keys = [f"{KEYS}{name}_token_id" for name in is_free if is_free[name]]
    if lost_ids := other_ids[len(free_keys) :]:
        notes.append(f"answers do not end at {lost_ids} of eos_token_id: no key of a GGUF has room")
    return dict(zip(free_keys, (MetadataValue("u32", id) for id in other_ids), strict=False))


def _bos_eos_flags(
    table: _VocabularyFiles, values: Mapping[str, MetadataValue], templates: str, notes: list[str]
) -> dict[str, MetadataValue]:
    """Return add_bos_token, add_eos_token: by the post-processor, else the config; adds to `notes`. InputError."""
    post_steps = flatten_steps(table.path, "post_processor", table.fast.get("post_processor"))
    added_texts = [[t for s in post_steps for t in _around(table, s)[at]] for at in (0, 1)]
    flags: dict[str, bool] = {}
    for name, texts, place in zip(("bos", "eos"), added_texts, ("before", "after"), strict=True):
        configured, id = table.about.get(f"add_{name}_token"), values.get(f"{name}_token_id")
        expected_texts = [table.tokens[id.value].decode()] if id else []
        if texts not in ([], expected_texts) and not all(text in templates for text in texts):
            raise InputError(
                f"{table.path}: post_processor puts {' '.join(texts)} {place} a text; a GGUF vocabulary can only put"
                f" {name.upper()} there, {' '.join(expected_texts) or 'which this one does not have'}"
            )
        if post_steps:  # transformers 5 lets the post-processor decide, whatever add_bos_token says
            flags[name] = texts == expected_texts != []
        elif isinstance(configured, bool) or table.fast:
            flags[name] = configured is True
        if isinstance(configured, bool) and configured != flags[name]:
            fact = f"post_processor counts, not add_{name}_token {configured}"
            notes.append(f"{fact} of tokenizer_config.json")
    return {f"add_{name}_token": MetadataValue("bool", flag) for name, flag in flags.items()}


def _around(table: _VocabularyFiles, step: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return (special tokens that a post-processor's step puts before a text, those after). Raises InputError."""
    if step["type"] not in ("ByteLevel", "TemplateProcessing"):
        fact = f"{table.path}: post_processor is {step['type']}"
        raise InputError(fact, "it must be TemplateProcessing")
    listed = [as_object(item) for item in as_list(step.get("single"))]
    text_index = next((i for i, item in enumerate(listed) if "Sequence" in item), len(listed))
    texts = [str(as_object(item.get("SpecialToken")).get("id")) for item in listed]
    for name, special in as_object(step.get("special_tokens")).items():
        ids, own_ids = as_object(special).get("ids"), [table.ids.get(name)]
        if name in texts and ids not in (None, own_ids):
            raise InputError(f"{table.path}: post_processor: {name} is {ids}; it must be {own_ids}")
    return texts[:text_index], texts[text_index + 1 :]


def _chat_templates(folder: Path, about: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """Return metadata of chat templates, one or several with names: of files, else `about`, the tokenizer's config."""
    chat_template = about.get("chat_template")
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        chat_template = [
            {"name": n, "template": plain_checkpoint.read_text(path)} for n, path in files.items()
        ]
    elif chat_template is None:
        chat_template = _optional(folder / "chat_template.json").get("chat_template")
    if not isinstance(chat_template, list):
        text_entry = {"name": "default", "template": chat_template}
        chat_template = [] if chat_template is None else [text_entry]
    values_by_key: dict[str, MetadataValue] = {}
    allowed = string.ascii_letters + string.digits
    for template_entry in map(as_object, chat_template):
        name, template = (_text(template_entry.get(key)) for key in ("name", "template"))
        stored_name = "".join(c if c in allowed else "_" for c in name or "")
        suffix = "" if name == "default" else f".{stored_name}"
        if not name or template is None or suffix in values_by_key:
            fact = f"{folder}: chat_template {str(template_entry)[:60]} is no text"
            raise InputError(fact, "it must be a text or named texts")
        values_by_key[suffix] = MetadataValue("string", template)
    values = {f"tokenizer.chat_template{name}": value for name, value in values_by_key.items()}
    template_names = [name[1:].encode() for name in values_by_key if name]
    if template_names:
        values["tokenizer.chat_templates"] = MetadataValue("string", template_names)
    return values
