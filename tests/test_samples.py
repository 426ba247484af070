"""From data files to samples: every form, the same conversation; what is left out is said; bad records have a line."""

import gzip
import io
import json
import tracemalloc
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from packtrain import gguf
from packtrain.cli.main import main
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.data import token_cache
from packtrain.data.chat_template import choose_template
from packtrain.data.conversations import (
    DatasetRecipe,
    SampleDataset,
    TokenizedSamples,
    build_samples,
    prepare_dataset,
)
from packtrain.data.conversations.field_meanings import LOSS
from packtrain.data.conversations.messages import Conversation
from packtrain.data.conversations.record_formats import PlainText, RecordReader
from packtrain.data.conversations.samples_cache import VOCABULARY_KEYS, read_dataset
from packtrain.data.text import records, text_streams
from packtrain.data.text.corpus_cache import checksum, plain_metadata
from packtrain.data.text.documents import SourceFile, find_sources, splits_of
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.text.text_streams import DATA_SUFFIXES
from packtrain.data.tokenizer import Tokenizer
from packtrain.data.train_vocabulary import train_vocabulary
from packtrain.gguf import GGUF, MetadataValue

SHARED = Path(__file__).parent.parent.parent / "shared/data"
needs_shared = pytest.mark.shared
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' if loop.first }}{{ m.role }}: {{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' }}\n{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
)
PAIR = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
TEXT_PART = {"type": "text", "text": "why"}
SYSTEM_AND_PAIR = [{"role": "system", "content": "be"}, *PAIR]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    words = "user assistant system why so one two three four five\n" * 40
    values = train_vocabulary([words], 300, True, len(words))
    gguf.write_gguf(
        path, values | {"tokenizer.chat_template": MetadataValue("string", TEMPLATE)}, {}
    )
    return path


def write_data(tmp_path: Path, content: Any, name: str = "data.jsonl") -> Path:
    """A file of lines of JSON, of an array, or of text."""
    path = tmp_path / name
    if name.endswith((".jsonl", ".jsonl.gz")) and not isinstance(content, str):
        content = "\n".join(map(json.dumps, content))
    raw = (content if isinstance(content, str) else json.dumps(content, indent=1)).encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


def read(path: Path) -> tuple[list[Conversation | PlainText], str]:
    reader = RecordReader(SourceFile(path))
    return list(reader), reader.notes[0]


def build_dataset(data: Path, model: Path, tmp_path: Path, **options: Any) -> SampleDataset:
    """Samples, made in this process."""
    folder = tmp_path / "made"
    folder.mkdir()
    recipe = DatasetRecipe(data, model, options.pop("length", 100), **options)
    build_samples.write_dataset(recipe, folder, lambda sentence: None)
    parts = splits_of(recipe.val_split, find_sources(recipe.data, DATA_SUFFIXES))
    return read_dataset(folder, parts, Tokenizer(GGUF(model).metadata).vocab_size)


def learned_texts(samples: TokenizedSamples, model: Path) -> list[str]:
    """The samples, with [[…]] around what is learnt."""
    tokenizer, marked_texts = Tokenizer(GGUF(model).metadata), []
    for ids, weights in (samples[i] for i in range(len(samples))):
        text = "".join(
            f"[[{tokenizer.piece(id).decode()}]]" if weight else tokenizer.piece(id).decode()
            for id, weight in zip(ids.tolist(), weights.tolist(), strict=True)
        )
        marked_texts.append(text.replace("]][[", ""))
    return marked_texts


# ---- forms


@pytest.mark.parametrize(
    ("record", "messages", "form"),
    [
        ({"messages": PAIR}, PAIR, "messages"),
        ({"messages": [*PAIR, {"role": "user", "content": "?"}]}, PAIR, "messages"),
        ({"prompt": "why", "completion": "so"}, PAIR, "prompt/completion"),
        ({"prompt": SYSTEM_AND_PAIR[:2], "completion": PAIR[1:]}, SYSTEM_AND_PAIR, "prompt/completion"),
        ({"question": "why", "answer": "so"}, PAIR, "prompt/completion"),
        ({"instruction": "why", "output": "so"}, PAIR, "prompt/completion"),
        (
            {"instruction": "why", "input": "not", "output": "so", "system": "be", "history": [["a", "b"]]},
            [
                SYSTEM_AND_PAIR[0],
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "why\nnot"},
                PAIR[1],
            ],
            "prompt/completion",
        ),
        (
            {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]},
            PAIR,
            "conversations",
        ),
        ({"conversations": PAIR, "system": "be"}, SYSTEM_AND_PAIR, "conversations"),
        (
            {"messages": [{"role": "user", "content": [TEXT_PART, {"type": "text", "text": ""}]}, PAIR[1]]},
            PAIR,
            "messages",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_forms(tmp_path: Path, record: dict[str, Any], messages: list[Any], form: str, name: str):
    records, note = read(write_data(tmp_path, [record, record], name))
    assert [conversation.messages for conversation in records] == [messages] * 2
    assert note == f"{name}: 2 records of {form}"
    assert records[0].location == f"{tmp_path / name}: line {1 if 'jsonl' in name else 2}"


def test_tools(tmp_path: Path):
    """Calls and tools of both kinds of records come out alike: arguments as objects, ids of nine letters."""
    tool = {"name": "add", "parameters": {"type": "object"}}
    call = {"name": "add", "arguments": {"a": 1}}
    sharegpt = [
        {"from": "human", "value": "add"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    openai = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]  # fmt: skip
    (a,), _ = read(write_data(tmp_path, [{"conversations": sharegpt, "tools": json.dumps([tool])}]))
    (b,), _ = read(
        write_data(
            tmp_path, [{"messages": openai, "tools": [{"type": "function", "function": tool}]}]
        )
    )
    assert (a.messages, a.tools) == (b.messages, b.tools)
    openai[1]["tool_calls"][0]["id"] = openai[2]["tool_call_id"] = (
        None  # as columns of tables have them
    )
    (c,), _ = read(write_data(tmp_path, [{"messages": openai}]))
    assert c.messages == b.messages
    expected_function = {"name": "add", "description": "", "parameters": {"type": "object"}}
    assert a.tools == [{"type": "function", "function": expected_function}]
    assert list(a.tools[0]["function"]) == ["name", "description", "parameters"]
    expected_call = {"id": "call00001", "type": "function", "function": call}
    assert a.messages[1] == {"role": "assistant", "content": "", "tool_calls": [expected_call]}
    assert a.messages[2] == {"role": "tool", "content": "2", "tool_call_id": "call00001"}


def test_what_is_not_used_is_said_once(tmp_path: Path):
    pair = [{**PAIR[0], "time": 3}, PAIR[1]]
    _, note = read(
        write_data(tmp_path, [{"messages": pair, "id": 1}, {"messages": pair, "id": 2, "tag": 1}])
    )
    assert note == "data.jsonl: 2 records of messages; not used: id, tag, time"


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_arrays_come_in_chunks(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_streams, "CHUNK_NBYTES", chunk)
    values = [{"text": 'ä]}"\\n' * 5, "n": [1, {"a": "["}]}, {"text": "b"}, 3, "c"]
    for indent in (None, 2):
        path = tmp_path / "a.json"
        path.write_text("\ufeff" + json.dumps(values, indent=indent, ensure_ascii=False) + "\n")
        assert [value for _, value in records.read_records("", ReadingReport(path))] == values
    path.write_text(" [ ] ")
    assert list(records.read_records("", ReadingReport(path))) == []


def test_memory_of_a_large_array(tmp_path: Path):
    path = tmp_path / "a.json"
    with open(path, "w") as file:
        file.write("[")
        file.write(",\n".join(json.dumps({"text": "word " * 200}) for _ in range(30_000)))
        file.write("]")
    assert path.stat().st_size > 30e6
    tracemalloc.start()
    count = sum(1 for _ in records.read_records("", ReadingReport(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 30_000 and peak < 8e6


def test_folders(tmp_path: Path):
    def template_named() -> list[tuple[str, str]]:
        return [(s.path.name, s.split) for s in find_sources(tmp_path, DATA_SUFFIXES)]

    for name in ("b.txt", "a.json", "c.jsonl.gz", "d.md"):
        (tmp_path / name).write_text("x")
    assert template_named() == [("a.json", ""), ("b.txt", ""), ("c.jsonl.gz", "")]
    (tmp_path / "train.jsonl").write_text("x")
    assert template_named() == [("train.jsonl", "")]
    (tmp_path / "valid.json.gz").write_text("x")
    (tmp_path / "test.jsonl").write_text("x")
    assert template_named() == [("train.jsonl", "train"), ("valid.json.gz", "valid")]


@pytest.mark.parametrize("name", [
    "test.jsonl", "validation.jsonl", "gsm8k_test.csv", "my-dev.txt", "test-00000-of-00001.parquet", "Eval.json",
    "validation-00000-of-00002.parquet", "val_2.txt.gz",
])  # fmt: skip
def test_files_that_are_not_for_training_by_their_names_are_not_trained_on(
    tmp_path: Path, name: str
):
    for file_name in ("train-00000-of-00001.jsonl", name):
        (tmp_path / file_name).write_text("x")
    with pytest.raises(
        InputError, match=rf"has {name} beside files to train on; it must have train"
    ):
        find_sources(tmp_path, DATA_SUFFIXES)
    (tmp_path / "train-00000-of-00001.jsonl").unlink()
    if name.partition(".")[0] not in ("valid", "val"):
        assert [s.path.name for s in find_sources(tmp_path, DATA_SUFFIXES)] == [name]


def test_names_that_only_begin_like_a_split_are_read(tmp_path: Path):
    names = ["a.txt", "contest.txt", "devil.txt", "test_of_time.txt", "testimony.txt"]
    for name in names:
        (tmp_path / name).write_text("x")
    assert [s.path.name for s in find_sources(tmp_path, DATA_SUFFIXES)] == names


@pytest.mark.parametrize("arguments", ["", " ", None, {}])
def test_a_call_without_arguments(tmp_path: Path, arguments: Any):
    turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    ((conversation,), _) = read(write_data(tmp_path, [{"messages": [PAIR[0], turn]}]))
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_marks_of_utf8_and_capital_suffixes_are_no_text(tmp_path: Path):
    ((text,), _) = read(write_data(tmp_path, "\ufeffwhy \ufeff so", "a.txt"))
    assert isinstance(text, PlainText) and "".join(text.pieces) == "why \ufeff so"
    records, note = read(write_data(tmp_path, json.dumps({"messages": PAIR}), "A.JSONL"))
    assert isinstance(records[0], Conversation) and "1 record of messages" in note


# ---- training and validation


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_small_files_of_a_folder_are_divided_together(tmp_path: Path, model: Path, suffix: str):
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(9):
        write_data(folder, "why so" if suffix == ".txt" else [{"messages": PAIR}], f"{i}{suffix}")
    dataset = build_dataset(folder, model, tmp_path, val_split=0.25)
    assert dataset.valid is not None and (len(dataset.train), len(dataset.valid)) == (7, 2)


def test_too_few_records_for_a_validation_part(tmp_path: Path, model: Path):
    data = write_data(tmp_path, [{"messages": PAIR}] * 3)
    dataset = build_dataset(data, model, tmp_path, val_split=0.05)
    assert (len(dataset.train), dataset.valid) == (3, None)
    assert dataset.notes[-1] == (
        "nothing is held out for validation: --val-split 0.05 of 3 records is less than one"
        "; --val-split 0.33 holds out one"
    )
    (tmp_path / "larger").mkdir()
    dataset = build_dataset(data, model, tmp_path / "larger", val_split=0.33)
    assert dataset.valid is not None and len(dataset.valid) == 1
    assert dataset.notes[-1] == "1 of 3 records is held out for validation"


# ---- what is refused


TURN, SILENT = {"role": "user", "content": "a"}, {"role": "assistant", "content": " "}
NO_CALL = {"from": "function_call", "value": "no"}
CALLS = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{no"}]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"messages": []}', r"line 1: messages must be a list of messages"),
        ('{"text": "a"}\n\n{"text": ', r"data\.jsonl: line 3 is not JSON; a record is like"),
        ("[1]", r"line 1 is list, not an object"),
        ([{"words": 1, "more": 2}], r"line 1 has the fields words, more; a record is like"),
        ([{}], r"line 1 has no fields"),
        ([{"text": "a"}, {"messages": PAIR}], r"line 2 has no field text; all records of a file must be like"),
        ([{"messages": [PAIR[0], {**PAIR[1], "weight": 2}]}], r"messages\[1\]: weight is 2; it must be 0 or 1"),
        ([{"messages": [PAIR[0], {**PAIR[1], "weight": 0}]}], r"line 1 has no answer with a weight of 1 to train on"),
        ([{"messages": [{"role": "robot", "content": "a"}]}], r"messages\[0\]: role is 'robot'; it must be"),
        ([{"messages": [TURN]}], r"line 1 has no turn of the assistant"),
        ([{"messages": [PAIR[1]]}], r"line 1 has no answer of the assistant to train on"),
        ([{"messages": [TURN, SILENT]}], r"messages\[1\]: the assistant's content is empty"),
        ([{"messages": [TURN, {"role": "assistant"}]}], r"messages\[1\]: content is NoneType, not a string"),
        ([{"prompt": "a", "chosen": "b", "rejected": 5}], r'rejected: content is int.*"chosen": "…", "rejected": "…"'),
        ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], r"content has a part that is not text"),
        ([{"prompt": "a", "completion": ""}], r"line 1: completion: the assistant's content is empty"),
        ([{"instruction": "", "output": "a"}], r"line 1: instruction: the user's content is empty"),
        ([{"instruction": "a", "output": "a", "history": ["b"]}], r"history\[0\] must be a pair of texts"),
        ([{"text": 3}], r"line 1: text is int, not a string"),
        ([{"text": " \n"}], r"line 1: text is empty"),
        ([{"text": "\ud800"}], r"line 1: text has half a surrogate pair"),
        ([{"messages": PAIR, "tools": "{"}], r'line 1: tools is not JSON; it must be like \[{"name"'),
        ([{"messages": [TURN, CALLS]}], r'messages\[1\]: arguments is not JSON; it must be like {"city"'),
        ([{"messages": PAIR, "tools": ["a"]}], r"line 1: tools\[0\] is str, not an object"),
        ([{"messages": PAIR, "tools": {"a": 1}}], r"line 1: tools must be a list of objects"),
        ([{"messages": PAIR, "tools": [{"a": 1}]}], r"line 1: tools\[0\] has no name"),
        ([{"messages": [TURN, {"role": "assistant", "tool_calls": [{"function": {}}]}]}], r"a tool call needs a name"),
        ([{"conversations": [TURN, NO_CALL]}], r"is not JSON; it must be like"),
        (f'{{"text": "a", "more": {"[" * 600}{"]" * 600}}}', r"line 1 is nested too deep; a record is like"),
    ],
)  # fmt: skip
def test_bad_records(tmp_path: Path, content: Any, said: str):
    with pytest.raises(InputError, match=said) as raised:
        read(write_data(tmp_path, content))
    assert "\n" not in str(raised.value) and "data.jsonl: line" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}', r"a\.json must be an array; with one record a line it is a \.jsonl"),
        ('[{"text": "a"},\n{"text": }]', r"a\.json: line 2 is not JSON"),
        ('[{"text": "a"},\n\n{"text": "b"', r"a\.json: line 3 is not JSON"),
        ('[{"text": "a"}]\n[]', r"a\.json: line 2: text follows the end of the array"),
        ('["' + "a" * 3000, r"a\.json: line 1 is not JSON"),
    ],
)
def test_bad_arrays(tmp_path: Path, content: str, said: str):
    with pytest.raises(InputError, match=said):
        read(write_data(tmp_path, content, "a.json"))


def test_a_damaged_gzip(tmp_path: Path):
    path = write_data(tmp_path, [{"text": "a" * 1000}], "a.jsonl.gz")
    content = path.read_bytes()
    for damaged in (content[:-10], b"no gzip", content[:15] + b"\0\0\0\0" + content[19:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.jsonl\.gz is damaged, or no gzip file"):
            read(path)


# ---- samples


def test_conversations_become_samples(tmp_path: Path, model: Path):
    data = write_data(
        tmp_path, [{"messages": SYSTEM_AND_PAIR}, {"messages": [*PAIR, TURN, PAIR[1]]}]
    )
    dataset = build_dataset(data, model, tmp_path)
    assert learned_texts(dataset.train, model) == [
        "<s> system: be\nuser: why\nassistant:[[ so</s>]] \n",
        "<s> user: why\nassistant:[[ so</s>]] \nuser: a\nassistant:[[ so</s>]] \n",
    ]
    assert dataset.notes == ("data.jsonl: 2 records of messages",) and dataset.valid is None
    assert dataset.train.targets == int(dataset.train.weights.sum())


def test_options(tmp_path: Path, model: Path):
    data = write_data(tmp_path, [{"messages": [*PAIR, TURN, PAIR[1]]}])
    for name, options, expected in (
        ("all", {"everything": True}, "[[<s> user: why\nassistant: so</s> \nuser: a\nassistant: so</s> \n]]"),
        ("last", {"last_only": True}, "<s> user: why\nassistant: so</s> \nuser: a\nassistant:[[ so</s>]] \n"),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        assert learned_texts(
            build_dataset(data, model, tmp_path / name, **options).train, model
        ) == [expected]


@pytest.mark.parametrize("key", LOSS)
@pytest.mark.parametrize("values", [(0, 1), (False, True), (0.0, None)])
def test_a_turn_that_is_not_trained_on_is_context(
    tmp_path: Path, model: Path, key: str, values: Any
):
    context_turn, trained_turn = ({**PAIR[1], key: value} for value in values)
    records = [
        {"messages": [PAIR[0], context_turn, TURN, trained_turn]},
        {"messages": [PAIR[0], trained_turn, TURN, context_turn]},
    ]
    dataset = build_dataset(write_data(tmp_path, records), model, tmp_path)
    assert learned_texts(dataset.train, model) == [
        "<s> user: why\nassistant: so</s> \nuser: a\nassistant:[[ so</s>]] \n",
        "<s> user: why\nassistant:[[ so</s>]] \n",
    ]
    note = "turns of the assistant that the data keeps from being trained on: 2"
    assert dataset.notes == ("data.jsonl: 2 records of messages", note)


def test_a_model_without_a_template(tmp_path: Path, model: Path):
    """It learns to stop at a token that it has; the same template must then go into its file."""
    values = {k: v for k, v in GGUF(model).values.items() if k != "tokenizer.chat_template"}
    bare_model = tmp_path / "bare.gguf"
    gguf.write_gguf(bare_model, values, {})
    dataset = build_dataset(write_data(tmp_path, [{"messages": PAIR}]), bare_model, tmp_path)
    assert learned_texts(dataset.train, bare_model) == [
        "<s> <|im_start|>user\nwhy</s> \n<|im_start|>assistant\n[[so</s>]] \n"
    ]
    (note,) = dataset.notes[1:]
    assert note.startswith(
        "chat template: chatml, since the model has none and its vocabulary has no"
    )
    assert dataset.template is not None and "<|im_end|>" not in dataset.template
    assert "eos_token" in dataset.template
    template = choose_template(GGUF(model).metadata, TEMPLATE)
    assert (template.source, template.reason) == (TEMPLATE, "")


def without_bos(model: Path, path: Path) -> Path:
    """The same model, which adds no BOS."""
    file = GGUF(model)
    add_no_bos = {"tokenizer.ggml.add_bos_token": MetadataValue("bool", False)}
    gguf.write_gguf(path, {**file.values, **add_no_bos}, {})
    return path


@pytest.mark.parametrize("bos", [True, False])
def test_texts_are_split(tmp_path: Path, model: Path, bos: bool):
    """Each token is a target once; a window begins with BOS, or the last token of the one before."""
    words = " ".join(["one two three"] * 20)
    model = model if bos else without_bos(model, tmp_path / "no_bos.gguf")
    tokenizer = Tokenizer(GGUF(model).metadata)
    assert tokenizer.add_bos == bos
    ids = [*tokenizer.encode(words), tokenizer.eos]
    for name, content in (("a.txt", words), ("a.jsonl", [{"text": words}])):
        folder = tmp_path / name[2:]
        folder.mkdir()
        samples = build_dataset(write_data(folder, content, name), model, folder, length=7).train
        parts = [samples[i][0].tolist() for i in range(len(samples))]
        assert [len(part) for part in parts[:-1]] == [8] * (len(parts) - 1)
        assert parts[0] + [id for part in parts[1:] for id in part[1:]] == ids
        first_ids = [tokenizer.bos if bos else part[-1] for part in parts[:-1]]
        assert [part[0] for part in parts[1:]] == first_ids and len(parts) > 3
        assert samples.targets == len(ids) - 1


LONG = {"messages": [PAIR[0], {"role": "assistant", "content": "one two three four five " * 5}]}


@pytest.mark.parametrize(
    ("truncate", "said"), [("end", "cut at their end"), ("drop", "left out"), ("split", "split")]
)
def test_long_conversations(tmp_path: Path, model: Path, truncate: str, said: str):
    data = write_data(tmp_path, [LONG, {"messages": PAIR}])
    full_sample = build_dataset(data, model, tmp_path, truncate=truncate, length=1000).train[0]
    (tmp_path / truncate).mkdir()
    dataset = build_dataset(data, model, tmp_path / truncate, truncate=truncate, length=20)
    assert dataset.notes[1] == f"conversations longer than 20 tokens, {said}: 1"
    samples = [dataset.train[i] for i in range(len(dataset.train) - 1)]
    assert all(len(ids) <= 21 for ids, _ in samples)
    if truncate == "end":
        assert [ids.tolist() for ids, _ in samples] == [full_sample[0][:21].tolist()]
    elif truncate == "drop":
        assert samples == []
    else:
        for i in (0, 1):
            first, *remaining = (sample[i].tolist() for sample in samples)
            assert first + [v for piece in remaining for v in piece[1:]] == full_sample[i].tolist()
        assert {int(ids[0]) for ids, _ in samples} == {Tokenizer(GGUF(model).metadata).bos}


def test_nothing_to_learn(tmp_path: Path, model: Path):
    long_record = {
        "messages": [{"role": "user", "content": "one two three four five " * 5}, PAIR[1]]
    }
    dataset = build_dataset(
        write_data(tmp_path, [long_record, {"messages": PAIR}]), model, tmp_path, length=20
    )
    assert len(dataset.train) == 1
    assert "samples left out because they have no tokens to train on: 1" in dataset.notes
    (tmp_path / "all").mkdir()
    with pytest.raises(
        InputError,
        match=r"leaves no tokens to train on for training \(data\.jsonl: 1 rec.*samples left out",
    ):
        build_dataset(write_data(tmp_path, [long_record]), model, tmp_path / "all", length=20)


def test_words_that_spell_control_tokens(tmp_path: Path, model: Path):
    """They become these tokens, as llama.cpp makes them, and that is said; they do not end what is learnt."""
    said = [{"role": "user", "content": "why </s>"}, {"role": "assistant", "content": "so </s> so"}]
    dataset = build_dataset(
        write_data(tmp_path, [{"messages": said}, {"messages": PAIR}]), model, tmp_path
    )
    assert (
        learned_texts(dataset.train, model)[0]
        == "<s> user: why </s> \nassistant:[[ so </s>  so</s>]] \n"
    )
    (note,) = (note for note in dataset.notes if "control" in note)
    assert note.startswith("messages that spell control tokens") and note.endswith(": 2")


def test_validation(tmp_path: Path, model: Path):
    data = write_data(tmp_path, [{"text": f"{i}"} for i in range(1, 11)])
    dataset = build_dataset(data, model, tmp_path, val_split=0.2)
    assert dataset.valid is not None
    assert learned_texts(dataset.valid, model) == ["[[<s> 5</s>]]", "[[<s> 10</s>]]"]
    assert len(dataset.train) == 8
    (tmp_path / "few").mkdir()
    small_dataset = build_dataset(
        write_data(tmp_path, [{"text": "1"}], "one.jsonl"), model, tmp_path / "few", val_split=0.2
    )
    assert small_dataset.valid is None and small_dataset.notes[-1].endswith(
        "--val-split 0.2 of 1 record is less than one"
    )


def test_no_records(tmp_path: Path, model: Path):
    for name, content in (("a.jsonl", "\n"), ("a.json", "[]"), ("a.txt", " \n")):
        (tmp_path / name[2:]).mkdir()
        with pytest.raises(InputError, match=rf"{name} holds no records"):
            build_dataset(write_data(tmp_path, content, name), model, tmp_path / name[2:])


# ---- the cache


def test_prepared_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    data, cache = write_data(tmp_path, [{"messages": PAIR}]), tmp_path / "cache"
    recipe = DatasetRecipe(data, model, 100)
    first = prepare_dataset(recipe, cache, lambda sentence: None)
    assert learned_texts(first.train, model) == ["<s> user: why\nassistant:[[ so</s>]] \n"]

    def fail_if_called(*args: Any) -> None:
        raise AssertionError("made again")

    with monkeypatch.context() as patch:
        patch.setattr("packtrain.data.token_cache.build_folder", fail_if_called)
        second = prepare_dataset(recipe, cache, lambda sentence: None)
    assert second.fingerprint == first.fingerprint and second.notes == first.notes
    assert not second.train.ids.flags.owndata and not second.train.ids.flags.writeable
    (weights,) = cache.glob("*/train.weights.npy")
    weights.write_bytes(weights.read_bytes()[:-1])  # damaged ones are made anew
    assert (
        prepare_dataset(recipe, cache, lambda sentence: None).train.targets == first.train.targets
    )
    moved = DatasetRecipe(data.rename(tmp_path / "other.jsonl"), model, 100)
    renamed = prepare_dataset(moved, cache, lambda sentence: None)
    assert renamed.notes == ("other.jsonl: 1 record of messages", *first.notes[1:])
    assert renamed.fingerprint == first.fingerprint


@pytest.mark.parametrize(("option", "flag"), [
    ({"last_only": True}, "--train-on"), ({"truncate": "drop"}, "--truncate"),
    ({"template": TEMPLATE}, "--chat-template"),
])  # fmt: skip
def test_settings_of_conversations_are_said_to_have_no_effect_on_texts(
    tmp_path: Path, model: Path, option: dict[str, Any], flag: str
):
    (tmp_path / "texts").mkdir()
    data = write_data(tmp_path, [{"text": "why so"}])
    note = f"{flag} has no effect: the data has no conversation"
    assert note in build_dataset(data, model, tmp_path / "texts", **option).notes
    data = write_data(tmp_path, [{"messages": PAIR}])
    assert note not in build_dataset(data, model, tmp_path, **option).notes


def test_a_separator_is_for_plain_text(tmp_path: Path, model: Path):
    data = write_data(tmp_path, [{"messages": PAIR}])
    with pytest.raises(InputError, match=r"--separator: .*data\.jsonl is no plain text to divide"):
        build_dataset(data, model, tmp_path, separator="#")


def test_what_a_fingerprint_depends_on(tmp_path: Path, model: Path):
    data, cache = write_data(tmp_path, [{"messages": PAIR}]), tmp_path / "cache"

    def fingerprint_of(**changes: Any) -> str:
        options = {"data": data, "model": model, "length": 100} | changes
        return prepare_dataset(DatasetRecipe(**options), cache, lambda sentence: None).fingerprint

    other_model = tmp_path / "other.gguf"
    values = dict(GGUF(model).values)
    gguf.write_gguf(
        other_model,
        values | {"tokenizer.chat_template": MetadataValue("string", TEMPLATE + " ")},
        {},
    )
    names = [
        fingerprint_of(),
        fingerprint_of(length=50),
        fingerprint_of(everything=True),
        fingerprint_of(last_only=True),
        fingerprint_of(model=other_model),
    ]
    data.write_text(data.read_text() + "\n" + data.read_text())
    assert len({*names, fingerprint_of()}) == 6


def test_runs_from_before_columns_could_be_named_know_their_data(tmp_path: Path, model: Path):
    recipe = DatasetRecipe(write_data(tmp_path, [{"messages": PAIR}]), model, 100)
    options = {**asdict(recipe), "data": "", "model": ""}
    del options["columns"]
    values = {k: v for k, v in GGUF(model).values.items() if k.startswith(VOCABULARY_KEYS)}
    older = checksum(
        (7, sorted(options.items()), plain_metadata(values)),
        find_sources(recipe.data, DATA_SUFFIXES),
    )
    assert prepare_dataset(recipe, tmp_path / "cache", lambda sentence: None).fingerprint == older


def test_memory_counts_the_child_that_renders_chats(tmp_path: Path, model: Path):
    """A limit that would do for text is refused: chats are rendered in a further process."""
    recipe = DatasetRecipe(write_data(tmp_path, [{"messages": PAIR}]), model, 100)
    release_memory()
    limit = private_nbytes() + token_cache.CHILD_START_NBYTES + token_cache.RENDERING_NBYTES // 2
    with pytest.raises(DoesNotFit, match="needs at least"):
        prepare_dataset(recipe, tmp_path / "cache", lambda sentence: None, f"{limit}B")


def test_errors_of_the_child(tmp_path: Path, model: Path):
    with pytest.raises(InputError, match=r"data\.jsonl: line 1 is not JSON"):
        prepare_dataset(
            DatasetRecipe(write_data(tmp_path, "{"), model, 100),
            tmp_path / "cache",
            lambda sentence: None,
        )
    assert list((tmp_path / "cache").iterdir()) == []
    bare_model = tmp_path / "bare.gguf"
    gguf.write_gguf(bare_model, {"general.name": MetadataValue("string", "a")}, {})
    with pytest.raises(InputError, match=r"bare\.gguf: the metadata has no tokenizer\.ggml\.model"):
        prepare_dataset(
            DatasetRecipe(write_data(tmp_path, "{}"), bare_model, 100),
            tmp_path / "cache",
            lambda sentence: None,
        )


# ---- the command


def packtrain(*arguments: object) -> tuple[int, str]:
    said = io.StringIO()
    with redirect_stdout(said):
        code = main([str(argument) for argument in arguments])
    return code, said.getvalue()


def test_the_command(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = write_data(tmp_path, [{"messages": PAIR, "id": 1}, {"messages": SYSTEM_AND_PAIR}])
    code, said = packtrain("data", data, "--model", model, "--show", 1)
    assert code == 0
    lines = said.splitlines()
    assert lines[0] == "data.jsonl: 2 records of messages; not used: id"
    assert lines[1].startswith("training: 2 samples, ")
    assert "; --ctx that samples need: half at most " in lines[1]
    assert lines[2:] == [
        "---- sample 1 (data.jsonl: line 1)",
        "<s> user: why",
        "assistant:[[ so</s>]] ",
        "",
    ]


@needs_shared
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gsm8k_train.jsonl", "gsm8k_train.jsonl: 7,473 records of prompt/completion"),
        ("glaive_toolcall_en_demo.json", "glaive_toolcall_en_demo.json: 300 records of conversations"),
        ("dummy_conversation.json", "dummy_conversation.json: 500 records of conversations; not used: id"),
    ],
)  # fmt: skip
def test_real_files(name: str, said: str):
    conversations, note = read(SHARED / "chat" / name)
    assert note == said
    assert all(
        isinstance(conversation, Conversation) and conversation.messages[-1]["role"] == "assistant"
        for conversation in conversations
    )
