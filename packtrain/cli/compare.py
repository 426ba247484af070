"""packtrain compare: models side by side on conversations: losses, right answers, wins, examples; as a page, too."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

from packtrain.cli import DONE, say
from packtrain.cli.comparison_page import comparison_page
from packtrain.cli.event_output import Shown
from packtrain.common.errors import printable
from packtrain.common.files import check_writable, write_text
from packtrain.training.model_loss import Mean
from packtrain.workflows.comparison import Compare, Compared, Subject, compare

WIDE = 76  # characters of a printed answer's line


def run(settings: Compare) -> int:
    """Print the table and some answers. Raises InputError, DoesNotFit, and Interrupted on a signal."""
    for file, flag in ((settings.html, "--html"), (settings.json, "--json")):
        if file is not None:
            check_writable(file, flag)
    comparison = compare(settings, Shown())
    for line in table(settings, comparison):
        print(line)
    for line in examples(settings, comparison):
        print(printable(line))
    if not comparison.same:
        say("these models tokenize the data differently: their losses cannot be compared")
    if settings.json is not None:
        write_text(settings.json, as_json(comparison))
        say(f"figures and answers are in {settings.json}")
    if settings.html is not None:
        write_text(settings.html, page(settings, comparison))
        say(f"all answers are in {settings.html}")
    return DONE


def columns(settings: Compare, comparison: Compared) -> dict[str, Callable[[Subject], str]]:
    """What the table shows of each model, by heading."""

    def wins(subject: Subject) -> str:
        if subject is comparison.subjects[0]:
            return ""
        ties = len(comparison.questions) - subject.wins - subject.losses
        return f"{subject.wins} won, {subject.losses} lost, {ties} even"

    count = len(comparison.questions)
    shown: dict[str, Callable[[Subject], str]] = {"model": lambda subject: subject.name}
    if comparison.subjects[0].loss is not None:
        shown["loss"] = lambda subject: str(subject.loss)
    shown["right"] = lambda subject: (
        f"{sum(subject.right)} of {count} ({sum(subject.right) / count:.0%})"
    )
    if settings.has is not None:
        shown["has style"] = lambda subject: (
            f"{sum(subject.has)} of {count} ({sum(subject.has) / count:.0%})"
        )
    if settings.judge is not None:
        shown["judged"] = lambda subject: f"{sum(subject.scores) / count:.3f}"
    shown["words"] = lambda subject: f"{subject.words:.0f}"
    shown[f"by {settings.rule}"] = wins
    if settings.text is not None:
        shown[f"perplexity of {settings.text.name}"] = lambda subject: _perplexity(subject.text)
    return shown


def as_json(comparison: Compared) -> str:
    """Figures of each model, with the share of right answers, of those in the style, and the mean score."""
    shares = {"right": "share_right", "has": "share_has", "scores": "mean_score"}
    models = [
        asdict(subject)
        | {
            name: sum(values) / len(values)
            for field, name in shares.items()
            if (values := getattr(subject, field))
        }
        for subject in comparison.subjects
    ]
    for mean in (mean for model in models for mean in (model["loss"], model["text"]) if mean):
        mean["error"] = mean["error"] if math.isfinite(mean["error"]) else None
    questions = [{"question": q.text, "reference": q.answer} for q in comparison.questions]
    return json.dumps({"questions": questions, "models": models}, ensure_ascii=False) + "\n"


def _perplexity(loss: Mean | None) -> str:
    return "" if loss is None else str(loss.exponential)


def table(settings: Compare, comparison: Compared) -> Iterator[str]:
    shown = columns(settings, comparison)
    rows = [
        [*shown],
        *([make(subject) for make in shown.values()] for subject in comparison.subjects),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()


def examples(settings: Compare, comparison: Compared) -> Iterator[str]:
    """The first answers side by side."""
    for number, question in enumerate(comparison.questions[: settings.show]):
        yield ""
        yield f"---- {_short(question.text)}"
        yield f"     data: {_short(question.answer)}"
        for subject in comparison.subjects:
            mark = "+" if subject.right[number] else "-"
            yield f"   {mark} {subject.name}: {_short(subject.answers[number])}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDE else f"{line[: WIDE - 2]} …"


def page(settings: Compare, comparison: Compared) -> str:
    """All of it as HTML that loads nothing."""
    shown = columns(settings, comparison)
    rows = [
        {name: cell(subject) for name, cell in shown.items()} for subject in comparison.subjects
    ]
    return comparison_page(settings.data, rows, comparison)
