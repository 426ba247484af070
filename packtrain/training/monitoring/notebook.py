"""Support for notebooks: results as tables and pictures, a progress bar, Ctrl-C that saves, data in memory.

This module imports no notebook package: it uses IPython where that already runs."""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError, with_keywords
from packtrain.common.events import Counted, TaskCallbacks
from packtrain.common.files import write_text
from packtrain.common.signals import stop_on_interrupt
from packtrain.data.text.text_streams import DATA_SUFFIXES
from packtrain.kernels.runtime.environment import cache_root, writable
from packtrain.training.monitoring.progress import ProgressLine, WorkCounter

REDRAW_SECONDS = 0.5  # between two drawings of the progress bar
TABLE_TAG = '<table style="font-variant-numeric:tabular-nums">'


def notebook_display() -> Callable[..., Any] | None:
    """Return IPython's function that shows an object in a cell's output; None outside a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return sys.modules["IPython"].display.display  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Html:
    """HTML that a notebook shows, such as a plot."""

    html: str = field(repr=False)
    text: str = "a picture; it is shown in a notebook, and `.html` is its text"

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def html_table(rows: Iterable[Sequence[str]]) -> str:
    """Format rows of texts as an HTML table."""
    cell_tag = '<td style="text-align:left">'  # a notebook's own style aligns cells, not tables
    row_cells = ("".join(f"{cell_tag}{escape(cell)}</td>" for cell in row) for row in rows)
    return f"{TABLE_TAG}{''.join(f'<tr>{row}</tr>' for row in row_cells)}</table>"


def to_frame(history: Sequence[Mapping[str, Any]]) -> Any:
    """Return the records of steps as a pandas DataFrame. Raises InputError without pandas."""
    try:
        return import_module("pandas").DataFrame(history)
    except ImportError:
        raise InputError("to_frame needs pandas", "install it: pip install pandas") from None


# ---- progress and Ctrl-C


class NotebookBar:
    """The progress bar in a cell's output; has the interface of `progress_bar.TerminalBar`."""

    def __init__(self, show_object: Callable[..., Any], steps: int) -> None:
        self.show_object, self.steps, self.due = show_object, steps, 0.0
        self.display_handle: Any = None

    def draw(self, step: int, parts: Sequence[str]) -> None:
        bar = f'<progress value="{step}" max="{self.steps}" style="width:12em"></progress>'
        line_html = Html(f"{bar} <code>{escape('  '.join(filter(None, parts)))}</code>", "progress")
        if self.display_handle is None:
            self.display_handle = self.show_object(line_html, display_id=True)
        else:
            self.display_handle.update(line_html)
        self.due = time.monotonic() + REDRAW_SECONDS

    def print_above(self, text: str) -> None:
        print(text)

    def close(self) -> None:
        """Keep the last line in the cell's output."""


@dataclass
class LibraryCallbacks(TaskCallbacks):
    """Callbacks of a call from Python: Ctrl-C saves and stops; in a notebook the run draws its progress there."""

    _line: ProgressLine | None = field(default=None, init=False, repr=False)

    def message(self, text: str) -> None:
        super().message(with_keywords(text))

    def notice(self, text: str) -> None:
        if self.on_message is None:
            print(with_keywords(text), file=sys.stderr)
        else:
            self.message(text)

    @contextmanager
    def training(
        self, steps: int, planned_nbytes: int, report_every: int, limit_nbytes: int | None = None
    ) -> Iterator[None]:
        show_object, sizes = notebook_display(), (steps, planned_nbytes, report_every, limit_nbytes)
        with super().training(*sizes):
            if show_object is not None and self.on_step is None:
                self._line = ProgressLine(sys.stdout, *sizes, NotebookBar(show_object, steps))
            yield
        self._line = None

    def step(self, record: Mapping[str, Any], peak_nbytes: int) -> None:
        super().step(record, peak_nbytes)
        if self._line is not None:
            self._line.step(record, peak_nbytes)

    @contextmanager
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        show = notebook_display()
        if show is None or self.on_progress is not None:
            with super().counting(label, unit) as count:
                yield count
            return
        with WorkCounter(sys.stdout, label, unit, lambda total: NotebookBar(show, total)) as count:
            yield count

    @contextmanager
    def stopping(self) -> Iterator[Callable[[], bool]]:
        with stop_on_interrupt() as interrupted:
            yield lambda: interrupted() or self.cancel.is_set()


# ---- data in memory


def records_path(data: Any, name: str = "data") -> Any:
    """Return `data` if it is a path; write records in memory to a cached JSON Lines file, called `name`, and return its
    path. Takes a list of dicts or of texts, a DataFrame of pandas or polars, a datasets.Dataset. Raises InputError."""
    if data is None or isinstance(data, str | Path):
        return data
    lines = [json.dumps(record, ensure_ascii=False) for record in _iter_records(data, name)]
    text = "\n".join([*lines, ""])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = writable(cache_root() / "records")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.jsonl"
    if not path.exists():
        write_text(path, text)
    return path


def _iter_records(data: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the records, dicts, of a list, DataFrame or datasets.Dataset. Raises InputError, which calls it `name`."""
    if hasattr(data, "to_dicts"):  # polars
        data = data.to_dicts()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        data = data.to_dict("records")
    elif hasattr(data, "column_names") and hasattr(data, "__len__"):  # datasets, not streamed
        data = data if isinstance(data, Mapping) else list(data)
    if not isinstance(data, list | tuple):
        raise InputError(
            f"{name} is a {type(data).__name__}",
            "it must be a path, a list of dicts or of texts, a DataFrame or a datasets.Dataset",
        )
    if not data:
        raise InputError(f"{name} has no records; at least one is needed")
    for number, record in enumerate(data, 1):
        if isinstance(record, str):
            if record.lower().endswith(DATA_SUFFIXES) and Path(record).exists():
                raise InputError(f"{name}: record {number} is a file", "give one path, or a folder")
            yield {"text": record}
        elif isinstance(record, Mapping):
            yield {
                str(key): _json_value(value, f"{name}: record {number}")
                for key, value in record.items()
            }
        else:
            fact = f"{name}: record {number} is a {type(record).__name__}"
            raise InputError(f"{fact}; it must be a dict or a text")


def _json_value(value: Any, location: str) -> Any:
    """Convert a record's value to plain JSON; NaN, a missing cell of a DataFrame, becomes null."""
    if hasattr(value, "tolist"):  # NumPy's
        value = value.tolist()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _json_value(item, location) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item, location) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    fact = f"{location} has a {type(value).__name__}; values are texts, numbers and lists"
    raise InputError(fact)
