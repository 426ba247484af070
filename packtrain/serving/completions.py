"""/v1/completions and /v1/chat/completions: OpenAI's shapes of answers, whole and as streams."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from packtrain.generation import Pieces
from packtrain.serving.jobs import Chosen, Counts, End, Part
from packtrain.serving.shapes import described, finish, head, new_id, timings, usage
from packtrain.serving.tools import Tools
from packtrain.tokenizer import Tokenizer

Found = Sequence[tuple[str, tuple[Chosen, ...], End]]
Event = dict[str, Any]


class Texts:
    """Answers of /v1/completions.

    counted  whether a stream ends with the counts of tokens
    told     whether tokens have probabilities
    """

    kind, object, streamed = "cmpl", "text_completion", "text_completion"
    ends_with_done = True

    def __init__(self, model: str, tokenizer: Tokenizer, counted: bool, told: bool) -> None:
        self._model, self._tokenizer, self._counted, self._told = model, tokenizer, counted, told
        self._id = new_id(self.kind)

    def _head(self, object: str) -> Event:
        return head(object, self._id, self._model)

    def _event(
        self, number: int, content: Event, reason: str | None = None, tokens: Sequence[Chosen] = ()
    ) -> Event:
        told = self._probabilities(tokens) if self._told and tokens else None
        choice = {"index": number, **content, "logprobs": told, "finish_reason": reason}
        return self._head(self.streamed) | {"choices": [choice]}

    def begin(self) -> list[Event]:
        return []

    def part(self, number: int, part: Part) -> list[Event]:
        return [self._event(number, {"text": part.text}, tokens=part.tokens)]

    def end(self, number: int, end: End) -> list[Event]:
        return [self._event(number, {"text": ""}, finish(end)) | {"timings": timings(end.counts)}]

    def close(self, counts: Sequence[Counts]) -> list[Event]:
        """After all answers."""
        if not self._counted:
            return []
        return [
            self._head(self.streamed)
            | {"choices": [], "usage": usage(counts), "timings": timings(counts[-1])}
        ]

    def whole(self, found: Found) -> Event:
        """All answers at once."""
        choices = [self._choice(number, *one) for number, one in enumerate(found)]
        counts = [end.counts for _, _, end in found]
        told = {"usage": usage(counts), "timings": timings(counts[0])}
        return self._head(self.object) | {"choices": choices} | told

    def _choice(self, number: int, text: str, tokens: Sequence[Chosen], end: End) -> Event:
        told = self._probabilities(tokens) if self._told else None
        return {"index": number, "text": text, "logprobs": told, "finish_reason": finish(end)}

    def _probabilities(self, tokens: Sequence[Chosen]) -> Event:
        """As /v1/completions has always had them, and by token, as chats have them."""
        content = [described(token, self._tokenizer) for token in tokens]
        lengths = accumulate((len(one["token"]) for one in content), initial=0)
        return {
            "content": content,
            "tokens": [one["token"] for one in content],
            "token_logprobs": [one["logprob"] for one in content],
            "top_logprobs": [
                {t["token"]: t["logprob"] for t in one["top_logprobs"]} for one in content
            ],
            "text_offset": [*lengths][:-1],
        }


class Chats(Texts):
    """Answers of /v1/chat/completions. Calls of tools are told when they are whole."""

    kind, object, streamed = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        counted: bool,
        told: bool,
        tools: Tools | None,
        answers: int,
    ) -> None:
        super().__init__(model, tokenizer, counted, told)
        self._tools = tools
        openings = (tools.style.opening,) if tools else ()
        self._shown = [Pieces(openings) for _ in range(answers)]
        self._texts = [""] * answers

    def _delta(
        self, number: int, delta: Event, reason: str | None = None, tokens: Sequence[Chosen] = ()
    ) -> Event:
        event = self._event(number, {"delta": delta}, reason, tokens)
        if not self._told or not tokens:
            del event["choices"][0]["logprobs"]
        return event

    def begin(self) -> list[Event]:
        start = {"role": "assistant", "content": None}
        return [self._delta(number, start) for number in range(len(self._texts))]

    def part(self, number: int, part: Part) -> list[Event]:
        self._texts[number] += part.text
        shown = self._shown[number]
        text = "" if shown.stopped else shown.add(part.text)
        return [self._delta(number, {"content": text}, None, part.tokens)] if text else []

    def end(self, number: int, end: End) -> list[Event]:
        events, reason, shown = list[Event](), finish(end), self._shown[number]
        rest = "" if shown.stopped else shown.rest()
        calls = self._calls(self._texts[number])[1]
        if shown.stopped and not calls:  # it began like a call, and was none
            text = self._texts[number]
            rest = text[text.index(shown.found) :]
        if rest:
            events.append(self._delta(number, {"content": rest}))
        for index, call in enumerate(calls):
            events.append(self._delta(number, {"tool_calls": [{"index": index, **call}]}))
        reason = "tool_calls" if calls else reason
        return [*events, self._delta(number, {}, reason) | {"timings": timings(end.counts)}]

    def _calls(self, text: str) -> tuple[str, list[Event]]:
        return self._tools.parse(text) if self._tools else (text, [])

    def _choice(self, number: int, text: str, tokens: Sequence[Chosen], end: End) -> Event:
        content, calls = self._calls(text)
        message: Event = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": number,
            "message": message,
            "finish_reason": "tool_calls" if calls else finish(end),
        }
        return choice | ({"logprobs": self._probabilities(tokens)} if self._told else {})

    def _probabilities(self, tokens: Sequence[Chosen]) -> Event:
        return {"content": [described(token, self._tokenizer) for token in tokens]}
