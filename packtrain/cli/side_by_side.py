"""Answers of base and tuned model beside each other where the terminal is wide, one above the other elsewhere."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap

from packtrain.common.errors import printable
from packtrain.workflows.behaviour_check import END_LABELS, CheckedAnswer

MIN_WIDTH = 100  # characters of a terminal that shows two columns
MAX_LINES = 12  # most lines of a shown answer


def side_by_side(answers: Sequence[CheckedAnswer], width: int) -> Iterator[str]:
    """Yield lines of at most `width` characters that show held-out answers of base and tuned model."""
    for number, answer in enumerate(answers, 1):
        heading = f"held-out question {number} of {len(answers)}: {_on_one_line(answer.question)}"
        yield from wrap(heading, width, max_lines=3, placeholder=" …")
        reference = f"  data: {_on_one_line(answer.reference)}"
        yield from wrap(reference, width, subsequent_indent="    ", max_lines=3, placeholder=" …")
        columns = (
            (f"base ({END_LABELS[answer.base_ended]})", answer.base),
            (f"tuned ({END_LABELS[answer.tuned_ended]})", answer.tuned),
        )
        if width < MIN_WIDTH:
            for title, text in columns:
                yield f"  {title}"
                yield from (f"    {line}" for line in _wrapped_lines(text, width - 4))
            continue
        column_width = (width - 5) // 2
        left, right = ([title, *_wrapped_lines(text, column_width)] for title, text in columns)
        for base_line, tuned_line in zip_longest(left, right, fillvalue=""):
            yield f"  {base_line:<{column_width}} │ {tuned_line}".rstrip()


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _wrapped_lines(text: str, width: int) -> list[str]:
    """Wrap the lines of a text, at most MAX_LINES; the last line is `…` if there are more."""
    lines = [part for line in text.splitlines() for part in wrap(printable(line), width)]
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "…"]
