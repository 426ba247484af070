"""/v1/completions and /v1/chat/completions: OpenAI's shapes of answers, whole and as streams."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.generator import Pieces
from packtrain.serving.generation_jobs import Chosen, Counts, End, Part, Progress
from packtrain.serving.llama_completion import Native
from packtrain.serving.reasoning_text import Thoughts, split
from packtrain.serving.request_parsing import Asked
from packtrain.serving.response_shapes import (
    described,
    finish,
    head,
    new_id,
    progress,
    timings,
    usage,
)

Found = Sequence[tuple[str, tuple[Chosen, ...], End]]
Event = dict[str, Any]
BYTES = "bytes:"


class Texts:
    """Answers of /v1/completions.

    verbose  /completion's shape, if its fields are wanted, too
    """

    kind, object, streamed = "cmpl", "text_completion", "text_completion"
    ends_with_done = True

    def __init__(
        self, model: str, tokenizer: Tokenizer, request: Asked, verbose: Native | None = None
    ) -> None:
        self._model, self._tokenizer, self._asked, self._verbose = (
            model,
            tokenizer,
            request,
            verbose,
        )
        self._id, self._told = new_id(self.kind), request.shown is not None
        self._decoders = [getincrementaldecoder("utf-8")("replace") for _ in request.jobs]
        self._lengths = [0] * len(request.jobs)

    def _head(self, object: str) -> Event:
        return head(object, self._id, self._model)

    def _event(
        self, number: int, content: Event, reason: str | None = None, tokens: Sequence[Chosen] = ()
    ) -> Event:
        logprobs = self._probabilities(number, tokens) if self._told and tokens else None
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._head(self.streamed) | {"choices": [choice]}

    def begin(self) -> list[Event]:
        prefixes = enumerate(self._asked.before)
        return [self._event(number, {"text": text}) for number, text in prefixes]

    def part(self, number: int, part: Part) -> list[Event]:
        event = self._event(number, {"text": part.text}, tokens=part.tokens)
        return [event | self._timed(part)]

    def _timed(self, part: Part) -> Event:
        return {"timings": timings(part.counts)} if self._asked.timed else {}

    def progress(self, number: int, update: Progress) -> list[Event]:
        return [self._event(number, {"text": ""}) | progress(update)]

    def end(self, number: int, end: End) -> list[Event]:
        extra = self._more(number, "", end) | {"timings": timings(end.counts)}
        return [self._event(number, {"text": ""}, finish(end)) | extra]

    def _more(self, number: int, text: str, end: End) -> Event:
        """What `verbose` asks for."""
        return {"__verbose": self._verbose.last(number, text, (), end)} if self._verbose else {}

    def close(self, counts: Sequence[Counts]) -> list[Event]:
        """After all answers."""
        if not self._asked.counted:
            return []
        totals = {"usage": usage(counts, self._asked.count), "timings": timings(counts[-1])}
        return [self._head(self.streamed) | {"choices": []} | totals]

    def whole(self, answers: Found) -> Event:
        """All answers at once."""
        choices = [self._choice(number, *answer) for number, answer in enumerate(answers)]
        counts = [end.counts for _, _, end in answers]
        totals = {"usage": usage(counts, self._asked.count), "timings": timings(counts[0])}
        extra = self._more(0, answers[0][0], answers[0][2])
        return self._head(self.object) | {"choices": choices} | totals | extra

    def _choice(self, number: int, text: str, tokens: Sequence[Chosen], end: End) -> Event:
        logprobs = self._probabilities(number, tokens) if self._told else None
        text = self._asked.before[number] + text if self._asked.before else text
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish(end)}

    def _described(self, tokens: Sequence[Chosen]) -> list[Event]:
        return [described(token, self._tokenizer, self._asked.shown) for token in tokens]

    def _probabilities(self, number: int, tokens: Sequence[Chosen]) -> Event:
        """As /v1/completions has always had them, and by token, as chats have them."""
        content = self._described(tokens)
        names = [_name(entry) for entry in content]
        offsets = [self._offset(number, *entry) for entry in zip(names, content, strict=True)]
        return {
            "content": content,
            "tokens": names,
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [
                {_name(top): top["logprob"] for top in entry["top_logprobs"]} for entry in content
            ],
            "text_offset": offsets,
        }

    def _offset(self, number: int, name: str, token: Event) -> int:
        """Where in the text of an answer the next token begins."""
        before = self._lengths[number]
        self._lengths[number] += len(self._decoders[number].decode(bytes(token["bytes"])))
        return before if name.startswith(BYTES) else self._lengths[number] - len(name)


def _name(token: Event) -> str:
    """The text of a token, or its bytes as OpenAI writes them where they are no text: `bytes:\\xc3`."""
    piece = bytes(token["bytes"])
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return BYTES + "".join(f"\\x{byte:02x}" for byte in piece)


class Chats(Texts):
    """Answers of /v1/chat/completions. Calls of tools are told when they are whole."""

    kind, object, streamed = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, tokenizer: Tokenizer, request: Asked, verbose: Native | None = None
    ) -> None:
        super().__init__(model, tokenizer, request, verbose)
        tools = self._tools = request.tools
        openings = tools.awaited if tools else ()
        self._leading = request.head
        self._shown = [Pieces(openings) for _ in request.jobs]
        self._texts = [""] * len(request.jobs)
        thinks = request.thinks
        self._thoughts = (
            None if thinks is None else [Thoughts(thinks, request.marks) for _ in request.jobs]
        )

    def _head(self, object: str) -> Event:
        warnings = self._tools.warnings if self._tools else ()
        return super()._head(object) | ({"warnings": [*warnings]} if warnings else {})

    def _delta(
        self, number: int, delta: Event, reason: str | None = None, tokens: Sequence[Chosen] = ()
    ) -> Event:
        event = self._event(number, {"delta": delta}, reason, tokens)
        if not self._told or not tokens:
            del event["choices"][0]["logprobs"]
        return event

    def begin(self) -> list[Event]:
        if self._asked.jobs[0].progress:  # answers begin after their prompts
            return []
        return [self._start(number) for number in range(len(self._texts))]

    def _start(self, number: int) -> Event:
        return self._delta(number, {"role": "assistant", "content": None})

    def progress(self, number: int, update: Progress) -> list[Event]:
        events = [self._start(number) | progress(update)]
        return [*events, self._start(number)] if update.read == update.total else events

    def part(self, number: int, part: Part) -> list[Event]:
        thought, content = self._split(number, part.text)
        text = self._next(number, content)
        if not thought and not text:
            return []
        delta = {"reasoning_content": thought} if thought else {}
        delta |= {"content": text} if text else {}
        return [self._delta(number, delta, None, part.tokens) | self._timed(part)]

    def _split(self, number: int, text: str) -> tuple[str, str]:
        return self._thoughts[number].add(text) if self._thoughts else ("", text)

    def _next(self, number: int, content: str) -> str:
        """What can be told of the content so far: what may become a call, or stand before words, waits."""
        before, shown = self._texts[number], self._shown[number]
        text = self._texts[number] = before + content
        if self._leading.startswith(text):
            return ""
        if self._leading and self._leading.startswith(before):
            content = text.removeprefix(self._leading)
        return "" if shown.stopped else shown.add(content)

    def end(self, number: int, end: End) -> list[Event]:
        events, reason, shown = list[Event](), finish(end), self._shown[number]
        thought, content = self._thoughts[number].rest() if self._thoughts else ("", "")
        if thought:
            events.append(self._delta(number, {"reasoning_content": thought}))
        rest = self._next(number, content)
        rest += "" if shown.stopped else shown.rest()
        if self._leading.startswith(self._texts[number]) and self._leading != self._texts[number]:
            rest = self._texts[number]
        words, calls = self._calls(self._texts[number])
        if shown.stopped:  # words that began like a call, and were none
            at = self._texts[number].removeprefix(self._leading).index(shown.found)
            rest = words[at - len(rest) :]
        if rest:
            events.append(self._delta(number, {"content": rest}))
        for index, call in enumerate(calls):
            events.append(self._delta(number, {"tool_calls": [{"index": index, **call}]}))
        reason = "tool_calls" if calls and reason == "stop" else reason
        extra = {} if self._asked.counted else {"timings": timings(end.counts)}
        return [*events, self._delta(number, {}, reason) | self._more(number, "", end) | extra]

    def _calls(self, text: str) -> tuple[str, list[Event]]:
        return self._tools.parse(text) if self._tools else (text.removeprefix(self._leading), [])

    def _choice(self, number: int, text: str, tokens: Sequence[Chosen], end: End) -> Event:
        thinks = self._asked.thinks
        thought, text = ("", text) if thinks is None else split(text, thinks, self._asked.marks)
        content, calls = self._calls(text)
        message: Event = {"role": "assistant", "content": content or (None if calls else "")}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        reason = finish(end)
        reason = "tool_calls" if calls and reason == "stop" else reason
        choice = {"index": number, "message": message, "finish_reason": reason}
        return choice | ({"logprobs": self._probabilities(number, tokens)} if self._told else {})

    def _probabilities(self, number: int, tokens: Sequence[Chosen]) -> Event:
        return {"content": self._described(tokens)}
