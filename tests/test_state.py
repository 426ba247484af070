"""Checkpoints: whole or not there, checked when read, the one before kept."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.training import checkpoints
from packtrain.training.checkpoints import TrainingProgress
from packtrain.workflows.run_training import outcome

ARRAYS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "m/w": np.zeros((3, 4), np.float32)}


def save_checkpoint(path, step=7, **about):
    progress = TrainingProgress(step, tokens=(1 << 40) + step, seconds=1.5, best=math.inf)
    checkpoints.save(path, progress, {"lr": 0.1, "steps": 9, **about}, ARRAYS)
    return progress


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    path = tmp_path / "checkpoint.gguf"
    progress = save_checkpoint(path)
    said = []
    checkpoint = checkpoints.load_checkpoint(path, said.append)
    assert (
        checkpoint is not None
        and checkpoint.progress == progress
        and checkpoint.about == {"lr": 0.1, "steps": 9}
    )
    for name, array in ARRAYS.items():
        assert checkpoint.array(name).tobytes() == array.tobytes()
    assert said == [] and [f.name for f in tmp_path.iterdir()] == ["checkpoint.gguf"]


def test_the_one_before_is_kept_and_used_when_the_newest_is_damaged(tmp_path):
    path = tmp_path / "checkpoint.gguf"
    save_checkpoint(path, step=1)
    save_checkpoint(path, step=2)
    save_checkpoint(path, step=3)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "checkpoint.gguf",
        "checkpoint.previous.gguf",
    ]
    intact = path.read_bytes()
    for damaged in (intact[:-40], intact[:-40] + bytes([intact[-40] ^ 1]) + intact[-39:], b""):
        path.write_bytes(damaged)
        said = []
        checkpoint = checkpoints.load_checkpoint(path, said.append)
        assert checkpoint is not None and checkpoint.progress.step == 2
        assert len(said) == 1 and "checkpoint.gguf" in said[0] and "previous" in said[0]


def test_a_changed_number_is_noticed(tmp_path):
    path = tmp_path / "checkpoint.gguf"
    save_checkpoint(path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"step": 7', b'"step": 8'))
    with pytest.raises(InputError, match="checksum"):
        checkpoints.load_checkpoint(path, print)


def test_no_checkpoint_is_none_and_a_newer_one_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.gguf"
    assert checkpoints.load_checkpoint(path, print) is None
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    save_checkpoint(path)
    monkeypatch.setattr(checkpoints, "FORMAT", 1)
    pattern = r"checkpoint\.gguf: checkpoint format 2, which packtrain \d\S* reads; .* up to 1"
    with pytest.raises(InputError, match=pattern):
        checkpoints.load_checkpoint(path, print)


@pytest.mark.parametrize(
    "changed", [{"step": -1}, {"step": "7"}, {"best": None}, {"step": 1 << 70}, {"other": 1}]
)
def test_what_no_run_writes_is_refused_though_its_checksum_is_right(tmp_path, monkeypatch, changed):
    path = tmp_path / "checkpoint.gguf"
    monkeypatch.setattr(checkpoints, "asdict", lambda progress: asdict(progress) | changed)
    save_checkpoint(path)
    with pytest.raises(InputError, match=r"checkpoint\.gguf: its description of the run"):
        checkpoints.load_checkpoint(path, print)


def test_a_checkpoint_of_an_older_version_is_read(tmp_path, monkeypatch):
    path, new_fields = tmp_path / "checkpoint.gguf", ("best_step", "last")
    old_fields = {
        name: value for name, value in asdict(TrainingProgress(7)).items() if name not in new_fields
    }
    monkeypatch.setattr(checkpoints, "asdict", lambda progress: old_fields)
    save_checkpoint(path)
    checkpoint = checkpoints.load_checkpoint(path, print)
    assert checkpoint is not None and checkpoint.progress == TrainingProgress(7)


@pytest.mark.parametrize(
    ("losses", "best", "said"),
    [
        ((3.0, 2.0), False, "step 2, the last and best: validation loss 2.0000"),
        ((3.0, 2.0), True, "step 2, the last and best: validation loss 2.0000"),
        (
            (2.0, 3.0),
            True,
            "step 1, the best: validation loss 2.0000 (the last, step 2: 3.0000)",
        ),
        (
            (2.0, 3.0),
            False,
            "step 2, the last: validation loss 3.0000 (the lowest, step 1: 2.0000;",
        ),
        ((math.nan, math.nan), False, "step 2, the last; no validation loss was finite"),
    ],
)
def test_the_end_says_which_step_the_result_is_of(losses, best, said):
    progress = TrainingProgress()
    for loss in losses:
        progress = progress.after_step(10, 1.0).validated(loss)
    assert outcome(progress, best).startswith(f"the result is {said}")
    old_progress = replace(progress, best_step=0, last=math.inf)
    assert math.isnan(losses[0]) or f"loss {min(losses):.4f}" in outcome(old_progress, best)


def test_an_only_validation_has_no_best():
    progress = TrainingProgress().after_step(10, 1.0).validated(2.0)
    assert outcome(progress, False, has_several_evals=False) == (
        "the result is step 1, the last: validation loss 2.0000"
    )


def test_a_model_is_no_checkpoint(tmp_path):
    from packtrain.gguf import MetadataValue, write_gguf

    path = tmp_path / "checkpoint.gguf"
    write_gguf(path, {"general.architecture": MetadataValue("string", "llama")}, ARRAYS)
    with pytest.raises(InputError, match="not a checkpoint"):
        checkpoints.load_checkpoint(path, print)


def test_a_failed_save_leaves_both_files(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.gguf"
    save_checkpoint(path, step=1)
    save_checkpoint(path, step=2)

    def fail_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail_full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(path, step=3)
    checkpoint = checkpoints.load_checkpoint(path, print)
    assert checkpoint is not None and checkpoint.progress.step == 2
