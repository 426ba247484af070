"""`packtrain runs`: what state a run is in, and a table as wide as the terminal."""

import json
import os
from pathlib import Path

import pytest

from packtrain.common.files import file_lock
from packtrain.training.monitoring import RUN_LOCK
from packtrain.training.monitoring.history import QUIET_MERGE, QUIET_SECONDS, RunHistory
from packtrain.training.monitoring.run_folders import comparison_rows, lines

STEP = {"step": 3, "loss": 1.5, "tokens": 30, "seconds": 3.0}


def make_history(
    folder: Path, *records: dict[str, object], age: float, merge: bool = True
) -> RunHistory:
    """A run whose files were written so many seconds ago."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "run.yaml").write_text("merge: calibrated\n" if merge else "preset: 1m\n")
    for file in folder.iterdir():
        now = file.stat().st_mtime
        os.utime(file, (now - age, now - age))
    history = RunHistory(folder, folder.name)
    history.refresh(1)
    return history


@pytest.mark.parametrize(
    ("records", "age", "merge", "state"),
    [
        ([STEP], 0, True, "running"),
        ([STEP], 2 * QUIET_SECONDS, True, "stopped"),
        ([STEP | {"loss": float("nan")}], 0, True, "failed"),
        ([STEP, {"step": 3, "event": "end"}], 2 * QUIET_SECONDS, True, "running"),
        ([STEP, {"step": 3, "event": "end"}], 2 * QUIET_MERGE, True, "unmerged"),
        ([STEP, {"step": 3, "event": "end"}], 2 * QUIET_MERGE, False, "done"),
    ],
)
def test_the_state_of_a_run(records, age, merge, state, tmp_path: Path) -> None:
    assert make_history(tmp_path / "a.run", *records, age=age, merge=merge).state() == state


def test_a_lock_tells_whether_a_run_is_alive(tmp_path: Path) -> None:
    """A stopped run is not running, however young its last record, and a slow one is, however old."""
    end = {"step": 3, "event": "end"}
    for name, age, record, dead_state in (
        ("slow", 2 * QUIET_MERGE, STEP, "stopped"), ("young", 0.0, STEP, "stopped"), ("merge", 0.0, end, "unmerged"),
    ):  # fmt: skip
        history = make_history(tmp_path / f"{name}.run", STEP, record, age=age, merge=True)
        with file_lock(history.folder / RUN_LOCK, "the run"):
            assert history.state() == "running"
        assert history.state() == dead_state


def test_a_run_is_done_once_its_merge_has_ended(tmp_path: Path) -> None:
    history = make_history(
        tmp_path / "a.run", STEP, {"step": 3, "event": "end"}, age=2 * QUIET_MERGE
    )
    (tmp_path / "a.run/Modelfile").write_text("FROM ../a.gguf\n")
    assert history.state() == "done"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_is_as_wide_as_the_terminal(width: int, tmp_path: Path) -> None:
    run_folders = [make_history(tmp_path / f"{name}.run", STEP, age=0) for name in "ab"]
    table = [*lines(comparison_rows(run_folders), width)]
    assert max(map(len, table[:-1])) <= width
    assert table[-1].endswith(": a wider terminal, --json or --html") and "last record" in table[-1]
    assert len([*lines(comparison_rows(run_folders))]) == 3
