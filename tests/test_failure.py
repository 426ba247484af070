"""The failure rules: signals are flags, bad steps are skipped and named, the third in a row ends the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.common.signals import stop_on_signals
from packtrain.engine.optim import AdamW, training_graph
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training.training_engine import MAX_BAD_STEPS, NotFinite, TrainingEngine
from tests.models import CONFIG, seeded_batch, seeded_weights

ROOT = Path(pt.__file__).parents[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_a_flag_and_second_leaves(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stopped:
        assert not stopped()
        os.kill(os.getpid(), number)
        assert stopped()
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_run_ends_between_two_steps():
    y = pt.input("x", (4,))
    for _ in range(5):
        y = pt.neg(y)
    run = pt.Session().executor(pt.place(pt.Graph({"y": y})))
    with stop_on_signals() as stopped:
        run({"x": np.ones(4)}, stop=stopped)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(pt.Stopped, match="stopped before neg"):
            run({"x": np.ones(4)}, stop=stopped)


def step_of_one_weight():
    x, w = pt.input("x", (3,)), pt.weight("w", (3,))
    loss = pt.sum(pt.log(pt.mul(x, w)))
    optimizer = AdamW()
    session = pt.Session()
    run = session.executor(pt.place(training_graph({"loss": loss}, [w], optimizer, max_norm=1.0)))
    session.set({"w": np.ones(3)})
    return session, run, optimizer.inputs(1)


def test_a_bad_step_changes_nothing_and_is_named():
    session, run, hyper = step_of_one_weight()
    bad = hyper | {"x": np.array([1.0, -1.0, 1.0])}
    run(bad)
    diagnosis = run.diagnose(bad)
    assert diagnosis is not None and diagnosis.startswith(
        "log: log is nan at [1]\n  at test_failure.py:"
    )
    for name in ("w", "m/w", "v/w"):
        assert (session.get(name) == (name == "w")).all()


def test_good_steps_reset_the_count_and_three_bad_ones_raise():
    engine = TrainingEngine(make_plans(StepShape(CONFIG, 2, 16, max_norm=1.0), AdamW()), AdamW())
    engine.session.set(seeded_weights(CONFIG))
    good = seeded_weights(CONFIG)
    huge = {"output_norm.weight": np.full_like(good["output_norm.weight"], 3e38)}

    def is_bad(weights: dict[str, np.ndarray]) -> bool:
        engine.session.set(weights)
        return engine.step([seeded_batch(CONFIG, 2, 16)], 1, 1e-3).skip_reason is not None

    assert [*map(is_bad, (huge, huge, good, huge, huge))] == [True, True, False, True, True]
    assert engine.num_bad_steps == MAX_BAD_STEPS - 1
    with pytest.raises(NotFinite, match="3 steps in a row"):
        is_bad(huge)


def test_a_job_in_the_background_ignores_ctrl_c(tmp_path: Path) -> None:
    """A shell has it do so; the modules of the command load under the same rule."""
    code = f"""import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:0] = [{str(ROOT)!r}]
import packtrain_command
from packtrain.cli import main as cli
load = cli._command_module
cli._command_module = lambda name: os.kill(os.getpid(), signal.SIGINT) or load(name)
sys.argv[1:] = ["inspect", "none.gguf"]
sys.exit(packtrain_command.main())"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 2 and "no such file or directory" in process.stderr


def test_ctrl_c_during_imports_leaves_quietly(tmp_path: Path) -> None:
    (tmp_path / "packtrain/cli").mkdir(parents=True)
    for folder in ("packtrain", "packtrain/cli"):
        (tmp_path / folder / "__init__.py").touch()
    slow = "import os, signal; os.kill(os.getpid(), signal.SIGINT); import nowhere"
    (tmp_path / "packtrain/cli/main.py").write_text(slow)  # in the place of what takes a second
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import packtrain_command as p; p.main()"
    process = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "")
