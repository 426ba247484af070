"""/v1/completions and /v1/chat/completions: OpenAI's shapes of answers, whole and as streams."""

import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from uuid import uuid4

from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.generator import StopTextFilter
from packtrain.serving import generation_jobs, response_shapes
from packtrain.serving.generation_jobs import AnswerEnd, GeneratedToken, PromptProgress, TextDelta
from packtrain.serving.llama_completion import LlamaCompletionFormat
from packtrain.serving.reasoning_text import ReasoningSplitter, split_reasoning
from packtrain.serving.request_parsing import OpenAIRequest
from packtrain.serving.response_shapes import finish, timing_fields, token_entry

JsonObject = dict[str, Any]
BYTES_PREFIX = "bytes:"


class TextCompletionFormat:
    """The JSON shape of answers of /v1/completions.

    verbose_format  the shape of /completion, if the request wants those fields, too
    """

    id_prefix, object_type, chunk_type = "cmpl", "text_completion", "text_completion"
    ends_with_done, has_named_events = True, False

    def __init__(
        self, model: str, tokenizer: Tokenizer, request: OpenAIRequest,
        verbose_format: LlamaCompletionFormat | None = None,
    ) -> None:  # fmt: skip
        self._model, self._tokenizer, self._request, self._verbose = (
            model, tokenizer, request, verbose_format,
        )  # fmt: skip
        self._response_id = f"{self.id_prefix}-{uuid4().hex}"
        self._has_logprobs = request.shown is not None
        self._decoders = [getincrementaldecoder("utf-8")("replace") for _ in request.jobs]
        self._text_lengths = [self._text_start(number) for number in range(len(request.jobs))]

    def _response_head(self, object_type: str) -> JsonObject:
        """Return the fields with which every answer of OpenAI's API begins; `object_type`: the value of `object`."""
        return {
            "id": self._response_id, "object": object_type, "created": int(time.time()), "model": self._model,
            "system_fingerprint": response_shapes.FINGERPRINT,
        }  # fmt: skip

    def _chunk_event(
        self, number: int, content: JsonObject, reason: str | None = None, tokens: Sequence[GeneratedToken] = (),
    ) -> JsonObject:  # fmt: skip
        logprobs = self._probabilities(number, tokens) if self._has_logprobs and tokens else None
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._response_head(self.chunk_type) | {"choices": [choice]}

    def start_events(self) -> list[JsonObject]:
        prefixes = enumerate(self._request.echoed_texts)
        return [self._chunk_event(answer_index, {"text": text}) for answer_index, text in prefixes]

    def delta_events(self, number: int, delta: TextDelta) -> list[JsonObject]:
        event = self._chunk_event(number, {"text": delta.text}, tokens=delta.tokens)
        return [event | self._timed(delta)]

    def _timed(self, delta: TextDelta) -> JsonObject:
        return {"timings": timing_fields(delta.counts)} if self._request.has_timings else {}

    def progress_events(self, number: int, update: PromptProgress) -> list[JsonObject]:
        return [self._chunk_event(number, {"text": ""}) | self._progress_fields(update)]

    def _progress_fields(self, update: PromptProgress) -> JsonObject:
        return response_shapes.progress_fields(update, self._request.has_timings)

    def end_events(self, number: int, end: AnswerEnd) -> list[JsonObject]:
        extra = self._verbose_fields(number, "", end) | {"timings": timing_fields(end.counts)}
        return [self._chunk_event(number, {"text": ""}, finish(end)) | extra]

    def _verbose_fields(self, number: int, text: str, end: AnswerEnd) -> JsonObject:
        """Return /completion's fields of answer `number` if the request is verbose, else {}."""
        return {"__verbose": self._verbose.last(number, text, (), end)} if self._verbose else {}

    def close_events(self, counts: Sequence[generation_jobs.TokenCounts]) -> list[JsonObject]:
        """Return a stream's last events: the total of `counts` (one per answer) if the request wants it, else none."""
        if not self._request.has_usage:
            return []
        return [self._response_head(self.chunk_type) | {"choices": []} | self._totals(counts)]

    def _totals(self, counts: Sequence[generation_jobs.TokenCounts]) -> JsonObject:
        totals = (
            sum(getattr(c, f.name) for c in counts) for f in fields(generation_jobs.TokenCounts)
        )
        timings = timing_fields(generation_jobs.TokenCounts(*totals))
        return {"usage": response_shapes.usage(counts, self._request.count), "timings": timings}

    def full_response(self, answers: generation_jobs.AnswerResults) -> JsonObject:
        """Return all answers as one document."""
        choices = [self._answer_choice(number, *answer) for number, answer in enumerate(answers)]
        counts = [answer_end.counts for _, _, answer_end in answers]
        totals = self._totals(counts) | self._verbose_fields(0, answers[0][0], answers[0][2])
        return self._response_head(self.object_type) | {"choices": choices} | totals

    def _answer_choice(
        self, number: int, text: str, tokens: Sequence[GeneratedToken], end: AnswerEnd
    ) -> JsonObject:
        logprobs = self._probabilities(number, tokens) if self._has_logprobs else None
        text = self._request.echoed_texts[number] + text if self._request.echoed_texts else text
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish(end)}

    def _token_entries(self, tokens: Sequence[GeneratedToken]) -> list[JsonObject]:
        return [token_entry(token, self._tokenizer, self._request.shown) for token in tokens]

    def _probabilities(self, number: int, tokens: Sequence[GeneratedToken]) -> JsonObject:
        """Return log-probabilities of an answer's tokens: lists by field for /v1/completions, by token for chats."""
        content = self._token_entries(tokens)
        names = [_name(token_entry) for token_entry in content]
        offsets = [self._text_offset(number, *entry) for entry in zip(names, content, strict=True)]
        return {
            "content": content, "tokens": names, "token_logprobs": [token_entry["logprob"] for token_entry in content],
            "top_logprobs": [
                None
                if entry["logprob"] is None
                else {_name(top): top["logprob"] for top in entry["top_logprobs"]}
                for entry in content
            ],
            "text_offset": offsets,
        }  # fmt: skip

    def _text_offset(self, number: int, name: str, token: JsonObject) -> int:
        """Add a token (text `name`) to the length of answer `number`, and return where it begins; call once a token."""
        before = self._text_lengths[number]
        self._text_lengths[number] += len(self._decoders[number].decode(bytes(token["bytes"])))
        is_text = not name.startswith(BYTES_PREFIX)
        return max(self._text_lengths[number] - len(name) if is_text else before, 0)

    def _text_start(self, number: int) -> int:
        """Return the offset of answer `number`'s first token; below 0 if an echoed prompt hides a space or BOS."""
        prompt = self._request.jobs[number].prompt
        if not self._request.jobs[number].scores_prompt:
            return 0
        pieces = b"".join(map(self._tokenizer.piece, prompt)).decode(errors="replace")
        return len(self._request.echoed_texts[number]) - len(pieces)


def _name(token: JsonObject) -> str:
    r"""Return the text of a token's JSON, or its bytes as OpenAI writes them where they are no text: `bytes:\\xc3`."""
    piece = bytes(token["bytes"])
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return BYTES_PREFIX + "".join(f"\\x{byte:02x}" for byte in piece)


class ChatCompletionFormat(TextCompletionFormat):
    """The JSON shape of answers of /v1/chat/completions. Tool calls are sent when they are complete."""

    id_prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, tokenizer: Tokenizer, request: OpenAIRequest,
        verbose_format: LlamaCompletionFormat | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, tokenizer, request, verbose_format)
        tools = self._tools = request.tools
        call_openings = tools.stream_openings if tools else ()
        self._leading = request.words_prefix
        self._shown = [StopTextFilter(call_openings) for _ in request.jobs]
        self._texts = [""] * len(request.jobs)
        thinks, self._thoughts = request.starts_thinking, list[ReasoningSplitter]()
        if thinks is not None:
            self._thoughts += [ReasoningSplitter(thinks, request.think_marks) for _ in request.jobs]

    def _response_head(self, object_type: str) -> JsonObject:
        warnings = self._request.warnings
        return super()._response_head(object_type) | ({"warnings": [*warnings]} if warnings else {})

    def _delta(
        self, number: int, delta: JsonObject, reason: str | None = None, tokens: Sequence[GeneratedToken] = (),
    ) -> JsonObject:  # fmt: skip
        event = self._chunk_event(number, {"delta": delta}, reason, tokens)
        if not self._has_logprobs or not tokens:
            del event["choices"][0]["logprobs"]
        return event

    def start_events(self) -> list[JsonObject]:
        if self._request.jobs[0].report_progress:  # answers begin after their prompts
            return []
        return [self._role_event(answer_index) for answer_index in range(len(self._texts))]

    def _role_event(self, number: int) -> JsonObject:
        return self._delta(number, {"role": "assistant", "content": None})

    def progress_events(self, number: int, update: PromptProgress) -> list[JsonObject]:
        events = [self._role_event(number) | self._progress_fields(update)]
        return [*events, self._role_event(number)] if update.read == update.total_tokens else events

    def delta_events(self, number: int, text_delta: TextDelta) -> list[JsonObject]:
        piece, thoughts = text_delta.text, self._thoughts
        thought, content = thoughts[number].add_piece(piece) if thoughts else ("", piece)
        text = self._next_text(number, content)
        if not thought and not text:
            return []
        delta = {"reasoning_content": thought} if thought else {}
        delta |= {"content": text} if text else {}
        return [self._delta(number, delta, None, text_delta.tokens) | self._timed(text_delta)]

    def _next_text(self, number: int, content: str) -> str:
        """Add content to answer `number`; return what can be sent; the start of a call or of `words_prefix` waits."""
        previous_text, text_filter = self._texts[number], self._shown[number]
        text = self._texts[number] = previous_text + content
        if self._leading.startswith(text):
            return ""
        if self._leading and self._leading.startswith(previous_text):
            content = text.removeprefix(self._leading)
        return "" if text_filter.is_stopped else text_filter.add(content)

    def end_events(self, number: int, end: AnswerEnd) -> list[JsonObject]:
        events, finish_word, text_filter = list[JsonObject](), finish(end), self._shown[number]
        thought, content = self._thoughts[number].flush() if self._thoughts else ("", "")
        if thought:
            events.append(self._delta(number, {"reasoning_content": thought}))
        rest_text = self._next_text(number, content)
        rest_text += "" if text_filter.is_stopped else text_filter.flush()
        if self._leading.startswith(self._texts[number]) and self._leading != self._texts[number]:
            rest_text = self._texts[number]
        answer_words, tool_calls = self._parse_calls(self._texts[number])
        if text_filter.is_stopped:  # text that began like a tool call, but was none
            at = self._texts[number].removeprefix(self._leading).index(text_filter.matched_stop)
            rest_text = answer_words[at - len(rest_text) :]
        if rest_text:
            events.append(self._delta(number, {"content": rest_text}))
        for call_index, tool_call in enumerate(tool_calls):
            events.append(self._delta(number, {"tool_calls": [{"index": call_index, **tool_call}]}))
        finish_word = "tool_calls" if tool_calls and finish_word == "stop" else finish_word
        extra_fields = {} if self._request.has_usage else {"timings": timing_fields(end.counts)}
        delta = self._delta(number, {}, finish_word)
        return [*events, delta | self._verbose_fields(number, "", end) | extra_fields]

    def _parse_calls(self, text: str) -> tuple[str, list[JsonObject]]:
        return self._tools.parse(text) if self._tools else (text.removeprefix(self._leading), [])

    def _answer_choice(
        self, number: int, text: str, tokens: Sequence[GeneratedToken], end: AnswerEnd
    ) -> JsonObject:
        starts_thinking = self._request.starts_thinking
        thought = ""
        if starts_thinking is not None:
            thought, text = split_reasoning(text, starts_thinking, self._request.think_marks)
        content, calls = self._parse_calls(text)
        message: JsonObject = {"role": "assistant", "content": content or (None if calls else "")}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        finish_word = finish(end)
        finish_word = "tool_calls" if calls and finish_word == "stop" else finish_word
        choice = {"index": number, "message": message, "finish_reason": finish_word}
        if self._has_logprobs:
            choice["logprobs"] = self._probabilities(number, tokens)
        return choice

    def _probabilities(self, number: int, tokens: Sequence[GeneratedToken]) -> JsonObject:
        return {"content": self._token_entries(tokens)}
