"""The page of `packtrain compare`: the table, and each question with the answers side by side. It has no script."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from packtrain.common.text import plural
from packtrain.training.monitoring.runs_page import scriptless_page
from packtrain.workflows.comparison import ComparisonResult


def comparison_page(
    data: Path, table_rows: Sequence[Mapping[str, str]], comparison: ComparisonResult
) -> str:
    """Return the page as HTML; `table_rows` are the measures of each model by their headings."""
    header_cells = "".join(f"<th>{escape(name)}</th>" for name in table_rows[0])
    row_cells = (
        "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in row.items())
        for row in table_rows
    )
    table_html = "".join(f"<tr>{row}</tr>" for row in row_cells)
    model_names = [Path(subject.name).name for subject in comparison.subjects]
    if len(set(model_names)) < len(model_names):
        model_names = [subject.name for subject in comparison.subjects]
    articles = "\n".join(
        _article(comparison, model_names, number) for number in range(len(comparison.questions))
    )
    subtitle = f"{plural(len(comparison.questions), 'conversation')} of {data}"
    return scriptless_page(
        "Models compared",
        f"<h1>Models compared</h1>\n<p>{escape(subtitle)}</p>\n"
        f'<section><div class="scroll"><table><tr>{header_cells}</tr>{table_html}</table></div></section>\n{articles}',
        "answers.css",
    )


def _article(comparison: ComparisonResult, model_names: Sequence[str], number: int) -> str:
    """Return the HTML of a question, the data's answer, and the models' answers."""
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
