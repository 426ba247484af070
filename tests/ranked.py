"""Runs of several ranks, for tests and benchmarks."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from packtrain import distributed
from packtrain.gguf import GGUF
from packtrain.training.monitoring import metrics_file
from tests.hosts import Hosts
from tests.kill import RESULT_NAMES, TINY_FLAGS

COMMON_FLAGS = ["--no-tensorboard", "-t", "1"]
Started = list["subprocess.Popen[str]"]


def train_command(folder: Path, name: str, *extra_flags: str) -> list[str]:
    files = ["--data", str(folder / "text.txt"), "-o", str(folder / f"{name}.gguf")]
    return [
        sys.executable,
        "-m",
        "packtrain",
        "train",
        *files,
        *TINY_FLAGS,
        *COMMON_FLAGS,
        *extra_flags,
    ]


def run_checked(command: list[str], code: int = 0, **environment: str) -> str:
    process = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert process.returncode == code, process.stderr
    return process.stderr


def metric_values(folder: Path, name: str, key: str = "loss") -> np.ndarray:
    records = metrics_file.read(folder / f"{name}.run/metrics.jsonl")
    return np.array([record[key] for record in records if key in record])


def assert_same_runs(folder: Path, one: str, other: str, *, norms: bool = True) -> None:
    """Weights, moments and losses are equal, bit for bit; and the norms of gradients."""
    for result in RESULT_NAMES:
        a, b = (GGUF(folder / result.format(name)) for name in (one, other))
        assert a.entries.keys() == b.entries.keys()
        for name in a.entries:
            assert a.array(name).tobytes() == b.array(name).tobytes(), name
    for key in ("loss", "grad_norm", "val_loss")[:: 1 if norms else 2]:
        assert (
            metric_values(folder, one, key).tolist() == metric_values(folder, other, key).tolist()
        )


def assert_close_runs(folder: Path, one: str, other: str, steps: int) -> None:
    for key, count in (("loss", steps), ("val_loss", steps // 50)):
        a, b = metric_values(folder, one, key), metric_values(folder, other, key)
        assert len(a) == len(b) == count
        assert np.all(np.abs(a - b) <= 1e-5 * a), np.max(np.abs(a - b) / a)


def by_hand(command: Sequence[str], *each: Sequence[str], on: Hosts | None = None) -> Started:
    """A rank for each list of more arguments, as torchrun starts them; each on a host of its own if there are any."""
    port, started = distributed.free_port(), []
    for rank, extra_args in enumerate(each):
        rank_env = {"RANK": str(rank), "WORLD_SIZE": str(len(each)), "MASTER_PORT": str(port)}
        rank_env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        full_command = [*command, *extra_args]
        if on is not None:
            rank_env, full_command = (
                on.environment(rank, len(each), port),
                on.command(rank, full_command),
            )
        started.append(
            subprocess.Popen(
                full_command, stderr=subprocess.PIPE, text=True, env={**os.environ, **rank_env}
            )
        )
    return started


def wait_for_checkpoints(checkpoint: Path, started: Started) -> None:
    """Until a run has saved twice."""
    while not checkpoint.with_suffix(".previous.gguf").exists():
        assert all(process.poll() is None for process in started), last_errors(started, 30)
        time.sleep(0.05)


def last_errors(started: Started, seconds: float) -> list[str]:
    """What the ranks say at last; each must end, and fail, within so many seconds."""
    until, last_lines = time.monotonic() + seconds, []
    for process in started:
        said = process.communicate(timeout=max(until - time.monotonic(), 0))[1]
        assert process.returncode != 0
        last_lines.append(said.splitlines()[-1] if said else "")
    return last_lines
