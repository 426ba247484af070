"""Columns by other names: guessed and said, or given by --columns; joined, not dropped; spreadsheets as they are."""

import json
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import Conversation
from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text import columnar_files
from packtrain.data.text.documents import SourceFile, find_sources, unread_notes
from packtrain.data.text.field_names import parse_columns
from packtrain.data.text.text_streams import DATA_SUFFIXES
from tests.test_corpus import parts_of, vocab
from tests.test_samples import build_dataset, model, write_data

__all__ = ["model", "vocab"]  # fixtures


def pairs(path: Path, columns: str | None = None) -> tuple[list[tuple[str, ...]], list[str]]:
    """The contents of each conversation's messages, and the notes."""
    reader, contents = RecordReader(SourceFile(path), columns=columns), []
    for record in reader:
        assert isinstance(record, Conversation)
        contents.append(tuple(message["content"] for message in record.messages))
    return contents, reader.notes


@pytest.mark.parametrize(
    ("header", "row", "contents", "said"),
    [
        ("Question,Answer", "why,so", ("why", "so"), "Question → prompt, Answer → completion"),
        ("id,QUERY,Reply", "1,why,so", ("why", "so"), "QUERY → prompt, Reply → completion"),
        ("user,assistant", "why,so", ("why", "so"), "user → prompt, assistant → completion"),
        ("user,request,response", "me,why,so", ("why", "so"), "request → prompt, response → completion"),
        ("Context,question,answer", "c,why,so", ("c\nwhy", "so"),
         "Context + question → prompt, answer → completion"),
        ("instruction,input,output", "do,why,so", ("do\nwhy", "so"),
         "instruction + input → prompt, output → completion"),
        ("instruction,context,response", "do,,so", ("do", "so"),
         "instruction + context → prompt, response → completion"),
        ("Prompt,Context,Completion", "why,c,so", ("why\nc", "so"), "Prompt + Context → prompt"),
        ("Prompt,Completion,system", "why,so,be", ("be", "why", "so"), None),
    ],
)  # fmt: skip
def test_common_names_are_guessed_and_said(
    tmp_path: Path, header: str, row: str, contents: tuple[str, ...], said: str | None
):
    records, notes = pairs(write_data(tmp_path, f"{header}\n{row}\n{row}x", "a.csv"))
    assert records[0] == contents
    assert notes[1:] == ([] if said is None else [f"a.csv: columns: {said}"])


def test_fields_of_json_lines_are_guessed(tmp_path: Path):
    """Also those that later records have and the first one has not."""
    records = [
        {"Instruction": "do", "response": "so"},
        {"instruction": "do", "response": "so", "context": "c"},
    ]
    examples, notes = pairs(write_data(tmp_path, records))
    assert examples == [("do", "so"), ("do\nc", "so")]
    assert notes[1] == "data.jsonl: columns: Instruction → prompt, response → completion"
    answers = {"question": "why", "context": "c", "chosen": "so", "rejected": "no"}
    (tmp_path / "pairs").mkdir()
    (pair,) = RecordReader(SourceFile(write_data(tmp_path / "pairs", [answers])))
    assert not isinstance(pair, Conversation) and pair.location.endswith("line 1")
    assert pair.chosen.messages[0]["content"] == "why\nc"  # type: ignore[union-attr]


def test_what_cannot_be_joined_is_refused(tmp_path: Path):
    data = write_data(tmp_path, [{"question": "why", "context": ["c"], "answer": "so"}])
    with pytest.raises(InputError, match=r"line 1: context is no text; it must be to be joined to"):
        pairs(data)


@pytest.mark.parametrize(
    ("text", "contents", "notes"),
    [
        ("Die Frage=prompt,antwort=completion", ("why", "so"), "Die Frage → prompt, Antwort → completion"),
        ("Thema=prompt, die frage = PROMPT ,antwort=completion", ("t\nwhy", "so"),
         "Thema + Die Frage → prompt, Antwort → completion"),
        ("Thema=system,Die Frage=prompt,Antwort=completion", ("t", "why", "so"),
         "Thema → system, Die Frage → prompt, Antwort → completion"),
    ],
)  # fmt: skip
def test_columns_by_name(tmp_path: Path, text: str, contents: tuple[str, ...], notes: str):
    data = write_data(tmp_path, "Thema,Die Frage,Antwort\nt,why,so", "a.csv")
    assert pairs(data, text)[0] == [contents]
    assert pairs(data, text)[1][1] == f"a.csv: columns: {notes}"
    record = {"Thema": "t", "Die Frage": "why", "Antwort": "so"}
    assert pairs(write_data(tmp_path, [record]), text)[0] == [contents]


def test_a_column_in_the_way_of_a_given_one_is_not_used(tmp_path: Path):
    data = write_data(tmp_path, "prompt,ask,context,answer\nold,why,c,so", "a.csv")
    records, notes = pairs(data, "ask=prompt")
    assert records == [("why", "so")]
    assert notes[0] == "a.csv: 1 record of prompt/completion; not used: context, prompt"


@pytest.mark.parametrize(
    ("text", "content", "said"),
    [
        ("a", "a,b\nc,d", r"--columns a: a must be like NAME=FIELD; fields are prompt, completion, text"),
        ("", "a,b\nc,d", r"must be like NAME=FIELD"),
        ("a=question", "a,b\nc,d", r"a=question must be like NAME=FIELD"),
        ("x=prompt,b=completion", "a,b\nc,d", r"--columns: .*a\.csv: row 1 has no column x; there are a, b"),
        ("1=prompt,3=completion", "a,b\nc,d", r"row 1 has no column 3; there are 1, 2"),
        ("1=prompt,2=completion", "Query,Answer\nc,d",
         r"row 1 is a header: Query → prompt, Answer → completion; leave"),
    ],
)  # fmt: skip
def test_bad_columns(tmp_path: Path, text: str, content: str, said: str):
    with pytest.raises(InputError, match=said):
        pairs(write_data(tmp_path, content, "a.csv"), text)


def test_columns_of_files_without_them(tmp_path: Path):
    with pytest.raises(InputError, match=r"--columns: \S+a\.txt is plain text and has none; leave"):
        list(RecordReader(SourceFile(write_data(tmp_path, "a", "a.txt")), columns="a=text"))
    with pytest.raises(InputError, match=r"line 1 has none of them; there are q, a"):
        pairs(write_data(tmp_path, [{"q": "why", "a": "so"}]), "x=prompt")
    with pytest.raises(InputError, match=r"has the fields q, a; .*; --columns NAME=FIELD renames"):
        pairs(write_data(tmp_path, [{"q": "why", "a": "so"}]))


def test_a_table_without_a_header(tmp_path: Path):
    """No row is lost: by number, the first one is a record, and that is said."""
    data = write_data(tmp_path, "sep=;\nwhy;so\n\nhow;thus\n;x\n", "a.csv")
    with pytest.raises(InputError, match=r"row 4: 1: the user's content is empty"):
        pairs(data, "1=prompt,2=completion")
    reader = RecordReader(SourceFile(data), skip_bad=True, columns="1=prompt,2=completion")
    assert [record.location for record in reader] == [f"{data}: row 1", f"{data}: row 3"]
    assert "a.csv: row 1 is a record, as --columns has numbers" in reader.notes


def test_train_reads_text_from_another_column(tmp_path: Path, vocab: Path):
    data = write_data(tmp_path, "id,Body\n1,a\n2,b\n", "a.csv")
    assert parts_of(data, vocab, columns="body=text") == (["a", "b"], None)
    with pytest.raises(InputError, match=r"say which to read as text, for example --columns id=te"):
        parts_of(data, vocab)


def test_repeated_records_are_counted(tmp_path: Path, model: Path):
    rows = "".join(f"{i},why {i % 5},so\n" for i in range(8))
    dataset = build_dataset(
        write_data(tmp_path, f"id,prompt,completion\n{rows}", "a.csv"), model, tmp_path
    )
    assert dataset.notes[1] == "a.csv: 3 records repeat another, word for word"
    assert len(dataset.train) == 8


@pytest.mark.parametrize(
    ("count", "split", "held_out", "said"),
    [
        (82, 0.05, 4, "4 of 82 rows are held out for validation"),
        (1, 0.05, 0, "nothing is held out for validation: --val-split 0.05 of 1 row is less than one"),
    ],
)  # fmt: skip
def test_how_many_rows_are_held_out(
    tmp_path: Path, model: Path, count: int, split: float, held_out: int, said: str
):
    rows = "".join(f"why,so {i}\n" for i in range(count))
    data = write_data(tmp_path, f"prompt,completion\n{rows}", "a.csv")
    dataset = build_dataset(data, model, tmp_path, val_split=split)
    assert len(dataset.valid or ()) == held_out and len(dataset.train) == count - held_out
    assert dataset.notes[-1] == said
    assert dataset.locations[0] == "a.csv: row 2" and len(dataset.locations) == len(dataset.train)


def test_the_data_command_takes_columns(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    data = write_data(tmp_path, "Frage,Antwort\nwhy,so\n", "a.csv")
    named = ["--columns", "Frage=prompt,Antwort=completion", "--show", "1"]
    assert main(["data", str(data), "--model", str(model), *named]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "a.csv: columns: Frage → prompt, Antwort → completion"
    assert "---- sample 1 (a.csv: row 2)" in said


# ---- spreadsheets


def sheet(rows: list[list[Any]]) -> str:
    """A worksheet with texts and numbers; None is a cell that is not there."""

    def cell(place: str, value: Any) -> str:
        if isinstance(value, str):
            return f'<c r="{place}" t="inlineStr"><is><t xml:space="preserve">{value}</t></is></c>'
        return "" if value is None else f'<c r="{place}"><v>{value}</v></c>'

    lines = (
        f'<row r="{y}">{"".join(cell(f"{chr(65 + x)}{y}", v) for x, v in enumerate(row))}</row>'
        for y, row in enumerate(rows, 1)
    )
    name = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    return f'<worksheet xmlns="{name}"><sheetData>{"".join(lines)}</sheetData></worksheet>'


def workbook(path: Path, **sheets: list[list[Any]]) -> Path:
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    main_name = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    sheet_tags = "".join(
        f'<sheet name="{n}" sheetId="{i}" r:id="r{i}"/>' for i, n in enumerate(sheets, 1)
    )
    links = "".join(
        f'<Relationship Id="r{i}" Type="{office}/worksheet" Target="worksheets/sheet{i}.xml"/>'
        for i in range(1, len(sheets) + 1)
    )
    relationship = (
        f'<Relationship Id="r1" Type="{office}/officeDocument" Target="xl/workbook.xml"/>'
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "_rels/.rels", f'<Relationships xmlns="{package}">{relationship}</Relationships>'
        )
        file.writestr(
            "xl/workbook.xml",
            f'<workbook xmlns="{main_name}" xmlns:r="{office}"><sheets>{sheet_tags}</sheets></workbook>',
        )
        file.writestr(
            "xl/_rels/workbook.xml.rels",
            f'<Relationships xmlns="{package}">{links}</Relationships>',
        )
        for i, rows in enumerate(sheets.values(), 1):
            file.writestr(f"xl/worksheets/sheet{i}.xml", sheet(rows))
    return path


@pytest.mark.calamine
def test_a_spreadsheet(tmp_path: Path):
    rows = [[], ["Question", "Answer", "n"], ["why\noh", 4, 1], [], ["how", 4.5, 2], [None, "x", 3]]
    path = workbook(tmp_path / "a.xlsx", Chats=rows, Notes=[["x"]])
    reader = RecordReader(SourceFile(path), skip_bad=True)
    contents = [
        (record.location, *(message["content"] for message in record.messages))
        for record in reader
        if isinstance(record, Conversation)
    ]
    assert contents == [(f"{path}: row 3", "why\noh", "4"), (f"{path}: row 5", "how", "4.5")]
    assert reader.notes == [
        "a.xlsx: 2 records of prompt/completion; not used: n",
        "a.xlsx: sheet Chats; not read: Notes",
        "a.xlsx: columns: Question → prompt, Answer → completion",
        "a.xlsx: 1 bad record skipped:",
        "  row 6: Question: the user's content is empty",
    ]


@pytest.mark.calamine
@pytest.mark.parametrize("name", ["a.xlsx", "a.xls", "a.ods"])
def test_a_damaged_spreadsheet(tmp_path: Path, name: str):
    with pytest.raises(
        InputError, match=rf"{name} cannot be read as \.\w+: .*in Excel, save it as"
    ):
        pairs(write_data(tmp_path, "no table at all", name))


@pytest.mark.calamine
def test_a_spreadsheet_that_unpacks_to_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columnar_files, "MAX_SHEET_NBYTES", 1000)
    path = workbook(tmp_path / "a.xlsx", Chats=[["prompt", "completion"], ["a", "b" * 1000]])
    with pytest.raises(InputError, match=r"a\.xlsx has \d,\d+ bytes unpacked; in Excel, save it"):
        pairs(path)


def test_without_the_reader_of_spreadsheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columnar_files, "find_spec", lambda name: None)
    for name in ("a.xlsx", "a.xls", "a.ods"):
        with pytest.raises(
            InputError, match=r"is a spreadsheet: in Excel, .*pip install python-calamine"
        ):
            pairs(write_data(tmp_path, "x", name))


def test_a_spreadsheet_beside_its_table_is_not_read_twice(tmp_path: Path):
    write_data(tmp_path, "prompt,completion\nwhy,so", "a.csv")
    write_data(tmp_path, "x", "a.xlsx")
    sources = find_sources(tmp_path, DATA_SUFFIXES)
    assert [source.path.name for source in sources] == ["a.csv"]
    assert unread_notes(tmp_path, sources) == (f"{tmp_path}: not read: a.xlsx",)
    (tmp_path / "a.csv").unlink()
    with pytest.raises(InputError, match=r"of a\.xlsx give one by name"):
        find_sources(tmp_path, DATA_SUFFIXES)


def test_json_of_a_cell_is_still_read(tmp_path: Path):
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    cell = json.dumps(turns).replace('"', '""')
    assert pairs(write_data(tmp_path, f'Chat\n"{cell}"', "a.csv"), "chat=messages")[0] == [
        ("why", "so")
    ]


# ---- names with commas


def test_a_column_whose_name_has_a_comma_is_quoted(tmp_path: Path):
    header = '"Question, short","Answer ""best"", long",other'
    path = write_data(tmp_path, f"{header}\nwhy,so,x\n", "a.csv")
    columns = '"Question, short"=prompt, "Answer ""best"", long"=completion'
    assert pairs(path, columns)[0] == [("why", "so")]
    with pytest.raises(InputError) as caught:
        pairs(path)
    example = str(caught.value).partition("--columns ")[2].partition("; if")[0]
    assert pairs(path, *shlex.split(example))[0] == [("why", "so")]
    with pytest.raises(
        InputError,
        match=r'Question must be like NAME=FIELD; .*; a NAME with a comma is in double quotes, such as "Quest',
    ):
        parse_columns("Question, short=prompt,other=completion")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a=prompt,b=completion", {"a": "prompt", "b": "completion"}),
        ('"a"=prompt', {"a": "prompt"}),
        ('5" pipe=prompt,b=completion', {'5" pipe': "prompt", "b": "completion"}),
        ('"x=1, y"=text', {"x=1, y": "text"}),
        ("a=b=text", {"a=b": "text"}),
    ],
)
def test_names_are_read_as_they_are_quoted(text: str, fields: dict[str, str]):
    assert parse_columns(text) == fields


@pytest.mark.parametrize("text", ["", ",", "a=prompt,", '"a, b=prompt', '""=text', "a"])
def test_what_is_no_name_and_field_is_refused(text: str):
    with pytest.raises(InputError, match="must be like NAME=FIELD"):
        parse_columns(text)
