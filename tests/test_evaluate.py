"""packtrain eval: perplexity as llama-perplexity defines it, loss as finetune validates, models side by side."""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli import evaluate
from packtrain.cli.main import main
from packtrain.common.errors import DoesNotFit, InputError, Interrupted
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.kernels.runtime import kernel_cache
from packtrain.models.model_file import open_model, save_model
from packtrain.training import perplexity_windows
from packtrain.training.model_loss import MeanEstimate, loss_executor, loss_plan
from packtrain.training.monitoring import progress
from packtrain.training.monitoring.progress import WorkCounter
from packtrain.training.perplexity_windows import PerplexityWindows, read_single_text
from packtrain.workflows import calibration_data
from packtrain.workflows.eval_data import EvalDataLoader, EvaluateSettings, find_eval_file
from tests.adapters import random_adapter
from tests.architectures import random_model
from tests.kill import sample_chats
from tests.numpy_models import Model as Independent
from tests.test_model_file import SHARED, STORIES, needs_shared, save

WORDS = "the cat the hat a bad head\nan added deed, the face of a cafe. "
SAMPLE = SHARED / "text/tinystories_sample.txt"
USED_NBYTES = 1 << 20  # private memory before the losses are planned
RESULT_RE = re.compile(r"loss ([\d.]+) ± ([\d.]+) nats per token, perplexity ([\d.]+) ± ([\d.]+)\n")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.workflows.eval_data.cache_root", lambda: tmp_path / "cache")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def with_values(model: Path, path: Path, **values: MetadataValue) -> Path:
    """The same model with other metadata of the tokenizer."""
    file = GGUF(model)
    tokenizer_metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    write_gguf(
        path,
        {**file.values, **tokenizer_metadata},
        {name: file.array(name) for name in file.entries},
    )
    return path


Read = Callable[..., tuple[float, float, str]]


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Read:
    """Loss and perplexity as they are printed for one model, and all else on both streams."""

    def run(model: Path, data: Path, **options: object) -> tuple[float, float, str]:
        capsys.readouterr()
        assert evaluate.run(EvaluateSettings((model,), data, **options)) == 0  # type: ignore[arg-type]
        out, said = capsys.readouterr()
        match = RESULT_RE.match(out)
        assert match, out
        return float(match[1]), float(match[3]), out + said

    return run


def test_nothing_held_out_is_not_measured(tmp_path: Path, model: Path):
    data = tmp_path / "a.csv"
    data.write_text("text\nthe cat\n")
    with pytest.raises(InputError, match=r"a\.csv has too few records; --val-split holds out none"):
        evaluate.run(EvaluateSettings((model,), data, split="valid"))


# ---- text, as llama-perplexity measures it


def by_hand(model: Path, text: str, context: int, add_bos: bool) -> np.ndarray:
    """Losses that llama-perplexity counts, by an independent forward pass: read from its source, perplexity.cpp."""
    opened = open_model(model)
    tokenizer = opened.tokenizer()
    weights = {name: opened.weight(name) for name in opened.weight_names}
    independent = Independent(opened.gguf.metadata, weights, context)
    ids = tokenizer.encode(text.removesuffix("\n"), bos=add_bos, eos=False, special=False)
    losses = []
    for chunk in range(len(ids) // context):
        window = ids[chunk * context : (chunk + 1) * context]
        if add_bos:
            window[0] = tokenizer.bos
        losses.append(independent.losses(np.array(window))[context // 2 :])
    return np.concatenate(losses)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize(("name", "context"), [("llama", 33), ("gemma3", 32)])
def test_a_text_is_measured_as_llama_perplexity_does(
    name: str, context: int, add_bos: bool, tmp_path: Path, evaluated: Read
) -> None:
    random_model(tmp_path / "base.gguf", name)
    model = with_values(
        tmp_path / "base.gguf", tmp_path / "m.gguf", add_bos_token=MetadataValue("bool", add_bos)
    )
    text = WORDS * 6 + "the <s> </s> end\n\n"
    (tmp_path / "t.txt").write_text(text)
    loss, perplexity, said = evaluated(model, tmp_path / "t.txt", ctx=context, batch_size=2)
    expected_losses = by_hand(model, text, context, add_bos)
    error = expected_losses.std() / math.sqrt(len(expected_losses) - 1)
    assert abs(loss - expected_losses.mean()) < 1e-4
    assert abs(perplexity / math.exp(expected_losses.mean()) - 1) < 1e-4
    printed = RESULT_RE.search(said)
    assert printed and abs(float(printed[2]) - error) < 1e-3 and len(expected_losses) > 100
    assert abs(float(printed[4]) / (perplexity * error) - 1) < 1e-2
    windows = len(expected_losses) // (context - 1 - context // 2)
    assert (
        f"{windows} windows of {context} tokens" in said
        and f"({len(expected_losses):,} tokens)" in said
    )
    assert ("each starting with BOS" in said) == add_bos
    start_offset, end_offset = (said.index(f"{windows} windows {text}") for text in ("…", "in 0:"))
    assert start_offset < end_offset
    assert abs(by_hand(model, text, context, not add_bos).mean() - loss) > 2e-3  # and it matters


def test_counted_losses_are_those_of_the_whole_window(tmp_path: Path) -> None:
    """The head leaves out what does not count; nothing else changes."""
    random_model(tmp_path / "m.gguf", "llama")
    model = open_model(tmp_path / "m.gguf")
    ids = np.arange(40, dtype=np.int32) % 30 + 260
    batch = PerplexityWindows(ids, 1, 3, 13)[0]
    got = loss_executor(model, 3, 12, skipped=6)(batch)["losses"]
    assert got.shape == (3, 6) and batch["weights"].sum() == 18
    padded = {name: np.pad(batch[name], ((0, 0), (6, 0))) for name in ("targets", "weights")}
    expected = loss_executor(model, 3, 12)({**batch, **padded})["losses"]
    np.testing.assert_allclose(got, expected[:, 6:], rtol=1e-6)


def test_a_text_is_read_whole(tmp_path: Path, model: Path) -> None:
    tokenizer = open_model(model).tokenizer()
    path = tmp_path / "t.txt"
    for text in ("the cat\n", "\n\nthe </s>cat\r\n\n", "the cat\r\n"):
        path.write_bytes(text.encode())
        expected = tokenizer.encode(text.removesuffix("\n"), eos=False, special=False)
        got = read_single_text(path, None, tokenizer)
        assert got is not None and got.tolist() == expected
    path.write_text("the cat\n<|endoftext|>\nthe hat\n")
    assert read_single_text(path, None, tokenizer) is None
    token_ids = read_single_text(path, "", tokenizer)
    text = path.read_text().removesuffix("\n")
    assert token_ids is not None and token_ids.tolist() == tokenizer.encode(
        text, eos=False, special=False
    )


def test_windows_cover_the_text_but_its_tail() -> None:
    ids = np.arange(23, dtype=np.int32)
    for rows in (1, 2, 3):
        windows = PerplexityWindows(ids, None, rows, 5)
        batches = [windows[i] for i in range(len(windows))]
        counted = np.concatenate([b["targets"][b["weights"] > 0] for b in batches])
        assert counted.tolist() == [3, 4, 8, 9, 13, 14, 18, 19]
        fed = np.concatenate([b["tokens"] for b in batches])[:4]
        assert fed.tolist() == [[n, n + 1, n + 2, n + 3] for n in (0, 5, 10, 15)]


def test_any_batch_size_gives_the_same(tmp_path: Path, model: Path, evaluated: Read) -> None:
    (tmp_path / "t.txt").write_text(WORDS * 5)
    results = [evaluated(model, tmp_path / "t.txt", batch_size=size)[:2] for size in (1, 4, None)]
    assert results[0] == results[1] == results[2]


@needs_shared
def test_all_positions_count_each_document_from_its_beginning(
    tmp_path: Path, evaluated: Read
) -> None:
    text = SAMPLE.read_text(encoding="utf-8")[:6000]
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    loss, _, said = evaluated(STORIES, tmp_path / "t.txt", ctx=128)
    assert "has several documents, each scored from its start; --separator '' reads" in said

    model = open_model(STORIES)
    tokenizer, expected_losses = model.tokenizer(), list[float]()
    weights = {name: model.weight(name) for name in model.weight_names}
    independent = Independent(model.gguf.metadata, weights, 128)
    windows = 0
    stories = [story.strip("\n") for story in text.split("<|endoftext|>")]
    for story in stories:
        ids = tokenizer.encode(story, bos=True, eos=True, special=False)
        for start in range(0, len(ids) - 1, 128):
            window = [tokenizer.bos, *ids[start + 1 : start + 129]]
            expected_losses += independent.losses(np.array(window)).tolist()
            windows += 1
    assert (
        len(stories) > 5
        and f"{len(expected_losses):,} of {len(expected_losses) + windows:,} tokens" in said
    )
    assert abs(loss - np.mean(expected_losses)) < 1e-4
    story_text = stories[0]
    (tmp_path / "one.txt").write_text(story_text, encoding="utf-8", newline="")
    count = len(tokenizer.encode(story_text, bos=True, eos=True, special=False)) - 1
    said = evaluated(STORIES, tmp_path / "one.txt", all_positions=True)[2]
    assert f" {count:,} of {count + 1:,} tokens are scored" in said


def test_short_texts_and_long_windows(tmp_path: Path, model: Path, evaluated: Read) -> None:
    text, model_context = tmp_path / "t.txt", open_model(model).config.context_length
    text.write_text("a few words")
    said = evaluated(model, text, ctx=100_000)[2]
    assert "fewer than a window of 100,000; it is one window" in said
    text.write_text(WORDS * model_context)
    assert "own context" not in evaluated(model, text, ctx=model_context)[2]
    assert (
        f"more than the model's own context of {model_context:,}"
        in evaluated(model, text, ctx=model_context + 1)[2]
    )
    text.write_text("")
    with pytest.raises(InputError, match=r"t\.txt has 1 tokens; there must be 3 or more"):
        evaluated(model, text)


def test_what_cannot_be_measured(tmp_path: Path, model: Path) -> None:
    with pytest.raises(InputError, match=r"--data: .*none\.txt does not exist"):
        evaluate.run(EvaluateSettings((model,), model.parent / "none.txt"))
    (tmp_path / "t.txt").write_text(WORDS)
    opened = open_model(model)
    weights = {name: opened.weight(name).copy() for name in opened.weight_names}
    weights["output_norm.weight"][0] = np.nan
    vocabulary = {k: v for k, v in opened.gguf.values.items() if k.startswith("tokenizer.")}
    broken = tmp_path / "nan.gguf"
    save_model(broken, opened.config, vocabulary, weights.__getitem__, name="nan")
    with pytest.raises(InputError, match=r"nan\.gguf: the loss is nan"):
        evaluate.run(EvaluateSettings((broken,), tmp_path / "t.txt"))


def test_it_can_be_stopped(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text(WORDS * 10)
    original_getitem = PerplexityWindows.__getitem__

    def then_stop(windows: PerplexityWindows, index: int) -> dict[str, np.ndarray]:
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original_getitem(windows, index)

    monkeypatch.setattr(PerplexityWindows, "__getitem__", then_stop)
    with pytest.raises(Interrupted, match=r"stopped after 2 of \d+ batches"):
        evaluate.run(EvaluateSettings((model,), tmp_path / "t.txt", batch_size=1))


# ---- conversations, and models side by side


def lines(out: str) -> dict[str, list[float]]:
    """Numbers of the table by name."""
    rows = (line.partition("  ") for line in out.splitlines()[1:])
    return {name: [float(n) for n in re.findall(r"-?\d+\.\d{4}", rest)] for name, _, rest in rows}


def test_conversations_lose_what_finetune_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model(tmp_path / "base.gguf", "llama tied")
    (tmp_path / "chats.jsonl").write_text(sample_chats())
    base, data = str(tmp_path / "base.gguf"), ["--data", str(tmp_path / "chats.jsonl")]
    output = str(tmp_path / "tuned.gguf")
    train_flags = ["--iters", "3", "--lr", "0.01", "--batch-size", "2", "--val-batches", "0"]
    train_flags += ["--lora-rank", "4", "--val-split", "0.2", "--no-tensorboard"]
    assert main(["finetune", base, *data, "-o", output, *train_flags]) == 0
    out, said = capsys.readouterr()
    match = re.search(
        r"base (\d+\.\d+), with the adapter (\d+\.\d+), merged (\d+\.\d+)", out + said
    )
    assert match, said
    adapter = str(tmp_path / "tuned.run/adapter.gguf")
    split = ["--split", "valid", "--val-split", "0.2"]
    eval_args = [base, output, *data, *split, "--lora", adapter, "--compare"]
    assert main(["eval", *eval_args]) == 0
    out, said = capsys.readouterr()
    table = lines(out)
    assert list(table)[:3] == [base, f"{base} + {adapter}", output]
    for name, number in zip(table, match.groups(), strict=False):
        assert abs(table[name][0] - float(number)) < 2e-4
        assert abs(table[name][2] - math.exp(table[name][0])) < 1e-3 * table[name][2]
    assert abs(table[output][4] - (table[output][0] - table[base][0])) < 2e-4
    assert "chats.jsonl (valid split): " in out and "as in finetune's validation" in out
    assert main(["eval", base, *data, "--all-positions"]) == 0
    assert f"{RESULT_RE.match(capsys.readouterr().out)[1]}" != f"{table[base][0]:.4f}"  # type: ignore[index]


def test_adapters_add_up_unless_they_are_compared(tmp_path: Path, capsys, evaluated: Read) -> None:
    random_model(tmp_path / "base.gguf", "llama")
    base = tmp_path / "base.gguf"
    first_lora, second_lora = (
        str(random_adapter(tmp_path / f"{i}.gguf", open_model(base), seed=i)) for i in (0, 1)
    )
    (tmp_path / "t.txt").write_text(WORDS * 6)
    single_losses = [
        evaluated(base, tmp_path / "t.txt", lora=lora)[0]
        for lora in ((), (first_lora,), (second_lora,))
    ]
    both = evaluated(base, tmp_path / "t.txt", lora=(first_lora, second_lora))[0]
    assert len({*single_losses, both}) == 4
    evaluate.run(
        EvaluateSettings((base,), tmp_path / "t.txt", lora=(first_lora, second_lora), compare=True)
    )
    table = lines(capsys.readouterr().out)
    assert [numbers[0] for numbers in list(table.values())[:3]] == single_losses
    with pytest.raises(InputError, match="--compare: there is no adapter to compare"):
        evaluate.run(EvaluateSettings((base,), tmp_path / "t.txt", compare=True))


def test_other_vocabularies_do_not_compare(tmp_path: Path, model: Path, capsys) -> None:
    other_model = with_values(
        model, tmp_path / "o.gguf", add_space_prefix=MetadataValue("bool", False)
    )
    (tmp_path / "t.txt").write_text(WORDS * 6)
    evaluate.run(EvaluateSettings((model, other_model), tmp_path / "t.txt"))
    out = capsys.readouterr().out
    assert "losses and perplexities do not compare" in out and "difference" not in out


# ---- which data


def test_which_part_of_the_data(tmp_path: Path) -> None:
    folder, file = tmp_path / "data", tmp_path / "one.jsonl"
    folder.mkdir()
    file.write_text("{}")
    (folder / "train.jsonl").write_text("{}")
    assert find_eval_file(folder, None) == (folder / "train.jsonl", "")
    for split in ("valid", "train"):
        assert find_eval_file(folder, split) == (folder / "train.jsonl", split)
    with pytest.raises(InputError, match=r"--split test: .*data has no test\.jsonl, test\.txt"):
        find_eval_file(folder, "test")
    for name in ("val", "test"):
        (folder / f"{name}.txt").write_text("a")
        assert find_eval_file(folder, None) == (folder / f"{name}.txt", "")
    assert find_eval_file(folder, "valid") == (folder / "val.txt", "")
    assert find_eval_file(folder, "train") == (folder / "train.jsonl", "")
    assert find_eval_file(file, None) == (file, "") and find_eval_file(file, "valid") == (
        file,
        "valid",
    )
    with pytest.raises(InputError, match=r"--split test: .*one\.jsonl is one file; give a folder"):
        find_eval_file(file, "test")
    assert find_eval_file(tmp_path, None) == (tmp_path, "")


def test_the_test_file_of_a_folder_is_measured(
    tmp_path: Path, model: Path, evaluated: Read
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, word in (("train", "the"), ("valid", "a"), ("test", "cat")):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": f"the {word}"}))
    split_results = {
        split: evaluated(model, folder, split=split) for split in (None, "test", "valid", "train")
    }
    assert (
        split_results[None][0] == split_results["test"][0]
        and "data/test.jsonl:" in split_results[None][2]
    )
    assert len({split_results[split][0] for split in ("test", "valid", "train")}) == 3


# ---- how it is said


def test_means_have_an_error() -> None:
    values = np.random.default_rng(0).normal(3, 2, 500).astype(np.float32)
    mean = MeanEstimate.of(values)
    assert abs(mean.error - values.std(ddof=1) / 500**0.5) < 1e-6
    assert mean.exponential.value == math.exp(mean.value)
    assert mean.exponential.error == mean.exponential.value * mean.error
    assert str(MeanEstimate.of(values[:1])) == f"{values[0]:.4f}"
    assert MeanEstimate(1e4, 0.1).exponential.value == math.inf


def test_a_count_is_plain_where_nobody_sees_it_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = StringIO()
    with WorkCounter(stream, "text", "window") as count:
        for done in range(1, 61):
            now += 1
            count(done, 60, f"perplexity {done}")
    assert stream.getvalue().splitlines() == [
        f"text: window {n} of 60, 0:{60 - n:02} left  perplexity {n}" for n in (10, 20, 30, 40, 50)
    ]


def test_a_count_on_a_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with WorkCounter(stream, "text", "window") as count:
        for done in range(1, 4):
            count(done, 3, "perplexity 7")
    assert (
        "window 3 of 3, 0:00 left  perplexity 7" in stream.getvalue() and "\r" in stream.getvalue()
    )


def test_memory_decides_how_many_windows_are_read_at_a_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_data, "private_nbytes", lambda: USED_NBYTES)
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 40)
    opened, length = open_model(model), 32
    arenas = {
        rows: loss_plan(opened, rows, length, skipped=length // 2)[1].arena().nbytes
        for rows in (1, 8)
    }

    def rows_within(nbytes: int) -> int:
        settings = EvaluateSettings(
            (model,), text, ctx=length, batch_size=8, memory=f"{(nbytes + USED_NBYTES) / 1024:f}KiB"
        )
        return EvalDataLoader(settings, opened, list[str]().append).load(length).batches.rows

    monkeypatch.setattr(perplexity_windows, "private_nbytes", lambda: -(1 << 30))
    assert rows_within(arenas[8]) == 8
    assert rows_within(arenas[8] - 1) == 4
    assert rows_within(arenas[1]) == 1
    with pytest.raises(DoesNotFit, match="too small to measure the loss; the smallest that would"):
        rows_within(arenas[1] - 1)


def test_a_text_whose_tokens_have_no_room_is_refused(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 40)
    with pytest.raises(DoesNotFit, match=f"too small for the tokens of {text}"):
        read_single_text(text, None, open_model(model).tokenizer(), memory="1MiB")


def test_kernels_that_eval_compiles_keep_to_its_memory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 40)
    monkeypatch.setattr(kernel_cache, "missing_modules", lambda names: ["row_products"])
    with pytest.raises(DoesNotFit, match="compiling kernels needs"):
        pt.evaluate(model, text, ctx=32, memory="150MiB")
