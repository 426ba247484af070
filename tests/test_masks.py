"""What is learnt of a conversation: exactly the assistant's words and their end marker.

The texts in tests/goldens/masks have [[…]] around what is learnt. `python -m tests.test_masks` writes them anew: read
every line of the difference.
"""

import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations import conversation_renderer as rendering
from packtrain.data.conversations.conversation_renderer import (
    ConversationRenderer,
    RenderedConversation,
)
from packtrain.data.conversations.loss_mask import LossMasker, MaskedSample, places_of
from packtrain.data.conversations.messages import Conversation
from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text.documents import SourceFile
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF
from tests.templates import CHATS, GEMMA_4, GEMMA_4_ENDS, Chat

GOLDENS = Path(__file__).parent / "goldens/masks"
VOCABULARIES = Path(__file__).parent.parent.parent / "shared/data/tokenizers/ggml-vocab"
# a template may write thoughts, also empty ones, before words
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
each = pytest.mark.parametrize("name", CHATS)
# with a vocabulary of bytes, and with the model's own where the shared data have it
MODEL_VOCABULARIES = [f"{name} of the model" for name, chat in CHATS.items() if chat.vocabulary]
each_vocabulary = pytest.mark.parametrize(
    "model",
    [*CHATS, *(pytest.param(name, marks=pytest.mark.shared) for name in MODEL_VOCABULARIES)],
)

SYSTEM = {"role": "system", "content": "You answer briefly."}
TOOLS = [
    {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
CALL = {"name": "weather", "arguments": {"city": "Zürich"}}


def dialogue(*words: str) -> list[dict[str, Any]]:
    """What a user and the assistant say in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": said} for i, said in enumerate(words)]


RECORDS: dict[str, dict[str, Any]] = {
    "one question": {"messages": dialogue("Who are you?", "A program.")},
    "three turns and a system": {
        "messages": [SYSTEM, *dialogue("Hi.", "Hello!", "Say A program.", "A program.", "Bye.", "Bye.\n\nTill soon.")]
    },
    "a call of a tool": {
        "tools": TOOLS,
        "messages": [
            SYSTEM,
            *dialogue("Is it warm in Zürich?"),
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"celsius": 31}'},
            {"role": "assistant", "content": "Yes, 31 °C."},
            *dialogue("Thanks.", "You are welcome."),
        ],
    },
    "thoughts": {
        "messages": dialogue("1 + 1?", "<think>\nEasy.\n</think>\n\n2", "2 + 2?", "<think>\nTwice.\n</think>\n\n4")
    },
    "blanks around words": {"messages": dialogue(" a ", " \n b\n", "c", "d ")},
}  # fmt: skip


def make_conversation(record: dict[str, Any], folder: Path) -> Conversation:
    """A record as it comes out of a file."""
    path = folder / "data.jsonl"
    path.write_text(json.dumps(record))
    (parsed,) = RecordReader(SourceFile(path))
    assert isinstance(parsed, Conversation)
    return parsed


def template_of(chat: Chat) -> ChatTemplate:
    return ChatTemplate(chat.source, chat.bos, chat.eos)


def render_record(
    chat: Chat, record: dict[str, Any], folder: Path, **options: bool
) -> list[RenderedConversation]:
    return ConversationRenderer(template_of(chat), list(chat.eog_texts), **options).render(
        make_conversation(record, folder)
    )


def mark_spans(one: RenderedConversation) -> str:
    """The text with [[…]] around what is learnt."""
    text, at = "", 0
    for begin, end in one.spans:
        text += f"{one.text[at:begin]}[[{one.text[begin:end]}]]"
        at = end
    return text + one.text[at:]


def golden_text(name: str, folder: Path) -> str:
    parts = []
    for about, record in RECORDS.items():
        parts += [f"==== {about}", *map(mark_spans, render_record(CHATS[name], record, folder))]
    return "\n".join(parts) + "\n"


@each
def test_goldens(name: str, tmp_path: Path):
    assert golden_text(name, tmp_path) == (GOLDENS / f"{name}.txt").read_text(encoding="utf-8")


@each
@pytest.mark.parametrize("about", RECORDS)
def test_what_is_learnt_is_what_the_assistant_says(name: str, about: str, tmp_path: Path):
    """By a rule that knows no spans: each turn's words, thoughts aside, and one end marker; a call as its JSON."""
    said = [m for m in RECORDS[about]["messages"] if m["role"] == "assistant"]
    target_texts = [
        sample.text[begin:end]
        for sample in render_record(CHATS[name], RECORDS[about], tmp_path)
        for begin, end in sample.spans
    ]
    assert len(target_texts) == len(said)
    for words, message in zip(target_texts, said, strict=True):
        (mark,) = (end for end in CHATS[name].eog_texts if words.endswith(end))
        body = THOUGHT.sub("", words.removesuffix(mark)).strip()
        if "tool_calls" in message:
            assert '"weather"' in body and '{"city": "Zürich"}' in body
            assert not {"user", "assistant", "model", "weather?"} & set(re.findall(r"\w+\??", body))
        else:
            assert body == THOUGHT.sub("", message["content"]).strip()


@each
@pytest.mark.parametrize("about", RECORDS)
def test_what_is_not_learnt_has_no_reply_in_it(name: str, about: str, tmp_path: Path):
    """Where all turns are in one text, nothing that only the assistant says is left outside of the spans."""
    texts = render_record(CHATS[name], RECORDS[about], tmp_path)
    if len(texts) == 1:
        rest = re.sub(r"\[\[.*?\]\]", "", mark_spans(texts[0]).replace("\\]", ""), flags=re.DOTALL)
        for only in ("Hello!", "Till soon", "31 °C", "You are welcome", "Easy.", "Twice."):
            assert only not in rest


@each
def test_the_last_turn_alone(name: str, tmp_path: Path):
    (sample,) = render_record(
        CHATS[name], RECORDS["three turns and a system"], tmp_path, last_only=True
    )
    ((begin, end),) = sample.spans
    assert "Till soon." in sample.text[begin:end] and "Hello!" in sample.text[:begin]


HARMONY = """
{%- for m in messages %}
    {%- if m.role != 'assistant' %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}
    {%- else %}
        {%- if m.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {{- '<|start|>assistant to=functions.' ~ m.tool_calls[0].function.name }}
            {{- '<|channel|>commentary json<|message|>' ~ m.tool_calls[0].function.arguments|tojson ~ '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""  # gpt-oss's, in short


@pytest.mark.parametrize(
    "said",
    [
        {"content": "4", "thinking": "Twice."},
        {"content": "4", "reasoning_content": "Twice."},
        {"content": "<think>\nTwice.\n</think>\n\n4"},
    ],
    ids=["thinking", "reasoning_content", "marks"],
)
def test_thoughts_go_where_the_template_has_them(said: dict[str, str], tmp_path: Path):
    """In channels of their own, of the last turn only: each turn is learnt as it is said, in a text that ends there."""
    messages = [*dialogue("1 + 1?"), {"role": "assistant", **said}]
    messages += [*dialogue("2 + 2?"), {"role": "assistant", **said}]
    end_markers = ["<|return|>", "<|call|>"]
    texts = ConversationRenderer(ChatTemplate(HARMONY, "", ""), end_markers).render(
        make_conversation({"messages": messages}, tmp_path)
    )
    first = "<|start|>user<|message|>1 + 1?<|end|><|start|>assistant"
    target_text = (
        "[[<|channel|>analysis<|message|>Twice.<|end|><|start|>assistant"
        "<|channel|>final<|message|>4<|return|>]]"
    )
    second = (
        "<|channel|>final<|message|>4<|end|><|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
    )
    assert [*map(mark_spans, texts)] == [first + target_text, first + second + target_text]


def test_a_call_with_thoughts_ends_with_its_own_mark(tmp_path: Path):
    call = {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [CALL]}
    renderer = ConversationRenderer(ChatTemplate(HARMONY, "", ""), ["<|return|>", "<|call|>"])
    (sample,) = renderer.render(
        make_conversation({"messages": [*dialogue("Warm?"), call]}, tmp_path)
    )
    ((begin, end),) = sample.spans
    assert sample.text[begin:end] == (
        "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>'
    )


def test_thoughts_calls_and_results_in_one_turn(tmp_path: Path):
    """As Gemma 4 is to write them: also the thoughts before its last words, which its template leaves out."""
    call = {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [CALL]}
    result = {"role": "tool", "name": "weather", "content": "31"}
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "31 is warm."}
    turn = [*dialogue("Warm?"), call, result, said]
    record = {"messages": [SYSTEM, *turn], "tools": TOOLS}
    renderer = ConversationRenderer(ChatTemplate(GEMMA_4, "<bos>", ""), list(GEMMA_4_ENDS))
    (sample,) = renderer.render(make_conversation(record, tmp_path))
    written = '<|tool_call>call:weather{city:<|"|>Zürich<|"|>}<tool_call|>'
    assert mark_spans(sample) == (
        "<bos><|turn>system\n<|think|>\nYou answer briefly.<|tool>declaration:weather{}<tool|><turn|>\n"
        "<|turn>user\nWarm?<turn|>\n<|turn>model\n"
        f"[[<|channel>thought\nI ask.\n<channel|>{written}<|tool_response>]]"
        'response:weather{value:<|"|>31<|"|>}<tool_response|>'
        "[[<|channel>thought\n31 is warm.\n<channel|>Yes.<turn|>]]\n"
    )
    assert not renderer.notes
    # no thoughts: none are asked for; and those of earlier turns are not in later ones
    without_thoughts = make_conversation({"messages": [*dialogue("Warm?", "Yes.")]}, tmp_path)
    assert mark_spans(renderer.render(without_thoughts)[0]) == (
        "<bos><|turn>user\nWarm?<turn|>\n<|turn>model\n[[Yes.<turn|>]]\n"
    )
    *_, last = renderer.render(
        make_conversation({"messages": [*turn, *dialogue("Sure?", "I am.")]}, tmp_path)
    )
    assert "I ask." not in last.text and "31 is warm." not in last.text


def test_thoughts_that_a_template_does_not_read_are_counted(tmp_path: Path):
    said = {"role": "assistant", "content": "4", "reasoning_content": "Twice."}
    renderer = ConversationRenderer(template_of(CHATS["chatml"]), list(CHATS["chatml"].eog_texts))
    renderer.render(make_conversation({"messages": [*dialogue("2 + 2?"), said]}, tmp_path))
    assert renderer.notes[rendering.THOUGHTS_NOTE] == 1


# ---- tokens


@cache
def metadata(chat: Chat) -> dict[str, Any]:
    """A vocabulary of bytes and the special tokens; token 1 is BOS where the metadata do not name one."""
    special = dict.fromkeys(("<s>", *chat.special))
    texts = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    names = {"bos": chat.bos, "eos": chat.eos}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text.encode() for text in texts],
        "tokenizer.ggml.scores": np.zeros(len(texts), np.float32),
        "tokenizer.ggml.token_type": np.array([2] + [3] * len(special) + [6] * 256 + [1], np.int32),
        "tokenizer.ggml.add_bos_token": bool(chat.bos),
        "tokenizer.ggml.add_space_prefix": False,
    } | {f"tokenizer.ggml.{k}_token_id": texts.index(v) for k, v in names.items() if v}


@cache
def tokenizer_of(model: str) -> tuple[Chat, Tokenizer]:
    """A chat and its vocabulary, by its name as in `each_vocabulary`."""
    name, model_vocab, _ = model.partition(" of the model")
    chat = CHATS[name]
    if not model_vocab:
        return chat, Tokenizer(metadata(chat))
    return chat, Tokenizer(GGUF(VOCABULARIES / f"ggml-vocab-{chat.vocabulary}.gguf").metadata)


def learned_text(masker: LossMasker, sample: MaskedSample) -> str:
    """The text of the tokens that are learnt."""
    pairs = zip(sample.ids, sample.weights, strict=True)
    return b"".join(masker.tokenizer.piece(id) for id, weight in pairs if weight).decode()


@each_vocabulary
@pytest.mark.parametrize("about", RECORDS)
def test_tokens(model: str, about: str, tmp_path: Path):
    """Ids are those of the whole text with one BOS; tokens that are learnt spell what is learnt of the text."""
    chat, tokenizer = tokenizer_of(model)
    masker = LossMasker(tokenizer)
    assert set(chat.eog_texts) <= set(masker.eog_texts)
    for text in render_record(chat, RECORDS[about], tmp_path):
        sample = masker.mask_conversation(text)
        text_body = text.text.removeprefix(chat.bos) if tokenizer.add_bos else text.text
        assert sample.ids == tokenizer.encode(text_body)
        assert sample.ids.count(tokenizer.bos) == (1 if chat.bos else 0) or tokenizer.bos is None
        spelt = "".join(text.text[begin:end] for begin, end in text.spans)
        words = learned_text(masker, sample)
        assert "".join(words.split()) == "".join(spelt.split())
        if (
            not tokenizer.add_space_prefix and about != "blanks around words"
        ):  # a token with the prompt's line break
            assert words == spelt
        assert all(
            weight == 1
            for weight in LossMasker(tokenizer, everything=True).mask_conversation(text).weights
        )


TINY = Chat("", "<s>", "</s>", ("</s>",), ("<s>", "</s>"), None)


@pytest.mark.parametrize(
    "text", ["a", " a", "<s>a</s> \n b", "ä\u2581é  x", "🙂" * 3, "</s></s>\t"]
)
@each_vocabulary
def test_where_tokens_begin(model: str, text: str):
    """The pieces of all tokens are the text between their places, but for spaces that are put in or swallowed."""
    (_, tokenizer), raw = tokenizer_of(model), text.encode()
    ids = tokenizer.encode(text, bos=False, eos=False)
    places = list(places_of(tokenizer, ids, raw))
    assert all(a[1] <= b[0] and not raw[a[1] : b[0]].strip() for a, b in pairwise(places))
    for id, (begin, end) in zip(ids, places, strict=True):
        piece = raw[begin:end].replace("\u2581".encode(), b" ")
        assert tokenizer.piece(id).replace("\u2581".encode(), b" ").strip() == piece.strip()


@pytest.mark.parametrize(
    ("text", "span", "weights"),
    [
        ("abcdef  ", (2, 4), [0, 1, 0, 0]),
        ("ab cdefg", (3, 6), [0, 1, 1, 0]),  # a word of the reply with a blank of the prompt
        (
            "abcdef  ",
            (3, 5),
            [0, 1, 1, 0],
        ),  # letters of both; then of the reply and of what follows
        ("ab    ef", (3, 8), [0, 0, 1, 1]),  # blanks of both
        ("abcdef  ", (3, 3), [0, 0, 0, 0]),  # nothing
    ],
)
def test_a_token_across_a_border(text: str, span: tuple[int, int], weights: list[int]):
    class PairTokenizer(Tokenizer):
        def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
            return [self.tokens.index(text[i : i + 2].encode()) for i in range(0, len(text), 2)]

    pair_metadata = metadata(TINY) | {"tokenizer.ggml.add_bos_token": False}
    pairs = sorted({text[i : i + 2].encode() for i in range(0, len(text), 2)})
    pair_metadata["tokenizer.ggml.tokens"] = [*pair_metadata["tokenizer.ggml.tokens"], *pairs]
    count = len(pairs)
    for key, value in (("token_type", 1), ("scores", 0.0)):
        pair_metadata[f"tokenizer.ggml.{key}"] = np.append(
            pair_metadata[f"tokenizer.ggml.{key}"], [value] * count
        )
    assert (
        LossMasker(PairTokenizer(pair_metadata))
        .mask_conversation(RenderedConversation(text, [span]))
        .weights
        == weights
    )


def test_a_text_ends_once():
    tokenizer = Tokenizer(metadata(TINY))
    masker = LossMasker(tokenizer)
    bos, eos = tokenizer.bos, tokenizer.eos
    words = tokenizer.encode("ab", bos=False)

    def ids(*args: Any) -> list[int | None]:
        return [id for part in masker.encode_text(*args) for id in part]

    assert ids(["a", "b"], False) == [bos, *words, eos]
    assert ids(["<s>ab</s>"], True) == [bos, *words, eos]
    assert ids(["<s>ab</s>"], False) == [
        bos,
        *tokenizer.encode("<s>ab</s>", bos=False, special=False),
        eos,
    ]


# ---- templates that are not as others


def test_notes(tmp_path: Path):
    """What a template does not take is said, with a count."""
    expected_notes = {
        "gemma": {
            rendering.SYSTEM_NOTE,
            rendering.CALLS_NOTE,
            rendering.RESULTS_NOTE,
            rendering.TOOLS_NOTE,
        },
        "phi-3": {rendering.CALLS_NOTE, rendering.RESULTS_NOTE, rendering.TOOLS_NOTE},
        "chatml": {rendering.CALLS_NOTE, rendering.TOOLS_NOTE},
        "mistral": {rendering.UNSTABLE},
        "qwen3": {rendering.UNSTABLE},
        "qwen2.5": set(),
        "llama-3": set(),
    }
    for name, notes in expected_notes.items():
        renderer = ConversationRenderer(template_of(CHATS[name]), list(CHATS[name].eog_texts))
        renderer.render(make_conversation(RECORDS["a call of a tool"], tmp_path))
        assert set(renderer.notes) == notes and set(renderer.notes.values()) <= {1}


def test_a_prompt_that_asks_for_thoughts(tmp_path: Path):
    """A prompt for a reply need not be what the conversation goes on with; that thoughts are lost is said."""
    source = CHATS["chatml"].source.replace(
        "assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"
    )
    source = source.replace("m.content", "m.content.split('</think>')[-1]|trim")
    assert source.count("think") == 2
    renderer = ConversationRenderer(ChatTemplate(source), list(CHATS["chatml"].eog_texts))
    for about, replies in (("one question", ["A program."]), ("thoughts", ["2", "4"])):
        (sample,) = renderer.render(make_conversation(RECORDS[about], tmp_path))
        assert [sample.text[a:b] for a, b in sample.spans] == [
            f"{words}<|im_end|>" for words in replies
        ]
    assert renderer.notes == {rendering.CHANGED_NOTE: 2}


KNOWN_ROLES = (
    "{% for m in messages if m.role in ('user', 'assistant', 'tool') or m.role == 'system' and m == messages[0] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("spoken", "note"),
    [
        ("developer: Rhyme. | user: Hi. | assistant: Ho.", rendering.DEVELOPER_NOTE),
        ("system: Rhyme. | system: Assist a user. | user: Hi. | assistant: Ho.", rendering.LOST_NOTE),
        ("user: Hi. | assistant: Ho. | system: Rhyme. | user: Hi. | assistant: Ho.", rendering.LOST_NOTE),
        ("user Ada: Hi. | assistant: Ho.", rendering.LOST_NOTE),
        ("user: Hi. | call up: | tool: 1 | assistant: Ho.", None),
        ("user: Hi. | call up up: | tool: 1 | tool: 2 | assistant: Ho.", rendering.CHANGED_NOTE),
        ("system:  Rhyme. \n | user: Hi. | assistant: Ho.", None),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_said(spoken: str, note: str | None, tmp_path: Path):
    """Messages of a role that it does not write, names of speakers, and all calls but the first."""
    messages: list[dict[str, Any]] = []
    for part in spoken.split(" | "):
        speaker, _, content = part.partition(":")
        role, *names = speaker.split()
        message: dict[str, Any] = {"role": role, "content": content.removeprefix(" ")}
        if role == "call":
            message |= {"role": "assistant", "tool_calls": [{"name": name} for name in names]}
        messages.append(message | ({"name": names[0]} if names and role != "call" else {}))
    renderer = ConversationRenderer(ChatTemplate(KNOWN_ROLES), ["<|im_end|>"])
    (sample,) = renderer.render(make_conversation({"messages": messages}, tmp_path))
    assert renderer.notes == ({note: 1} if note else {})
    if note == rendering.DEVELOPER_NOTE:
        assert sample.text.startswith("<|im_start|>system\nRhyme.<|im_end|>")


def test_bad_templates(tmp_path: Path):
    parsed = make_conversation(RECORDS["one question"], tmp_path)
    raising = CHATS["gemma"].source.replace(
        "messages[0].role == 'system'", "messages[0].role == 'user'"
    )
    with pytest.raises(InputError, match="the chat template: System role not supported"):
        ConversationRenderer(ChatTemplate(raising, "", ""), []).render(parsed)
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    with pytest.raises(InputError, match="no text in which the reply can be told from the prompt"):
        ConversationRenderer(ChatTemplate(silent, "", ""), []).render(parsed)


def test_a_template_without_an_end(tmp_path: Path):
    source = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"
    renderer = ConversationRenderer(ChatTemplate(source, "", ""), ["</s>"])
    (sample,) = renderer.render(make_conversation(RECORDS["one question"], tmp_path))
    assert mark_spans(sample) == "user: Who are you?\nassistant: [[A program.]]\n"
    assert renderer.notes == {rendering.ENDLESS_NOTE: 1}


GLM = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% set words = m.content %}{% if not loop.last %}{% set words = words.split('</think>')[-1].strip() %}{% endif %}"
    "{{ words }}{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("about", "learned_texts"),
    [
        ("one question", ["A program.<|user|>"]),
        ("a call of a tool", ['weather {"city": "Zürich"}<|observation|>', "Yes, 31 °C.<|user|>"]),
        ("thoughts", ["<think>\nEasy.\n</think>\n\n2<|user|>", "<think>\nTwice.\n</think>\n\n4<|user|>"]),
    ],
)  # fmt: skip
def test_an_end_that_the_next_message_brings(about: str, learned_texts: list[str], tmp_path: Path):
    renderer = ConversationRenderer(
        ChatTemplate(GLM), ["<|endoftext|>", "<|user|>", "<|observation|>"]
    )
    samples = renderer.render(make_conversation(RECORDS[about], tmp_path))
    said = [sample.text[a:b] for sample in samples for a, b in sample.spans]
    assert said[: len(learned_texts)] == learned_texts
    assert rendering.ENDLESS_NOTE not in renderer.notes


def test_a_template_that_needs_a_list_of_tools(tmp_path: Path):
    """As those of `tokenizer.chat_template.tool_use`: no tools are an empty list there."""
    source = "{% for t in tools %}{{ t.function.name }}\n{% endfor %}" + CHATS["chatml"].source
    renderer = ConversationRenderer(ChatTemplate(source), list(CHATS["chatml"].eog_texts))
    assert renderer.takes_tools and renderer.takes_system
    (sample,) = renderer.render(make_conversation(RECORDS["one question"], tmp_path))
    assert [sample.text[a:b] for a, b in sample.spans] == ["A program.<|im_end|>"]


def test_a_template_that_needs_arguments_as_text(tmp_path: Path):
    """As functionary's."""
    source = (
        "{% for m in messages %}>>>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name + '\n' + c.function.arguments }}{% endfor %}"
        "<|eot_id|>{% endfor %}{% if add_generation_prompt %}>>>assistant\n{% endif %}"
    )
    renderer = ConversationRenderer(ChatTemplate(source), ["<|eot_id|>"])
    (sample,) = renderer.render(make_conversation(RECORDS["a call of a tool"], tmp_path))
    first = sample.text[slice(*sample.spans[0])]
    assert (
        first == 'weather\n{"city": "Zürich"}<|eot_id|>'
        and rendering.CALLS_NOTE not in renderer.notes
    )


def test_a_call_where_the_prompt_begins_thoughts(tmp_path: Path):
    """The reply begins where it differs from the prompt."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}<call>"
        "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
        "{% else %}{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}{% endif %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    renderer = ConversationRenderer(ChatTemplate(source), ["<|end|>"])
    samples = renderer.render(make_conversation(RECORDS["a call of a tool"], tmp_path))
    said = [sample.text[a:b] for sample in samples for a, b in sample.spans]
    assert said[0] == "<call>weather<|end|>"  # not within the token
    assert said[1].endswith("Yes, 31 °C.<|end|>")


def write(folder: Path) -> None:
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for name in CHATS:
        (GOLDENS / f"{name}.txt").write_text(golden_text(name, folder), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent)
    (Path(__file__).parent / "data.jsonl").unlink()
