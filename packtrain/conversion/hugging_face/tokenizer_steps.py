"""Reads the steps of a tokenizer.json that a GGUF vocabulary performs, too; refuses any other by name.

A GGUF names one of llama.cpp's pre-tokenizers (byte-level BPE), or has spaces as U+2581, with or without one before a
text (SentencePiece's BPE). Its readers apply no normalizer."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.plain_checkpoint import as_list, as_object
from packtrain.data.tokenizer.bpe import ALPHABET
from packtrain.data.tokenizer.encoding import merge_parts
from packtrain.data.tokenizer.split_rules import DIGITS_STEP, GPT_2_STEP, RULES, known_patterns

Step = Mapping[str, Any]
AllowedSteps = Mapping[str, Mapping[str, tuple[Any, ...]]]
SPACE = "\u2581"
SPACED = ({"String": " "},)
BYTE_NAMES = [f"<0x{b:02X}>" for b in range(256)]
UTF8_BYTES = {*range(256)} - {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes of UTF-8
# by section and type of step: fields, and the values that agree with a GGUF vocabulary
MODEL_STEPS: dict[str, AllowedSteps] = {
    "model": {
        "BPE": {"dropout": (None, 0), "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, "")}
    },
}  # fmt: skip
PIECE_STEPS: dict[str, AllowedSteps] = MODEL_STEPS | {
    "normalizer": {"NFC": {}, "Prepend": {"prepend": (SPACE,)}, "Replace": {"pattern": SPACED, "content": (SPACE,)}},
    "pre_tokenizer": {
        "Metaspace": {"replacement": (SPACE,), "prepend_scheme": ("always", "first", "never", None)},
        "Split": {"pattern": SPACED, "behavior": ("MergedWithPrevious",), "invert": (False, None)},
    },
    "decoder": {
        "ByteFallback": {}, "Fuse": {}, "Metaspace": {"replacement": (SPACE,)},
        "Replace": {"pattern": ({"String": SPACE},), "content": (" ",)},
        "Strip": {"content": (" ",), "start": (0, 1), "stop": (0,)},
    },
}  # fmt: skip
BYTE_STEPS: dict[str, AllowedSteps] = MODEL_STEPS | {
    "normalizer": {"NFC": {}}, "decoder": {"ByteLevel": {}},
    "pre_tokenizer": {
        "ByteLevel": {"add_prefix_space": (False, None)}, "Digits": {}, "Punctuation": {"behavior": ("Contiguous",)},
        "Split": {"behavior": ("Isolated", "Removed", None)},
    },
}  # fmt: skip


@dataclass(slots=True)
class TokenizerSteps:
    """The steps of a tokenizer.json, as far as a GGUF vocabulary performs them."""

    merges: list[tuple[str, str]]  # pairs in their order
    # tokens are texts with U+2581 for spaces, and bytes as <0x0A>; else in GPT-2's alphabet of bytes
    use_pieces: bool = True
    pre: str = "default"  # name of the pre-tokenizer
    adds_space: bool = False  # a space is put before a text
    # a normalizer writes spaces as U+2581, before tokens with normalized: true are found
    replaces: bool = False
    # sentences about what readers of the GGUF do otherwise
    notes: list[str] = field(default_factory=list)
    # texts around a special token that both read alike
    special_frames: tuple[str, ...] = ("{}", "a{}b", "x {} y {}")
    normalize_text: Callable[[str], str] = str  # removes from a text what both read differently


def read_steps(path: Path, fast: Step) -> TokenizerSteps:
    """Read the steps of a tokenizer.json. Raises InputError for steps that a GGUF vocabulary does not perform."""
    model, places = as_object(fast.get("model")), ("normalizer", "pre_tokenizer", "decoder")
    flat_steps = {section: flatten_steps(path, section, fast.get(section)) for section in places}
    is_byte_level = any(step["type"] == "ByteLevel" for step in flat_steps["pre_tokenizer"])
    for section, allowed_steps in (BYTE_STEPS if is_byte_level else PIECE_STEPS).items():
        _check(path, section, flat_steps.get(section, [{"type": "BPE"} | model]), allowed_steps)
    raw_merges = as_list(model.get("merges"))
    pairs = [m.split(" ") if isinstance(m, str) else as_list(m) for m in raw_merges]
    is_valid = all(len(p) == 2 and isinstance(p[0], str) and isinstance(p[1], str) for p in pairs)
    if not isinstance(model.get("vocab"), dict) or "merges" not in model or not is_valid:
        raise InputError(f"{path}: model must be a BPE with vocab and merges")
    normalizer_kinds = [step["type"] for step in flat_steps["normalizer"]]
    merges = [(left, right) for left, right in pairs]
    steps = TokenizerSteps(merges, replaces="Replace" in normalizer_kinds)
    (_read_byte_steps if is_byte_level else _read_piece_steps)(
        path, fast, steps, normalizer_kinds, flat_steps["pre_tokenizer"]
    )
    _check_added_tokens(path, fast, steps, normalizer_kinds)
    if "NFC" in normalizer_kinds:
        normalize_before = steps.normalize_text
        steps.notes.append("normalizer NFC is not applied by readers of GGUF: compose accents")
        steps.normalize_text = lambda text: normalize_before(unicodedata.normalize("NFC", text))
    ignored_keys = (key for key in ("truncation", "padding") if fast.get(key))
    steps.notes += [f"{key} is left out: texts are encoded as a whole" for key in ignored_keys]
    decoder_kinds = {step["type"] for step in flat_steps["decoder"]}
    right = ("ByteLevel",) if is_byte_level else ("ByteFallback", "Replace or Metaspace")
    if decoder_kinds and not all(decoder_kinds & {*name.split(" or ")} for name in right):
        fact = f"{path}: decoder must have {' and '.join(right)}, as this vocabulary spells texts"
        raise InputError(fact)
    space_steps = [step for step in flat_steps["decoder"] if step["type"] in ("Strip", "Metaspace")]
    first_steps = [step for step in space_steps if step.get("start", 1) == 1]
    drops = any(_prepend_scheme(step) != "never" for step in first_steps)
    if decoder_kinds and not is_byte_level and drops != steps.adds_space:
        verbs = "drops" if drops else "keeps", "keep" if drops else "drop"
        note = f"decoder {verbs[0]} a space before a text, and readers of GGUF {verbs[1]} it"
        steps.notes.append(note)
    return steps


def _prepend_scheme(metaspace: Step) -> str:
    """Return when a tokenizer.json's Metaspace step puts spaces before words: always, first or never."""
    default_scheme = "never" if metaspace.get("add_prefix_space") is False else "always"
    return str(metaspace.get("prepend_scheme") or default_scheme)


def _check_added_tokens(path: Path, fast: Step, steps: TokenizerSteps, before: list[str]) -> None:
    """Raise InputError for added tokens that readers of a GGUF would find elsewhere in a text, or give other ids;
    `before`: types of the normalizer's steps."""
    vocabulary = fast["model"]["vocab"]
    next_id = len(vocabulary)
    for token in map(as_object, as_list(fast.get("added_tokens"))):
        text = str(token.get("content"))
        id = vocabulary.get(text, next_id)
        next_id = max(next_id, id + 1) if type(id) is int else next_id
        if token.get("id") != id:
            raise InputError(
                f"{path}: added token {text!r} has id {token.get('id')!r}, and its readers give it {id}, the next one"
                " or the vocabulary's; both must be the same"
            )
        is_changed = "Prepend" in before or (steps.replaces and " " in text)
        is_changed |= "NFC" in before and unicodedata.normalize("NFC", text) != text
        if token.get("normalized") is True and is_changed:
            raise InputError(
                f"{path}: added token {text!r} is found after normalizer has changed it; a GGUF vocabulary finds tokens"
                " as they are written: its normalized must be false"
            )


def flatten_steps(path: Path, section: str, raw_step: Any) -> list[Step]:
    """Return the steps of a section as a flat list, each a dict with a type."""
    if raw_step is None:
        return []
    if not isinstance(raw_step, dict) or not isinstance(raw_step.get("type"), str):
        fact = f"{path}: {section} has {str(raw_step)[:80]!r}; a step is an object with a type"
        raise InputError(fact)
    if raw_step["type"] != "Sequence":
        return [raw_step]
    listed: Iterable[Any] = next((as_list(raw_step[key]) for key in raw_step if key != "type"), [])
    return [step for nested_step in listed for step in flatten_steps(path, section, nested_step)]


def _check(path: Path, section: str, steps: list[Step], allowed_steps: AllowedSteps) -> None:
    """Raise InputError if a section of tokenizer.json has a step of another type, or with other options."""
    for step in steps:
        kind = str(step.get("type"))
        if kind not in allowed_steps:
            right = f"only {', '.join(allowed_steps)} can be converted"
            fact = f"{path}: {section} is {kind}, which a GGUF vocabulary does not have; {right}"
            raise InputError(fact)
        if kind not in ("Digits", "Split") and sum(peer.get("type") == kind for peer in steps) > 1:
            raise InputError(f"{path}: {section} has {kind} twice; a GGUF vocabulary has it once")
        for name, values in allowed_steps[kind].items():
            if step.get(name) not in values:
                raise InputError(
                    f"{path}: {section} {kind}: {name} is {str(step.get(name))[:60]!r}; it must be"
                    f" {' or '.join(map(repr, values))}, as in GGUF vocabularies"
                )


# ---- SentencePiece's BPE -------------------------------------------------------------------------------------


def _read_piece_steps(
    path: Path, fast: Step, steps: TokenizerSteps, normalizer_kinds: list[str], cuts: list[Step]
) -> None:
    """Read SentencePiece's BPE into `steps`; `cuts`: the pre-tokenizer's steps. Raises InputError."""
    vocabulary = fast["model"]["vocab"]
    missing_byte = next((name for name in BYTE_NAMES if name not in vocabulary), "")
    metaspace = next((step for step in cuts if step["type"] == "Metaspace"), {})
    inner = next((requirement for requirement in vocabulary if SPACE in requirement[1:]), None)
    is_split = bool(metaspace) and metaspace.get("split", True) is not False
    for is_unsupported, requirement in (
        (fast["model"].get("byte_fallback") is not True, "model.byte_fallback must be true if no step is ByteLevel"),
        (missing_byte, f"byte {missing_byte} is no token; a GGUF vocabulary has all bytes"),
        (not steps.replaces and (not metaspace or len(cuts) > 1), "normalizer must have Replace, or pre_tokenizer"
         " Metaspace: in GGUF vocabularies spaces are U+2581"),
        (is_split and inner, f"Metaspace must have split: false, since a GGUF vocabulary finds {inner!r} across words"),
    ):  # fmt: skip
        if is_unsupported:
            raise InputError(f"{path}: {requirement}")
    _check_made(path, fast, steps, fast["model"].get("ignore_merges") is True)
    steps.adds_space = "Prepend" in normalizer_kinds
    scheme = _prepend_scheme(metaspace)
    if metaspace and not steps.adds_space and scheme != "never":
        is_first = scheme == "first"
        steps.adds_space, steps.special_frames = True, ("{}", "a{}") if is_first else ("{}", "a{}b")
        note = "pre_tokenizer Metaspace puts a space before texts that have none; readers of GGUF always put one"
        steps.notes.append(note + ", also after special tokens" * is_first)
        steps.normalize_text = lambda requirement: requirement.lstrip(f" {SPACE}")


# ---- byte-level BPE ------------------------------------------------------------------------------------------


def _read_byte_steps(
    path: Path, fast: Step, steps: TokenizerSteps, normalizer_kinds: list[str], cuts: list[Step]
) -> None:
    """Read byte-level BPE of a tokenizer.json (`fast`) into `steps`; `cuts`: its pre-tokenizer's. Raises InputError."""
    model = fast["model"]
    missing_byte = next((b for b in UTF8_BYTES if ALPHABET[b] not in model["vocab"]), None)
    if missing_byte is not None and model.get("unk_token") is not None:
        fact = f"{path}: byte {missing_byte} has no token; a GGUF vocabulary has all bytes"
        raise InputError(fact)
    patterns = tuple(filter(None, (_split_pattern(path, step) for step in cuts)))
    pre_tokenizers = known_patterns()
    if patterns not in pre_tokenizers:
        names = dict.fromkeys(name for v in pre_tokenizers.values() for name in v.values())
        raise InputError(
            f"{path}: pre_tokenizer splits words by {' '.join(map(repr, patterns))[:200]}; only those of"
            f" {', '.join(names)} are known"
        )
    ignores_merges = model.get("ignore_merges") is True
    fallback = next(iter(pre_tokenizers[patterns].values()))
    steps.use_pieces, steps.pre = False, pre_tokenizers[patterns].get(ignores_merges, fallback)
    split_rule = RULES[steps.pre]
    if cuts[-1]["type"] != "ByteLevel" and steps.pre != "falcon":
        raise InputError(f"{path}: pre_tokenizer must end with ByteLevel for {steps.pre}")
    _check_made(path, fast, steps, ignores_merges is not bool(split_rule.ignore_merges))
    if split_rule.patterns != patterns:
        steps.normalize_text = lambda text: text if text.isascii() else ""
        steps.notes.append(
            f"llama.cpp's pre-tokenizer {steps.pre} splits some words beyond ASCII elsewhere, at capitals, marks or"
            " digits"
        )


def _split_pattern(path: Path, step: Step) -> str:
    """Return the regex by which a pre-tokenizer step splits, "" for none, or its type if unknown. Raises InputError."""
    step_kind = step["type"]
    if step_kind == "ByteLevel":
        return GPT_2_STEP if step.get("use_regex", True) is not False else ""
    pattern = str(as_object(step.get("pattern")).get("Regex"))
    covers_text = step.get("invert") is True and pattern.endswith(r"|\s+")  # matches drop nothing
    if step.get("behavior") == "Removed" and not covers_text:
        raise InputError(f"{path}: pre_tokenizer Split drops text; its behavior must be Isolated")
    has_single_digits = step_kind == "Digits" and step.get("individual_digits") is True
    return pattern if step_kind == "Split" else DIGITS_STEP if has_single_digits else str(step_kind)


def _check_made(path: Path, fast: Step, steps: TokenizerSteps, merges_differ: bool) -> None:
    """If `merges_differ` (file and GGUF ignore merges differently), raise InputError for tokens no merges build."""
    ranks = {(a.encode(), b.encode()): i for i, (a, b) in reversed([*enumerate(steps.merges)])}
    added_texts = {as_object(token).get("content") for token in as_list(fast.get("added_tokens"))}
    for text in set(fast["model"]["vocab"]) - added_texts - {*BYTE_NAMES} if merges_differ else ():
        if len(merge_parts([c.encode() for c in text], lambda a, b: ranks.get((a, b)))) > 1:
            raise InputError(
                f"{path}: model.ignore_merges must be {not fast['model'].get('ignore_merges')}, as for"
                f" {steps.pre} in GGUF vocabularies, since merges do not make the token {text!r}"
            )
