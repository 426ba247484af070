"""Private memory: what a process allocates counts, what it only maps does not, and a peak is seen when it is over."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.watched import private_nbytes_of
from packtrain.common import memory
from packtrain.common.memory import MemoryPeak, private_nbytes, release_memory

MIB = 1 << 20
SLACK = 6 * MIB  # of what else happens in this process


@pytest.fixture(params=["kernel", "psutil"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to count, wherever the test runs; only Linux has the first."""
    if request.param == "kernel" and not memory.HAS_RSS_COUNTERS:
        pytest.skip("the kernel does not count private memory")
    monkeypatch.setattr(memory, "HAS_RSS_COUNTERS", request.param == "kernel")


@pytest.mark.usefixtures("source")
def test_what_is_touched_counts() -> None:
    release_memory()  # other tests may have left a heap with room for all of it
    before = private_nbytes()
    buffer = np.ones(64 * MIB, np.uint8)
    assert abs(private_nbytes() - before - buffer.nbytes) < SLACK
    del buffer
    release_memory()
    assert abs(private_nbytes() - before) < SLACK


GROWN = """
import numpy as np
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.engine.ops.arrays import copy_acc
x, y = np.zeros(4, np.float32), np.ones(4, np.float32)
copy_acc(x, y)
release_memory()
before = private_nbytes()
for _ in range(60_000):
    copy_acc(x, y)
assert (x == 1).all()
print(private_nbytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages are counted otherwise")
def test_ops_that_run_again_and_again_take_no_more() -> None:
    """NumPy's __array_interface__ makes a name each time, of which the interpreter's table of names grows by 1 MiB."""
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True)
    assert int(done.stdout) < MIB // 4


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are told apart on Linux")
def test_a_file_that_is_mapped_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(32 * MIB))
    with open(tmp_path / "file", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    before = private_nbytes()
    assert np.frombuffer(mapped, np.uint8).max() == 0
    assert private_nbytes() - before < SLACK


def test_shared_memory_counts() -> None:
    before = private_nbytes()
    with mmap.mmap(-1, 32 * MIB) as shared:  # anonymous and shared: RssShmem
        shared.write(b"x" * len(shared))
        assert abs(private_nbytes() - before - 32 * MIB) < SLACK


def test_a_peak_is_seen_when_it_is_over() -> None:
    release_memory()
    with MemoryPeak() as peak:
        assert peak.nbytes >= peak.baseline > MIB
        buffer = np.ones(64 * MIB, np.uint8)
        time.sleep(0.2)
        del buffer
        time.sleep(0.05)
        assert abs(peak.nbytes - peak.baseline - 64 * MIB) < SLACK
    assert not peak._thread.is_alive()
    release_memory()
    assert private_nbytes() - peak.baseline < SLACK


def test_to_look_costs_next_to_nothing() -> None:
    start_time = time.thread_time()
    for _ in range(100):
        private_nbytes()
    assert (time.thread_time() - start_time) / 100 < 0.001
    before = private_nbytes()
    with MemoryPeak() as peak:
        time.sleep(0.3)
    assert peak.nbytes - before < MIB


@pytest.mark.usefixtures("source")
def test_children_count_from_outside() -> None:
    grandchild = f"held = bytearray(b'x' * {48 * MIB}); print('ready', flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert 48 * MIB < private_nbytes_of(process.pid) < 48 * MIB + 40 * MIB
        process.communicate(b"\n")
    assert private_nbytes_of(process.pid) == 0


OUTSIDE = """
import os
from benchmarks.watched import private_nbytes_of
from packtrain.common.memory import private_nbytes
print(private_nbytes_of(os.getpid()) - private_nbytes())
"""


def test_of_a_process_without_children_it_is_the_same_from_outside() -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE], capture_output=True, text=True, check=True, cwd=root
    )
    assert abs(int(done.stdout)) < SLACK
