"""Counts of the engine in Prometheus's text format, with llama-server's names."""

from packtrain.serving.engine_thread import Engine

PREFIX = "llamacpp:"


def metrics_text(engine: Engine) -> str:
    """A line of help, of type and of value for each."""
    t = engine.totals
    busy = sum(slot.writing is not None for slot in engine.slots)
    rows = (
        ("prompt_tokens_total", "counter", "tokens of prompts that were read", t.read),
        ("prompt_tokens_cached_total", "counter", "tokens of prompts that were known", t.cached),
        ("prompt_seconds_total", "counter", "seconds of reading prompts", t.reading),
        ("tokens_predicted_total", "counter", "tokens that were written", t.written),
        ("tokens_predicted_seconds_total", "counter", "seconds of writing", t.writing),
        ("n_decode_total", "counter", "runs of the model", t.runs),
        ("n_tokens_max", "counter", "tokens of the longest text", t.longest),
        ("n_busy_slots_per_decode", "gauge", "busy slots of a run, mean", ratio(t.busy, t.runs)),
        ("prompt_tokens_seconds", "gauge", "tokens read a second, mean", ratio(t.read, t.reading)),
        (
            "predicted_tokens_seconds",
            "gauge",
            "tokens written a second, mean",
            ratio(t.written, t.writing),
        ),
        ("requests_processing", "gauge", "requests in slots", busy),
        ("requests_deferred", "gauge", "requests that wait for a slot", engine.waiting),
    )
    return "".join(
        f"# HELP {PREFIX}{name} {about}\n# TYPE {PREFIX}{name} {kind}\n{PREFIX}{name} {value:.10g}\n"
        for name, kind, about, value in rows
    )


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
