"""Progress while packed files are read: text is never compared with the size of a file that holds it packed."""

import gzip
import importlib
import json
import zipfile
from pathlib import Path

import pytest

from packtrain.data.text.build_corpus import write_corpus
from tests.test_corpus import text_of, vocab
from tests.test_fields import workbook

__all__ = ["vocab"]  # a fixture


def packed_file(folder: Path, name: str) -> Path:
    """Some 3 MB of text in a file that is much smaller."""
    path, lines = folder / name, [f"a line of text, {i % 7} {'word ' * 200}" for i in range(3000)]
    if name.endswith(".gz"):
        rows = {
            ".txt": lines,
            ".jsonl": [json.dumps({"text": line}) for line in lines],
            ".csv": ["text", *(f'"{line}"' for line in lines)],
        }[path.with_suffix("").suffix]
        path.write_bytes(gzip.compress("\n".join(rows).encode()))
    elif name.endswith(".xlsx"):
        workbook(path, Texts=[["text"], *([line] for line in lines)])
        with zipfile.ZipFile(path) as archive:
            parts = {part.filename: archive.read(part) for part in archive.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for part, content in parts.items():
                file.writestr(part, content)
    else:
        arrow = importlib.import_module("pyarrow")
        table = arrow.table({"text": lines})
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("a.txt.gz", "a.jsonl.gz", "a.csv.gz"),
        pytest.param("a.xlsx", marks=pytest.mark.calamine),
        pytest.param("a.parquet", marks=pytest.mark.pyarrow),
    ],
)
def test_progress_in_packed_files_counts_their_text(
    tmp_path: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """The text is not compared with the size of the file: that is known once all has been read."""
    monkeypatch.setattr("packtrain.data.token_cache.SECONDS_BETWEEN_LINES", -1.0)
    said, path = list[str](), packed_file(tmp_path, name)
    assert path.stat().st_size < 500_000
    (tmp_path / "made").mkdir()
    write_corpus(text_of(path, vocab), tmp_path / "made", said.append)
    reading = [line for line in said if line.startswith("reading: ")]
    assert reading and not any(" of " in line for line in reading)
    counted = [line.split() for line in said if line.startswith("tokenizing: ")]
    assert counted and {of for _, _, _, of, _ in counted} == {"3"}
    assert max(int(done) for _, done, *_ in counted) in (2, 3)
