"""Chat templates of known families, for a model that has none: chosen by the markers in its vocabulary.

Each template renders llama.cpp's built-in template of that name, and is recognized in the same way. A
model can only stop at a token, so a family is chosen only if its markers are tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import require_existing
from packtrain.data.tokenizer import CONTROL, END_TEXTS, KEYS, USER_DEFINED

TEMPLATE_KEY = "tokenizer.chat_template"


def _family_template(name: str) -> str:
    """Return a template's text: the lines of its file, joined, with line breaks where it has \\n."""
    path = resources.files("packtrain.data.chat_template") / f"families/{name}.jinja"
    return "".join(path.read_text("utf-8").splitlines()).replace("\\n", "\n")


CHATML = _family_template("chatml")
# AFTER stands for text after a marker, BEFORE for text before one; tools have no place. Gemma has no system role:
# its text goes before the next user message
MISTRAL, MISTRAL_7 = _family_template("mistral"), _family_template("mistral7")
END_OF_TURN = "<|im_end|>"


def _mistral(template: str, before: str = "", after: str = "", trim: str = "") -> str:
    """Fill in Mistral's template: texts before and after an instruction, and the filter that trims it."""
    return template.replace("BEFORE", before).replace("AFTER", after).replace("TRIM", trim)


TEMPLATES = {
    "chatml": CHATML, "gemma": _family_template("gemma"), "llama2-sys": _family_template("llama2"),
    "llama3": _family_template("llama3"), "mistral-v1": _mistral(MISTRAL, " ", " "),
    "mistral-v3": _mistral(MISTRAL, "", " ", " | trim"),
    "mistral-v3-tekken": _mistral(MISTRAL).replace("'[INST]'", '"[INST]"'), "mistral-v7": _mistral(MISTRAL_7, "", " "),
    "mistral-v7-tekken": _mistral(MISTRAL_7),
    "phi3": _family_template("phi3"), "phi4": _family_template("phi4"), "command-r": _family_template("command-r"),
}  # fmt: skip
MARKERS = {  # the first family with all its markers wins
    "gemma": ("<start_of_turn>", "<end_of_turn>"), "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "chatml": ("<|im_start|>", "<|im_end|>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"), "mistral-v7": ("[SYSTEM_PROMPT]", "[INST]", "[/INST]", "</s>"),
    "mistral-v3": ("[INST]", "[/INST]", "</s>"), "command-r": ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
}  # fmt: skip
TEKKEN = "tekken"
NONE = "since the model has none and its vocabulary has"
CHOOSE = "choose another with --chat-template"


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """The chat template in use; `source` is its text.

    name    family of the template; "" for a model's own, or one from a file
    reason  why it was chosen; "" for a model's own, which needs no note
    """

    source: str
    name: str = ""
    reason: str = ""

    @property
    def note(self) -> str:
        return f"chat template: {self.name or 'custom'}, {self.reason}"


def choose_template(
    metadata: Mapping[str, Any], model_template: str | None, requested: str | None = None
) -> TemplateChoice:
    """Return the template `requested` (its text), else the model's own, else its family's, else ChatML."""
    if requested is not None:
        name = next((name for name in TEMPLATES if TEMPLATES[name] == requested), "")
        replaced_note = "" if model_template is None else ", in place of the model's own"
        return TemplateChoice(requested, name, f"from --chat-template{replaced_note}")
    if model_template is not None:
        return TemplateChoice(model_template)
    name = family_of(metadata)
    if name:
        marker = MARKERS[name.removesuffix(f"-{TEKKEN}")][0]
        return TemplateChoice(TEMPLATES[name], name, f"{NONE} {marker}; {CHOOSE}")
    has_end_token = END_OF_TURN.encode() in metadata[f"{KEYS}tokens"]
    ending_note = "" if has_end_token else "; turns end with its EOS token"
    source = CHATML if has_end_token else CHATML.replace(END_OF_TURN, "{{ eos_token }}")
    return TemplateChoice(source, "chatml", f"{NONE} no known markers{ending_note}; {CHOOSE}")


def family_of(metadata: Mapping[str, Any]) -> str:
    """Return the name of the family all of whose markers are special tokens of the vocabulary; "" if there is none."""
    tokens, declared_types = metadata[f"{KEYS}tokens"], metadata.get(f"{KEYS}token_type")
    marker_tokens = {text.encode() for texts in MARKERS.values() for text in texts}
    marker_ids = {token: i for i, token in enumerate(tokens) if token in marker_tokens}
    if declared_types is not None:
        end_tokens = {text.encode() for text in END_TEXTS.split()}
        token_types = np.asarray(declared_types)
        marker_ids = {
            token: i
            for token, i in marker_ids.items()
            if token in end_tokens or token_types[i] in (CONTROL, USER_DEFINED)
        }
    for name, texts in MARKERS.items():
        if all(text.encode() in marker_ids for text in texts):
            is_tekken = name.startswith("mistral") and metadata.get(f"{KEYS}pre") == TEKKEN
            return f"{name}-{TEKKEN}" if is_tekken else name
    return ""


def load_template(name_or_path: str) -> str:
    """Return the template of a family by name, of a file, or the text itself if it has {{ or {%. Raises InputError."""
    if name_or_path in TEMPLATES or "{{" in name_or_path or "{%" in name_or_path:
        return TEMPLATES.get(name_or_path, name_or_path)
    if not Path(name_or_path).is_file():
        fact = f"--chat-template: {name_or_path} is no file, and no known template"
        raise InputError(f"{fact}; these are {', '.join(TEMPLATES)}")
    try:
        return require_existing(name_or_path, "--chat-template").read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        fact = f"--chat-template: {name_or_path} is not UTF-8; save it as UTF-8"
        raise InputError(fact) from None
