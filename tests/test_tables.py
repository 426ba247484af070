"""Data as people have it: tables of every make, folders of all sorts, line ends, bad records among good ones."""

import csv
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.data.conversations import DatasetRecipe, prepare_dataset
from packtrain.data.conversations.messages import Conversation
from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text import columnar_files, spreadsheet_tables, text_streams
from packtrain.data.text.documents import SourceFile, find_sources, unread_notes
from packtrain.data.text.reading_report import ReadingReport
from packtrain.gguf import GGUF
from tests.test_corpus import parts_of, vocab, write_files
from tests.test_samples import PAIR, build_dataset, learned_texts, model, write_data

__all__ = ["model", "vocab"]  # fixtures
PAIRS = [("why, oh why", "so"), ('he "said"', "one\ntwo"), ("ä€", " so ")]
needs_pyarrow = pytest.mark.pyarrow


def write_table(path: Path, rows: list[Any], encoding: str = "utf-8", **options: Any) -> Path:
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, **options).writerows(rows)
    return path


def read_conversations(
    path: Path, skip_bad: bool = False
) -> tuple[list[tuple[str, str]], list[str]]:
    reader = RecordReader(SourceFile(path), skip_bad=skip_bad)
    pairs = []
    for record in reader:
        assert isinstance(record, Conversation)
        question, answer = record.messages
        pairs.append((question["content"], answer["content"]))
    return pairs, reader.notes


# ---- tables


@pytest.mark.parametrize("chunk", [1 << 20, 1, 7])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.csv", {}),
        ("a.csv", {"delimiter": ";", "encoding": "utf-8-sig", "lineterminator": "\r\n"}),
        ("a.csv", {"delimiter": "\t"}),
        ("a.tsv", {"delimiter": "\t", "quoting": csv.QUOTE_ALL}),
        ("a.csv", {"lineterminator": "\r", "quoting": csv.QUOTE_ALL}),
    ],
)
def test_tables(
    tmp_path: Path, name: str, options: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", chunk)
    path = write_table(tmp_path / name, [("prompt", "completion"), *PAIRS], **options)
    records, notes = read_conversations(path)
    assert records == PAIRS and notes == [f"{name}: 3 records of prompt/completion"]
    packed = tmp_path / f"b{name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_conversations(packed)[0] == PAIRS


@pytest.mark.parametrize(
    ("header", "row", "form"),
    [
        ("question,answer", "why,so", "prompt/completion"),
        ("Prompt,Response", "why,so", "prompt/completion"),
        ("input,output", "why,so", "prompt/completion"),
        ("query,response", "why,so", "prompt/completion"),
        ("instruction,input,output", "why,,so", "prompt/completion"),
        ("id,prompt,completion,tag", "3,why,so,x", "prompt/completion"),
        (",prompt,completion", "0,why,so", "prompt/completion"),
        ("prompt;completion;;", "why;so;;", "prompt/completion"),
        (" prompt , completion ", "why,so", "prompt/completion"),
        ("prompt,completion,", "why,so", None),
        ("sep=;\nprompt;completion", "why;so", "prompt/completion"),
        ("\n\nprompt,completion", "why,so\n\n,\n", "prompt/completion"),
        ("messages,tools", '"' + json.dumps(PAIR).replace('"', '""') + '",', "messages"),
        ("conversations", '"' + json.dumps(PAIR).replace('"', '""') + '"', "conversations"),
    ],
)
def test_headers(tmp_path: Path, header: str, row: str, form: str | None):
    path = write_data(tmp_path, f"{header}\n{row}", "a.csv")
    if form is None:
        with pytest.raises(InputError, match=r"row 2 has 2 cells where the header has 3 columns"):
            read_conversations(path)
        return
    records, notes = read_conversations(path)
    assert records == [("why", "so")] and notes[0].startswith(f"a.csv: 1 record of {form}")


def test_columns_without_use_are_listed(tmp_path: Path):
    path = write_data(tmp_path, "id,prompt,completion,tag\n3,why,so,x", "a.csv")
    assert read_conversations(path)[1] == [
        "a.csv: 1 record of prompt/completion; not used: id, tag"
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Frage,Antwort\na,b", r"a\.csv: row 1 names the columns Frage, Antwort; say which to read as prompt and c"
         r"ompletion, for example --columns Frage=prompt,Antwort=completion; if this row is no header: --columns 1=pr"),
        ("\nsep=;\n\nwhy;so\na;b", r"row 3 names the columns why, so; say which"),
        ("Nr,Die Frage,tag,Antwort\n1,why oh,x,so", r"--columns 'Die Frage=prompt,Antwort=completion'; if"),
        ("a" * 39 + ",b\nc,d", r"names the columns a{39}, b; say"),
        ("a" * 99 + ",b\nc,d", r"row 1 is no header but a record: a{40}…, b; write the row prompt,completion above it,"
         r" or give --columns 1=prompt,2=completion$"),
        ("How do I reset it?,So\nc,d", r"row 1 is no header but a record: How do I reset it\?, So; write the row"),
        (" ,\na,b", r"a\.csv: row 1 names no columns; it must name prompt and completion$"),
        ("prompt,Prompt\na,b", r"row 1 names the field prompt twice; each column needs its own"),
        ("prompt,completion\na,b\nc,d,e", r"row 3 has 3 cells where the header has 2 columns; a cell that .* quotes"),
        ('prompt,completion\na,b\n"c"d,e', r"line 3: text follows a quoted cell; a quote within quotes must be doub"),
        ('prompt,completion\na,b\nc,"d\n\n', r"line 3: a quoted cell begins here and never ends"),
        ("prompt,completion\n", r"a\.csv holds no records"),
        ("", r"a\.csv holds no records"),
        ("messages\nhello", r"row 2: messages is not JSON"),
        ("Question,Answer\n\na,b\n,c", r"row 4: Question: the user's content is empty.*; --skip-bad skips"),
        ("prompt,completion\n\"a\n\n\",b\n,c", r"row 3: prompt: the user's content is empty"),
        ("prompt,completion\na,b\n,c", r"row 3: prompt: the user's content is empty.*; --skip-bad skips"),
        ("prompt,chosen,rejected\na,b,c", r"row 2 is a pair of answers.* is for finetune --loss dpo"),
    ],
)  # fmt: skip
def test_bad_tables(tmp_path: Path, model: Path, content: str, said: str):
    with pytest.raises(InputError, match=said) as raised:
        build_dataset(write_data(tmp_path, content, "a.csv"), model, tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_wrong_header_is_named_and_no_record_blamed(tmp_path: Path, vocab: Path, skip_bad: bool):
    path = write_data(tmp_path, "prompt,completion\na,b\nc,d", "a.csv")
    named = r"a\.csv: row 1 names the columns"
    with pytest.raises(
        InputError, match=rf"{named} prompt, completion; .* --columns prompt=text; if .*; conv"
    ):
        parts_of(path, vocab, skip_bad=skip_bad)
    with pytest.raises(InputError, match=rf"{named} Frage, Antwort; say which to read as prompt"):
        read_conversations(write_data(tmp_path, "Frage,Antwort\na,b\nc,d", "a.csv"), skip_bad)


@pytest.mark.parametrize(
    ("encoding", "said"),
    [
        ("cp1252", r"byte 19 is not UTF-8; in Excel, save it as “CSV UTF-8 \(comma delimited\)”; elsewhere .*"
         r"iconv -f WINDOWS-1252 -t UTF-8 \S+ > \S+-utf8\.csv"),
        ("utf-16", r"a\.csv is UTF-16, Excel's “Unicode Text”; in Excel, save it as “CSV UTF-8 .* iconv -f UTF-16"),
    ],
)  # fmt: skip
def test_encodings(tmp_path: Path, encoding: str, said: str):
    path = write_table(tmp_path / "a.csv", [("prompt", "completion"), ("ä", "b")], encoding)
    with pytest.raises(InputError, match=said):
        read_conversations(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.jsonl.zst", r"\.zst files cannot be read; unpack it with: zstd -d \S+a\.jsonl\.zst"),
        ("a.docx", r"\.docx files cannot be read; save its text as \.txt, in UTF-8"),
        ("a.zip", r"\.zip files cannot be read; unpack it with: unzip"),
        ("a.parquet.gz", r"a\.parquet\.gz is compressed; unpack it with: gunzip"),
    ],
)
def test_files_that_are_not_read(tmp_path: Path, name: str, said: str):
    with pytest.raises(InputError, match=said):
        read_conversations(write_data(tmp_path, "x", name))


def test_long_cells(tmp_path: Path):
    """Cells of 10 MB are read; what is longer than a cell can be ends with the place of its quote."""
    path = write_table(tmp_path / "a.csv", [("prompt", "completion"), ("why", "so\n" * 3_300_000)])
    ((_, answered),), _ = read_conversations(path)
    assert len(answered) == 9_900_000
    unclosed = write_data(tmp_path, 'text\nb\n"' + "word\n" * 3_500_000, "never.csv")
    with pytest.raises(
        InputError, match=r"line 3: a cell has more than 16,777,216 characters; a q"
    ):
        list(RecordReader(SourceFile(unclosed)))


def test_memory_of_a_large_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_table(
        tmp_path / "a.csv", [("prompt", "completion"), *[("word " * 100, "so")] * 40_000]
    )
    assert path.stat().st_size > 20e6
    tracemalloc.start()
    count = sum(1 for _ in spreadsheet_tables.table_rows(ReadingReport(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 40_000 and peak < 8e6
    monkeypatch.setattr(spreadsheet_tables, "MAX_LINE_LENGTH", 3 << 20)
    endless = write_data(tmp_path, "text\n" + "word " * 1_000_000, "b.csv")
    with pytest.raises(InputError, match=r"b\.csv: line 2 is longer than 3,145,728 characters"):
        list(spreadsheet_tables.table_rows(ReadingReport(endless)))


def test_train_reads_the_text_column(tmp_path: Path, vocab: Path):
    data = write_data(tmp_path, 'id,text\n1,"a, b"\n2,"c\r\nd"\n3,\n', "a.csv")
    assert parts_of(data, vocab) == (["a, b", "c\nd"], None)


# ---- parquet and arrow


@needs_pyarrow
@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow", "stream.arrow"])
def test_columns(tmp_path: Path, vocab: Path, name: str):
    import pyarrow
    from pyarrow import feather, ipc, parquet

    turns = [[{**turn, "tool_calls": None} for turn in PAIR], [*PAIR, *PAIR]]
    path, rows = tmp_path / name, pyarrow.table({"messages": turns * 300, "tools": [None] * 600})
    if name == "a.parquet":
        parquet.write_table(rows, path, row_group_size=100)
    elif name == "a.feather":
        feather.write_feather(rows, path)
    else:
        new = ipc.new_file if name == "a.arrow" else ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as file, new(file, rows.schema) as writer:
            writer.write_table(rows)
    reader = RecordReader(SourceFile(path))
    records = list(reader)
    assert [record.messages for record in records[:2]] == [PAIR, [*PAIR, *PAIR]]
    assert reader.notes == [
        f"{name}: 600 records of messages",
        f"{name}: 598 records repeat another, word for word",
    ]
    assert records[299].location == f"{path}: row 300"
    with pytest.raises(InputError, match=r"row 1 has no field text.*conversations are for packtr"):
        parts_of(path, vocab)


@needs_pyarrow
def test_damaged_columns(tmp_path: Path):
    for name in ("a.parquet", "a.arrow", "a.feather"):
        with pytest.raises(InputError, match=rf"{name} cannot be read as \.\w+ after row 0: "):
            list(RecordReader(SourceFile(write_data(tmp_path, "no table at all", name))))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columnar_files, "find_spec", lambda name: None)
    with pytest.raises(InputError) as raised:
        list(RecordReader(SourceFile(write_data(tmp_path, "x", "a.parquet"))))
    said = str(raised.value)
    assert "a.parquet needs pyarrow: pip install pyarrow" in said
    assert (
        "pandas.read_parquet('a.parquet').to_json('a.jsonl', orient='records', lines=True)" in said
    )
    with pytest.raises(InputError, match=r"pandas\.read_feather\('a\.feather'\)"):
        list(RecordReader(SourceFile(write_data(tmp_path, "x", "a.feather"))))


# ---- line ends


@pytest.mark.parametrize("chunk", [1 << 20, 1, 2, 3])
def test_line_ends_of_texts(
    tmp_path: Path, vocab: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", chunk)
    data = write_files(tmp_path, a_txt=b"a\r\nb\rc\r\r\n\nd\r") / "a.txt"
    assert parts_of(data, vocab) == (["a\nb\nc\n\n\nd\n"], None)
    assert parts_of(data, vocab, separator="\r\n") == (["a", "b", "c", "d"], None)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_line_ends_of_records(tmp_path: Path, model: Path, name: str):
    content: Any = [{"prompt": "why\r\noh", "completion": "so\rso"}]
    if name == "a.csv":
        content = 'prompt,completion\r\n"why\r\noh","so\rso"\r\n'
    dataset = build_dataset(write_data(tmp_path, content, name), model, tmp_path)
    assert learned_texts(dataset.train, model) == [
        "<s> user: why\noh\nassistant:[[ so\nso</s>]] \n"
    ]
    assert dataset.notes[1] == f"{name}: 2 line ends changed from \\r\\n or \\r to \\n"


def test_line_ends_are_counted(tmp_path: Path, vocab: Path):
    report = ReadingReport(tmp_path / "a.txt")
    assert "".join(report.chunks(["a\r", "\nb\r", "c", "\r"])) == "a\nb\nc\n"
    assert report.notes == ["a.txt: 3 line ends changed from \\r\\n or \\r to \\n"]


# ---- bad records


def bad_lines() -> str:
    lines = [json.dumps({"prompt": "why", "completion": f"so {i}"}) for i in range(20)]
    for i, bad in enumerate(
        ['{"a"', '{"prompt": "x"}', "[1]", '{"prompt": "", "completion": ""}', "\xff"]
    ):
        lines[2 * i + 1] = bad
    lines[12:12] = ['{"prompt": 3, "completion": ""}']
    return "\n".join(lines)


def test_bad_records_are_left_out(tmp_path: Path, model: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bad_lines().encode("latin-1"))
    records, notes = read_conversations(path, skip_bad=True)
    assert len(records) == 15
    assert notes == [
        "a.jsonl: 15 records of prompt/completion",
        "a.jsonl: 6 bad records skipped; the first 5:",
        "  line 2 is not JSON",
        "  line 4 has no field completion",
        "  line 6 is list, not an object",
        "  line 8: prompt: the user's content is empty",
        "  line 10 is not UTF-8",
    ]
    dataset = build_dataset(path, model, tmp_path, skip_bad=True)
    assert len(dataset.train) == 15 and list(dataset.notes) == notes
    with pytest.raises(InputError, match=r"a\.jsonl: line 2 is not JSON; .*; --skip-bad skips bad"):
        read_conversations(path)


def test_a_bad_first_record(tmp_path: Path):
    """It is left out if that is asked for; else the flag is no advice, for the form may be wrong for all."""
    path = write_data(tmp_path, [{"a": 1}, {"prompt": "why", "completion": "so"}])
    assert read_conversations(path, skip_bad=True)[0] == [("why", "so")]
    with pytest.raises(InputError) as raised:
        read_conversations(path)
    assert "--skip-bad" not in str(raised.value)


def test_no_good_record(tmp_path: Path, model: Path, vocab: Path):
    path = write_data(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 7)
    with pytest.raises(
        InputError, match=r"no records.*7 bad records skipped.*line 1 is a pair of answers"
    ):
        build_dataset(path, model, tmp_path, skip_bad=True)
    with pytest.raises(
        InputError, match=r"has no record that can be read.*line 1 has no field text"
    ):
        parts_of(path, vocab, skip_bad=True)


def test_records_that_the_template_refuses(tmp_path: Path, model: Path):
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text(
        "{% for m in messages %}{{ raise_exception('no') if m.content == 'bad' }}{{ m.content }}</s>{% endfor %}"
    )
    turns = [[{**PAIR[0], "content": words}, PAIR[1]] for words in ("why", "bad", "oh")]
    data = write_data(tmp_path, [{"messages": messages} for messages in turns])
    dataset = build_dataset(data, model, tmp_path, skip_bad=True, template=refusing.read_text())
    assert dataset.notes[:3] == (
        "data.jsonl: 2 records of messages",
        "data.jsonl: 1 bad record skipped:",
        "  line 2: the chat template: no",
    )
    (tmp_path / "all").mkdir()
    with pytest.raises(InputError, match=r"line 2: the chat template: no; --skip-bad skips"):
        build_dataset(data, model, tmp_path / "all", template=refusing.read_text())


def test_train_skips_bad_records(tmp_path: Path, vocab: Path):
    data = (
        write_files(tmp_path, a_jsonl='{"text": "a"}\n{"text": 3}\nno\n{"text": "b"}') / "a.jsonl"
    )
    assert parts_of(data, vocab, skip_bad=True) == (["a", "b"], None)
    with pytest.raises(InputError, match=r"line 2: text is int, .*; --skip-bad skips bad records"):
        parts_of(data, vocab)


@pytest.mark.parametrize("record", [{"messages": PAIR}, {"prompt": "a", "completion": "b"}])
def test_train_points_to_finetune(tmp_path: Path, vocab: Path, record: dict[str, Any]):
    with pytest.raises(
        InputError, match=r"; conversations are for packtrain finetune, which"
    ) as raised:
        parts_of(write_data(tmp_path, [record]), vocab)
    assert "--skip-bad" not in str(raised.value)


# ---- conversations that the assistant begins


def test_an_assistant_that_speaks_first(tmp_path: Path):
    greeting = [{"from": "gpt", "value": "hello"}]
    turns = [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]
    records = [{"conversations": greeting + turns}, {"conversations": turns}]
    pairs, notes = read_conversations(write_data(tmp_path, records))
    assert pairs == [("why", "so")] * 2
    assert notes[1] == "data.jsonl: 1 conversation started with the assistant; that turn is dropped"
    system = {"from": "system", "value": "be"}
    (tmp_path / "b").mkdir()
    reader = RecordReader(
        SourceFile(write_data(tmp_path / "b", [{"conversations": [system, *greeting, *turns]}]))
    )
    (record,) = reader
    assert isinstance(record, Conversation)
    assert [message["role"] for message in record.messages] == ["system", "user", "assistant"]
    with pytest.raises(InputError, match=r"line 1 has no answer of the assistant"):
        list(RecordReader(SourceFile(write_data(tmp_path, [{"conversations": greeting}]))))


# ---- folders


def test_what_a_folder_has_beside_its_data(tmp_path: Path, model: Path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("b.txt", "notes.md", "c.pdf", "d", "e", "f", "g", ".hidden"):
        write_data(data, "why so", name)
    (data / "more").mkdir()
    (note,) = unread_notes(data, find_sources(data))
    assert note == f"{data}: not read: c.pdf, d, e, f, g and 2 more"
    write_data(data, "a", "a.jsonl")
    (note,) = unread_notes(data, find_sources(data))
    assert note.startswith(f"{data}: not read: a.jsonl, c.pdf")
    for name in ("c.pdf", "d", "e", "f", "g", "a.jsonl"):
        (data / name).unlink()
    dataset = prepare_dataset(
        DatasetRecipe(data, model, 100), tmp_path / "cache", lambda line: None
    )
    assert dataset.notes[0] == f"{data}: not read: more/, notes.md"
    (data / "notes.md").unlink()
    (data / "more").rmdir()
    second = prepare_dataset(DatasetRecipe(data, model, 100), tmp_path / "cache", lambda line: None)
    assert second.notes == dataset.notes[1:] and second.fingerprint == dataset.fingerprint
    assert unread_notes(data / "b.txt", find_sources(data / "b.txt")) == ()


def test_a_folder_of_other_data(tmp_path: Path):
    write_data(tmp_path, "text\na", "a.csv")
    with pytest.raises(
        InputError, match=r"holds no text; it must have train\.txt.*of a\.csv give one"
    ):
        find_sources(tmp_path)


# ---- the command


def test_data_shows_all_of_it(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    data = write_data(tmp_path, "prompt;completion\r\nwhy;so\r\nwhy\r\n", "a.csv")
    command = ["data", str(data), "--model", str(model)]
    assert main(command) == 2
    assert "row 3 has 1 cell where the header has 2 columns" in capsys.readouterr().err
    assert main([*command, "--skip-bad", "--chat-template", "gemma", "--show", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [
        "a.csv: 1 record of prompt/completion",
        "a.csv: 1 bad record skipped:",
        "  row 3 has 1 cell where the header has 2 columns",
        "chat template: gemma, from --chat-template, in place of the model's own",
    ]
    assert "<start_of_turn>model" in said
    assert main([*command, "--chat-template", "none"]) == 2
    assert "--chat-template: none is no file" in capsys.readouterr().err
    assert "tokenizer.chat_template" in GGUF(model).metadata


def test_options_that_change_samples_change_the_fingerprint(tmp_path: Path, model: Path):
    data = write_data(tmp_path, "prompt,completion\nwhy,so", "a.csv")
    prints = {
        prepare_dataset(
            DatasetRecipe(data, model, 100, **options), tmp_path / "cache", lambda line: None
        ).fingerprint
        for options in (
            {},
            {"skip_bad": True},
            {"template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}"},
        )
    }
    text = write_data(tmp_path, data.read_text(), "a.txt")
    prints.add(
        prepare_dataset(
            DatasetRecipe(text, model, 100), tmp_path / "cache", lambda line: None
        ).fingerprint
    )
    assert len(prints) == 4
