"""Wording of messages: plurals, "did you mean", tables, and whether to use colour."""

import os
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import TextIO


def plural(num_items: int, singular: str, plural_form: str = "") -> str:
    """Format a count: 1 document, 2 documents, 3 matrices; `plural_form` replaces `singular` with an s."""
    return f"{num_items:,} {singular if num_items == 1 else plural_form or f'{singular}s'}"


def shortlist(names: Collection[str], max_names: int = 8, width: int = 40) -> str:
    """Return the first `max_names` names, each cut to `width` characters, in one text, with how many more there are."""
    shown = [name if len(name) <= width else f"{name[:width]}…" for name in [*names][:max_names]]
    suffix = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return f"{', '.join(shown)}{suffix}"


def did_you_mean(typed: str, candidates: Collection[str]) -> str:
    """Return `; did you mean --memory?` with the closest candidate, or an empty text."""
    names = {name.lstrip("-").lower(): name for name in candidates}  # dashes make options alike
    stripped = typed.lstrip("-").lower()
    prefixed = sorted((name for name in names if stripped and name.startswith(stripped)), key=len)
    matches = prefixed or get_close_matches(stripped, [*names], n=1, cutoff=0.65)
    return f"; did you mean {names[matches[0]]}?" if matches else ""


def aligned(rows: Sequence[Sequence[str]], right_columns: Collection[int] = ()) -> Iterator[str]:
    """Yield rows as lines whose columns are two spaces apart, those in `right_columns` aligned right."""
    columns = enumerate(zip(*rows, strict=True))
    forms = [f"{'<>'[k in right_columns]}{max(map(len, column))}" for k, column in columns]
    for row in rows:
        yield "  ".join(map(format, row, forms)).rstrip()


def long_context_warning(ctx: int, model_ctx: int) -> str:
    """Return a warning that a context of `ctx` tokens is longer than the `model_ctx` that the model was trained on."""
    return (
        f"--ctx {ctx:,} is more than the model's own context of {plural(model_ctx, 'token')};"
        " what it writes or predicts beyond that may be poor"
    )


def use_colour(stream: TextIO) -> bool:
    """Whether to write colour to a stream: a terminal, or with FORCE_COLOR; never with NO_COLOR (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def clock(seconds: float) -> str:
    """Format seconds: 83 -> '1:23', 3683 -> '1:01:23'."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def speed_text(tokens_per_second: float) -> str:
    """Format the speed in tokens/s; callers count all computed tokens, prompts and padding included."""
    return f"{tokens_per_second:,.0f} tokens/s"
