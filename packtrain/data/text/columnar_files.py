"""Rows of files that optional packages read: .parquet, .arrow and .feather by pyarrow, spreadsheets by python-calamine.

A null cell is left out of its record; cells of a spreadsheet become text. python-calamine is 1 MB, has an MIT license,
and reads .xls and .ods, too."""

import zipfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.text import shortlist
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.text.text_streams import SAVE_TABLE, suffix_of

BATCH_ROWS = 256  # rows converted to Python values at a time
MAX_SHEET_NBYTES = 1 << 30  # most bytes unpacked: a sheet is read at once
BUFFER_NBYTES = 1 << 20  # a row group may be the whole file: its pages are read on demand


def column_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place in words, row as a dict) of each row. Raises InputError."""
    if path.suffix == ".gz":
        raise InputError(f"{path} is compressed; unpack it with: gunzip {path}")
    if find_spec("pyarrow") is None:
        reader_name = "read_parquet" if suffix_of(path) == ".parquet" else "read_feather"
        raise InputError(
            f"{path} needs pyarrow: pip install pyarrow (or packtrain with its extra data); or convert the file where"
            f" pandas is: python -c \"import pandas; pandas.{reader_name}('{path.name}')"
            f".to_json('{path.stem}.jsonl', orient='records', lines=True)\""
        )
    arrow = import_module("pyarrow")
    row_number = 0
    try:
        for batch in _record_batches(path, arrow):
            for row in batch.to_pylist():
                row_number += 1
                yield f"{path}: row {row_number}", drop_nulls(row)
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable_file(path, error, f" after row {row_number}") from None


def _unreadable_file(path: Path, error: Exception, place: str = "", advice: str = "") -> InputError:
    text = " ".join(str(error).split())[:200]
    return InputError(f"{path} cannot be read as {suffix_of(path)}{place}: {text}{advice}")


def _record_batches(path: Path, arrow: Any) -> Iterator[Any]:
    if suffix_of(path) == ".parquet":
        parquet = import_module("pyarrow.parquet")
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_NBYTES) as file:
            yield from file.iter_batches(batch_size=BATCH_ROWS)
        return
    ipc = import_module("pyarrow.ipc")
    with arrow.memory_map(str(path)) as source:
        try:
            file = ipc.open_file(source)
            record_batches = (file.get_batch(i) for i in range(file.num_record_batches))
        except arrow.ArrowInvalid:  # the stream format, as in Hugging Face's caches
            source.seek(0)
            record_batches = iter(ipc.open_stream(source))
        for batch in record_batches:
            for row_start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(row_start, BATCH_ROWS)


def drop_nulls(value: Any) -> Any:
    """Remove null fields from a value: every row of a table has every field of a struct."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


# ---- spreadsheets


def sheet_rows(report: ReadingReport) -> Iterator[tuple[str, list[str]]]:
    """Yield (place in words, cells' texts) of non-empty rows of the first sheet of report.path. Raises InputError."""
    path = report.path
    if find_spec("python_calamine") is None:
        raise InputError(
            f"{path} is a spreadsheet: {SAVE_TABLE}; or, to read it as it is: pip install python-calamine (or packtrain"
            " with its extra data)"
        )
    calamine = import_module("python_calamine")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                nbytes = sum(member.file_size for member in file.infolist())
            if nbytes > MAX_SHEET_NBYTES:
                raise InputError(f"{path} has {nbytes:,} bytes unpacked; {SAVE_TABLE}")
        book = calamine.load_workbook(path)
        sheet_names = book.sheet_names
        rows = book.get_sheet_by_index(0).iter_rows() if sheet_names else ()
    except (calamine.CalamineError, zipfile.BadZipFile, OSError) as error:
        raise _unreadable_file(path, error, advice=f"; {SAVE_TABLE}") from None
    if len(sheet_names) > 1:
        report.remarks.append(f"sheet {sheet_names[0]}; not read: {shortlist(sheet_names[1:])}")
    for row_number, cells in enumerate(rows, 1):
        texts = [_cell_text(cell) for cell in cells]
        if any(texts):
            yield f"{path}: row {row_number}", texts


def _cell_text(cell: Any) -> str:
    """Return the text of a cell: whole numbers without a point, as spreadsheets show them."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).upper() if isinstance(cell, bool) else str(cell)
