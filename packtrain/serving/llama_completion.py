"""/completion: llama-server's own shape of answers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from packtrain.data.tokenizer import Tokenizer
from packtrain.serving import generation_jobs
from packtrain.serving.generation_jobs import AnswerEnd, GeneratedToken, GenerationJob, TokenCounts
from packtrain.serving.json_fields import FIELDS, JsonBody
from packtrain.serving.response_shapes import progress_fields, timing_fields, token_entry

STOP_TYPES = {"end": "eos", "stop": "word", "count": "limit", "context": "limit"}

# llama-server's settings that are always off here
OFF = {
    "adaptive_target": -1.0, "adaptive_decay": 0.9, "min_keep": 0, "grammar_lazy": False,
    "grammar_triggers": [], "preserved_tokens": [], "chat_format": "Content-only", "reasoning_format": "none",
    "reasoning_in_content": False, "generation_prompt": "", "speculative.types": "none", "backend_sampling": False,
}  # fmt: skip
TEXT_SETTINGS = {
    "dry_sequence_breakers", "stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens"
}  # fmt: skip


def settings_of(job: GenerationJob, body: JsonBody | None = None) -> dict[str, Any]:
    """Return a job's settings by llama-server's names; without the request's `body` (/slots), no TEXT_SETTINGS."""
    sampling_values, request_body = dataclasses.asdict(job.sampling), body or JsonBody({})
    biases = job.sampling.biases.items()
    settings = {name: sampling_values[field] for name, field in FIELDS.items()} | {
        "seed": job.seed, "n_predict": job.max_tokens, "max_tokens": job.max_tokens, "n_probs": job.num_top_logprobs,
        "stop": [*job.stops], "samplers": [*job.sampling.order], "ignore_eos": job.ignore_eos,
        "logit_bias": [{"token": id, "bias": x if math.isfinite(x) else None} for id, x in biases],
        "dry_sequence_breakers": [*job.sampling.breakers], "n_keep": job.num_keep, "n_discard": job.num_discard,
        "grammar": request_body.text("grammar"), "stream": request_body.get_flag("stream"),
        "timings_per_token": request_body.get_flag("timings_per_token"), "post_sampling_probs": job.is_post_sampling,
        "lora": [{"id": id, "scale": scale} for id, scale in enumerate(job.adapter_scales)],
    }  # fmt: skip
    return {k: v for k, v in (OFF | settings).items() if body is not None or k not in TEXT_SETTINGS}


class LlamaCompletionFormat:
    """The JSON shape of answers of /completion, to one prompt or several."""

    ends_with_done, has_named_events = False, False  # no [DONE] at the end of a stream

    def __init__(
        self, body: JsonBody, jobs: Sequence[GenerationJob], model: str, tokenizer: Tokenizer
    ) -> None:
        self._jobs, self._model, self._tokenizer = jobs, model, tokenizer
        self._all, self._timed = body.get_flag("return_tokens"), body.get_flag("timings_per_token")
        self._settings = [settings_of(job, body) for job in jobs]
        self._fields = body.get_texts("response_fields", 64)
        self._texts = [""] * len(jobs)

    def start_events(self) -> list[dict[str, Any]]:
        return []

    def delta_events(self, number: int, delta: generation_jobs.TextDelta) -> list[dict[str, Any]]:
        """Return the events of a stream for a piece of the text of answer `number`, from 0."""
        self._texts[number] += delta.text
        token_ids = [token.token_id for token in delta.tokens]
        event = self._piece(number, delta.text, token_ids, delta.counts.output_tokens)
        if self._timed:
            event["timings"] = timing_fields(delta.counts)
        return [event | self._probabilities(number, delta.tokens)]

    def progress_events(
        self, number: int, update: generation_jobs.PromptProgress
    ) -> list[dict[str, Any]]:
        """Return the events of a stream while the prompt of answer `number` is read."""
        return [self._piece(number, "", [], 0) | progress_fields(update, self._timed)]

    def _piece(self, number: int, text: str, ids: list[int], output_tokens: int) -> dict[str, Any]:
        return {
            "index": number, "content": text, "tokens": ids, "stop": False, "id_slot": -1,
            "tokens_predicted": output_tokens, "tokens_evaluated": len(self._jobs[number].prompt),
        }  # fmt: skip

    def end_events(self, number: int, end: AnswerEnd) -> list[dict[str, Any]]:
        """Return the events of a stream at the end of answer `number`."""
        return [self.last(number, "", (), end)]

    def close_events(self, counts: Sequence[TokenCounts]) -> list[dict[str, Any]]:
        return []

    def full_response(self, answer_results: generation_jobs.AnswerResults) -> Any:
        """Return the JSON of all answers: a list of objects, or one object for a single answer."""
        answers = []
        for number, (text, tokens, end) in enumerate(answer_results):
            self._texts[number] = text
            token_ids = tokens if self._all else ()
            answer = self.last(number, text, token_ids, end) | self._probabilities(number, tokens)
            answers.append(select_fields(answer, self._fields) if self._fields else answer)
        return answers[0] if len(answers) == 1 else answers

    def _probabilities(self, number: int, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        if not self._jobs[number].num_top_logprobs:
            return {}
        entries = [token_entry(token, self._tokenizer) for token in tokens]
        after = self._jobs[number].is_post_sampling
        return {"completion_probabilities": [*map(linear, entries)] if after else entries}

    def last(
        self, number: int, text: str, tokens: Sequence[GeneratedToken], end: AnswerEnd
    ) -> dict[str, Any]:
        """Return the JSON of answer `number`, which has ended: text, settings and counts."""
        job, token_counts = self._jobs[number], end.counts
        return {
            "index": number, "content": text, "tokens": [token.token_id for token in tokens], "id_slot": end.slot_index,
            "stop": True, "model": self._model, "tokens_predicted": token_counts.output_tokens,
            "tokens_evaluated": token_counts.prompt,
            "tokens_cached": token_counts.prompt + max(token_counts.output_tokens - 1, 0),
            "generation_settings": self._settings[number],
            "prompt": b"".join(map(self._tokenizer.piece, job.prompt)).decode(errors="replace"),
            "has_new_line": "\n" in self._texts[number],
            "truncated": end.reason == "context" or token_counts.forgotten_tokens > 0,
            "stop_type": STOP_TYPES.get(end.reason, "none"), "stopping_word": end.stop_text,
            "timings": timing_fields(token_counts),
        }  # fmt: skip


def linear(token: dict[str, Any]) -> dict[str, Any]:
    """Convert a token's JSON, and that of its likeliest tokens, from log-probabilities to probabilities."""
    token_fields = {name: token[name] for name in ("id", "token", "bytes")}
    top = {"top_probs": [*map(linear, token["top_logprobs"])]} if "top_logprobs" in token else {}
    return token_fields | {"prob": math.exp(token["logprob"])} | top


def select_fields(answer_fields: dict[str, Any], field_paths: Sequence[str]) -> dict[str, Any]:
    """Select fields of an answer by path, such as `generation_settings/n_predict`; returns {path: value}."""
    selected_fields = dict[str, Any]()
    for field_path in field_paths:
        value: Any = answer_fields
        for key in field_path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            selected_fields[field_path] = value
    return selected_fields
