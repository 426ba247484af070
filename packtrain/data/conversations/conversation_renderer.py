"""Renders a conversation with a chat template, and finds the assistant's parts of the text.

If the template has generation blocks, a turn's parts are its blocks. Otherwise a turn begins where the prompt before
it, rendered with a generation prompt, ends, and ends with the next end marker. This module knows no token ids; an
error in the template is an InputError that names the record."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, product
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations import messages as sample_messages
from packtrain.data.conversations.messages import Conversation, Message

PROBE = "packtrainprobe"
PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": PROBE, "arguments": {}}}
NONE = {"type": "object", "properties": {}, "required": []}
TOOL = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": NONE}}
ASK, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SAID = {"role": "user", "content": PROBE}
RESULT = {"role": "tool", "content": PROBE, "tool_call_id": "call00001", "name": "a"}

THOUGHTS = "reasoning_content", "thinking"  # the fields that templates read
THINKING = {"enable_thinking": True}  # variable without which some templates ignore thoughts
# variables that templates write before and after generation blocks
BLOCK_MARKS = {"generation_start": "\x02generation\x03", "generation_end": "\x02endgeneration\x03"}
BLOCK = re.compile("{generation_start}(.*?){generation_end}".format(**BLOCK_MARKS), re.DOTALL)
THINK_TAG, THOUGHT_BLOCK = "<think>", re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)

# notes with a count
SYSTEM_NOTE = (
    "system messages put before the user's first words, because the template does not support them"
)
DEVELOPER_NOTE = "developer messages written as the system's, because the template has no such role"
CALLS_NOTE = "tool calls written as JSON, because the template does not support them"
RESULTS_NOTE = "tool results written as user messages, because the template does not support them"
TOOLS_NOTE = "lists of tools left out, because the template does not support them"
THOUGHTS_NOTE = "thoughts left out, because the template does not support them"
UNSTABLE = "conversations rendered once per trained turn, because later turns change earlier ones"
CHANGED_NOTE = "turns whose content, reasoning or tool calls the template changes"
LOST_NOTE = "messages whose words or speaker's name the template leaves out or changes"
WEIGHTLESS = "turns of the assistant that the data keeps from being trained on"
ENDLESS_NOTE = "turns without an end token, so that the model cannot learn to stop"
BLOCKS_NOTE = "turns trained on as the template's generation blocks say"
BLOCKLESS_NOTE = "turns not trained on, because the template has no generation block around them"


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A text, and the spans (start, end) of it that are trained on."""

    text: str
    spans: list[tuple[int, int]]

    @property
    def trained_texts(self) -> list[str]:
        return [self.text[start:end] for start, end in self.spans]


class ConversationRenderer:
    """Renders conversations with one template.

    eog_texts  texts of tokens that end a reply
    notes      counts of unexpected findings, by message
    """

    def __init__(
        self, template: ChatTemplate, eog_texts: list[str], last_only: bool = False
    ) -> None:
        self.template, self.last_only = template, last_only
        self.notes: Counter[str] = Counter()
        self._end_pattern = re.compile(
            "|".join(map(re.escape, sorted(eog_texts, key=len, reverse=True))) or "(?!)"
        )
        call_message: Message = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
        self._no_tools: list[Any] | None = None  # `tools` for no tools
        if not self._shows([SAID]) and self._shows([SAID], []):
            self._no_tools = []
        self.takes_system, self._takes_developer = (
            self._shows([{"role": role, "content": PROBE}, ASK]) for role in ("system", "developer")
        )
        self.takes_calls = self._shows([ASK, call_message])
        self._as_text = not self.takes_calls and self._shows(
            [ASK, sample_messages.with_text_arguments(call_message)]
        )
        if self._as_text:
            self.takes_calls, call_message = True, sample_messages.with_text_arguments(call_message)
        self._by_id = not self.takes_calls and self._shows(
            [ASK, sample_messages.name_call_ids([call_message])[0]]
        )
        if self._by_id:
            self.takes_calls, call_message = True, sample_messages.name_call_ids([call_message])[0]
        self.takes_results = self._shows([ASK, call_message if self.takes_calls else REPLY, RESULT])
        self.takes_tools = self._shows([ASK], [TOOL])
        (call,) = call_message["tool_calls"]
        # the probe is neither its name nor in its id, which may hold the name
        named_call = {**call, "id": "a", "function": {**call["function"], "name": "a"}}
        replies = (REPLY, {**call_message, "tool_calls": [named_call]})
        marks = {"generation_start": PROBE}
        self.has_blocks = any(self._shows([ASK, r], extra_variables=marks) for r in replies)
        self._thought_field, self.marks = self._find_thoughts(replies)
        self._own_marks = THINK_TAG not in (self.marks[0] or THINK_TAG)

    def _find_thoughts(self, replies: tuple[Message, Message]) -> tuple[str, tuple[str, str]]:
        """Return (name of the message field from which the template reads thoughts, (the text that it writes before
        thoughts, and after)); the name is "" if it reads none, both texts are "" if they cannot be told. `replies`: an
        answer without and one with a tool call, as some templates render thoughts only before calls."""
        for reply, name in product(replies, THOUGHTS):
            if not self._shows([ASK, {**reply, name: PROBE}]):
                continue
            prefix, _, suffix = self._text([ASK, {**reply, name: PROBE}], None).partition(PROBE)
            base_text = self._text([ASK, reply], None)
            head = base_text[: len(base_text) - num_common(suffix[::-1], base_text[::-1])]
            opening, closing = prefix[len(head) :], suffix.removesuffix(base_text[len(head) :])
            mark = opening.lstrip()
            fits = prefix.startswith(head)
            return name, (mark, closing + opening.removesuffix(mark)) if fits and mark else ("", "")
        return "", ("", "")

    def _shows(self, messages: list[Message], tools: Any = None, **options: Any) -> bool:
        """Whether the template renders PROBE, a text in one of the messages: it neither drops the text nor raises."""
        try:
            return PROBE in self._text(messages, tools, **options)
        except InputError:
            return False

    def _text(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> str:
        return self.template.render(messages, self._no_tools if tools is None else tools, **options)

    def render(self, conversation: Conversation) -> list[RenderedConversation]:
        """Render one text with all turns of the assistant, or one for each turn if later turns change earlier ones."""
        messages, tools = self._fitted(conversation)
        first = len(messages) - (conversation.num_answer_messages or len(messages))
        weights = [m.get("weight") != 0 for m in conversation.messages]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        turns = [i for i in answers if weights[i - len(messages)]]
        if len(turns) < len(answers):
            self.notes[WEIGHTLESS] += len(answers) - len(turns)
        thinks = bool(self._thought_field) and any(m.get(self._thought_field) for m in messages)
        options = {"extra_variables": THINKING} if thinks else {}
        turns = turns[-1 if self.last_only else 0 :]
        if self.has_blocks:
            answers = [i for i in answers if i <= turns[-1]]
            renderings = self._render_blocks(messages, answers, turns, tools, options)
        else:
            renderings = [self._render_turn(messages, i, tools, options) for i in turns]
            text = renderings[-1].text
            if all(text.startswith(r.text[: r.spans[0][1]]) for r in renderings):
                spans = [span for rendering in renderings for span in rendering.spans]
                renderings = [RenderedConversation(text, spans)]
            else:
                self.notes[UNSTABLE] += 1
        text = renderings[-1].text
        num_lost = sum(sample_messages.is_lost(m, text) for m in messages[: turns[-1] + 1])
        self.notes += Counter({LOST_NOTE: num_lost})  # which leaves out a count of 0
        return renderings

    def _render_blocks(
        self, messages: list[Message], answers: list[int], turns: list[int], tools: list[Any] | None,
        options: dict[str, Any],
    ) -> list[RenderedConversation]:  # fmt: skip
        """Render one text or several, as `render`, with the spans of the trained turns' blocks. `answers`: indices of
        all the assistant's messages, `turns`: of the trained ones."""
        texts = {i: self._mark_blocks(messages[: i + 1], tools, options) for i in answers}
        firsts = (self._first_block(messages[: i + 1], texts[i], tools, options) for i in answers)
        bounds = pairwise([*firsts, None])
        turn_blocks = {i: slice(*bound) for i, bound in zip(answers, bounds, strict=True)}
        separate = [replace(texts[i], spans=texts[i].spans[turn_blocks[i].start :]) for i in turns]
        for i, rendering in zip(turns, separate, strict=True):
            self._count_notes(messages[i], rendering)
        full = texts[turns[-1]]
        full_spans = [full.spans[turn_blocks[i]] for i in turns]
        stops = (max((b for a, b in spans if a < b), default=0) for spans in full_spans)
        if all(full.text[:end] == r.text[:end] for r, end in zip(separate, stops, strict=True)):
            return [RenderedConversation(full.text, [*chain(*full_spans)])]
        self.notes[UNSTABLE] += 1
        return separate

    def _first_block(
        self, messages: list[Message], text: RenderedConversation, tools: list[Any] | None, options: dict[str, Any]
    ) -> int:  # fmt: skip
        """Return the index in `text.spans` of the last message's first generation block: the first block that the
        messages before it lack, or if its turn changes theirs, the first that differs with another last message."""
        *earlier, answer = messages
        prompt = self._mark_blocks(earlier, tools, options, True).trained_texts
        num_before = num_common(prompt, text.trained_texts)
        if num_before == len(prompt):
            return num_before
        calls = [
            {**c, "function": {**c["function"], "name": PROBE}}
            for c in answer.get("tool_calls", ())
        ]
        changes: Message = {name: PROBE for name in ("content", *THOUGHTS) if answer.get(name)}
        changes |= {"tool_calls": calls} if calls else {}
        probed_text = self._mark_blocks([*earlier, answer | changes], tools, options)
        return max(num_before, num_common(probed_text.trained_texts, text.trained_texts))

    def _mark_blocks(
        self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any], begins: bool = False,
    ) -> RenderedConversation:  # fmt: skip
        """Render messages, with (start, end) of all their generation blocks; `begins` adds a generation prompt."""
        marks = {"extra_variables": {**options.get("extra_variables", {}), **BLOCK_MARKS}}
        parts = BLOCK.split(self._text(messages, tools, add_generation_prompt=begins, **marks))
        text = self._text(messages, tools, add_generation_prompt=begins, **options)
        if "".join(parts) != text:
            fact = "the chat template has generation blocks in one another, or changes their text"
            raise InputError(fact, "blocks must enclose what is written, after all filters")
        offsets = [*accumulate(map(len, parts))]
        return RenderedConversation(text, [*zip(offsets[::2], offsets[1::2], strict=False)])

    def _count_notes(self, message: Message, turn: RenderedConversation) -> None:
        """Count what is unexpected in a turn's generation blocks."""
        reply = "".join(turn.trained_texts)
        self.notes[BLOCKS_NOTE if reply else BLOCKLESS_NOTE] += 1
        if reply and self._is_changed(message, reply):
            self.notes[CHANGED_NOTE] += 1
        if reply and not self._end_pattern.search(reply):
            self.notes[ENDLESS_NOTE] += 1

    def _is_changed(self, message: Message, reply: str) -> bool:
        """Whether a reply lacks the words or thoughts of its message, or the name of a function that it calls."""
        words = message["content"].strip(), (message.get(self._thought_field) or "").strip()
        calls = Counter(call["function"]["name"] for call in message.get("tool_calls", ()))
        return any(text not in reply for text in words) or any(
            reply.count(name) < count for name, count in calls.items()
        )

    def strip_end(self, reply: str) -> str:
        """Return a reply without the token that ends it."""
        marks = [*self._end_pattern.finditer(reply)]
        return reply[: marks[-1].start()] if marks and marks[-1].end() == len(reply) else reply

    def prompt(
        self, conversation: Conversation, variables: Mapping[str, Any] | None = None, begins: bool = True,
    ) -> str:  # fmt: skip
        """Render the text up to the next answer; `begins` adds how an answer begins. `variables` are the template's."""
        messages, tools = self._fitted(conversation)
        return self._text(messages, tools, add_generation_prompt=begins, extra_variables=variables)

    def _render_turn(
        self, messages: list[Message], i: int, tools: list[Any] | None, options: dict[str, Any]
    ) -> RenderedConversation:
        """Render the conversation up to message i, an assistant's turn, with that turn's span."""
        prompt = self._text(messages[:i], tools, add_generation_prompt=True, **options)
        text, reply_start = self._text(messages[: i + 1], tools, **options), len(prompt)
        content = messages[i]["content"].strip()
        if not text.startswith(prompt):
            probe_text = self._text([*messages[:i], {**REPLY, "content": PROBE}], tools, **options)
            question_text = messages[i - 1]["content"].strip()
            has_calls = bool(messages[i].get("tool_calls"))
            text, reply_start = _join_reply(prompt, text, question_text, probe_text, has_calls)
        text = self._with_thoughts(messages[i], text, reply_start)
        content_start = text.find(content, reply_start)
        search_start = reply_start if content_start < 0 else content_start + len(content)
        end_match = self._end_pattern.search(text, search_start)
        if end_match is None:
            text = self._append_end(messages[: i + 1], tools, text, options)
            end_match = self._end_pattern.search(text, search_start)
        if end_match is None:
            self.notes[ENDLESS_NOTE] += 1
        reply_end = end_match.end() if end_match else max(reply_start, len(text.rstrip()))
        if self._is_changed(messages[i], text[reply_start:reply_end]):
            self.notes[CHANGED_NOTE] += 1
        return RenderedConversation(text, [(reply_start, reply_end)])

    def _with_thoughts(self, message: Message, text: str, reply_start: int) -> str:
        """Insert the thoughts before the reply, if the template leaves them out, as Gemma 4's does."""
        thought, (opening, closing) = (message.get(self._thought_field) or "").strip(), self.marks
        reply = text[reply_start:]
        if not thought or thought in reply or not opening or opening.strip() in reply:
            return text
        return f"{text[:reply_start]}{opening}{thought}{closing}{reply}"

    def _append_end(
        self, messages: list[Message], tools: list[Any] | None, text: str, options: dict[str, Any]
    ) -> str:
        """Append the last reply's end, if the template writes it only with the next message, as GLM's does."""
        has_calls = messages[-1].get("tool_calls") and self.takes_results
        try:
            longer_text = self._text([*messages, RESULT if has_calls else SAID], tools, **options)
        except InputError:
            return text
        *_, last_line = text.rstrip().rpartition("\n")
        at = longer_text.rfind(last_line, 0, max(longer_text.rfind(PROBE), 0)) + len(last_line)
        end_match = self._end_pattern.search(longer_text, at)
        if at < len(last_line) or end_match is None or longer_text[at : end_match.start()].strip():
            return text
        return text.rstrip() + longer_text[at : end_match.end()]

    # ---- what templates do not support

    def _fitted(self, conversation: Conversation) -> tuple[list[Message], list[Any] | None]:
        """Return (messages, tools) as the template supports them, such as a system message joined to the user's."""
        messages, tools = conversation.messages, conversation.tools
        if not self._takes_developer and any(m["role"] == "developer" for m in messages):
            self.notes[DEVELOPER_NOTE] += 1
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if messages[0]["role"] == "system" and not self.takes_system:
            self.notes[SYSTEM_NOTE] += 1
            system, first, *rest = messages
            messages = [{**first, "content": f"{system['content']}\n{first['content']}"}, *rest]
        if tools and not self.takes_tools:
            self.notes[TOOLS_NOTE] += 1
            tools = None
        if self._by_id:
            messages = sample_messages.name_call_ids(messages)
        return [self._adapt_message(message) for message in messages], tools

    def _adapt_thoughts(self, message: Message) -> Message:
        """Move thoughts to the template's field, also from the content if the template marks thoughts itself."""
        content, thoughts = message["content"], [message[n] for n in THOUGHTS if message.get(n)]
        thought_match = THOUGHT_BLOCK.match(content) if self._own_marks and not thoughts else None
        if thought_match:
            content, thoughts = content[thought_match.end() :], [thought_match[1].strip()]
        if thoughts and not self._thought_field:
            self.notes[THOUGHTS_NOTE] += 1
        if not thoughts or not self._thought_field:
            return message
        return {**message, "content": content, self._thought_field: thoughts[0]}

    def _adapt_message(self, message: Message) -> Message:
        """Return a message as the template supports it: tool calls or results, for example, may become plain text."""
        if message["role"] == "assistant":
            message = self._adapt_thoughts(message)
        if message.get("tool_calls") and not self.takes_calls:
            self.notes[CALLS_NOTE] += 1
            calls = (json.dumps(c["function"], ensure_ascii=False) for c in message["tool_calls"])
            content = "\n".join(filter(None, (message["content"], *calls)))
            return {"role": "assistant", "content": content}
        if message.get("tool_calls") and self._as_text:
            return sample_messages.with_text_arguments(message)
        if message["role"] == "tool" and not self.takes_results:
            self.notes[RESULTS_NOTE] += 1
            return {"role": "user", "content": message["content"]}
        return message


def num_common(items: Sequence[str], peer_items: Sequence[str]) -> int:
    """Return how many items, or characters, at the beginning of both are equal."""
    pairs = enumerate(zip(items, peer_items, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(items), len(peer_items)))


def _join_reply(
    prompt: str, text: str, question_text: str, probe_text: str, has_calls: bool
) -> tuple[str, int]:
    """Return the text to train on, the prompt followed by its reply, and the index at which the reply starts.

    The trained reply must follow the prompt as the model will see it, for example with the system message in the last
    question. If the prompt opens a reasoning block that is dropped from the answer, the answered text is used, and
    `probe_text`, with the probe as its reply, tells where replies begin. A tool call, which may have another beginning,
    begins where the text differs from the prompt. Raises InputError if the reply cannot be told from the prompt.
    """
    question_start = prompt.rfind(question_text) if question_text else -1
    prompt_end = prompt[question_start:]
    if question_start >= 0 and prompt_end in text:
        return prompt + text[text.rindex(prompt_end) + len(prompt_end) :], len(prompt)
    reply_start = probe_text.rfind(PROBE)
    # perhaps a tool call, which begins where the text differs from the prompt
    if reply_start < 0 or text[:reply_start] != probe_text[:reply_start]:
        reply_start = num_common(prompt, text)
        tag_start = text.rfind("<", 0, reply_start)
        if reply_start < len(text) and tag_start >= 0 and ">" not in text[tag_start:reply_start]:
            reply_start = tag_start  # two tags may begin alike
        if not has_calls or question_start < 0 or reply_start < question_start + len(question_text):
            fact = "the chat template gives no text in which the reply can be told from the prompt"
            raise InputError(fact)
    return text, reply_start
