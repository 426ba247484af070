"""packtrain compare: models side by side on conversations: losses, right answers, wins, examples; as a page, too."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from packtrain.cli import DONE, print_message
from packtrain.cli.comparison_page import comparison_page
from packtrain.cli.event_output import TerminalEvents
from packtrain.common.errors import printable
from packtrain.common.files import check_writable, write_text
from packtrain.common.text import aligned
from packtrain.training.model_loss import MeanEstimate
from packtrain.workflows.comparison import ComparedModel, CompareSettings, ComparisonResult, compare
from packtrain.workflows.tool_call_scores import call_shares

ANSWER_WIDTH = 76  # characters of a printed answer's line


def run(settings: CompareSettings) -> int:
    """Print the table and some answers. Raises InputError, DoesNotFit, and Interrupted on a signal."""
    check_writable(settings.html, "--html")
    check_writable(settings.json, "--json")
    comparison = compare(settings, TerminalEvents())
    for line in table_lines(settings, comparison):
        print(line)
    for line in example_lines(settings, comparison):
        print(printable(line))
    if not comparison.same:
        print_message("these models tokenize the data differently: their losses cannot be compared")
    if settings.json is not None:
        write_text(settings.json, comparison_json(comparison))
        print_message(f"figures and answers are in {settings.json}")
    if settings.html is not None:
        write_text(settings.html, html_page(settings, comparison))
        print_message(f"all answers are in {settings.html}")
    return DONE


def table_columns(
    settings: CompareSettings, comparison: ComparisonResult
) -> dict[str, Callable[[ComparedModel], str]]:
    """Return the table's columns: headings, each with a function from a model to its cell."""

    def wins(subject: ComparedModel) -> str:
        if subject is comparison.subjects[0]:
            return ""
        ties = len(comparison.questions) - subject.wins - subject.losses
        return f"{subject.wins} won, {subject.losses} lost, {ties} even"

    num_questions = len(comparison.questions)
    shown: dict[str, Callable[[ComparedModel], str]] = {"model": lambda subject: subject.name}
    if comparison.subjects[0].loss is not None:
        shown["loss"] = lambda subject: str(subject.loss)
    if settings.kl:
        shown["KL from the first"] = lambda subject: subject.kl.text(6) if subject.kl else ""
    shown["right"] = lambda subject: (
        f"{sum(subject.right)} of {num_questions} ({sum(subject.right) / num_questions:.0%})"
    )
    if settings.has is not None:
        shown["has style"] = lambda subject: (
            f"{sum(subject.has)} of {num_questions} ({sum(subject.has) / num_questions:.0%})"
        )
    if settings.judge is not None:
        shown["judged"] = lambda subject: f"{sum(subject.scores) / num_questions:.3f}"
    for name, _, _ in call_shares(comparison.subjects[0].calls):
        shown[name] = partial(_call_share, name)
    shown["words"] = lambda subject: f"{subject.words:.0f}"
    shown[f"by {settings.rule}"] = wins
    if settings.text is not None:
        shown[f"perplexity of {settings.text.name}"] = lambda subject: _perplexity(subject.text)
    return shown


def _call_share(name: str, subject: ComparedModel) -> str:
    return next(
        f"{n} of {all} ({n / all:.0%})" for x, n, all in call_shares(subject.calls) if x == name
    )


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


def _perplexity(loss: MeanEstimate | None) -> str:
    return "" if loss is None else str(loss.exponential)


def table_lines(settings: CompareSettings, comparison: ComparisonResult) -> Iterator[str]:
    column_texts = table_columns(settings, comparison)
    table_rows = [
        [*column_texts],
        *([make(subject) for make in column_texts.values()] for subject in comparison.subjects),
    ]
    yield from aligned(table_rows)


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
    """Return the comparison as an HTML page that loads nothing."""
    shown = table_columns(settings, comparison)
    table_rows = [
        {name: cell(subject) for name, cell in shown.items()} for subject in comparison.subjects
    ]
    return comparison_page(settings.data, table_rows, comparison)
