"""The memory that a run takes beside the one that was planned for it, without --memory."""

import json
import os
import pty
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from packtrain.engine.executor import Session
from packtrain.planner.training_plans import BOUND_NBYTES
from tests.kill import RUN_KINDS, sample_chats
from tests.real import BASE
from tests.test_budget import deep_shape, make_request

# prints the modules that are loaded after the plan is shown
WATCHED = """
import sys
from packtrain.cli.main import main
from packtrain.cli import event_output

known = set()

class Noting(event_output.TerminalEvents):
    def plan(self, ready):
        super().plan(ready)
        known.update(sys.modules)

event_output.TerminalEvents = Noting
code = main(sys.argv[1:])
print(*sorted(set(sys.modules) - known))
sys.exit(code)
"""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("kind", RUN_KINDS)
def test_a_run_without_a_budget_stays_within_its_plan(
    kind: str, terminal: bool, tmp_path: Path
) -> None:
    """A module that is loaded inside the plan takes memory that nothing counts: 6 MiB where it has to be compiled."""
    RUN_KINDS[kind].prepare(tmp_path)
    run_flags = ["--iters", "12", "--steps-per-eval", "4", "-o", str(tmp_path / "m.gguf")]
    command = [sys.executable, "-c", WATCHED, *RUN_KINDS[kind].flags(tmp_path), *run_flags]
    inside, outside = pty.openpty() if terminal else os.pipe()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=outside, env=env, text=True
        ) as process,
        open(inside, "rb", buffering=0) as said,
    ):
        os.close(outside)
        text = b""
        while part := _read(said.fileno()):
            text += part
        late_modules = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0, text.decode()
    assert not late_modules.split(), "loaded inside the plan"
    end = json.loads((tmp_path / "m.run/metrics.jsonl").read_text().splitlines()[-1])
    assert end["peak_bytes"] <= end["planned_bytes"], end


@pytest.mark.real
@pytest.mark.parametrize("budget", [[], ["--memory", "500MiB"]])
def test_a_run_on_the_real_base_stays_within_its_plan(budget: list[str], tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(sample_chats())
    data = ["--data", str(tmp_path / "chats.jsonl"), "-o", str(tmp_path / "m.gguf")]
    short_flags = ["--iters", "2", "--merge", "none", *budget]
    command = [sys.executable, "-m", "packtrain", "finetune", str(BASE), *data, *short_flags]
    subprocess.run(command, check=True, capture_output=True)
    end = json.loads((tmp_path / "m.run/metrics.jsonl").read_text().splitlines()[-1])
    assert end["peak_bytes"] <= end["planned_bytes"], end


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except OSError:  # a terminal whose other end is closed
        return b""


def test_a_plan_counts_what_executors_take() -> None:
    """The bytes of each call in a deep model, where they are megabytes together."""
    plans = make_request().make_plans(deep_shape(24))
    tracemalloc.start()
    try:
        executors = Session().executors(plans.placed_graphs, plans.plans)
        python = tracemalloc.DomainFilter(
            True, 0
        )  # not NumPy's buffers, which hold what is planned
        traces = tracemalloc.take_snapshot().filter_traces([python]).traces
        nbytes = sum(trace.size for trace in traces)
    finally:
        tracemalloc.stop()
    assert executors and plans.calls > 2000
    assert nbytes <= BOUND_NBYTES * plans.calls, f"{nbytes / plans.calls:.0f} bytes a call"
