"""What is refused before a run's first step, or ends it: idle settings, another run's checkpoint, full disks."""

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from packtrain.cli.main import main
from packtrain.common.errors import DiskFull, InputError
from packtrain.common.option_rules import rules
from packtrain.common.options import resumable_names
from packtrain.data import token_cache
from packtrain.engine.tensor import state, weight
from packtrain.planner.training_plans import TrainingPlans
from packtrain.training import disk_space
from packtrain.training.checkpoints import TrainingProgress, save
from packtrain.training.disk_space import check_space, resumable, run_files
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.resume_check import differences
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_job import HEAD_NBYTES, make_schedule
from packtrain.workflows.planned_run import (
    check_effects,
    check_validation,
    optimizer_settings,
)
from tests.test_train import data, refusal_line, said, signal_after, train_arguments  # noqa: F401  data is a fixture

# ---- settings without effect

INEFFECTIVE_SETTINGS = {
    TrainSettings: {
        "--epochs": {"epochs": 2.0, "iters": 9},
        "--offload": {"offload": "moments"},
        "--lr-min": {"lr_min": 1e-5, "lr_scheduler": "constant"},
        "--lr-cycles": {"lr_cycles": 2, "lr_scheduler": "constant"},
        "--lr-cycle-growth": {"lr_cycle_growth": 2.0},
        "--lr-half-every": {"lr_half_every": 9},
        "--warmup-lr": {"warmup_lr": 1e-5, "warmup_ratio": 0.0},
        "--beta1": {"beta1": 0.8, "optimizer": "sgd"},
        "--beta2": {"beta2": 0.8, "optimizer": "sgd"},
        "--history": {"history": 9},
        "--line-search": {"line_search": "armijo"},
        "--armijo": {"armijo": 1e-3},
        "--wolfe": {"wolfe": 0.5},
        "--trials": {"trials": 9},
        "--lr-scheduler": {"lr_scheduler": "linear", "optimizer": "lbfgs"},
        "--warmup-ratio": {"warmup_ratio": 0.5, "optimizer": "lbfgs"},
        "--max-grad-norm": {"max_grad_norm": 0.5, "optimizer": "lbfgs"},
        "--max-grad-value": {"max_grad_value": 0.5, "optimizer": "lbfgs"},
        "--weight-decay": {"weight_decay": 0.5, "optimizer": "lbfgs"},
        "--eps": {"eps": 1e-6, "optimizer": "sgd"},
        "--decay-axes": {"decay_axes": 1, "weight_decay": 0.0},
        "--momentum": {"momentum": 0.8},
        "--nesterov": {"nesterov": True, "optimizer": "sgd"},
        "--muon-momentum": {"muon_momentum": 0.8},
        "--delta": {"delta": 1e-3},
        "--sample-prompt": {"sample_prompt": "Once"},
        "--force-reshuffle": {"force_reshuffle": True},
        "--separator": {"separator": "\n", "sample_start": "\n"},
        "--no-fill-samples": {"fill_samples": False, "sample_start": "\n"},
        "--overwrite": {"overwrite": True, "resume": True},
        "--patience": {"patience": 2, "steps_per_eval": 0},
        "--val-split": {"val_split": 0.2, "data": Path("split")},
        "--vocab-size": {"vocab_size": "300", "vocab": Path("m.gguf")},
        "--no-random-offsets": {"random_offsets": False, "fill_samples": False},
        "--preset": {"preset": "15m", "from_checkpoint": Path("old.gguf")},
        "--strict": {"strict": True},
        "--resident": {"resident": "2GiB"},
        "--shuffle-samples": {"shuffle_samples": True, "fill_samples": False},
        "--no-shuffle-samples": {"shuffle_samples": False, "sample_start": "\n"},
    },
    TuneSettings: {
        "--lora-rank": {"full": True, "lora_rank": ("4",)},
        "--lora-alpha": {"full": True, "lora_alpha": 8.0},
        "--lora-modules": {"full": True, "lora_modules": "attn"},
        "--lora-dropout": {"full": True, "lora_dropout": 0.1},
        "--rslora": {"full": True, "rslora": True},
        "--adapter": {"full": True, "adapter": Path("a.gguf")},
        "--merge": {"full": True, "merge": "plain"},
        "--tensor-type": {"full": True, "tensor_type": ("ffn_down=q8_0",)},
        "--save-model": {"full": True, "save_model": "model-ITERATION.gguf"},
        "--type": {"merge": "none", "type": "f16"},
        "--masters": {"masters": "bf16"},
        "--freeze": {"freeze": ("token_embd*",)},
        "--train-on": {"train_on": "last", "mask_prompt": False},
        "--aware": {"full": True, "aware": True},
        "--distill-weight": {"distill_weight": 0.7},
        "--distill-temperature": {"distill_temperature": 3.0},
        "--distill-top": {"distill_top": 9},
        "--beta": {"beta": 0.5},
        "--gamma": {"gamma": 0.0, "loss": "ipo"},
        "--sft-weight": {"sft_weight": 0.0},
        "--label-smoothing": {"label_smoothing": 0.1, "loss": "ipo"},
        "--length-normalized": {"length_normalized": True, "loss": "simpo"},
        "--reference-free": {"reference_free": True, "loss": "orpo"},
        "--replay-weight": {"replay": 0, "replay_weight": 2.0},
        "--teacher": {"teacher": Path("large.gguf"), "loss": "dpo"},
        "--shuffle-samples": {"shuffle_samples": True, "pack": False},
        "--strict": {"strict": True},
        "--resident": {"resident": "2GiB", "strict": True, "memory": "1GiB"},
    },
}


def split_folder(folder: Path) -> Path:
    """A folder of data that has a valid file."""
    (folder / "split").mkdir()
    for name in ("train", "valid"):
        (folder / f"split/{name}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return folder / "split"


@pytest.mark.parametrize("kind", INEFFECTIVE_SETTINGS)
def test_a_setting_without_effect_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(split_folder(tmp_path).parent)
    for flag, settings in INEFFECTIVE_SETTINGS[kind].items():
        with pytest.raises(InputError, match=f"{flag} has no effect .*; leave one of them out"):
            check_effects(kind(**settings))
    check_effects(kind())


@pytest.mark.parametrize(("search", "name", "value"), [
    ("none", "armijo", 1e-3), ("none", "trials", 3), ("none", "wolfe", 0.5), ("armijo", "wolfe", 0.5),
])  # fmt: skip
def test_what_a_line_search_does_not_read_is_refused(search, name, value):
    settings = {"optimizer": "lbfgs", "line_search": search, name: value}
    with pytest.raises(InputError, match=f"--{name} has no effect with --line-search none"):
        check_effects(TrainSettings(**settings))
    check_effects(TrainSettings(**settings | {"line_search": "wolfe"}))


def test_each_rule_has_its_case():
    case_flags = {
        flag.removeprefix("--").removeprefix("no-")
        for of in INEFFECTIVE_SETTINGS.values()
        for flag in of
    }
    ruled = set().union(*map(optimizer_settings, INEFFECTIVE_SETTINGS))
    ruled |= {"lr_scheduler", "warmup_ratio", "max_grad_norm", "max_grad_value"}  # with lbfgs
    for kind in INEFFECTIVE_SETTINGS:
        ruled |= {
            name
            for name, condition, *_ in rules(kind)
            if condition.split("=")[0] != "has_validation"
        }
    assert {name.replace("_", "-") for name in ruled} == case_flags


def test_a_run_that_goes_on_keeps_what_it_began_with():
    check_effects(TuneSettings(full=True, lora_alpha=8.0, resume=True))
    check_validation(TrainSettings(patience=3, resume=True), False)


def test_rates_that_rise_to_their_end_are_refused():
    with pytest.raises(InputError, match=r"--lr-min 0\.1 is more than the peak, --lr 0\.01"):
        make_schedule(TrainSettings(lr=0.01, lr_min=0.1), 10)


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(InputError, match="--lr 0 trains nothing; it must be more than 0"):
        check_effects(TuneSettings(lr=0.0))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("data {split} -m m.gguf --val-split 0.2", "--val-split has no effect with the valid file"),
        ("data {split} -m m.gguf --train-on last --no-mask-prompt", "--train-on has no effect with"),
        ("eval m.gguf --data {split} --val-split 0.2", "--val-split has no effect without --split"),
        ("eval m.gguf --data {split} --split valid --val-split 0.2", "no effect with the valid file"),
    ],
)  # fmt: skip
def test_commands_that_read_data_refuse_it_too(tmp_path, capsys, flags, line):
    split = split_folder(tmp_path)
    assert line in refusal_line(capsys, flags.format(split=split).split())


@pytest.mark.parametrize(
    "flags", [["--patience", "2"], ["--steps-per-eval", "5"], ["--val-batches", "1"]]
)
def test_nothing_validates_without_validation_data(data, tmp_path, capsys, flags):  # noqa: F811
    split_flags = ["--val-split", "0", *flags]
    line = refusal_line(capsys, train_arguments(data, tmp_path / "m.gguf", *split_flags))
    assert f"{flags[0]} has no effect without validation data" in line
    assert "has no effect" in refusal_line(
        capsys, ["plan", *train_arguments(data, tmp_path / "m.gguf", *split_flags)]
    )


# ---- resuming


def about(settings, fingerprint="aa bb", sources=None, **changes):
    """What a checkpoint says of a run with these settings."""
    saved_fields = {
        f.name: getattr(settings, f.name)
        for f in fields(settings)
        if f.name not in resumable_names(type(settings))
    }
    paths = {"data": "/x/chats.jsonl", "model": "/x/base.gguf"} | (sources or {})
    record = {
        **saved_fields,
        "data": fingerprint,
        "sources": paths,
        "steps": 9,
        "rows": 4,
        **changes,
    }
    return json.loads(json.dumps(record, default=str))


STARTED_SETTINGS = TuneSettings(lr=1e-3)
CHANGES = (
    (about(TuneSettings(lr=2e-3)), ["--lr was 0.001 and is 0.002"]),
    (about(TuneSettings()), ["--lr was 0.001 and is not given"]),
    (about(TuneSettings(lr=1e-3, pack=False)), ["--pack was on and is off"]),
    (about(TuneSettings(lr=1e-3, lora_rank=("4", "attn_q=8"))), ["--lora-rank was 16 and is 4 attn_q=8"]),
    (about(STARTED_SETTINGS, "cc bb"), ["the data chats.jsonl has changed since it began"]),
    (about(STARTED_SETTINGS, "cc bb", {"data": "/x/b.jsonl"}), ["--data was /x/chats.jsonl and is /x/b.jsonl"]),
    (about(STARTED_SETTINGS, "aa bb", {"data": "/y/chats.jsonl"}), []),  # the same, elsewhere
    (about(STARTED_SETTINGS, "cc dd"), ["the base base.gguf is not the file it began with"]),
    (about(TuneSettings(lr=1e-3, ctx=64), "cc bb"), ["--ctx was not given and is 64"]),
    (about(STARTED_SETTINGS, rows=2), ["its order of additions (rows) was 4 and is 2"]),
    (about(TuneSettings(lr=1e-3, batch_size=2), rows=2), ["--batch-size was 0 and is 2"]),
    (about(STARTED_SETTINGS, steps=20), []),
)  # fmt: skip


@pytest.mark.parametrize(("now", "lines"), CHANGES)
def test_what_changed_is_named_by_flag_or_file(now, lines):
    assert differences(about(STARTED_SETTINGS), now, TuneSettings) == lines


def test_checkpoints_of_older_versions_are_compared_by_what_they_know():
    older_record = about(STARTED_SETTINGS)
    del older_record["sources"], older_record["pack"], older_record["lora_rank"]
    older_record["gone"] = 7
    assert differences(older_record, about(STARTED_SETTINGS), TuneSettings) == []
    assert differences(older_record, about(STARTED_SETTINGS, "cc bb"), TuneSettings) == [
        "the data chats.jsonl has changed since it began"
    ]
    text = "the data chats.jsonl or the vocabulary v.gguf has changed since it began"
    vocab = about(TrainSettings(), "cc", {"vocab": "/x/v.gguf"})
    assert differences(about(TrainSettings(), "aa", {"vocab": None}), vocab, TrainSettings)[
        0
    ].startswith("--vocab was")
    old_record = about(TrainSettings(), "aa", {"vocab": "/x/v.gguf"})
    assert differences(old_record, vocab, TrainSettings) == [text]


def test_a_run_that_never_began_cannot_go_on(tmp_path, capsys):
    for words in (["train"], ["finetune"], ["finetune", "base.gguf"]):
        line = refusal_line(capsys, [*words, "-o", str(tmp_path / "m.gguf"), "--resume"])
        assert (
            f"--resume: {tmp_path / 'm.run'} holds no run to continue; -o names its model" in line
        )


def test_a_misspelt_file_of_data_is_answered_by_the_one_that_is_there(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("a text")
    words = ["train", "--data", str(tmp_path / "note.txt")]
    assert refusal_line(capsys, words).endswith("note.txt does not exist; did you mean notes.txt?")


def test_a_data_set_of_a_hub_and_a_cut_model_are_to_be_downloaded(tmp_path, capsys):
    address = "https://huggingface.co/datasets/openai/gsm8k"
    for name in ("openai/gsm8k", address):
        line = refusal_line(capsys, ["train", "--data", name])
        assert line.endswith("hf download --repo-type dataset openai/gsm8k --local-dir gsm8k")
    assert refusal_line(capsys, ["train", "--data", "texts/a.txt"]).endswith("does not exist")
    cut_model = tmp_path / "cut.gguf"
    cut_model.write_bytes(b"GGUF" + struct.pack("<IQQI", 3, 1, 9, 1))
    assert refusal_line(capsys, ["inspect", str(cut_model)]).endswith("left; download it again")


def test_a_changed_file_is_named_when_a_run_goes_on(data, tmp_path, capsys):  # noqa: F811
    data_copy = tmp_path / "mine.txt"
    shutil.copyfile(data, data_copy)
    output = tmp_path / "m.gguf"
    assert main(train_arguments(data_copy, output, "--iters", "1")) == 0
    data_copy.write_text(data_copy.read_text()[:-40])
    line = refusal_line(capsys, ["train", "-o", str(output), "--resume"])
    assert (
        f"{tmp_path / 'm.run'} cannot continue: the data mine.txt has changed since it began;"
        in line
    )
    other_file = tmp_path / "other.txt"
    other_file.write_text(data_copy.read_text())
    line = refusal_line(capsys, ["train", "-o", str(output), "--resume", "--data", str(other_file)])
    assert f"--data was {data_copy} and is {other_file};" in line
    assert main(["train", "-o", str(output), "--resume", "--overwrite"]) == 2


# ---- disks


def test_a_run_is_refused_where_the_disk_has_no_room(data, tmp_path, capsys, monkeypatch):  # noqa: F811
    free = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    line = refusal_line(capsys, train_arguments(data, tmp_path / "m.gguf"), code=1)
    assert f"{tmp_path}: the run needs " in line and "1.0 MiB are free" in line, line
    assert "two checkpoints" in line and "m.gguf" in line and "--output" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extra_flags", [[], ["--patience", "2", "--steps-per-eval", "2"]])
def test_what_a_run_writes_is_known_before_it(data, tmp_path, monkeypatch, extra_flags):  # noqa: F811
    planned: list[tuple[Path, str, int]] = []
    monkeypatch.setattr(
        "packtrain.workflows.run_training.check_space",
        lambda job, plans, extra_files: planned.extend(run_files(job, plans)),
    )
    output = tmp_path / "m.gguf"
    assert (
        main(train_arguments(data, output, "--iters", "6", "--save-every", "2", *extra_flags)) == 0
    )
    actual_nbytes = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    best = (
        (tmp_path / "m.run/best.gguf").stat().st_size if extra_flags else 0
    )  # once more while replaced
    logs = disk_space.LOGS_NBYTES
    needed = sum(nbytes for *_, nbytes in planned)
    # checkpoints name their leaves and settings: a few KB beside the values
    assert needed - logs - 200_000 < actual_nbytes + best < needed


def test_checkpoints_that_are_there_need_no_more_room(tmp_path):
    job = SimpleNamespace(
        settings=SimpleNamespace(
            folder=tmp_path, patience=0, save_every=20, save_name="", save_model=""
        ),
        steps=50,
        model=SimpleNamespace(output_files=lambda: {tmp_path / "m.gguf": 100}),
    )
    leaves = [weight("w", (1000,)), state("m/w", (1000,)), state("g/w", (1000,), role="sum")]
    leaves.append(state("cache.k", (9,), role="cache"))
    plans = SimpleNamespace(
        resident_leaves={leaf.name: leaf for leaf in leaves}, trained_names=["w"]
    )
    plans.checkpoint_tensors = TrainingPlans.checkpoint_tensors.fget(plans)  # type: ignore[attr-defined]
    sizes = {label: nbytes for _, label, nbytes in run_files(job, plans)}  # type: ignore[arg-type]
    assert sizes == {"two checkpoints": 16000, "m.gguf": 100, "logs": disk_space.LOGS_NBYTES}
    (tmp_path / "checkpoint.gguf").write_bytes(bytes(8000))
    sizes = {label: nbytes for _, label, nbytes in run_files(job, plans)}  # type: ignore[arg-type]
    assert sizes["two checkpoints"] == 8000
    job.settings.save_name = job.settings.save_model = "ITERATION.gguf"
    sizes = {label: nbytes for _, label, nbytes in run_files(job, plans)}  # type: ignore[arg-type]
    assert sizes["numbered checkpoints"] == 3 * 8000
    assert sizes["numbered models"] == 3 * (4000 + HEAD_NBYTES)
    check_space(job, plans)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "saved"), [(None, "no step is saved yet"), (40, "step 40 is saved")]
)
def test_a_full_disk_says_how_to_go_on(tmp_path, step, saved):
    checkpoint = tmp_path / "checkpoint.gguf"
    if step is not None:
        save(checkpoint, TrainingProgress(step), {"steps": 50}, {})
    full = OSError(errno.ENOSPC, "No space left on device", "m.gguf")
    with pytest.raises(DiskFull) as error, resumable(checkpoint, "packtrain train --resume"):
        raise full
    line = (
        f"m.gguf: no space left on device; {saved}; make room, then continue with: packtrain train"
    )
    assert str(error.value) == f"{line} --resume"
    with pytest.raises(PermissionError), resumable(checkpoint, ""):
        raise PermissionError(errno.EACCES, "no")


def test_a_disk_that_fills_during_the_run(data, tmp_path, capsys, monkeypatch):  # noqa: F811
    output, real = tmp_path / "m.gguf", os.fsync
    with signal_after(3):
        assert main(train_arguments(data, output, "--iters", "9")) == 130

    def full(number: int) -> None:
        if "checkpoint" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    line = refusal_line(capsys, ["train", "-o", str(output), "--resume"], code=1)
    assert "no space left on device; step 3 is saved; make room, then continue with:" in line
    assert line.endswith(f"packtrain train -o {output} --resume")
    monkeypatch.setattr(os, "fsync", real)
    assert main(["train", "-o", str(output), "--resume"]) == 0


def test_no_room_for_tokens_is_a_failure_of_the_disk(tmp_path, monkeypatch, capsys):
    def full(recipe, folder, report, budget) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    request = json.dumps({"folder": str(tmp_path), "room": None})
    monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=lambda: request))
    token_cache.serve_request(dict, full, {"place": ""})
    assert json.loads(capsys.readouterr().out) == ["full", f"{tmp_path}: no space left on device"]


WITHOUT_ROOM = """
from packtrain.data import token_cache
from packtrain.kernels.runtime import loader

token_cache.serve_request(dict, lambda *request: loader.with_numba("norm"), {"place": "a.jsonl: row 3"})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be limited")
@pytest.mark.parametrize("mib", [2, 19])
def test_a_child_without_room_for_numba_says_what_needs_memory(mib, tmp_path):
    """At 19 MiB it is llvmlite's library that finds none: an OSError without a number."""
    request = json.dumps({"folder": str(tmp_path), "room": mib << 20})
    command = [sys.executable, "-c", WITHOUT_ROOM]
    child = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    kind, sentence = json.loads(child.stdout)
    assert kind == "error" and f"row 3 needs more memory to be read than the {mib} MiB" in sentence


@pytest.mark.parametrize(
    "error, room, lacks_memory",
    [
        (OSError("Could not find/load shared object file"), 1, True),
        (OSError(errno.ENOMEM, "Cannot allocate memory", "numba/core"), 1, True),
        (ImportError("failed to map segment from shared object"), 1, True),
        (SystemError("error return without exception set"), 1, True),
        (ImportError("cannot import name"), None, False),
        (OSError(errno.EACCES, "Permission denied", "a.jsonl"), 1, False),
    ],
)
def test_what_a_child_raises_for_lack_of_memory(error, room, lacks_memory):
    assert token_cache._is_lack_of_memory(error, room) == lacks_memory


# ---- files that would be lost


def test_a_picture_never_replaces_what_a_run_reads(data, tmp_path, capsys):  # noqa: F811
    data_copy = tmp_path / "mine.txt"
    shutil.copyfile(data, data_copy)
    line = refusal_line(
        capsys, ["plan", "train", "--data", str(data_copy), "--json", str(data_copy)]
    )
    assert f"--json: {data_copy} is one of the files that are read; give another name" in line
    assert data_copy.read_text() == data.read_text()


def test_a_result_never_replaces_the_data_it_is_made_of(data, tmp_path, capsys):  # noqa: F811
    data_copy = tmp_path / "mine.txt"
    shutil.copyfile(data, data_copy)
    settings = f"--dim 32 --layers 1 --iters 1 --overwrite -o {data_copy}".split()
    for data_path in (data_copy, tmp_path):
        line = refusal_line(capsys, ["train", "--data", str(data_path), *settings])
        assert f"--output: {data_copy} is one of the files that are read; give another name" in line
    assert data_copy.read_text() == data.read_text()


CONVERT = {
    "--type f16 --base m.gguf": "--type has no effect with --base",
    "-o x.gguf --base m.gguf --peft out": "--output has no effect with --peft",
    "--overwrite --base m.gguf --peft out": "--overwrite has no effect with --peft",
    "--peft out": "--peft: --base must be given",
}


@pytest.mark.parametrize("flags", CONVERT)
def test_convert_refuses_what_would_be_ignored(flags, tmp_path, capsys):
    assert CONVERT[flags] in refusal_line(capsys, ["convert", str(tmp_path), *flags.split()])
