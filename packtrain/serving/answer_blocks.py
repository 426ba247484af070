"""Answers as lists of blocks (thoughts, text, tool calls), which /v1/messages and /v1/responses share.

The chat completion of an answer is read delta by delta: a block ends where a delta of another kind begins."""

from collections.abc import Iterator, Sequence
from typing import Any

from packtrain.data.tokenizer import Tokenizer
from packtrain.serving import generation_jobs
from packtrain.serving.generation_jobs import AnswerEnd, PromptProgress, TextDelta, TokenCounts
from packtrain.serving.openai_completions import ChatCompletionFormat, JsonObject
from packtrain.serving.request_parsing import OpenAIRequest

THOUGHT, TEXT, CALL = "thought", "text", "call"
DELTA_KEYS = {THOUGHT: "reasoning_content", TEXT: "content"}


class BlocksFormat:
    """Base of response formats whose answers are lists of blocks. Subclasses write the events of blocks.

    request  the client's request, converted to one of /v1/chat/completions, with one job
    """

    ends_with_done, has_named_events = False, True

    def __init__(self, model: str, tokenizer: Tokenizer, request: OpenAIRequest) -> None:
        self._model, self._job, self._request = model, request.jobs[0], request
        self._chat = ChatCompletionFormat(model, tokenizer, request)
        self._kind, self._text = "", ""  # of the block that is being written
        self._num_blocks = 0
        self._is_cut = False  # whether the last text ends at the limit of tokens

    # ---- written by subclasses

    def block_start(self, kind: str, call: JsonObject) -> Iterator[JsonObject]:
        raise NotImplementedError

    def block_delta(self, kind: str, text: str) -> JsonObject:
        raise NotImplementedError

    def block_end(self, kind: str, text: str, call: JsonObject) -> Iterator[JsonObject]:
        raise NotImplementedError

    def last_events(self, finish_word: str, end: AnswerEnd) -> list[JsonObject]:
        raise NotImplementedError

    def full_answer(
        self, blocks: Sequence[tuple[str, Any]], finish_word: str, end: AnswerEnd
    ) -> JsonObject:
        """Return the whole answer; blocks: (kind, text or OpenAI's call) pairs; finish_word: OpenAI's finish_reason."""
        raise NotImplementedError

    # ---- the format of a response, see event_stream

    def delta_events(self, number: int, delta: TextDelta) -> list[JsonObject]:
        return [*self._block_events(self._chat.delta_events(number, delta))]

    def progress_events(self, number: int, update: PromptProgress) -> list[JsonObject]:
        return []

    def end_events(self, number: int, end: AnswerEnd) -> list[JsonObject]:
        chunks = self._chat.end_events(number, end)
        events = [*self._block_events(chunks)]
        finish_word = chunks[-1]["choices"][0]["finish_reason"]
        self._is_cut = finish_word == "length"
        return [*events, *self._end_block(), *self.last_events(finish_word, end)]

    def close_events(self, counts: Sequence[TokenCounts]) -> list[JsonObject]:
        return []

    def full_response(self, answers: generation_jobs.AnswerResults) -> JsonObject:
        choice = self._chat.full_response(answers)["choices"][0]
        message, blocks = choice["message"], list[tuple[str, Any]]()
        blocks += [(kind, message[key]) for kind, key in DELTA_KEYS.items() if message.get(key)]
        blocks += [(CALL, call) for call in message.get("tool_calls", ())]
        return self.full_answer(blocks, choice["finish_reason"], answers[0][2])

    def _block_events(self, chunks: Sequence[JsonObject]) -> Iterator[JsonObject]:
        for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
            for kind, key in DELTA_KEYS.items():
                if delta.get(key):
                    yield from self._text_events(kind, delta[key])
            for call in delta.get("tool_calls", ()):
                yield from self._end_block()
                yield from self.block_start(CALL, call)
                yield self.block_delta(CALL, call["function"]["arguments"])
                yield from self._end_block(CALL, call)

    def _text_events(self, kind: str, text: str) -> Iterator[JsonObject]:
        if self._kind != kind:
            yield from self._end_block()
            yield from self.block_start(kind, {})
            self._kind = kind
        self._text += text
        yield self.block_delta(kind, text)

    def _end_block(self, kind: str = "", call: JsonObject | None = None) -> Iterator[JsonObject]:
        if kind := kind or self._kind:
            yield from self.block_end(kind, self._text, call or {})
            self._num_blocks += 1
        self._kind, self._text = "", ""
