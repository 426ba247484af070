"""packtrain compare: models side by side on conversations: losses, right answers, wins, examples; as a page, too."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from html import escape

from packtrain.commands import DONE, say
from packtrain.commands.shown import Shown
from packtrain.errors import printable
from packtrain.files import check_writable, write_text
from packtrain.tasks.compare import Compare, Compared, Subject, compare
from packtrain.training.measure import Mean
from packtrain.words import plural

WIDE = 76  # characters of a printed answer's line
STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem; border-bottom: 1px solid #8886 }
td { white-space: pre-wrap; overflow-wrap: anywhere }
.right { border-left: 3px solid #2a9d5c } .wrong { border-left: 3px solid #c8553d }
"""


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
    head = "".join(f"<th>{escape(name)}</th>" for name in shown)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(make(one))}</td>' for make in shown.values())}</tr>"
        for one in found.subjects
    )
    names = "".join(f"<th>{escape(one.name)}</th>" for one in found.subjects)
    answers = "".join(_row(found, number) for number in range(len(found.questions)))
    count = plural(len(found.questions), "conversation")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Models compared</title><style>{STYLE}</style>'
        f"<h1>Models compared</h1><p>{count} of {escape(str(settings.data))}</p>"
        f"<table><tr>{head}</tr>{rows}</table>"
        f"<table><tr><th>prompt</th><th>data</th>{names}</tr>{answers}</table></html>\n"
    )


def _row(found: Compared, number: int) -> str:
    question = found.questions[number]
    cells = "".join(
        f'<td class="{"right" if one.right[number] else "wrong"}">{escape(one.answers[number])}</td>'
        for one in found.subjects
    )
    return f"<tr><td>{escape(question.text)}</td><td>{escape(question.answer)}</td>{cells}</tr>"
