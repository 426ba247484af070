"""JSON that all kinds of answers share: tokens with probabilities, speeds, counts, errors."""

from collections.abc import Sequence
from typing import Any

from packtrain.common.version import __version__
from packtrain.data.tokenizer import Tokenizer
from packtrain.serving.generation_jobs import AnswerEnd, GeneratedToken, PromptProgress, TokenCounts

FINGERPRINT = f"b-packtrain-{__version__}"
LONGEST = 2000  # most characters of an error's message, which may repeat the request
FINISH_WORDS = {"end": "stop", "stop": "stop", "count": "length", "context": "length"}


def finish(end: AnswerEnd) -> str:
    """Return OpenAI's finish_reason of an answer."""
    return FINISH_WORDS.get(end.reason, "stop")


def usage(counts: Sequence[TokenCounts], answers: int = 1) -> dict[str, Any]:
    """Return OpenAI's `usage`; `counts`: one per answer, `answers` for each prompt in turn, whose tokens count once."""
    prompt, written = sum(c.prompt for c in counts[::answers]), sum(c.output_tokens for c in counts)
    prompt_starts = range(0, len(counts), answers)
    cached_tokens = sum(min(c.cached for c in counts[at : at + answers]) for at in prompt_starts)
    return {
        "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }  # fmt: skip


def timing_fields(counts: TokenCounts) -> dict[str, Any]:
    """Return tokens, times and speeds of an answer, by llama-server's names."""

    def speed_fields(prefix: str, tokens: int, steps: int, seconds: float) -> dict[str, float]:
        return {
            f"{prefix}_n": tokens, f"{prefix}_ms": 1e3 * seconds,
            f"{prefix}_per_token_ms": 1e3 * seconds / steps if steps else 0.0,
            f"{prefix}_per_second": steps / seconds if seconds else 0.0,
        }  # fmt: skip

    return {
        "cache_n": counts.cached, **speed_fields("prompt", counts.read, counts.read, counts.reading),
        **speed_fields("predicted", counts.output_tokens, counts.decode_steps, counts.output_seconds),
    } | ({"draft_n": counts.drafted, "draft_n_accepted": counts.accepted} if counts.drafted else {})  # fmt: skip


def progress_fields(update: PromptProgress, has_timings: bool) -> dict[str, Any]:
    """Return how much of a prompt has been read, by llama-server's names, with `timings` if `has_timings`."""
    progress_values = {
        "total": update.total_tokens, "cache": update.cached, "processed": update.read,
        "time_ms": int(1e3 * update.seconds),
    }  # fmt: skip
    read = update.read - update.cached
    counts = TokenCounts(update.read, update.cached, read, reading=update.seconds if read else 0.0)
    timings = timing_fields(counts)
    return {"prompt_progress": progress_values} | ({"timings": timings} if has_timings else {})


def token_entry(
    token: GeneratedToken, tokenizer: Tokenizer, max_top: int | None = None
) -> dict[str, Any]:
    """Return a token's JSON: id, text, bytes, log-probability, and `max_top` (None: all) of its likeliest tokens."""

    def describe_token(token_id: int, logprob: float | None) -> dict[str, Any]:
        piece = tokenizer.piece(token_id)
        text, logprob = piece.decode(errors="replace"), logprob and min(logprob, 0.0)
        return {"id": token_id, "token": text, "bytes": [*piece], "logprob": logprob}

    top_entries = [describe_token(id, logprob) for id, logprob in token.top_logprobs[:max_top]]
    return {**describe_token(token.token_id, token.logprob), "top_logprobs": top_entries}


class HttpRefusal(RuntimeError):
    """A request that cannot be served; `code`: its HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def missing_flag(feature: str, flag: str) -> HttpRefusal:
    """Return the refusal of a request for a feature that only a server started with this flag has."""
    return HttpRefusal(501, f"This server does not support {feature}. Start it with `{flag}`")


def error(code: int, message: str, error_type: str = "", **details: Any) -> dict[str, Any]:
    """Return the JSON body of an error with HTTP status `code`, as of OpenAI and llama-server; details: more fields."""
    error_type, message = error_type or ERROR_TYPES.get(code, "server_error"), message[:LONGEST]
    # "type" beside "error" is Anthropic's
    error = {"code": code, "message": message, "type": error_type} | details
    return {"type": "error", "error": error}


ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 501: "not_supported_error",
    503: "unavailable_error",
}  # fmt: skip
