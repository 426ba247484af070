"""The table of benchmarks.real; and the real base in short, without llama.cpp and data of others."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import real
from benchmarks.first_tune import COMMANDS
from benchmarks.real import PARTS
from benchmarks.real_base import Row, Setup
from packtrain.cli.demo import library_documents
from tests.kill import sample_chats
from tests.real import BASE


def test_parts_can_be_run_one_by_one(tmp_path, monkeypatch, capsys) -> None:
    """The table shows the earlier ones, too; the exit code is that of those that ran."""
    for name, good in (("first", False), ("eval", True)):
        row = Row("what", "found", "wanted", good)
        monkeypatch.setitem(PARTS, name, lambda setup, row=row: iter([row]))
    (tmp_path / "file").touch()
    file_flags = [f"--{name}={tmp_path / 'file'}" for name in ("base", "data", "text")]
    for parts, code in (("first", 1), ("eval", 0), ("eval,first", 1)):
        monkeypatch.setattr(
            sys, "argv", ["real", *file_flags, f"--work={tmp_path}", f"--parts={parts}"]
        )
        assert real.main() == code
    shown = capsys.readouterr().out.splitlines()[-2:]
    assert shown == [
        "| first | what | found | wanted | **no** |",
        "| eval | what | found | wanted | yes |",
    ]
    assert [*json.loads((tmp_path / "results.json").read_text())] == ["first", "eval"]


def test_a_part_that_cannot_go_on_is_a_row(tmp_path, monkeypatch) -> None:
    def part(setup: Setup) -> Iterator[Row]:
        yield Row("first", "found", "wanted", True)
        raise AssertionError("what was\nkilled | differs")

    monkeypatch.setitem(PARTS, "resume", part)
    setup = Setup(BASE, BASE, BASE, None, tmp_path, tmp_path, short=True)
    assert [str(row) for row in real.rows("resume", setup)] == [
        "| first | found | wanted | yes |",
        "| the whole part | killed / differs | to end | **no** |",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts=nothing"], "'nothing' is none of first, style, eval"),
        (["--parts=tutorial"], "--stories: the part tutorial needs a text"),
        (["--text=nowhere"], "--text: there is no nowhere"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, monkeypatch, capsys) -> None:
    file_flags = [f"--{name}={__file__}" for name in ("base", "data", "text")]
    monkeypatch.setattr(sys, "argv", ["real", *file_flags, *arguments])
    with pytest.raises(SystemExit, match="2"):
        real.main()
    assert said in capsys.readouterr().err


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    data, text = tmp_path / "chats.jsonl", tmp_path / "text.txt"
    data.write_text(sample_chats(100))
    text.write_text("\n".join(library_documents(20_000)))
    return Setup(BASE, data, text, None, tmp_path / "no-llama", tmp_path / "work", short=True)


@pytest.mark.real
@pytest.mark.parametrize("part", ["first", "eval", "memory"])
def test_the_real_base(part: str, setup: Setup) -> None:
    rows = [*PARTS[part](setup)]
    assert rows and all(row.is_good for row in rows), "\n".join(map(str, rows))


def test_the_part_style_runs_the_guide_as_it_stands() -> None:
    root = Path(real.ROOT)
    guide, readme = ((root / name).read_text() for name in ("docs/guide.md", "README.md"))
    for command in COMMANDS:
        assert f"\n{command}" in guide and f"\n{command}" in readme
