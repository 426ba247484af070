"""packtrain compare: models side by side on conversations: losses, right answers, wins, examples; as a page, too."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from html import escape
from pathlib import Path

from packtrain.cli import DONE, print_message
from packtrain.cli.event_output import TerminalEvents, without_controls
from packtrain.common.files import check_writable, write_text
from packtrain.common.text import aligned, plural
from packtrain.training.monitoring.runs_page import scriptless_page
from packtrain.workflows.comparison import ComparedModel, CompareSettings, ComparisonResult, compare
from packtrain.workflows.tool_call_scores import call_shares

ANSWER_WIDTH = 76  # characters of a printed answer's line


def run(settings: CompareSettings) -> int:
    """Print the table and some answers; returns the exit code. Raises InputError, DoesNotFit, Interrupted."""
    check_writable(settings.html, "--html")
    check_writable(settings.json, "--json")
    comparison = compare(settings, TerminalEvents())
    rows = table_rows(settings, comparison)
    for line in aligned([[*rows[0]], *([*row.values()] for row in rows)]):
        print(line)
    for line in example_lines(settings, comparison):
        print(without_controls(line))
    if not comparison.same:
        print_message("these models tokenize the data differently: their losses cannot be compared")
    if settings.json is not None:
        write_text(settings.json, comparison_json(comparison))
        print_message(f"figures and answers are in {settings.json}")
    if settings.html is not None:
        write_text(settings.html, html_page(settings, comparison))
        print_message(f"all answers are in {settings.html}")
    return DONE


def table_rows(settings: CompareSettings, comparison: ComparisonResult) -> list[dict[str, str]]:
    """Return the table's rows, one for each model: its cells by their headings."""

    def wins(subject: ComparedModel) -> str:
        if subject is comparison.subjects[0]:
            return ""
        ties = len(comparison.questions) - subject.wins - subject.losses
        return f"{subject.wins} won, {subject.losses} lost, {ties} even"

    def share(count: int, total: int = len(comparison.questions)) -> str:
        return f"{count} of {total} ({count / total:.0%})"

    def call_share(name: str, subject: ComparedModel) -> str:
        return next(share(n, all) for x, n, all in call_shares(subject.calls) if x == name)

    shown: dict[str, Callable[[ComparedModel], str]] = {"model": lambda subject: subject.name}
    if comparison.subjects[0].loss is not None:
        shown["loss"] = lambda subject: str(subject.loss)
    if settings.kl:
        shown["KL from the first"] = lambda subject: subject.kl.text(6) if subject.kl else ""
    shown["right"] = lambda subject: share(sum(subject.right))
    if settings.has is not None:
        shown["has style"] = lambda subject: share(sum(subject.has))
    if settings.judge is not None:
        shown["judged"] = lambda subject: f"{sum(subject.scores) / len(comparison.questions):.3f}"
    for name, _, _ in call_shares(comparison.subjects[0].calls):
        shown[name] = partial(call_share, name)
    shown["words"] = lambda subject: f"{subject.words:.0f}"
    shown[f"by {settings.rule}"] = wins
    if settings.text is not None:
        heading = f"perplexity of {settings.text.name}"
        shown[heading] = lambda subject: str(subject.text.exponential) if subject.text else ""
    return [{title: cell(s) for title, cell in shown.items()} for s in comparison.subjects]


def comparison_json(comparison: ComparisonResult) -> str:
    """Return questions and figures of each model as JSON, with shares of right and in-style answers and mean scores."""
    share_names = {"right": "share_right", "has": "share_has", "scores": "mean_score"}
    models = [
        asdict(subject)
        | {
            name: sum(model_values) / len(model_values)
            for field, name in share_names.items()
            if (model_values := getattr(subject, field))
        }
        | {f"share_{x.replace(' ', '_')}": n / all for x, n, all in call_shares(subject.calls)}
        for subject in comparison.subjects
    ]
    means = (model[name] for model in models for name in ("loss", "text", "kl") if model[name])
    for mean in means:
        mean["error"] = mean["error"] if math.isfinite(mean["error"]) else None
    questions = [{"question": q.text, "reference": q.answer} for q in comparison.questions]
    return json.dumps({"questions": questions, "models": models}, ensure_ascii=False) + "\n"


def example_lines(settings: CompareSettings, comparison: ComparisonResult) -> Iterator[str]:
    """Yield lines that show the first answers side by side."""
    for question_index, question in enumerate(comparison.questions[: settings.show]):
        yield ""
        yield f"---- {_one_line(question.text)}"
        yield f"     data: {_one_line(question.answer)}"
        for subject in comparison.subjects:
            mark = "+" if subject.right[question_index] else "-"
            yield f"   {mark} {subject.name}: {_one_line(subject.answers[question_index])}"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ANSWER_WIDTH else f"{line[: ANSWER_WIDTH - 2]} …"


def html_page(settings: CompareSettings, comparison: ComparisonResult) -> str:
    """Return a page with the table and all answers as HTML, which loads nothing and has no script."""
    rows = table_rows(settings, comparison)
    header_cells = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    row_cells = (
        "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in row.items())
        for row in rows
    )
    table_html = "".join(f"<tr>{row}</tr>" for row in row_cells)
    model_names = [Path(subject.name).name for subject in comparison.subjects]
    if len(set(model_names)) < len(model_names):
        model_names = [subject.name for subject in comparison.subjects]
    articles = "\n".join(
        _article(comparison, model_names, number) for number in range(len(comparison.questions))
    )
    subtitle = f"{plural(len(comparison.questions), 'conversation')} of {settings.data}"
    return scriptless_page(
        "Models compared",
        f"<h1>Models compared</h1>\n<p>{escape(subtitle)}</p>\n"
        f'<section><div class="scroll"><table><tr>{header_cells}</tr>{table_html}</table></div></section>\n{articles}',
        "answers.css",
    )


def _article(comparison: ComparisonResult, model_names: Sequence[str], number: int) -> str:
    """Return the HTML of question `number`, from 0, with the data's answer and the models'."""
    question = comparison.questions[number]
    columns = [_answer_column("data", "the answer in the data", "", question.answer)]
    for name, subject in zip(model_names, comparison.subjects, strict=True):
        kind = "right" if (subject.has or subject.right)[number] else "wrong"
        verdict = kind if not subject.has else "in style" if kind == "right" else "not in style"
        verdict += f", score {subject.scores[number]:.3g}" if subject.scores else ""
        columns.append(_answer_column(kind, name, f" · <b>{verdict}</b>", subject.answers[number]))
    return (
        f"<article><h3>{number + 1:,} of {len(comparison.questions):,}</h3>"
        f'<pre class="question">{escape(question.text)}</pre>'
        f'<div class="answers">{"".join(columns)}</div></article>'
    )


def _answer_column(kind: str, name: str, verdict: str, answer: str) -> str:
    return f'<div class="{kind}"><h3>{escape(name)}{verdict}</h3><pre>{escape(answer)}</pre></div>'
