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
    found = compare(settings, Shown())
    for line in table(settings, found):
        print(line)
    for line in examples(settings, found):
        print(printable(line))
    if not found.same:
        say("these models tokenize the data differently: their losses cannot be compared")
    if settings.json is not None:
        write_text(settings.json, as_json(found))
        say(f"figures and answers are in {settings.json}")
    if settings.html is not None:
        write_text(settings.html, page(settings, found))
        say(f"all answers are in {settings.html}")
    return DONE


def columns(settings: Compare, found: Compared) -> dict[str, Callable[[Subject], str]]:
    """What the table shows of each model, by heading."""

    def wins(one: Subject) -> str:
        if one is found.subjects[0]:
            return ""
        ties = len(found.questions) - one.wins - one.losses
        return f"{one.wins} won, {one.losses} lost, {ties} even"

    count = len(found.questions)
    shown: dict[str, Callable[[Subject], str]] = {"model": lambda one: one.name}
    if found.subjects[0].loss is not None:
        shown["loss"] = lambda one: str(one.loss)
    shown["right"] = lambda one: f"{sum(one.right)} of {count} ({sum(one.right) / count:.0%})"
    if settings.has is not None:
        shown["has style"] = lambda one: f"{sum(one.has)} of {count} ({sum(one.has) / count:.0%})"
    if settings.judge is not None:
        shown["judged"] = lambda one: f"{sum(one.scores) / count:.3f}"
    shown["words"] = lambda one: f"{one.words:.0f}"
    shown[f"by {settings.rule}"] = wins
    if settings.text is not None:
        shown[f"perplexity of {settings.text.name}"] = lambda one: _perplexity(one.text)
    return shown


def as_json(found: Compared) -> str:
    """Figures of each model, with the share of right answers, of those in the style, and the mean score."""
    shares = {"right": "share_right", "has": "share_has", "scores": "mean_score"}
    models = [
        asdict(one)
        | {name: sum(of) / len(of) for field, name in shares.items() if (of := getattr(one, field))}
        for one in found.subjects
    ]
    for mean in (mean for model in models for mean in (model["loss"], model["text"]) if mean):
        mean["error"] = mean["error"] if math.isfinite(mean["error"]) else None
    questions = [{"question": q.text, "reference": q.answer} for q in found.questions]
    return json.dumps({"questions": questions, "models": models}, ensure_ascii=False) + "\n"


def _perplexity(loss: Mean | None) -> str:
    return "" if loss is None else str(loss.exponential)


def table(settings: Compare, found: Compared) -> Iterator[str]:
    shown = columns(settings, found)
    rows = [[*shown], *([make(one) for make in shown.values()] for one in found.subjects)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()


def examples(settings: Compare, found: Compared) -> Iterator[str]:
    """The first answers side by side."""
    for number, question in enumerate(found.questions[: settings.show]):
        yield ""
        yield f"---- {_short(question.text)}"
        yield f"     data: {_short(question.answer)}"
        for one in found.subjects:
            mark = "+" if one.right[number] else "-"
            yield f"   {mark} {one.name}: {_short(one.answers[number])}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDE else f"{line[: WIDE - 2]} …"


def page(settings: Compare, found: Compared) -> str:
    """All of it as HTML that loads nothing."""
    shown = columns(settings, found)
    rows = [{name: cell(one) for name, cell in shown.items()} for one in found.subjects]
    return comparison_page(settings.data, rows, found)
