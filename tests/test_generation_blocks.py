"""Templates with generation blocks: what is learnt is what transformers masks, by a record and, where it is, live.

The record has short templates of our own (tests/generation_blocks.py); live come the training templates of TRL.
"""

import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import pytest

from packtrain.common.errors import InputError
from packtrain.data.chat_template import ChatTemplate, TemplateError
from packtrain.data.conversations import conversation_renderer as rendering
from packtrain.data.conversations.conversation_renderer import (
    ConversationRenderer,
    RenderedConversation,
)
from packtrain.data.conversations.loss_mask import LossMasker, places_of
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF
from tests.generation_blocks import (
    CHATML,
    CONVERSATIONS,
    RECORD,
    REFUSED,
    TEMPLATES,
    TOKENIZED,
    VOCABULARIES,
    SpiedTemplate,
    conversation,
    masked_by_transformers,
    masked_tokens,
    masked_turns,
    record_all,
)

each = pytest.mark.parametrize("name", TEMPLATES)
each_conversation = pytest.mark.parametrize("about", CONVERSATIONS)
WEIGHTED = "a weight of 0"
THINKING = ("thoughts", "thoughts in words")
SEVERAL_TURNS = ("turns", "blanks", "control tokens", *THINKING, "calls")
UNSUPPORTED = ("llava_next_training",)  # contents must be lists of parts there
# conversations whose later turns change earlier ones: each turn is learnt in a text that ends with it
SEPARATE = {
    "qwen3-last": SEVERAL_TURNS,
    "harmony": (*SEVERAL_TURNS, "thoughts, words and a call"),
}


def renderer_of(name: str, **options: bool) -> ConversationRenderer:
    source, bos, eos, eog_texts = TEMPLATES[name]
    return ConversationRenderer(ChatTemplate(source, bos, eos), [*eog_texts], **options)


@cache
def record() -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return entries


def spans_of(rendered: RenderedConversation) -> list[list[int]]:
    return [[start, end] for start, end in rendered.spans if start < end]


def check_spans(
    renderings: list[RenderedConversation], turns: list[dict[str, Any]], about: str
) -> None:
    """One text has the spans of all its turns but those of weight 0; of several, each has those of its last turn."""
    if len(renderings) == 1:
        expected = turns[-1]["spans"][turns[-1]["first"] if about == WEIGHTED else 0 :]
        assert (renderings[0].text, spans_of(renderings[0])) == (turns[-1]["text"], expected)
        return
    for rendered, turn in zip(renderings, turns, strict=True):
        expected = turn["spans"][turn["first"] :]
        assert (rendered.text, spans_of(rendered)) == (turn["text"], expected)


@each
@each_conversation
def test_spans_are_those_of_transformers(name: str, about: str):
    if (name, about) in REFUSED:
        with pytest.raises(TemplateError, match="Roles must alternate"):
            renderer_of(name).render(conversation(about))
        return
    renderings = renderer_of(name).render(conversation(about))
    assert (len(renderings) > 1) == (about in SEPARATE.get(name, ()))
    check_spans(renderings, record()[f"{name}: {about}"]["turns"], about)


def test_the_record_has_all_cases():
    cases = {(name, about) for name in TEMPLATES for about in CONVERSATIONS}
    assert {*record()} == {f"{name}: {about}" for name, about in cases - REFUSED}
    spans = {name: record()[f"{name}: turns"]["turns"][-1]["spans"] for name in TEMPLATES}
    assert all(len(s) >= 3 for name, s in spans.items() if name != "calls")


def check_tokens(
    vocabulary: str, rendered: RenderedConversation, expected: dict[str, list[int]], about: str
) -> int:
    """Compare ids and weights with those of transformers; returns the number of tokens that differ by rule.

    Transformers trains on the token in which a block begins, even if the block is empty. packtrain does so only if
    the token has words of the block, for otherwise the prompt alone, tokenized, ends with another token.
    """
    masker = LossMasker(tokenizer_named(vocabulary))
    sample = masker.mask_conversation(rendered)
    assert sample.ids == expected["ids"]
    num_added = 1 if masker.tokenizer.add_bos else 0
    dropped = len(masker.tokenizer.piece(sample.ids[0])) if num_added else 0
    raw, mask, num_blanks = rendered.text.encode()[dropped:], [*expected["mask"]], 0
    spans = [[len(rendered.text[:at].encode()) - dropped for at in span] for span in rendered.spans]
    places = places_of(masker.tokenizer, sample.ids[num_added:], raw)
    for i, (begin, end) in enumerate(places, num_added):
        across = [raw[start : min(stop, end)] for start, stop in spans if begin < start < end]
        is_within = any(start <= begin < stop for start, stop in spans)
        if across and not is_within and not b"".join(across).strip():
            assert mask[i] == 1
            mask[i] = 0
            num_blanks += 1
    assert sample.weights == mask
    return num_blanks


@cache
def tokenizer_named(vocabulary: str) -> Tokenizer:
    return Tokenizer(GGUF(VOCABULARIES / f"ggml-vocab-{vocabulary}.gguf").metadata)


@pytest.mark.shared
@pytest.mark.parametrize("name", TOKENIZED)
def test_tokens_are_those_of_transformers(name: str):
    num_blanks = {}
    for about in CONVERSATIONS:
        entry = record()[f"{name}: {about}"]
        (rendered,) = renderer_of(name).render(conversation(about))
        if about == WEIGHTED:  # transformers knows no weights
            rendered = RenderedConversation(rendered.text, entry["turns"][-1]["spans"])
        num_blanks[about] = check_tokens(TOKENIZED[name], rendered, entry, about)
    expected_blanks = {"blanks": 2} if name == "chatml" else {}
    assert {about: n for about, n in num_blanks.items() if n} == expected_blanks


# ---- what is said, and what is refused


def test_notes_of_blocks():
    """How many turns are learnt by blocks is said, and what blocks leave out."""
    expected_notes = {
        "chatml": {rendering.BLOCKS_NOTE: 3},
        "gemma-4": {rendering.BLOCKS_NOTE: 3},
        "calls": {rendering.BLOCKLESS_NOTE: 3},
    }
    for name, notes in expected_notes.items():
        renderer = renderer_of(name)
        renderer.render(conversation("turns"))
        assert renderer.notes == notes
    renderer = renderer_of("calls")
    renderer.render(conversation("thoughts, words and a call"))
    assert renderer.notes[rendering.BLOCKS_NOTE] == renderer.notes[rendering.BLOCKLESS_NOTE] == 1
    assert renderer.notes[rendering.ENDLESS_NOTE] == 1
    assert renderer.notes[rendering.CHANGED_NOTE] == 1  # its words are not in the block


def test_a_template_without_blocks_is_read_as_before():
    source = CHATML.replace("{%- generation %}", "{%- if true %}").replace("endgeneration", "endif")
    renderer = ConversationRenderer(ChatTemplate(source), ["<|im_end|>"])
    (rendered,) = renderer.render(conversation("one question"))
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["A program.<|im_end|>"]
    assert not renderer.has_blocks and not renderer.notes


# thoughts before a call stay only while no answer without a call follows, as gpt-oss's do
FADING = """
{%- set answers = messages|selectattr('role', 'eq', 'assistant')|rejectattr('tool_calls')|list %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {%- if m.tool_calls and not answers %}{{ '<think>' ~ m.thinking ~ '<|end|>' }}{% endif %}
            {{- '<call>' ~ m.tool_calls[0].function.name if m.tool_calls else '<final>' ~ m.content }}<|end|>
        {%- endgeneration %}
    {%- else %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '' }}{% endif %}"""


@pytest.mark.parametrize("weight", [0, 1])
def test_an_earlier_turn_whose_block_later_ones_change_keeps_its_block(weight: int):
    tool_conversation = conversation("thoughts, words and a call")
    messages = [
        {**m, "weight": weight} if m.get("tool_calls") else m for m in tool_conversation.messages
    ]
    renderer = ConversationRenderer(ChatTemplate(FADING), ["<|end|>"])
    renderings = renderer.render(replace(tool_conversation, messages=messages))
    learned_texts = [rendered.trained_texts for rendered in renderings]
    thought = [["<think>I ask.<|end|><call>weather<|end|>"]] if weight else []
    assert learned_texts == [*thought, ["<final>Yes.<|end|>"]]


@each
def test_the_last_turn_alone(name: str):
    (rendered,) = renderer_of(name, last_only=True).render(conversation("turns"))
    turn = record()[f"{name}: turns"]["turns"][-1]
    assert rendered.text == turn["text"]
    assert spans_of(rendered) == turn["spans"][turn["first"] :]


def test_the_answer_of_a_pair_alone():
    chosen = replace(conversation("turns"), num_answer_messages=3)
    (rendered,) = renderer_of("chatml").render(chosen)
    assert spans_of(rendered) == record()["chatml: turns"]["turns"][-1]["spans"][1:]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{{ m.content ~", "{% generation %}a{% endgeneration %}{{ m.content ~"),
        (
            "{%- generation %}{{ m.content ~ '<|im_end|>\n' }}{% endgeneration %}",
            "{% set x %}{% generation %} {{ m.content }}{% endgeneration %}{% endset %}{{ x|trim }}<|im_end|>",
        ),
        ("{{ m.content ~", "{{ generation_start ~ m.content ~"),
    ],
    ids=["one in another", "trimmed", "marked twice"],
)
def test_blocks_that_cannot_be_told_from_the_text_are_refused(old: str, new: str):
    source = CHATML.replace(old, new)
    assert source != CHATML
    renderer = ConversationRenderer(ChatTemplate(source), ["<|im_end|>"])
    with pytest.raises(InputError, match="generation blocks in one another, or changes their text"):
        renderer.render(conversation("one question"))


def test_words_that_spell_the_marks_are_refused():
    question = conversation("one question")
    for mark in rendering.BLOCK_MARKS.values():
        spelt = replace(
            question, messages=[{**m, "content": f"{mark}x"} for m in question.messages]
        )
        with pytest.raises(InputError, match="generation blocks in one another"):
            renderer_of("chatml").render(spelt)


def test_filters_that_keep_the_text_are_followed():
    """Transformers counts characters where a block is rendered, not where its text goes."""
    block = "{%- generation %}{{ m.content ~ '<|im_end|>\n' }}{% endgeneration %}"
    later = "{%- set x %}" + block + "{% endset %}{{ 'Hm. ' ~ x }}"
    renderer = ConversationRenderer(ChatTemplate(CHATML.replace(block, later)), ["<|im_end|>"])
    (rendered,) = renderer.render(conversation("one question"))
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["A program.<|im_end|>\n"]
    assert "assistant\nHm. A program." in rendered.text


# ---- live

TRL = find_spec("trl")
FOLDER = Path(*(TRL.submodule_search_locations or [])) if TRL else Path()
NAMES = sorted(path.stem for path in FOLDER.glob("chat_templates/*_training.jinja")) or [""]
ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "</s>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
]


@pytest.mark.transformers
@pytest.mark.shared
@pytest.mark.filterwarnings("ignore")
def test_the_record_is_what_transformers_gives():
    assert record_all() == record()


@pytest.mark.transformers
@pytest.mark.shared
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_training_templates_of_trl(name: str):
    """Spans are those of transformers, ids and masks too; what packtrain refuses, transformers refuses."""
    source, num_equal = (FOLDER / f"chat_templates/{name}.jinja").read_text(encoding="utf-8"), 0
    for about in CONVERSATIONS:
        template = SpiedTemplate(source, "<s>", "<|endoftext|>")
        renderer = template.renderer(ENDS)
        try:
            renderings = renderer.render(conversation(about))
        except TemplateError:
            template.variables = template.attempt
            with pytest.raises(jinja2.TemplateError):
                masked_by_transformers(template, template.attempt["messages"])
            continue
        assert renderer.has_blocks
        turns = masked_turns(template)
        check_spans(renderings, turns, about)
        num_equal += 1
        if len(renderings) > 1:
            learned = (turn["text"][: turn["spans"][-1][1]] for turn in turns)
            assert not all(turns[-1]["text"].startswith(text) for text in learned)
        elif about != WEIGHTED:
            check_tokens("qwen2", renderings[0], masked_tokens(template, "qwen2"), about)
    assert num_equal >= 9 or name in UNSUPPORTED
