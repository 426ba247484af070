"""Chat templates: the formats of known families from templates of our own, and whatever a hostile one may try."""

import os
import signal
import time
from datetime import datetime
from typing import Any

import pytest

from packtrain.data.chat_template import CHATML, ChatTemplate, TemplateError, template_source

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Gr\u00fc\u00dfe"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & '\u00e9'"}}]

# short templates in the manner of each family, and what the family's models were trained on
LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
QWEN_2 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] }}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' }}
            {{- tool | tojson }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN_3 = """{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if message.role == 'user' %}{% set ns.last = index %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {{- '<|im_start|>' ~ message.role ~ ('!' if loop.index0 == ns.last) ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endfor %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
PHI_3 = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% endif %}{% endfor %}"""


def rendered(source: str, messages: Any = TURNS, seconds: float = 10.0, **variables: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>", seconds).render(messages, **variables)


@pytest.mark.parametrize(
    ("source", "system", "expected"),
    [
        (CHATML, True, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
         "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nGr\u00fc\u00dfe<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA_3, True, "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nGr\u00fc\u00dfe<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (QWEN_2, True, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
         "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nGr\u00fc\u00dfe<|im_end|>\n<|im_start|>assistant\n"),
        (GEMMA, False, "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
         "<start_of_turn>user\nGr\u00fc\u00dfe<end_of_turn>\n<start_of_turn>model\n"),
        (PHI_3, True, "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello!<|end|>\n"
         "<|user|>\nGr\u00fc\u00dfe<|end|>\n<|assistant|>\n"),
        (MISTRAL, False, "<s>[INST] Hi [/INST] Hello!</s>[INST] Gr\u00fc\u00dfe [/INST]"),
    ],
)  # fmt: skip
def test_families(source: str, system: bool, expected: str):
    messages = [SYSTEM, *TURNS] if system else TURNS
    assert rendered(source, messages, add_generation_prompt=True) == expected


def test_without_the_prompt_for_an_answer():
    assert rendered(CHATML, TURNS[:1]) == "<|im_start|>user\nHi<|im_end|>\n"
    assert rendered(PHI_3, TURNS[:1]).endswith("<|end|>\n</s>")


def test_what_was_thought_is_left_out():
    thought = {"role": "assistant", "content": "<think>hm</think>\n\nHello!"}
    assert "assistant\nHello!<" in rendered(QWEN_3, [TURNS[0], thought, TURNS[2]])
    assert "user!\nGr" in rendered(QWEN_3) and "user\nHi" in rendered(QWEN_3)


def test_tools_are_json_as_it_was_in_training():
    text = rendered(QWEN_2, [SYSTEM, *TURNS], tools=TOOLS)
    shown = '{"type": "function", "function": {"name": "add", "description": "a < b & \'\u00e9\'"}}'
    assert f"<tools>\n{shown}\n</tools>" in text
    assert rendered("{{ [1, {'b': 2, 'a': 1}] | tojson(indent=1, sort_keys=true) }}") == (
        '[\n 1,\n {\n  "a": 1,\n  "b": 2\n }\n]'
    )


def test_small_things_that_templates_use():
    assert rendered("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}"
                    "{% if i == 4 %}{% break %}{% endif %}{% endfor %}") == "0134"  # fmt: skip
    assert rendered("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"  # blocks are trimmed
    assert rendered("{{ nothing }}{{ tools is none }}{{ messages is sequence }}") == "TrueTrue"
    assert rendered("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}{{ m('<&>') }}") == "[1][<&>]"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (GEMMA, "the chat template: System role not supported"),
        (MISTRAL, "the chat template: Roles must alternate"),
        ("a\n{% if %}", "the chat template: line 2: Expected an expression"),
        ("{{ messages[0].content.x.y }}", "UndefinedError: .* has no attribute 'x'"),
        ("{{ raise_exception('one\nline') }}", "the chat template: one line"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_what_a_template_does_not_take(source: str, said: str):
    with pytest.raises(TemplateError, match=said) as raised:
        rendered(source, [SYSTEM, *TURNS])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__ }}{{ x.y }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ '%10000000000d' % 1 }}",
        "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 9999 + ")" * 9999 + " }}",
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_refused_in_one_line(source: str):
    with pytest.raises(TemplateError, match="the chat template") as raised:
        rendered(source)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_a_template_may_change_lists_of_its_own():
    """As Kimi K2's keep ids of calls for their results."""
    source = "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append(m.role) %}{% endfor %}"
    assert rendered(source + "{{ ns.ids.pop(0) }}{{ ns.ids }}") == "user['assistant', 'user']"


def test_what_a_template_is_given_may_be_deep():
    deep: list[Any] = []
    for _ in range(700):
        deep = [deep]
    assert ChatTemplate("{{ x|length }}").render(TURNS, extra_variables={"x": deep}) == "1"


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}",
    "{{ '{0.__class__}'.format(1) }}", "{{ 'x' | attr('__class__') }}"])  # fmt: skip
def test_what_leads_out_of_the_sandbox_is_nothing(source: str):
    assert rendered(source) == ""


@pytest.mark.parametrize("source", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) if tools }}",
])  # fmt: skip
def test_an_endless_template_is_ended_and_another_goes_on(source: str):
    template, start = (
        ChatTemplate(f"{{% if tools %}}{source}{{% endif %}}x", seconds=2.0),
        time.monotonic(),
    )
    with pytest.raises(TemplateError, match="took longer than 2 s"):
        template.render(TURNS, tools=TOOLS)
    assert time.monotonic() - start < 10
    if "**" not in source:  # a constant is computed when the template is read
        assert template.render(TURNS) == "x"


def test_ctrl_c_is_not_for_the_child():
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(TURNS) == "Hi"
    os.kill(template._child.pid, signal.SIGINT)  # type: ignore[union-attr]
    assert template.render(TURNS[1:]) == "Hello!"
    os.kill(template._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
    with pytest.raises(TemplateError, match="ended its process"):
        template.render(TURNS)
    assert template.render(TURNS) == "Hi"


def test_which_template_a_file_has():
    key = "tokenizer.chat_template"
    assert template_source({}) is None
    assert template_source({key: "a", f"{key}.tool_use": "b"}) == "a"
    assert template_source({key: "a", f"{key}.tool_use": "b"}, tools=True) == "b"
    assert template_source({f"{key}.default": "c"}, tools=True) == "c"
    with pytest.raises(TemplateError, match="is not a text"):
        template_source({key: [b"a"]})
