"""/completion: llama-server's own shape of answers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from packtrain.serving.asked import FIELDS, Body
from packtrain.serving.jobs import Chosen, Counts, End, Job, Part
from packtrain.serving.shapes import described, timings
from packtrain.tokenizer import Tokenizer

ENDS = {"end": "eos", "stop": "word", "count": "limit", "context": "limit"}


def settings_of(job: Job) -> dict[str, Any]:
    """How a job was sampled, by llama-server's names."""
    own = dataclasses.asdict(job.sampling)
    return {name: own[field] for name, field in FIELDS.items()} | {
        "seed": job.seed,
        "n_predict": job.count,
        "max_tokens": job.count,
        "n_probs": job.top,
        "stop": [*job.stops],
        "samplers": [*job.sampling.order],
        "ignore_eos": job.endless,
        "lora": [{"id": id, "scale": scale} for id, scale in enumerate(job.adapters)],
    }


class Native:
    """Answers to one prompt or several."""

    ends_with_done = False  # no [DONE] at the end of a stream

    def __init__(self, body: Body, jobs: Sequence[Job], model: str, tokenizer: Tokenizer) -> None:
        self._jobs, self._model, self._tokenizer = jobs, model, tokenizer
        self._all = body.flag("return_tokens")
        self._fields = body.texts("response_fields", 64)
        self._texts = [""] * len(jobs)

    def begin(self) -> list[dict[str, Any]]:
        return []

    def part(self, number: int, part: Part) -> list[dict[str, Any]]:
        """What a stream sends for a part."""
        self._texts[number] += part.text
        found: dict[str, Any] = {
            "index": number,
            "content": part.text,
            "tokens": [token.id for token in part.tokens],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": 0,
            "tokens_evaluated": len(self._jobs[number].prompt),
        }
        return [found | self._probabilities(number, part.tokens)]

    def end(self, number: int, end: End) -> list[dict[str, Any]]:
        """What a stream sends at the end of an answer."""
        return [self._last(number, "", (), end)]

    def close(self, counts: Sequence[Counts]) -> list[dict[str, Any]]:
        return []

    def whole(self, found: Sequence[tuple[str, tuple[Chosen, ...], End]]) -> Any:
        """The answers at once; one is no list."""
        answers = []
        for number, (text, tokens, end) in enumerate(found):
            self._texts[number] = text
            ids = tokens if self._all else ()
            answer = self._last(number, text, ids, end) | self._probabilities(number, tokens)
            answers.append(chosen(answer, self._fields) if self._fields else answer)
        return answers[0] if len(answers) == 1 else answers

    def _probabilities(self, number: int, tokens: Sequence[Chosen]) -> dict[str, Any]:
        if not self._jobs[number].top:
            return {}
        return {"completion_probabilities": [described(t, self._tokenizer) for t in tokens]}

    def _last(self, number: int, text: str, tokens: Sequence[Chosen], end: End) -> dict[str, Any]:
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
            "generation_settings": settings_of(job),
            "prompt": self._tokenizer.decode(job.prompt, special=True),
            "has_new_line": "\n" in self._texts[number],
            "truncated": end.reason == "context",
            "stop_type": ENDS.get(end.reason, "none"),
            "stopping_word": end.stop,
            "timings": timings(counts),
        }


def chosen(answer: dict[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Only some fields of an answer, by path: `generation_settings/n_predict`."""
    found = dict[str, Any]()
    for path in wanted:
        value: Any = answer
        for part in path.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found
