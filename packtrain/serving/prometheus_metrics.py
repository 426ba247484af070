"""Counts of the engine in Prometheus's text format, with llama-server's names."""

from packtrain.serving.engine_thread import ServingEngine

PREFIX = "llamacpp:"


def metrics_text(engine: ServingEngine) -> str:
    """Format the engine's counts for Prometheus: a line of help, of type and of value for each."""
    t = engine.totals
    num_busy_slots = sum(slot.answer is not None for slot in engine.slots)
    metric_rows = (
        ("prompt_tokens_total", "counter", "tokens of prompts that were read", t.read),
        ("prompt_tokens_cached_total", "counter", "tokens of prompts that were known", t.cached),
        ("prompt_seconds_total", "counter", "seconds of reading prompts", t.reading),
        ("tokens_predicted_total", "counter", "tokens that were written", t.output_tokens),
        ("tokens_predicted_seconds_total", "counter", "seconds of writing", t.output_seconds),
        ("spec_decode_num_drafts_total", "counter", "times that tokens were guessed", t.drafts),
        ("spec_decode_num_draft_tokens_total", "counter", "tokens that were guessed", t.drafted),
        ("spec_decode_num_accepted_tokens_total", "counter", "guessed tokens that came", t.accepted),
        ("n_decode_total", "counter", "runs of the model", t.runs),
        ("n_tokens_max", "counter", "tokens of the longest text", t.max_text_tokens),
        ("n_busy_slots_per_decode", "gauge", "busy slots of a run, mean", ratio(t.busy, t.runs)),
        ("prompt_tokens_seconds", "gauge", "tokens read a second, mean", ratio(t.read, t.reading)),
        ("predicted_tokens_seconds", "gauge", "tokens written a second, mean", ratio(t.decode_steps, t.output_seconds)),
        ("requests_processing", "gauge", "requests in slots", num_busy_slots),
        ("requests_deferred", "gauge", "requests that wait for a slot", engine.num_waiting),
    )  # fmt: skip
    return "".join(
        f"# HELP {PREFIX}{name} {about}\n# TYPE {PREFIX}{name} {metric_type}\n{PREFIX}{name} {value:.10g}\n"
        for name, metric_type, about, value in metric_rows
    )


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
