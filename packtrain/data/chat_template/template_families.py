"""Chat templates of known families, for a model that has none: chosen by the markers in its vocabulary.

Each template renders llama.cpp's built-in template of that name, and is recognized in the same way. A
model can only stop at a token, so a family is chosen only if its markers are tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import require_existing
from packtrain.data.tokenizer import CONTROL, END_TEXTS, KEYS, USER_DEFINED

TEMPLATE_KEY = "tokenizer.chat_template"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TURN = "<|im_end|>"
PHI_4 = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
PHI_3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (  # no system role: its text goes before the next user message
    "{% set kept = namespace(system='') %}"
    "{% for message in messages %}"
    "{% set words = message['content'] | trim %}"
    "{% if message['role'] == 'system' %}{% set kept.system = kept.system + words %}"
    "{% elif message['role'] == 'assistant' %}{{ '<start_of_turn>model\n' + words + '<end_of_turn>\n' }}"
    "{% else %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{% if kept.system %}{{ kept.system + '\n\n' }}{% set kept.system = '' %}{% endif %}"
    "{{ words + '<end_of_turn>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (  # AFTER stands for text after a marker, BEFORE for text before a marker
    "{# tools have no place: no [AVAILABLE_TOOLS] #}"
    "{% for message in messages %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] == 'assistant' %}{{ 'BEFORE[INST]AFTER' }}{% endif %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ message['content'] + 'BEFORE[/INST]' }}"
    "{% else %}{{ 'AFTER' + message['content']TRIM + '</s>' }}"
    "{% endif %}"
    "{% endfor %}"
)
MISTRAL_7 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '[SYSTEM_PROMPT]AFTER' + message['content'] + '[/SYSTEM_PROMPT]' }}"
    "{% elif message['role'] == 'user' %}{{ '[INST]AFTER' + message['content'] + '[/INST]' }}"
    "{% else %}{{ 'AFTER' + message['content'] + '</s>' }}"
    "{% endif %}"
    "{% endfor %}"
)
LLAMA_2 = (
    "{% for message in messages %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] == 'assistant' %}{{ '[INST] ' }}{% endif %}"
    "{% if message['role'] == 'system' %}{{ '<<SYS>>\n' + message['content'] + '\n<</SYS>>\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + '</s>' }}"
    "{% endif %}"
    "{% endfor %}"
)


def _mistral(template: str, before: str = "", after: str = "", trim: str = "") -> str:
    return template.replace("BEFORE", before).replace("AFTER", after).replace("TRIM", trim)


TEMPLATES = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "llama2-sys": LLAMA_2,
    "llama3": LLAMA_3,
    "mistral-v1": _mistral(MISTRAL, " ", " "),
    "mistral-v3": _mistral(MISTRAL, "", " ", " | trim"),
    "mistral-v3-tekken": _mistral(MISTRAL).replace("'[INST]'", '"[INST]"'),
    "mistral-v7": _mistral(MISTRAL_7, "", " "),
    "mistral-v7-tekken": _mistral(MISTRAL_7),
    "phi3": PHI_3,
    "phi4": PHI_4,
}
MARKERS = {  # the first family with all its markers wins
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "mistral-v7": ("[SYSTEM_PROMPT]", "[INST]", "[/INST]", "</s>"),
    "mistral-v3": ("[INST]", "[/INST]", "</s>"),
}
TEKKEN = "tekken"
NONE = "since the model has none and its vocabulary has"
CHOOSE = "choose another with --chat-template"


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """The chat template in use.

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
    """Return the requested template (its text), else the model's own, else its family's, else ChatML."""
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
    """Return the family all of whose markers are special tokens of the vocabulary; "" if there is none."""
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
    """Return the text of the template with this name, or in this file, or this text. Raises InputError."""
    if name_or_path in TEMPLATES or "{{" in name_or_path or "{%" in name_or_path:
        return TEMPLATES.get(name_or_path, name_or_path)
    if not Path(name_or_path).is_file():
        raise InputError(
            f"--chat-template: {name_or_path} is no file, and no known template; these are {', '.join(TEMPLATES)}"
        )
    try:
        return require_existing(name_or_path, "--chat-template").read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(
            f"--chat-template: {name_or_path} is not UTF-8; save it as UTF-8"
        ) from None
