"""What benchmarks see of a command from outside."""

import sys

import pytest

from benchmarks.watched import run_watched

MIB = 1 << 20
GRANDCHILD = "import time; held = bytearray(b'x') * (40 << 20); time.sleep(0.5)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"


def test_memory_of_children_counts() -> None:
    done = run_watched(sys.executable, "-c", CHILD)
    assert done.code == 0
    assert 40 * MIB < done.peak < 100 * MIB
    assert done.seconds > 0.5


def test_input_output_and_exit_code() -> None:
    program = "import os, sys; print(input() + os.environ['WORD']); print('no', file=sys.stderr); sys.exit(3)"
    done = run_watched(sys.executable, "-c", program, typed="yes\n", variables={"WORD": "!"})
    assert (done.code, done.out, done.said) == (3, "yes!\n", "no\n")


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run_watched("packtrain-that-is-not-there")
