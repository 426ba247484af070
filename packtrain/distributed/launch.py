"""Starts the ranks of a run on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from types import FrameType
from typing import IO

from packtrain.distributed.heartbeat import PARENT_VARIABLE

GRACE_SECONDS = 25.0  # seconds in which ranks find out by themselves that a signal ended another
SHORT_SECONDS = 5.0  # seconds after a rank has reported an error; a rank that hangs cannot know
POLL_SECONDS = 0.05
SIGNALS = signal.SIGINT, signal.SIGTERM


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `packtrain ARGUMENTS` in `count` processes, pass signals on, show rank 0's output; return the first exit code
    that is not 0, else 0. If another rank fails and rank 0 reports no error, print the other ranks' error output."""
    port = free_port()
    command = [sys.executable, "-m", "packtrain", *arguments]
    with TemporaryFile() as output:  # output of the other ranks, which print what rank 0 prints
        ranks = [_start(command, _environment(rank, count, port), output) for rank in range(count)]
        exit_code = _wait_for_exit_code(ranks)
        if exit_code and ranks[0].returncode <= 0:
            output.seek(0)
            print(output.read().decode(errors="replace"), end="", file=sys.stderr)
    return exit_code


def _wait_for_exit_code(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for ranks, kill the rest, print which a signal ended; return the first error's code (signal: 1), or 0."""
    try:
        with _forward_signals(processes):
            _wait_for_ranks(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    exit_codes = [process.returncode for process in processes]
    for rank, exit_code in enumerate(exit_codes):
        if exit_code < 0:
            print(f"packtrain: rank {rank} was ended by signal {-exit_code}", file=sys.stderr)
    return next((exit_code if exit_code > 0 else 1 for exit_code in exit_codes if exit_code), 0)


def _environment(rank: int, count: int, port: int) -> Mapping[str, str]:
    """Return this process's environment with the variables by which `rank` finds the other ranks at local `port`."""
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PARENT_VARIABLE: str(os.getpid()),
    }  # fmt: skip
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return {**os.environ, **variables}


def _start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a rank in its own session, so that Ctrl-C reaches it once, from here; `output`: stderr of ranks above 0."""
    is_first_rank = environment["RANK"] == "0"
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=None if is_first_rank else subprocess.DEVNULL,
        stderr=None if is_first_rank else output, start_new_session=True,
    )  # fmt: skip


def _wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have ended: after an error at most SHORT_SECONDS, after a signal GRACE_SECONDS."""
    until = float("inf")
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
        failed = [exit_code for exit_code in codes if exit_code]
        if failed:
            grace = SHORT_SECONDS if any(exit_code > 0 for exit_code in failed) else GRACE_SECONDS
            until = min(until, time.monotonic() + grace)
        time.sleep(POLL_SECONDS)


@contextmanager
def _forward_signals(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Forward SIGINT and SIGTERM to the ranks during the block, instead of ending this process."""

    def send(signal_number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(signal_number)

    old_handlers = {signal_number: signal.signal(signal_number, send) for signal_number in SIGNALS}
    try:
        yield
    finally:
        for signal_number, handler in old_handlers.items():
            signal.signal(signal_number, handler)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
