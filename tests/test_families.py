"""Chat templates for models that have none: the texts are llama.cpp's, and a vocabulary tells its family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.data.chat_template import TEMPLATES, ChatTemplate, choose_template, load_template
from packtrain.data.chat_template.template_families import MARKERS, family_of
from packtrain.data.tokenizer import CONTROL, NORMAL

TURNS = [
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "Hello! "},
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
]

# what llama_chat_apply_template of llama.cpp gives for the name and for the template's text, with a prompt for a reply
TEXTS = {
    "chatml": "<|im_start|>user\n Hi\n<|im_end|>\n<|im_start|>assistant\nHello! <|im_end|>\n<|im_start|>system\n"
    "Be brief.\n<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>assistant\n",
    "command-r": "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "Hello!<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>b<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>c"
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "gemma": "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n<start_of_turn>user\n"
    "Be brief.\n\nb<end_of_turn>\n<start_of_turn>model\nc<end_of_turn>\n<start_of_turn>model\n",
    "llama2-sys": "[INST]  Hi\n [/INST]Hello! </s>[INST] <<SYS>>\nBe brief.\n\n<</SYS>>\n\nb [/INST]c</s>",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
    "\n\nHello!<|eot_id|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nc<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-v1": " [INST]  Hi\n [/INST] Hello! </s> [INST] Be brief.\n\n\nb [/INST] c</s>",
    "mistral-v3": "[INST]  Hi\n[/INST] Hello!</s>[INST] Be brief.\n\n\nb[/INST] c</s>",
    "mistral-v3-tekken": "[INST] Hi\n[/INST]Hello! </s>[INST]Be brief.\n\n\nb[/INST]c</s>",
    "mistral-v7": "[INST]  Hi\n[/INST] Hello! </s>[SYSTEM_PROMPT] Be brief.\n[/SYSTEM_PROMPT][INST] b[/INST] c</s>",
    "mistral-v7-tekken": "[INST] Hi\n[/INST]Hello! </s>[SYSTEM_PROMPT]Be brief.\n[/SYSTEM_PROMPT][INST]b[/INST]c</s>",
    "phi3": "<|user|>\n Hi\n<|end|>\n<|assistant|>\nHello! <|end|>\n<|system|>\nBe brief.\n<|end|>\n<|user|>\nb<|end|>"
    "\n<|assistant|>\nc<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>user<|im_sep|> Hi\n<|im_end|><|im_start|>assistant<|im_sep|>Hello! <|im_end|><|im_start|>"
    "system<|im_sep|>Be brief.\n<|im_end|><|im_start|>user<|im_sep|>b<|im_end|><|im_start|>assistant<|im_sep|>c"
    "<|im_end|><|im_start|>assistant<|im_sep|>",
}


def vocabulary(*texts: str, kind: int = CONTROL, **extra_values: Any) -> dict[str, Any]:
    tokens = [b"a", *(text.encode() for text in texts)]
    values = {
        "tokens": tokens,
        "token_type": np.array([NORMAL] + [kind] * len(texts)),
        **extra_values,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_llama_cpp(name: str):
    assert ChatTemplate(TEMPLATES[name]).render(TURNS, add_generation_prompt=True) == TEXTS[name]


@pytest.mark.parametrize("name", MARKERS)
def test_a_vocabulary_tells_its_family(name: str):
    vocab = vocabulary("<unk>", *MARKERS[name])
    assert family_of(vocab) == name
    assert family_of(vocabulary(*MARKERS[name][1:])) in ("", "chatml", "mistral-v3")
    template = choose_template(vocab, None)
    assert (template.source, template.name) == (TEMPLATES[name], name)
    assert template.note == (
        f"chat template: {name}, since the model has none and its vocabulary has {MARKERS[name][0]};"
        " choose another with --chat-template"
    )


def test_tekken_vocabularies_have_no_spaces_after_markers():
    assert family_of(vocabulary(*MARKERS["mistral-v3"], pre="tekken")) == "mistral-v3-tekken"
    assert family_of(vocabulary(*MARKERS["mistral-v7"], pre="tekken")) == "mistral-v7-tekken"


def test_markers_that_a_text_is_not_searched_for_are_none():
    """`<start_of_turn>` as a plain token would be spelt in pieces; the end of a turn is known by its text."""
    assert family_of(vocabulary(*MARKERS["gemma"], kind=NORMAL)) == ""
    vocab = vocabulary(*MARKERS["gemma"])
    vocab["tokenizer.ggml.token_type"][2] = NORMAL
    assert family_of(vocab) == "gemma"


def test_what_is_asked_for_comes_first(tmp_path: Path):
    vocab = vocabulary(*MARKERS["gemma"])
    assert (
        choose_template(vocab, "own").source == "own" and choose_template(vocab, "own").reason == ""
    )
    template = choose_template(vocab, "own", load_template("phi3"))
    assert template.note == "chat template: phi3, from --chat-template, in place of the model's own"
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}")
    template = choose_template(vocab, None, load_template(str(path)))
    assert (template.source, template.note) == (
        "{{ messages[0].content }}",
        "chat template: custom, from --chat-template",
    )


def test_other_vocabularies_get_chatml():
    with_end = choose_template(vocabulary("<|im_end|>"), None)
    assert with_end.source == TEMPLATES["chatml"]
    assert with_end.reason.startswith(
        "since the model has none and its vocabulary has no known markers"
    )
    eos_template = choose_template(vocabulary("</s>"), None)
    assert (
        "{{ eos_token }}" in eos_template.source
        and "turns end with its EOS token" in eos_template.reason
    )


def test_templates_that_are_not_there(tmp_path: Path):
    with pytest.raises(
        InputError, match=r"--chat-template: llama4 is no file, and no known templ.*chatml, gemma"
    ):
        load_template("llama4")
    path = tmp_path / "mine.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"mine\.jinja is not UTF-8"):
        load_template(str(path))
