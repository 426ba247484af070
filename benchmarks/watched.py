"""A command, watched from outside: exit code, output, seconds, and its most private memory with its children."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

from packtrain.common.mapped_file import MappedFile
from packtrain.common.memory import private_nbytes

SAMPLE_SECONDS = 0.005  # at least; a sample of a process with children takes up to 5 ms of a core


def private_nbytes_of(pid: int) -> int:
    """Return the private memory of a process and all its descendants; 0 after the process has ended.

    A child between fork and exec still shares its parent's memory, which is not counted twice.
    """
    try:
        root_process = psutil.Process(pid)
        command, nbytes = root_process.cmdline(), private_nbytes(pid)
        descendants = root_process.children(recursive=True)
    except psutil.Error:
        return 0
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            is_counted = process.cmdline() != command
            nbytes += private_nbytes(process.pid) if is_counted else 0
    return nbytes


class WatchedRun(NamedTuple):
    """A command that has ended: `out` and `said` are its standard output and error, `peak` is in bytes.

    `pages` is the most that files had in memory, and `resident` the most of both at one moment.
    """

    code: int
    out: str
    said: str
    peak: int
    seconds: float
    pages: int = 0
    resident: int = 0


def written_nbytes(output: Path) -> int:
    """Return the bytes of pages in memory of a file that is being written under a temporary name."""
    nbytes = 0
    for path in output.parent.glob(f".{output.name}.*.part"):
        with contextlib.suppress(OSError, ValueError):  # renamed by now, or still empty
            nbytes += MappedFile(path).resident_nbytes()
    return nbytes


def run_watched(
    *command: object,
    typed: str = "",
    variables: Mapping[str, str] = {},
    mapped: Path | None = None,
    written: Path | None = None,
) -> WatchedRun:
    """Run a command with `typed` on its standard input, and with these variables in its environment.

    mapped   a file whose pages in memory are watched, too
    written  a file whose pages are watched while it is written
    """
    watched_file, pages, resident = mapped and MappedFile(mapped), 0, 0
    if watched_file:
        watched_file.release_all()  # what another program left in memory is not the command's
    with ExitStack() as stack:
        stdin_file, *outputs = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        stdin_file.write(typed)
        stdin_file.seek(0)
        start_time, peak = time.monotonic(), 0
        process = subprocess.Popen(
            [*map(str, command)],
            stdin=stdin_file,
            stdout=outputs[0],
            stderr=outputs[1],
            env={**os.environ, **variables},
        )
        try:
            while process.poll() is None:
                sample_start = time.monotonic()
                private = private_nbytes_of(process.pid)
                nbytes = watched_file.resident_nbytes() if watched_file else 0
                nbytes += written_nbytes(written) if written else 0
                peak, pages = max(peak, private), max(pages, nbytes)
                resident = max(resident, private + nbytes)
                # no more than a quarter of a core, or the command takes longer for being watched
                time.sleep(max(SAMPLE_SECONDS, 3 * (time.monotonic() - sample_start)))
        finally:
            process.kill()
        seconds = time.monotonic() - start_time
        for file in outputs:
            file.seek(0)
        stdout_text, said = (file.read() for file in outputs)
    return WatchedRun(process.returncode, stdout_text, said, peak, seconds, pages, resident)


def run_packtrain(
    *arguments: object,
    typed: str = "",
    variables: Mapping[str, str] = {},
    mapped: Path | None = None,
    written: Path | None = None,
) -> WatchedRun:
    """One of packtrain's commands, watched."""
    command = sys.executable, "-m", "packtrain", *arguments
    return run_watched(*command, typed=typed, variables=variables, mapped=mapped, written=written)
