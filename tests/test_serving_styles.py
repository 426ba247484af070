"""How chat templates write calls of tools, found by rendering; texts that are read back; and grammars of them."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations.conversation_renderer import ConversationRenderer
from packtrain.data.conversations.messages import Conversation
from packtrain.inference.generator import StopTextFilter
from packtrain.serving.openai_completions import ChatCompletionFormat
from packtrain.serving.tool_call_styles import (
    COUNT,
    GRANITE,
    HERMES,
    ID_MARK,
    KIMI,
    LFM2,
    LLAMA,
    MISTRAL,
    ToolCallStyle,
    detect_style,
)
from packtrain.serving.tool_calls import RequestTools
from tests.templates import CHATS, GEMMA_4, GEMMA_4_ENDS

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("weather", "way")
]  # fmt: skip
NAMES = ["weather", "way"]
ARGUMENTS = {"city": "New York", "days": 3}
HEAD = (
    "{% if tools %}{{ tools|tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}"
)
TAIL = "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH, NAME, OBJECT = (
    "{% for c in m.tool_calls %}",
    "{{ c.function.name }}",
    "{{ c.function.arguments|tojson }}",
)
PAIRS = "{% for k, v in c.function.arguments.items() %}"
TEXT = "{{ v if v is string else v|tojson }}"
# as templates of these families write calls
BODIES = {
    "deepseek": "<calls>" + EACH + "<call>" + NAME + "<sep>" + OBJECT + "</call>{% endfor %}</calls>",
    "functionary": EACH + "<function=" + NAME + ">" + OBJECT + "</function>{% endfor %}",
    "minimax 1": "<calls>\n" + EACH + '{"name": "' + NAME + '", "arguments": ' + OBJECT + "}\n{% endfor %}</calls>",
    "kimi": "<sect>" + EACH + "<c>functions." + NAME + ":{{ loop.index0 }}<a>" + OBJECT + "</c>{% endfor %}</sect>",
    "solar": EACH + "<c>{{ c.id }}<n>" + NAME + "<a>" + OBJECT + "</c>{% endfor %}",
    "coder": EACH + "\n<tool_call>\n<function=" + NAME + ">\n" + PAIRS + "<parameter={{ k }}>\n" + TEXT
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "glm": EACH + "<tool_call>" + NAME + "\n" + PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXT
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "deepseek 3.2": "<calls>" + EACH + '<invoke name="' + NAME + '">\n' + PAIRS
    + '<parameter name="{{ k }}" string="' + "{{ 'true' if v is string else 'false' }}" + '">' + TEXT
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>",
    "lfm2": "<begin>[" + EACH + NAME + "(" + PAIRS + "{{ k }}={{ \"'\" ~ v ~ \"'\" if v is string else v|tojson }}"
    + "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<end>",
    "nemotron": "<TOOLCALL>[" + EACH + '{"name": "' + NAME + '", "arguments": ' + OBJECT
    + "}{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>",
    "cohere": "<act>[" + EACH + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + NAME + '", "parameters": '
    + OBJECT + "}{{ ', ' if not loop.last }}{% endfor %}]</act>",
}  # fmt: skip


def renderer_of(name: str) -> ConversationRenderer:
    if name in CHATS:
        chat = CHATS[name]
        return ConversationRenderer(
            ChatTemplate(chat.source, chat.bos, chat.eos), list(chat.eog_texts)
        )
    if name == "gemma-4":
        return ConversationRenderer(ChatTemplate(GEMMA_4), list(GEMMA_4_ENDS))
    return ConversationRenderer(ChatTemplate(HEAD + BODIES[name] + TAIL), ["<|end|>"])


def written_answer(renderer: ConversationRenderer, count: int, words: str = "") -> str:
    """The answer of a conversation with so many calls, as the template writes it."""
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for i, name in enumerate(NAMES[:count])
    ]  # fmt: skip
    answer = {"role": "assistant", "content": words, "tool_calls": calls}
    rendered = renderer.render(Conversation("", [{"role": "user", "content": "a"}, answer], TOOLS))[
        -1
    ]
    return renderer.strip_end(rendered.text[slice(*rendered.spans[-1])])


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama-3", "mistral", "gemma-4", *BODIES])
def test_what_a_template_writes_is_read_back(name: str):
    renderer = renderer_of(name)
    style = detect_style(renderer, "")
    allows_many = style.separator or style.is_list
    assert allows_many or name == "llama-3"
    for count in (1, 2) if allows_many else (1,):
        text = written_answer(renderer, count)
        assert style.parse(text, NAMES) == ("" if "think" not in text else style.parse(text, NAMES)[0], [
            (tool, ARGUMENTS) for tool in NAMES[:count]
        ])  # fmt: skip
        assert style.parse(text, ["other"]) == (text, [])


def test_calls_with_a_text_between_and_none_around():
    """As functionary 3.2 writes them."""
    body = "{% if not loop.first %}>>>{% endif %}" + NAME + "\n" + OBJECT + "{% endfor %}"
    renderer = ConversationRenderer(ChatTemplate(HEAD + EACH + body + TAIL), ["<|end|>"])
    style = detect_style(renderer, "")
    calls = [(tool, ARGUMENTS) for tool in NAMES]
    assert style.parse(written_answer(renderer, 2), NAMES) == ("", calls)
    assert style.parse(f"Let me see.>>>{written_answer(renderer, 2)}", NAMES) == (
        "Let me see.",
        calls,
    )
    assert style.parse(f"Let me see.{written_answer(renderer, 2)}", NAMES) == ("Let me see.", calls)
    plain_text = f"The weather\nis {written_answer(renderer, 1)}"
    assert style.parse(plain_text, NAMES) == (plain_text, [])


def test_a_line_before_words_is_no_part_of_them():
    body = (
        "{% if m.content or not loop.first %}>>>{% endif %}" + NAME + "\n" + OBJECT + "{% endfor %}"
    )
    head = HEAD.replace("{{ m.content }}", "{% if m.content %}all\n{% endif %}{{ m.content }}")
    style = detect_style(
        ConversationRenderer(ChatTemplate(head + EACH + body + TAIL), ["<|end|>"]), ""
    )
    text = 'weather\n{"days": 3}'
    assert style.words_prefix == "all\n"
    assert style.parse(f"all\nLet me see.>>>{text}", NAMES) == (
        "Let me see.",
        [("weather", {"days": 3})],
    )
    assert style.parse("all\nNo.", NAMES) == ("No.", [])
    assert style.parse(text, NAMES) == ("", [("weather", {"days": 3})])
    for parts in (["al", "l\nNo", "."], ["all\n", "No."], ["all\nNo."], ["No", "."]):
        stream = object.__new__(ChatCompletionFormat)
        stream._leading, stream._texts, stream._shown = (
            style.words_prefix,
            [""],
            [StopTextFilter(())],
        )
        assert (
            "".join(stream._next_text(0, part) for part in parts) + stream._shown[0].flush()
            == "No."
        )


def stream_text(style: ToolCallStyle, text: str, cuts: Iterable[int]) -> tuple[str, int]:
    """The words that a client gets of an answer in parts, and how many calls."""
    stream = object.__new__(ChatCompletionFormat)
    functions = tuple({"name": name, "parameters": {}} for name in NAMES)
    stream._tools = RequestTools(functions, "auto", True, style)
    stream._leading, stream._texts, stream._thoughts = style.words_prefix, [""], None
    stream._shown, stream._request = (
        [StopTextFilter(stream._tools.stream_openings)],
        SimpleNamespace(has_usage=True),
    )
    stream._delta = lambda number, delta, *extra: delta
    stream._verbose_fields = lambda *args: {}
    shown = [stream._next_text(0, text[a:b]) for a, b in pairwise([0, *cuts, len(text)])]
    events = stream.end_events(0, SimpleNamespace(reason="eos"))
    shown += [event["content"] for event in events if "content" in event]
    return "".join(shown), sum("tool_calls" in event for event in events)


@pytest.mark.parametrize(
    "words", ["I look.", "As in way\n{} I look.", "Not >>>way\n{} I look.", "", ">>> I", "al"]
)
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_words_are_the_same_in_one_piece_and_in_parts(words: str, calls: int):
    body = "{% if not loop.first %}>>>{% endif %}" + NAME + "\n" + OBJECT + "{% endfor %}"
    head = HEAD.replace("{{ m.content }}", "{% if m.content %}all\n{% endif %}{{ m.content }}")
    style = detect_style(
        ConversationRenderer(ChatTemplate(head + EACH + body + TAIL), ["<|end|>"]), ""
    )
    text = ">>>".join([f"all\n{words}", *['weather\n{"days": 3}'] * calls])
    expected = style.parse(text, NAMES)
    for cuts in ([], range(1, len(text)), range(2, len(text), 5), range(3, len(text), 7)):
        assert stream_text(style, text, cuts) == (expected[0], len(expected[1]))


@pytest.mark.parametrize(("name", "id"), [("call", "call_12"), ("a", "call00001"), ("way", 7)])
def test_an_id_that_has_a_name_within_a_word_does_not_say_it(name: str, id: Any):
    body = "<c>{{ c.id }}<a>" + OBJECT + "</c>{% endfor %}"
    result = "{% if m.role == 'tool' %}of {{ m.tool_call_id }}: {% endif %}{{ m.content }}"
    source = HEAD.replace("{{ m.content }}", result) + EACH + body + TAIL
    renderer = ConversationRenderer(ChatTemplate(source), ["<|end|>"])
    call = {"id": id, "function": {"name": name, "arguments": {}}}
    turns = [{"role": "user", "content": "a"}]
    for _ in range(2):  # clients may begin to count again
        turns += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "content": "far", "tool_call_id": id}]
    text = renderer.prompt(Conversation("", turns))
    for i in range(2):
        assert f"<c>functions.{name}:{i}<a>" in text and f"of functions.{name}:{i}: far" in text


def test_a_template_that_writes_ids_only_is_given_names_in_them():
    """As Kimi K2's own: the function is in the id of its call, and in that of the result."""
    body = "<c>{{ c.id }}<a>" + OBJECT + "</c>{% endfor %}"
    result = "{% if m.role == 'tool' %}of {{ m.tool_call_id }}: {% endif %}{{ m.content }}"
    source = HEAD.replace("{{ m.content }}", result) + EACH + body + TAIL
    renderer = ConversationRenderer(ChatTemplate(source), ["<|end|>"])
    call = "<c>functions.{}:{}<a>" + '{{"city": "New York", "days": 3}}</c>'
    text = "".join(call.format(tool, i) for i, tool in enumerate(NAMES))
    assert written_answer(renderer, 2) == text
    assert detect_style(renderer, "").parse(text, NAMES) == (
        "",
        [(tool, ARGUMENTS) for tool in NAMES],
    )
    called = {"id": "functions.way:7", "function": {"name": "way", "arguments": {}}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]
    turns += [{"role": "tool", "content": "far", "tool_call_id": "functions.way:7"}]
    second_call = {"id": "call00001", "function": {"name": "weather", "arguments": {}}}
    turns += [{"role": "assistant", "content": "", "tool_calls": [second_call]}]
    turns += [{"role": "tool", "content": "sun", "tool_call_id": "call00001"}]
    text = renderer.prompt(Conversation("", turns))
    assert "<c>functions.way:7<a>" in text and "of functions.way:7: far" in text
    assert "<c>functions.weather:1<a>" in text and "of functions.weather:1: sun" in text
    assert not renderer.notes


def test_a_name_that_only_begins_like_a_tool_is_none():
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.way_v2:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert KIMI.parse(text, ["way"]) == (text, [])
    assert KIMI.parse(text, ["way_v2"])[1] == [("way_v2", {})]


def test_styles():
    """The parts of some."""
    assert detect_style(renderer_of("qwen2.5"), "").opening == HERMES.opening
    assert replace(detect_style(renderer_of("llama-3"), ""), keys=()) == LLAMA
    assert detect_style(renderer_of("kimi"), "").middle == f":{COUNT}<a>"
    assert detect_style(renderer_of("solar"), "").opening == f"<c>{ID_MARK}<n>"
    cohere_style = detect_style(renderer_of("cohere"), "")
    assert (cohere_style.name, cohere_style.arguments, cohere_style.is_list) == (
        "tool_name",
        "parameters",
        True,
    )
    assert detect_style(renderer_of("chatml"), "") == HERMES  # it has no place for tools
    source = (
        HEAD
        + "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    renderer = ConversationRenderer(ChatTemplate(source), ["<|end|>"])
    assert detect_style(renderer, '<tool_call> "parameters"') == HERMES
    assert detect_style(renderer, 'tools "parameters"') == LLAMA
    assert detect_style(renderer, "<|tool_call|> [") == GRANITE
    assert detect_style(renderer, "'List of tools: ['") == LFM2
    kimi = detect_style(renderer, "<|tool_calls_section_begin|>{{ call.id }}")
    calls = (f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
             for i, name in enumerate(NAMES))  # fmt: skip
    text = f"So.<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
    assert kimi.parse(text, NAMES) == ("So.", [(name, {}) for name in NAMES])
    text = '<|tool_call_start|>[way(a="b"), weather(days=3)]<|tool_call_end|>So.'
    assert LFM2.parse(text, NAMES) == ("", [("way", {"a": "b"}), ("weather", {"days": 3})])


def test_examples_of_calls():
    """What a model is told whose template has no place for tools."""
    assert HERMES.example() == '<tool_call>\n{"name": NAME, "arguments": {…}}\n</tool_call>'
    example = detect_style(renderer_of("glm"), "").example()
    assert (
        example
        == "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
    )
    assert LFM2.example() == "<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>"
    assert MISTRAL.example() == '[TOOL_CALLS][{"name": NAME, "arguments": {…}}]'
    assert (
        detect_style(renderer_of("deepseek"), "").example()
        == "<calls><call>NAME<sep>{…}</call></calls>"
    )


@pytest.mark.parametrize("name", BODIES)
def test_words_before_calls_and_cut_calls(name: str):
    renderer = renderer_of(name)
    style = detect_style(renderer, "")
    text = written_answer(renderer, 1, "I look.")
    assert style.parse(text, NAMES) == ("I look.", [("weather", ARGUMENTS)])
    assert style.parse("I look.", NAMES) == ("I look.", [])
    cut = text[: text.index("New") + 3]
    assert style.parse(cut, NAMES) == (cut, [])
    (begins,) = {text.find(beginning) for beginning in style.call_openings(NAMES)}
    assert begins == text.index(style.opening.split(ID_MARK)[0].strip())


def test_kinds_of_values_and_values_of_python():
    """Texts that look like numbers are texts where a template says so; lists and objects may be Python's."""
    style = detect_style(renderer_of("deepseek 3.2"), "")
    assert dict(style.typed_separators).keys() == {"integer", "boolean", "array", "object", "null"}
    text = written_answer(renderer_of("deepseek 3.2"), 1).replace("New York", "7")
    assert style.parse(text, NAMES) == ("", [("weather", {"city": "7", "days": 3})])
    style = detect_style(renderer_of("lfm2"), "")
    for literal, value in (("{'a': [None, True]}", {"a": [None, True]}), ('{"a": null}', {"a": None}), ("-1.5", -1.5),
                         ("False", False), ('"it\'s"', "it's"), ("'it's, x'", "it's, x"),
                         ("[1, (2)]", [1, 2])):  # fmt: skip
        text = f"So <begin>[way(a={literal}, b='c'), way()]<end>"
        assert style.parse(text, NAMES) == ("So", [("way", {"a": value, "b": "c"}), ("way", {})])
    for cut in ("way(a=", "way(a='b", "way(a=[1", "way(a=x)"):
        assert style.parse(f"<begin>[{cut}", NAMES)[1] == []
    pairs = detect_style(renderer_of("glm"), "")
    text = "<tool_call>way\n<arg_key>a</arg_key>\n<arg_value>{'b': True}</arg_value>\n</tool_call>"
    assert pairs.parse(text, NAMES) == ("", [("way", {"a": {"b": True}})])


def test_a_notation_with_bare_keys():
    style = detect_style(renderer_of("gemma-4"), "")
    assert (style.opening, style.closing, style.quote) == (
        "<|tool_call>call:",
        "<tool_call|>",
        '<|"|>',
    )
    text = 'call:way{a:[1, -2.5,true],b:{c:<|"|>x, {"y"}: <|"|>},d:null,e:{},f:[]}'
    expected = {"a": [1, -2.5, True], "b": {"c": 'x, {"y"}: '}, "d": None, "e": {}, "f": []}
    assert style.parse(f"So <|tool_call>{text}<tool_call|>", NAMES) == ("So", [("way", expected)])
    for cut in (text[:-1], text[:20], "call:way{a:}"):
        assert style.parse(f"<|tool_call>{cut}<tool_call|>", NAMES)[1] == []


def test_white_space_may_differ():
    text = 'So:\n<tool_call>{"name": "way","arguments":{}}</tool_call>\n'
    text += ' <tool_call>\n\n{"name":"way", "arguments":{"a":[1]}}'
    assert HERMES.parse(text, NAMES) == ("So:", [("way", {}), ("way", {"a": [1]})])
    style = ToolCallStyle("<f=", "</f><f=", "</f>", middle="", pair=("<p=", ">", "</p>"))
    text = "<f=way>".replace(">", "") + ' <p=n> 3 </p> <p=t>"x"</p>\n</f>'
    assert style.parse(text, NAMES) == ("", [("way", {"n": 3, "t": '"x"'})])
    assert style.parse("<f=way</f>", NAMES) == ("", [("way", {})])


@pytest.mark.grammar
@pytest.mark.parametrize("name", ["qwen2.5", "mistral", "llama-3", "gemma-4", *BODIES])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_grammar_takes_what_the_template_writes(name: str, is_parallel: bool, tmp_path):
    pytest.importorskip("llguidance")
    from packtrain.data.tokenizer import Tokenizer
    from packtrain.gguf import GGUF
    from packtrain.serving.tool_calls import RequestTools
    from tests.architectures import random_model

    random_model(tmp_path / "m.gguf", "llama")
    tokenizer = Tokenizer(GGUF(tmp_path / "m.gguf").metadata)
    renderer = renderer_of(name)
    style = detect_style(renderer, "")
    functions = tuple(
        {**tool["function"], "parameters": {**tool["function"]["parameters"], "required": ["city", "days"]}}
        for tool in TOOLS
    )  # fmt: skip
    count = 2 if is_parallel and (style.separator or style.is_list) else 1
    text = written_answer(renderer, count)
    for choice in ("required", "auto"):
        grammar = RequestTools(functions, choice, is_parallel, style).grammar(tokenizer)
        assert grammar.awaits_trigger == (choice == "auto")
        for id in (tokenizer.tokens.index(b"<0x%02X>" % byte) for byte in text.strip().encode()):
            allowed = grammar.allowed(tokenizer.vocab_size)
            assert allowed is None or allowed[id], text
            grammar.accept(id)
        assert not grammar.awaits_trigger and grammar.is_complete
    strict = (
        RequestTools(functions, "required", is_parallel, style)
        .grammar(tokenizer)
        .allowed(tokenizer.vocab_size)
    )
    # an x begins no call
    assert strict is not None and not strict[tokenizer.tokens.index(b"<0x78>")]
