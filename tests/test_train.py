"""`packtrain train` as its users meet it: files, resume, refusals, exit codes."""

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import yaml

from benchmarks.watched import run_packtrain
from packtrain.cli.main import main
from packtrain.common.files import file_lock
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.training import checkpoints
from packtrain.training.checkpoints import load_checkpoint
from packtrain.training.monitoring import RunMonitor, metrics_file
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_job import build_job
from tests.architectures import TOKENS, vocabulary
from tests.kill import TINY_FLAGS, sample_text, survive_kills, without_times


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(sample_text())
    return path


@contextmanager
def signal_after(step: int, number: int = signal.SIGINT):
    """As if someone pressed Ctrl-C while this step was recorded."""
    before = RunMonitor.record_step

    def record(watch, record):
        before(watch, record)
        if record["step"] == step:
            os.kill(os.getpid(), number)

    RunMonitor.record_step = record
    try:
        yield
    finally:
        RunMonitor.record_step = before


def train_arguments(data, output, *flags: str) -> list[str]:
    return [
        "train",
        "--data",
        str(data),
        "-o",
        str(output),
        *TINY_FLAGS,
        "--no-tensorboard",
        *flags,
    ]


def said(capsys) -> list[str]:
    return capsys.readouterr().err.strip().splitlines()


def weight_bytes(path):
    gguf = GGUF(path)
    return {name: gguf.array(name).tobytes() for name in gguf.entries}


def assert_resumes(tuned, losses, folder, capsys):
    """A run of six steps that is stopped at the third and resumed has the losses and bits of one that is not.

    tuned(output, *flags)  runs finetune and returns its exit code
    losses(output)         those of its steps
    """
    uninterrupted, stopped = folder / "whole.gguf", folder / "stopped.gguf"
    assert tuned(uninterrupted, "--iters", "6") == 0
    with signal_after(3):
        assert tuned(stopped, "--iters", "6") == 130
    assert tuned(stopped, "--iters", "6", "--resume") == 0, said(capsys)
    assert losses(uninterrupted) == losses(stopped)
    first, second = (weight_bytes(path) for path in (uninterrupted, stopped))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_run_leaves_a_model_and_all_about_it(data, tmp_path, capsys):
    output = tmp_path / "model.gguf"
    code = main(
        train_arguments(data, output, "--iters", "12", "--steps-per-eval", "5", "--save-every", "4")
    )
    text = "\n".join(said(capsys))
    assert code == 0, text
    folder = tmp_path / "model.run"
    assert {f.name for f in folder.iterdir()} >= {
        "run.yaml", "metrics.jsonl", "checkpoint.gguf", "checkpoint.previous.gguf", "plan.json", "loss.svg",
    }  # fmt: skip
    records = metrics_file.read(folder / "metrics.jsonl")
    assert [r["step"] for r in records[:-1]] == list(range(1, 13))
    assert [r["step"] for r in records if "val_loss" in r] == [5, 10, 12]
    assert all(0 < r["val_accuracy"] < 1 for r in records if "val_loss" in r)
    assert list(records[0])[:8] == list(metrics_file.FIRST_KEYS)
    assert records[11]["loss"] < records[0]["loss"]
    end = records[-1]
    assert end["event"] == "end" and end["baseline_bytes"] < end["peak_bytes"]
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["total_bytes"] == end["planned_bytes"]
    run_settings = yaml.safe_load((folder / "run.yaml").read_text())
    assert (
        run_settings["iters"] == 12
        and run_settings["dim"] == 32
        and run_settings["data"] == str(data.absolute())
    )
    for part in ("weights", "arena", "total", "expected", "step 12/12", "memory: peak"):
        assert part in text
    assert main(["generate", str(output), "-p", "The", "-n", "4", "--temp", "0"]) == 0
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.parametrize(
    "extra_flags", [[], ["--grad-accumulation-steps", "2", "--recompute", "blocks"]]
)
def test_resume_is_bit_for_bit(data, tmp_path, capsys, extra_flags):
    at_once, in_parts = tmp_path / "a.gguf", tmp_path / "b.gguf"
    options = ["--iters", "11", "--steps-per-eval", "4", "--save-every", "3", *extra_flags]
    assert main(train_arguments(data, at_once, *options)) == 0
    with signal_after(7):
        assert main(train_arguments(data, in_parts, *options)) == 130
    text = "\n".join(said(capsys))
    assert "stopped after step 7 of 11" in text and "--resume" in text
    assert main(["train", "-o", str(in_parts), "--resume", "--no-tensorboard"]) == 0
    assert weight_bytes(at_once) == weight_bytes(in_parts)
    assert weight_bytes(tmp_path / "a.run/checkpoint.gguf") == weight_bytes(
        tmp_path / "b.run/checkpoint.gguf"
    )
    a, b = (without_times(tmp_path / f"{x}.run/metrics.jsonl") for x in "ab")
    assert a == b


def forget_setting(run_folder, name: str) -> None:
    """As if the run had begun before there was such a setting."""
    settings = yaml.safe_load((run_folder / "run.yaml").read_text())
    del settings[name]
    (run_folder / "run.yaml").write_text(yaml.safe_dump(settings))
    path = run_folder / "checkpoint.gguf"
    checkpoint = load_checkpoint(path, print)
    arrays = {n: np.array(checkpoint.array(n)) for n in checkpoint.gguf.entries}
    about = {key: value for key, value in checkpoint.about.items() if key != name}
    checkpoints.save(path, checkpoint.progress, about, arrays)


def assert_old_order_resumes(run, folder, capsys) -> None:
    """A run from before samples were shuffled goes on in its order, bit for bit; a new one has another.

    run(output, *flags)  runs the command, three steps with --iters 3, and returns its exit code
    """
    old, uninterrupted, new = (folder / f"{name}.gguf" for name in ("old", "uninterrupted", "new"))
    constant = ["--lr-scheduler", "constant", "--warmup-ratio", "0"]
    assert run(old, *constant, "--iters", "3", "--no-shuffle-samples") == 0, said(capsys)
    assert run(uninterrupted, *constant, "--iters", "6", "--no-shuffle-samples") == 0
    assert run(new, *constant, "--iters", "6") == 0
    forget_setting(folder / "old.run", "shuffle_samples")
    assert run(old, *constant, "--iters", "6", "--resume", "--shuffle-samples") == 2
    assert "--shuffle-samples was off and is on" in said(capsys)[-1]
    assert run(old, *constant, "--iters", "6", "--resume") == 0, said(capsys)
    assert weight_bytes(old) == weight_bytes(uninterrupted) != weight_bytes(new)
    assert run(old, *constant, "--iters", "7", "--resume") == 0, said(capsys)
    assert (
        load_checkpoint(folder / "old.run/checkpoint.gguf", print).about["shuffle_samples"] is False
    )


def test_a_run_from_before_samples_were_shuffled_keeps_its_order(data, tmp_path, capsys):
    def run(output, *flags: str) -> int:
        return main(train_arguments(data, output, "--separator", "\n", *flags))

    assert_old_order_resumes(run, tmp_path, capsys)


def test_a_run_without_a_checkpoint_resumes_from_the_beginning(data, tmp_path, capsys):
    output = tmp_path / "m.gguf"
    assert main(train_arguments(data, output, "--iters", "2", "--resume")) == 0
    assert "no checkpoint yet" in "\n".join(said(capsys))


def test_a_budget_changes_no_data_and_resumes_bit_for_bit(data, tmp_path):
    """In processes of their own: what this one holds is not the same twice."""
    wide = ["--dim", "64", "--ffn", "512", "--batch-size", "24", "-c", "256", "--layers", "2"]
    even = ["--lr-scheduler", "constant", "--warmup-ratio", "0", "--steps-per-eval", "2"]

    def run(name: str, steps: int, *extra_flags: str) -> str:
        args = train_arguments(
            data, tmp_path / f"{name}.gguf", *wide, *even, "--iters", str(steps), *extra_flags
        )
        done = subprocess.run(
            [sys.executable, "-m", "packtrain", *args], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    run("a", 5)
    plan = json.loads((tmp_path / "a.run/plan.json").read_text())
    limit = [
        "--recompute",
        "none",
        "--memory",
        f"{(plan['total_bytes'] - plan['arena_bytes'] // 2) // 1024}KiB",
    ]
    assert "micro-batches" in run("b", 5, *limit)
    run("c", 3, *limit)
    run("c", 5, *limit, "--resume")
    a, b, c = (without_times(tmp_path / f"{name}.run/metrics.jsonl") for name in "abc")
    assert [r["tokens"] for r in a] == [r["tokens"] for r in b]
    for ours, theirs in zip(a, b, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ("val_loss" in ours) == ("val_loss" in theirs)
        assert ours.get("val_loss", 0) == pytest.approx(theirs.get("val_loss", 0), rel=1e-3)
    assert weight_bytes(tmp_path / "b.gguf") == weight_bytes(tmp_path / "c.gguf")
    assert [r["loss"] for r in b] == [r["loss"] for r in c]


def test_more_steps_can_be_asked_for(data, tmp_path, capsys):
    output = tmp_path / "m.gguf"
    assert main(train_arguments(data, output, "--iters", "2")) == 0
    assert main(["train", "-o", str(output), "--resume", "--iters", "4"]) == 0
    assert "had 2 steps and has 4 now" in "\n".join(said(capsys))
    assert [r["step"] for r in metrics_file.read(tmp_path / "m.run/metrics.jsonl")[:-1]] == [
        1,
        2,
        3,
        4,
    ]


def test_early_stop_keeps_the_best_weights(data, tmp_path, capsys):
    output = tmp_path / "m.gguf"
    options = ["--iters", "60", "--steps-per-eval", "2", "--patience", "3", "--lr", "3"]
    options += ["--warmup-ratio", "1"]  # the rate grows, and soon no step helps
    assert main(train_arguments(data, output, *options)) == 0
    text = "\n".join(said(capsys))
    assert "stopped early" in text
    assert weight_bytes(output) == weight_bytes(tmp_path / "m.run/best.gguf")
    records = metrics_file.read(tmp_path / "m.run/metrics.jsonl")[:-1]
    losses = [r["val_loss"] for r in records if "val_loss" in r]
    assert len(losses) < 30 and min(losses) == losses[-4]
    best = f"the best: validation loss {min(losses):.4f} (the last, step {2 * len(losses)}: "
    assert f"the result is step {2 * len(losses) - 6}, {best}{losses[-1]:.4f})" in text
    assert "packtrain generate" in text
    assert main(["train", "-o", str(output), "--resume"]) == 0
    line = f"early stopping has ended training after step {2 * len(losses)}; finishing {output}"
    assert line in said(capsys) and weight_bytes(output) == weight_bytes(
        tmp_path / "m.run/best.gguf"
    )


def test_samples_are_written_during_the_run(data, tmp_path, capsys):
    options = ["--iters", "4", "--sample-every", "2", "--sample-prompt", "The cat"]
    assert main(train_arguments(data, tmp_path / "m.gguf", *options)) == 0
    assert sum(line.startswith("sample: The cat") for line in said(capsys)) == 2


def test_plan_prints_and_runs_nothing(data, tmp_path, capsys):
    plan_path = tmp_path / "plan.json"
    run = train_arguments(data, tmp_path / "m.gguf")[1:]
    assert main(["plan", "train", *run, "--json", str(plan_path)]) == 0
    printed = capsys.readouterr().out
    plan = json.loads(plan_path.read_text())
    assert "weights" in printed and "tokens/s" in printed
    parts = ("weights_bytes", "state_bytes", "gradient_bytes", "arena_bytes", "loop_bytes")
    assert plan["total_bytes"] == plan["baseline_bytes"] + sum(plan[part] for part in parts)
    assert plan["lower_bound_bytes"] <= plan["arena_bytes"]
    assert plan["arena_bytes"] >= max(b["offset"] + b["nbytes"] for b in plan["buffers"])
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]


def test_the_total_of_a_plan_is_not_exceeded(data, tmp_path):
    """Watched from outside, without a limit: a vocabulary is written that takes megabytes, and samples are."""
    vocab, output = tmp_path / "vocab.gguf", tmp_path / "m.gguf"
    extra_tokens = {f"<word {i:06}>": 1 for i in range(100_000)}
    write_gguf(
        vocab,
        {
            "general.architecture": MetadataValue("string", "llama"),
            **vocabulary(TOKENS | extra_tokens),
        },
        {},
    )
    options = [
        "--vocab",
        str(vocab),
        "--vocab-size",
        "auto",
        "--iters",
        "3",
        "--save-every",
        "2",
        "--sample-every",
        "2",
    ]
    done = run_packtrain(*train_arguments(data, output, *options))
    assert done.code == 0, done.said
    planned = json.loads((tmp_path / "m.run/plan.json").read_text())["total_bytes"]
    assert planned - (4 << 20) < done.peak <= planned


# ---- what is refused


def refusal_line(capsys, arguments, code=2) -> str:
    assert main(arguments) == code
    lines = said(capsys)
    assert lines[-1].startswith("packtrain: error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "does not exist"),
        (b"", "empty"),
        (b"ab\0cd" * 99, "NUL|binary"),
        (b"ok \xff\xfe" * 99, "UTF-8"),
        (b" \n" * 99, "nothing but whitespace"),
        (b"a", "no text"),
    ],
)
def test_bad_data(tmp_path, capsys, content, reason):
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    line = refusal_line(capsys, train_arguments(path, tmp_path / "m.gguf"))
    assert "data.txt" in line
    assert any(part in line for part in reason.split("|")), line


def test_bad_outputs_are_found_before_any_work(data, tmp_path, capsys):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "file").write_text("")
    assert "is a folder" in refusal_line(capsys, train_arguments(data, tmp_path / "folder.gguf"))
    for output in (tmp_path / "file/m.gguf", tmp_path / "missing/m.gguf"):
        assert "cannot be written" in refusal_line(capsys, train_arguments(data, output))
        assert (
            "missing does not exist; create it"
            in refusal_line(capsys, train_arguments(data, output))
        ) == (output.parent.name == "missing")
    (tmp_path / "old.gguf").write_text("precious")
    assert "old.gguf exists" in refusal_line(capsys, train_arguments(data, tmp_path / "old.gguf"))
    assert (tmp_path / "old.gguf").read_text() == "precious"


def test_a_run_is_not_begun_over_another(data, tmp_path, capsys):
    output = tmp_path / "m.gguf"
    assert main(train_arguments(data, output, "--iters", "1")) == 0
    before = (tmp_path / "m.run/checkpoint.gguf").read_bytes()
    assert "has a run already" in refusal_line(
        capsys, train_arguments(data, output, "--iters", "1")
    )
    line = refusal_line(
        capsys, train_arguments(data, output, "--iters", "1", "--resume", "--lr", "0.25")
    )
    assert "m.run cannot continue: --lr was not given and is 0.25; give the original ones" in line
    assert (tmp_path / "m.run/checkpoint.gguf").read_bytes() == before
    assert main(["train", "-o", str(output), "--resume"]) == 0, "the refused settings were kept"
    assert main(train_arguments(data, output, "--iters", "1", "--overwrite")) == 0


@pytest.mark.parametrize(
    "flags, part",
    [
        (["--preset", "7b"], "it must be one of"),
        (["--batch-size", "0"], "1 or more"),
        (["--batch-size", "many"], "a whole number"),
        (["--dim", "33"], "--heads"),
        (["--kv-heads", "3"], "--kv-heads"),
        (["--vocab-size", "lots"], "--vocab-size"),
        (["--vocab-size", "300000"], "vocab"),
        (["--vocab", "missing.gguf"], "--vocab-size has no effect with --vocab"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--epochs", "inf"], "finite"),
        (["--seed", "9" * 40], "it must be from 0"),
    ],
)
def test_bad_flags(data, tmp_path, capsys, flags, part):
    run = train_arguments(data, tmp_path / "m.gguf", *flags)
    try:
        code = main(run)
    except SystemExit as left:  # argparse leaves by itself
        code = left.code
    lines = said(capsys)
    assert code == 2 and part in lines[-1] and len(lines) == 1


def test_bad_settings_files(data, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    for text, part in (
        ("[1", "not YAML"),
        ("7", "lines like"),
        ("lrr: 1", "no setting lrr"),
        ("lr: fast", "a number"),
    ):
        path.write_text(text)
        assert part in refusal_line(
            capsys, train_arguments(data, tmp_path / "m.gguf", "--config", str(path))
        )
    path.write_text("lr: 1e-3\niters: 2\nvocab_size: 320\n")
    assert (
        main(train_arguments(data, tmp_path / "m.gguf", "--config", str(path), "--iters", "1")) == 0
    )
    run_settings = yaml.safe_load((tmp_path / "m.run/run.yaml").read_text())
    assert run_settings["lr"] == 1e-3 and run_settings["iters"] == 1


def test_a_full_disk_while_saving_loses_nothing(data, tmp_path, capsys):
    output, options = tmp_path / "m.gguf", ["--iters", "9", "--save-every", "2"]
    with signal_after(3):
        assert main(train_arguments(data, output, *options)) == 130
    checkpoint = tmp_path / "m.run/checkpoint.gguf"
    before = checkpoint.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        line = refusal_line(capsys, ["train", "-o", str(output), "--resume"], code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "checkpoint.gguf: file too large" in line
    assert checkpoint.read_bytes() == before
    assert not list(checkpoint.parent.glob(".*")) and not output.exists()
    assert main(["train", "-o", str(output), "--resume"]) == 0


def test_the_sound_checkpoint_stays_until_there_is_another(data, tmp_path, capsys):
    output, options = tmp_path / "m.gguf", ["--iters", "9", "--save-every", "2"]
    with signal_after(5):
        assert main(train_arguments(data, output, *options)) == 130
    checkpoint = tmp_path / "m.run/checkpoint.gguf"
    raw = bytearray(checkpoint.read_bytes())
    raw[-100] ^= 1
    checkpoint.write_bytes(raw)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(raw) // 2, hard))
    try:
        refusal_line(capsys, ["train", "-o", str(output), "--resume"], code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert main(["train", "-o", str(output), "--resume"]) == 0
    assert [r["step"] for r in metrics_file.read(tmp_path / "m.run/metrics.jsonl")[:-1]] == [
        *range(1, 10)
    ]


def test_links_are_followed_and_devices_left_alone(data, tmp_path, capsys):
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.gguf")
    assert main(train_arguments(data, tmp_path / "link.gguf", "--iters", "1")) == 0
    assert (tmp_path / "link.gguf").is_symlink() and (tmp_path / "real.gguf").is_file()
    os.mkfifo(tmp_path / "pipe.gguf")
    line = refusal_line(capsys, train_arguments(data, tmp_path / "pipe.gguf", "--overwrite"))
    assert "not a regular file" in line
    for name, message in (("", "--output is empty"), (".", "is a folder"), ("/", "is a folder")):
        assert message in refusal_line(capsys, train_arguments(data, name))


def test_a_run_outlives_whoever_reads_of_it(data, tmp_path):
    run = [
        sys.executable,
        "-m",
        "packtrain",
        *train_arguments(data, tmp_path / "m.gguf", "--iters", "3"),
    ]
    with open("/dev/full", "w") as nowhere:
        assert subprocess.run(run, stderr=nowhere, check=False).returncode == 0


def test_streams_that_are_closed_or_narrow(data, tmp_path):
    plan = [sys.executable, "-m", "packtrain", "plan", *train_arguments(data, tmp_path / "m.gguf")]
    narrow = subprocess.run(
        plan, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert narrow.returncode == 0 and b"a step is 2 ? 32" in narrow.stdout
    closed = " ".join(["exec", *map(shlex.quote, plan), "2>&-"])
    completed = subprocess.run(["sh", "-c", closed], capture_output=True, text=True, check=False)
    assert completed.returncode == 0 and completed.stdout.startswith("a step is")


def test_two_runs_do_not_share_a_folder(data, tmp_path, capsys):
    (tmp_path / "m.run").mkdir()
    with file_lock(tmp_path / "m.run/lock", "here"):
        line = refusal_line(capsys, train_arguments(data, tmp_path / "m.gguf", "--iters", "1"))
    assert "in use by another process" in line
    assert main(train_arguments(data, tmp_path / "m.gguf", "--iters", "1")) == 0


def test_a_closed_terminal_saves(data, tmp_path):
    with signal_after(3, signal.SIGHUP):
        assert main(train_arguments(data, tmp_path / "m.gguf", "--iters", "9")) == 130
    assert len(metrics_file.read(tmp_path / "m.run/metrics.jsonl")) == 3


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_files_are_read(tmp_path, capsys, make):
    make(tmp_path / "odd")
    for command in (
        train_arguments(tmp_path / "odd", tmp_path / "m.gguf"),
        ["inspect", str(tmp_path / "odd")],
    ):
        assert "not a regular file" in refusal_line(capsys, command)


def test_what_no_machine_has_is_refused_before_anything_is_lost(data, tmp_path, capsys):
    output = tmp_path / "m.gguf"
    assert main(train_arguments(data, output, "--iters", "1")) == 0
    for flags in (["--batch-size", "1000000000"], ["--dim", "1000000"]):
        huge = train_arguments(data, output, "--overwrite", "--recompute", "none", *flags)
        line = refusal_line(capsys, huge, code=3)
        assert "this needs" in line and "--memory" in line
    assert (tmp_path / "m.run/checkpoint.gguf").exists()
    assert "--threads" in refusal_line(
        capsys, train_arguments(data, output, "--overwrite", "--threads", "9999")
    )


def test_three_bad_steps_end_the_run(data, tmp_path, capsys):
    options = ["--iters", "40", "--lr", "1e30", "--save-every", "1", "--max-grad-norm", "0"]
    line = refusal_line(capsys, train_arguments(data, tmp_path / "m.gguf", *options), code=1)
    assert "3 steps in a row" in line
    assert (tmp_path / "m.run/checkpoint.gguf").exists() and not (tmp_path / "m.gguf").exists()


def test_the_demo_leaves_other_folders_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    assert "other files" in refusal_line(capsys, ["demo", "--folder", str(tmp_path)])
    assert "is a file" in refusal_line(capsys, ["demo", "--folder", str(tmp_path / "mine.txt")])


# ---- killed


def test_killed_runs_resume_bit_for_bit(tmp_path):
    assert survive_kills(tmp_path, kills=3, seed=1) > 10


def test_windows_begin_after_a_text(tmp_path, capsys):
    """Each line is a document that keeps its end; a window begins with one, and holds no other."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of this text\n" for i in range(200)))
    flags = ["--no-tensorboard", "--iters", "2", "--sample-start", r"\n", "--vocab-size", "auto"]
    settings = TrainSettings(
        data=path, preset="1m", vocab_size="300", sample_start=r"\n", val_split=0.0, ctx=48
    )
    batches = build_job(settings, print).train
    tokenizer = build_job(settings, print).model.tokenizer()
    for row in batches[0]["tokens"]:
        text = tokenizer.decode(row[: int(np.count_nonzero(row))].tolist())
        assert re.fullmatch(r"line \d+ of this text\n?", text.strip(" ")), text
    assert main(train_arguments(path, tmp_path / "m.gguf", *flags)) == 0
    assert main(train_arguments(path, tmp_path / "n.gguf", "--sample-start", "")) == 2
    assert "--sample-start is empty" in said(capsys)[-1]
    assert (
        main(train_arguments(path, tmp_path / "p.gguf", *flags, "--sample-start", "nowhere")) == 0
    )
    assert any("--sample-start 'nowhere' divides no file" in line for line in said(capsys))


def test_checkpoints_and_models_are_kept_by_number(data, tmp_path, capsys):
    names = ["--save-name", "chk-ITERATION.gguf", "--save-model", "model-ITERATION.gguf"]
    assert (
        main(
            train_arguments(data, tmp_path / "m.gguf", "--iters", "5", "--save-every", "2", *names)
        )
        == 0
    )
    folder = tmp_path / "m.run"
    for stem in ("chk", "model"):
        file_names = {path.name for path in folder.glob(f"{stem}-*.gguf")}
        assert file_names == {f"{stem}-{n}.gguf" for n in (2, 4, 5, "LATEST")}
        newest = (folder / f"{stem}-5.gguf").read_bytes()
        assert (folder / f"{stem}-LATEST.gguf").read_bytes() == newest
    assert weight_bytes(folder / "model-LATEST.gguf") == weight_bytes(tmp_path / "m.gguf")
    assert weight_bytes(folder / "model-2.gguf") != weight_bytes(tmp_path / "m.gguf")
    # back to step 2: the file is a checkpoint, and copying it changes no other
    before = (folder / "chk-5.gguf").read_bytes()
    (folder / "checkpoint.gguf").write_bytes((folder / "chk-2.gguf").read_bytes())
    resume_args = ["train", "-o", str(tmp_path / "m.gguf"), "--resume"]
    assert main(resume_args) == 0 and "step 3/5" in "\n".join(said(capsys))
    assert (folder / "chk-5.gguf").exists() and len(before) > 0
    for bad in ("model.gguf", "a/ITERATION.gguf", "ITERATION.bin"):
        assert main(train_arguments(data, tmp_path / "n.gguf", "--save-name", bad)) == 2
        assert "it must be a file name with ITERATION in it" in said(capsys)[-1]


def test_a_resumed_run_can_take_the_data_in_a_new_order(data, tmp_path, capsys):
    """Once: the order is kept by the checkpoint, for lives that come after."""
    flags = ["--iters", "2", "--lr-scheduler", "constant", "--warmup-ratio", "0"]
    outputs = [tmp_path / f"{name}.gguf" for name in "abc"]
    for output in outputs:
        assert main(train_arguments(data, output, *flags)) == 0
    a, b, c = ([*("train", "-o", str(output), "--resume", "--iters")] for output in outputs)
    assert main([*a, "6"]) == 0
    assert main([*b, "6", "--force-reshuffle"]) == 0
    assert main([*c, "4", "--force-reshuffle"]) == 0 and main([*c, "6"]) == 0
    first, other, parts = map(weight_bytes, outputs)
    assert other == parts and first != other
    assert load_checkpoint(tmp_path / "c.run/checkpoint.gguf", print).progress.shuffled == 2


def test_no_steps_write_the_model_as_it_begins_and_more_can_follow(data, tmp_path, capsys):
    """--iters 0: a valid file with the initial weights, those that a run with steps begins with."""
    output, other = tmp_path / "m.gguf", tmp_path / "n.gguf"
    assert main(train_arguments(data, output, "--iters", "0")) == 0, said(capsys)
    assert "the result is untouched: --iters 0 takes no step" in said(capsys)
    initial_weights = weight_bytes(output)
    assert main(["generate", str(output), "-p", "The", "-n", "2"]) == 0
    assert main(["train", "-o", str(output), "--resume", "--iters", "3"]) == 0
    assert main(train_arguments(data, other, "--iters", "3")) == 0
    assert weight_bytes(output) == weight_bytes(other) != initial_weights


def test_norms_and_rope_are_as_asked_for(data, tmp_path, capsys):
    """Epsilon, base and scale are in the file, compute, and stay at --resume."""
    output, plain_output = tmp_path / "m.gguf", tmp_path / "n.gguf"
    flags = ["--norm-rms-eps", "1e-3", "--rope-freq-base", "500", "--rope-freq-scale", "0.25"]
    assert main(train_arguments(data, output, "--iters", "2", *flags)) == 0, said(capsys)
    assert main(train_arguments(data, plain_output, "--iters", "2")) == 0
    keys = GGUF(output).metadata
    assert keys["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-3)
    assert keys["llama.rope.freq_base"] == 500
    assert keys["llama.rope.scaling.type"] == "linear" and keys["llama.rope.scaling.factor"] == 4
    assert weight_bytes(output) != weight_bytes(plain_output)
    run_settings = yaml.safe_load((tmp_path / "m.run/run.yaml").read_text())
    assert [run_settings[n] for n in ("norm_rms_eps", "rope_freq_base", "rope_freq_scale")] == [
        1e-3,
        500,
        0.25,
    ]
    assert main(["train", "-o", str(output), "--resume", "--iters", "3"]) == 0
    assert GGUF(output).metadata["llama.rope.freq_base"] == 500
    capsys.readouterr()
    for name, value in (
        ("norm-rms-eps", "1e-6"),
        ("rope-freq-base", "10000"),
        ("rope-freq-scale", "1"),
    ):
        assert main(["train", "-o", str(output), "--resume", f"--{name}", value]) == 2
        assert f"--{name} was" in said(capsys)[-1]
    for flags in (["--rope-freq-scale", "2"], ["--rope-freq-scale", "0"], ["--norm-rms-eps", "0"]):
        assert main(train_arguments(data, tmp_path / "o.gguf", *flags)) == 2
        assert f"{flags[0]} is" in said(capsys)[-1]


def test_each_of_rope_and_epsilon_changes_the_loss(data, tmp_path):
    losses = set()
    for flags in (
        [],
        ["--norm-rms-eps", "0.05"],
        ["--rope-freq-base", "50"],
        ["--rope-freq-scale", "0.1"],
    ):
        output = tmp_path / f"{len(losses)}.gguf"
        assert main(train_arguments(data, output, "--iters", "3", *flags)) == 0
        losses.add(metrics_file.read(output.with_suffix(".run") / "metrics.jsonl")[2]["loss"])
    assert len(losses) == 4


def test_the_optimizer_may_change_when_a_run_is_resumed(data, tmp_path, capsys):
    """Moments are dropped, which is said; AdamW after SGD counts its own steps, as one that begins there would."""
    output, folder = tmp_path / "m.gguf", tmp_path / "m.run"
    resume_args = ["train", "-o", str(output), "--resume"]
    assert main(train_arguments(data, output, "--iters", "2")) == 0
    assert (
        main([*resume_args, "--iters", "4", "--lr", "0.5"]) == 2 and "--lr was" in said(capsys)[-1]
    )
    assert main([*resume_args, "--iters", "4", "--optimizer", "sgd", "--lr", "0.5"]) == 0, said(
        capsys
    )
    line = "--optimizer was adamw and is sgd: moments of adamw are dropped, and sgd begins without moments"
    assert line in said(capsys)
    assert not [n for n in GGUF(folder / "checkpoint.gguf").entries if n.startswith(("m/", "v/"))]
    assert main([*resume_args, "--iters", "5"]) == 0 and "dropped" not in "\n".join(said(capsys))
    before = GGUF(folder / "checkpoint.gguf").array("blk.0.attn_q.weight").copy()
    assert (
        main(
            [
                *resume_args,
                "--iters",
                "6",
                "--optimizer",
                "adamw",
                "--lr",
                "0.01",
                "--weight-decay",
                "0",
            ]
        )
        == 0
    )
    assert "adamw begins with zero moments" in "\n".join(said(capsys))
    rate = metrics_file.read(folder / "metrics.jsonl")[5]["lr"]
    after = GGUF(folder / "checkpoint.gguf").array("blk.0.attn_q.weight")
    # a first step of AdamW moves each weight by its rate
    assert np.quantile(abs(after - before), 0.9) == pytest.approx(rate, rel=0.02)
    assert load_checkpoint(folder / "checkpoint.gguf", print).progress.since == 5
