"""The page of `packtrain compare`: the table, and each question with the answers side by side. It has no script."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from packtrain.tasks.compare import Compared
from packtrain.watch.page import scriptless_page
from packtrain.words import plural

STYLE = """
article {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; margin-top: 16px;
}
h3 { margin: 0 0 2px; font-size: 12px; font-weight: 600; color: var(--ink); overflow-wrap: anywhere; }
pre { color: var(--strong); }
pre:empty::before { content: "nothing was written"; font-style: italic; color: var(--ink); }
.question { font-weight: 600; margin-bottom: 10px; }
.answers { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); gap: 16px; }
.answers > div { border-left: 3px solid var(--line); padding-left: 10px; }
.answers > .right { border-color: var(--good); }
.answers > .wrong { border-color: var(--bad); }
.right b { color: var(--good); }
.wrong b { color: var(--bad); }
@media (max-width: 760px) {
  .answers { grid-auto-flow: row; gap: 12px; }
  article { padding: 10px; margin-top: 10px; }
  tr:first-child { display: none; }
  td { display: flex; gap: 12px; justify-content: space-between; border: 0; padding-right: 0; }
  td:empty { display: none; }
  td::before { content: attr(data-name); }
  td:first-child { color: var(--strong); font-weight: 600; }
  td:first-child::before { content: none; }
}
"""


def comparison_page(data: Path, rows: Sequence[Mapping[str, str]], found: Compared) -> str:
    """The HTML; `rows` are the measures of each model by their headings."""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    cells = (
        "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in row.items())
        for row in rows
    )
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    names = [Path(one.name).name for one in found.subjects]
    if len(set(names)) < len(names):
        names = [one.name for one in found.subjects]
    articles = "\n".join(_article(found, names, number) for number in range(len(found.questions)))
    about = f"{plural(len(found.questions), 'conversation')} of {data}"
    return scriptless_page(
        "Models compared",
        f"<h1>Models compared</h1>\n<p>{escape(about)}</p>\n"
        f'<section><div class="scroll"><table><tr>{head}</tr>{table}</table></div></section>\n{articles}',
        STYLE,
    )


def _article(found: Compared, names: Sequence[str], number: int) -> str:
    """A question: the answer that the data has, and those of the models."""
    question = found.questions[number]
    columns = [_column("data", "the answer in the data", "", question.answer)]
    for name, one in zip(names, found.subjects, strict=True):
        verdict = "right" if one.right[number] else "wrong"
        columns.append(_column(verdict, name, f" · <b>{verdict}</b>", one.answers[number]))
    return (
        f"<article><h3>{number + 1:,} of {len(found.questions):,}</h3>"
        f'<pre class="question">{escape(question.text)}</pre>'
        f'<div class="answers">{"".join(columns)}</div></article>'
    )


def _column(kind: str, name: str, verdict: str, answer: str) -> str:
    return f'<div class="{kind}"><h3>{escape(name)}{verdict}</h3><pre>{escape(answer)}</pre></div>'
