"""/completion: llama-server's own shape of answers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from packtrain.data.tokenizer import Tokenizer
from packtrain.serving.generation_jobs import Chosen, Counts, End, Job, Part, Progress
from packtrain.serving.json_fields import FIELDS, Body
from packtrain.serving.response_shapes import described, progress, timings

ENDS = {"end": "eos", "stop": "word", "count": "limit", "context": "limit"}


# what is always off here, as llama-server says it
OFF = {
    "adaptive_target": -1.0, "adaptive_decay": 0.9, "min_keep": 0, "grammar_lazy": False,
    "grammar_triggers": [], "preserved_tokens": [], "chat_format": "Content-only", "reasoning_format": "none",
    "reasoning_in_content": False, "generation_prompt": "", "speculative.types": "none", "backend_sampling": False,
}  # fmt: skip
TEXTS = {
    "dry_sequence_breakers", "stop", "logit_bias", "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens"
}  # fmt: skip


def settings_of(job: Job, body: Body | None = None) -> dict[str, Any]:
    """How a job was sampled, by llama-server's names; without a body without what it said in its own words."""
    sampling, request = dataclasses.asdict(job.sampling), body or Body({})
    biases = job.sampling.biases.items()
    settings = {name: sampling[field] for name, field in FIELDS.items()} | {
        "seed": job.seed,
        "n_predict": job.count,
        "max_tokens": job.count,
        "n_probs": job.top,
        "stop": [*job.stops],
        "samplers": [*job.sampling.order],
        "ignore_eos": job.endless,
        "logit_bias": [{"token": id, "bias": x if math.isfinite(x) else None} for id, x in biases],
        "dry_sequence_breakers": [*job.sampling.breakers],
        "n_keep": job.keep,
        "n_discard": job.discard,
        "grammar": request.text("grammar"),
        "stream": request.flag("stream"),
        "timings_per_token": request.flag("timings_per_token"),
        "post_sampling_probs": job.after,
        "lora": [{"id": id, "scale": scale} for id, scale in enumerate(job.adapters)],
    }
    return {k: v for k, v in (OFF | settings).items() if body is not None or k not in TEXTS}


class Native:
    """Answers to one prompt or several."""

    ends_with_done = False  # no [DONE] at the end of a stream

    def __init__(self, body: Body, jobs: Sequence[Job], model: str, tokenizer: Tokenizer) -> None:
        self._jobs, self._model, self._tokenizer = jobs, model, tokenizer
        self._all, self._timed = body.flag("return_tokens"), body.flag("timings_per_token")
        self._settings = [settings_of(job, body) for job in jobs]
        self._fields = body.texts("response_fields", 64)
        self._texts = [""] * len(jobs)

    def begin(self) -> list[dict[str, Any]]:
        return []

    def part(self, number: int, part: Part) -> list[dict[str, Any]]:
        """What a stream sends for a part."""
        self._texts[number] += part.text
        ids = [token.id for token in part.tokens]
        event = self._piece(number, part.text, ids, part.counts.written)
        if self._timed:
            event["timings"] = timings(part.counts)
        return [event | self._probabilities(number, part.tokens)]

    def progress(self, number: int, update: Progress) -> list[dict[str, Any]]:
        """What a stream sends while a prompt is read."""
        return [self._piece(number, "", [], 0) | progress(update)]

    def _piece(self, number: int, text: str, ids: list[int], written: int) -> dict[str, Any]:
        return {
            "index": number,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": written,
            "tokens_evaluated": len(self._jobs[number].prompt),
        }

    def end(self, number: int, end: End) -> list[dict[str, Any]]:
        """What a stream sends at the end of an answer."""
        return [self.last(number, "", (), end)]

    def close(self, counts: Sequence[Counts]) -> list[dict[str, Any]]:
        return []

    def whole(self, results: Sequence[tuple[str, tuple[Chosen, ...], End]]) -> Any:
        """The answers at once; one is no list."""
        answers = []
        for number, (text, tokens, end) in enumerate(results):
            self._texts[number] = text
            ids = tokens if self._all else ()
            answer = self.last(number, text, ids, end) | self._probabilities(number, tokens)
            answers.append(chosen(answer, self._fields) if self._fields else answer)
        return answers[0] if len(answers) == 1 else answers

    def _probabilities(self, number: int, tokens: Sequence[Chosen]) -> dict[str, Any]:
        if not self._jobs[number].top:
            return {}
        entries = [described(token, self._tokenizer) for token in tokens]
        after = self._jobs[number].after
        return {"completion_probabilities": [*map(linear, entries)] if after else entries}

    def last(self, number: int, text: str, tokens: Sequence[Chosen], end: End) -> dict[str, Any]:
        job, counts = self._jobs[number], end.counts
        return {
            "index": number,
            "content": text,
            "tokens": [token.id for token in tokens],
            "id_slot": end.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": counts.written,
            "tokens_evaluated": counts.prompt,
            "tokens_cached": counts.prompt + max(counts.written - 1, 0),
            "generation_settings": self._settings[number],
            "prompt": self._tokenizer.decode(job.prompt, special=True),
            "has_new_line": "\n" in self._texts[number],
            "truncated": end.reason == "context" or counts.forgotten > 0,
            "stop_type": ENDS.get(end.reason, "none"),
            "stopping_word": end.stop,
            "timings": timings(counts),
        }


def linear(token: dict[str, Any]) -> dict[str, Any]:
    """A token whose probabilities are not logarithms."""
    fields = {name: token[name] for name in ("id", "token", "bytes")}
    top = {"top_probs": [*map(linear, token["top_logprobs"])]} if "top_logprobs" in token else {}
    return fields | {"prob": math.exp(token["logprob"])} | top


def chosen(answer: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Only some fields of an answer, by path: `generation_settings/n_predict`."""
    selected = dict[str, Any]()
    for path in paths:
        value: Any = answer
        for part in path.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            selected[path] = value
    return selected
