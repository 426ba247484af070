"""--quiet and --log-json: what a run prints, and where."""

import json
from pathlib import Path

import pytest

from packtrain.cli.main import main
from packtrain.kernels.runtime import environment

SETTINGS = {
    "dim": 32, "layers": 1, "heads": 2, "kv-heads": 2, "ffn": 32, "ctx": 16, "vocab-size": 280, "iters": 3,
    "steps-per-eval": 2, "save-every": 2, "data": "notes.txt",
}  # fmt: skip
TINY_RUN = ["train", *(f"--{name}={value}" for name, value in SETTINGS.items())]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "is_quiet", False)
    Path("notes.txt").write_text("one two three four\n" * 200)
    return tmp_path


def test_quiet_prints_nothing_but_errors(folder, capsys):
    assert main([*TINY_RUN, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert Path("model.gguf").exists()
    assert main([*TINY_RUN, "--quiet"]) == 2
    assert "packtrain: error: " in capsys.readouterr().err


def test_log_json_prints_lines_of_json_beside_the_messages(folder, capsys):
    assert main([*TINY_RUN, "--log-json"]) == 0
    printed = capsys.readouterr()
    events = [json.loads(line) for line in printed.out.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [(step["step"], step["steps"]) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    metrics = Path("model.run/metrics.jsonl").read_text().splitlines()
    for step, line in zip(steps, metrics[:3], strict=True):
        assert json.loads(line).items() <= step.items() and step["peak_nbytes"] > 0
    assert "val_loss" in steps[1]
    kinds = {event["event"] for event in events}
    assert {"message", "plan", "checkpoint", "step"} <= kinds
    messages = [event["text"] for event in events if event["event"] == "message"]
    assert messages and all(message in printed.err for message in messages)
    assert "step 3/3" in printed.err


def test_both_together_print_json_alone(folder, capsys):
    assert main([*TINY_RUN, "--log-json", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and all(map(json.loads, printed.out.splitlines()))
