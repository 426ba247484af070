"""What all kinds of answers have in common: tokens with probabilities, speeds, counts, errors."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from packtrain.common.version import __version__
from packtrain.data.tokenizer import Tokenizer
from packtrain.serving.generation_jobs import Chosen, Counts, End, Progress

FINGERPRINT = f"b-packtrain-{__version__}"
LONGEST = 2000  # characters of a message, which may repeat what was asked
FINISH = {"end": "stop", "stop": "stop", "count": "length", "context": "length"}


def finish(end: End) -> str:
    """OpenAI's word for how an answer ended."""
    return FINISH.get(end.reason, "stop")


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def head(object: str, id: str, model: str) -> dict[str, Any]:
    """What every answer of OpenAI's kind begins with."""
    return {
        "id": id,
        "object": object,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def usage(counts: Sequence[Counts], answers: int = 1) -> dict[str, Any]:
    """Tokens of a request with so many answers to each of its prompts, which count once."""
    prompt, written = sum(c.prompt for c in counts[::answers]), sum(c.written for c in counts)
    starts = range(0, len(counts), answers)
    cached = sum(min(c.cached for c in counts[at : at + answers]) for at in starts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(counts: Counts) -> dict[str, Any]:
    """Speeds as llama-server names them."""
    read = counts.prompt - counts.cached

    def speeds(name: str, tokens: int, seconds: float) -> dict[str, float]:
        return {
            f"{name}_n": tokens,
            f"{name}_ms": 1e3 * seconds,
            f"{name}_per_token_ms": 1e3 * seconds / max(tokens, 1),
            f"{name}_per_second": tokens / seconds if seconds else 0.0,
        }

    return {
        "cache_n": counts.cached,
        **speeds("prompt", read, counts.reading),
        **speeds("predicted", counts.written, counts.writing),
    }


def progress(update: Progress) -> dict[str, Any]:
    """How much of a prompt has been read, as llama-server names it."""
    time_ms = int(1e3 * update.seconds)
    fields = {
        "total": update.total,
        "cache": update.cached,
        "processed": update.read,
        "time_ms": time_ms,
    }
    return {"prompt_progress": fields}


def described(token: Chosen, tokenizer: Tokenizer, max_top: int | None = None) -> dict[str, Any]:
    """A token, its probability, and the likeliest ones, at most so many."""

    def one(id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(id)
        text = piece.decode(errors="replace")
        return {"id": id, "token": text, "bytes": [*piece], "logprob": min(logprob, 0.0)}

    top = [one(id, logprob) for id, logprob in token.top[:max_top]]
    return {**one(token.id, token.logprob), "top_logprobs": top}


class Refused(RuntimeError):
    """A request that cannot be served, with its status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def error(code: int, message: str, kind: str = "", **details: Any) -> dict[str, Any]:
    """The body of an error."""
    kind, message = kind or KINDS.get(code, "server_error"), message[:LONGEST]
    return {"error": {"code": code, "message": message, "type": kind} | details}


KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
