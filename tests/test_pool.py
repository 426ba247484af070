"""Threads of our own: every task runs once, whoever opens a region, and from where."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from packtrain.data.token_cache import STACK_NBYTES

SOURCE = textwrap.dedent("""
    import sys
    import numpy as np
    from numba import types
    from packtrain import kernels
    kernels.loader.with_numba("jit")
    from packtrain.kernels.runtime.jit import each, kernel

    counts = types.Array(types.int64, 1, "C")

    @kernel(types.void(counts, types.int64))
    def count_one(counts, number):
        for _ in range(number % 7 * 1000):
            counts[number] += 1
            counts[number] -= 1
        counts[number] += 1

    @kernel(types.void(counts))
    def count_all(counts):
        each(count_one, (counts,), len(counts))

    @kernel(types.void(counts, types.int64))
    def count_more(counts, number):
        count_all(counts[number * 10 : number * 10 + 10])

    @kernel(types.void(counts))
    def count_nested(counts):
        each(count_more, (counts,), len(counts) // 10)
""")


def program_output(folder: Path, body: str) -> str:
    """What a program prints that has these kernels."""
    file = folder / "program.py"
    file.write_text(SOURCE + textwrap.dedent(body))
    command = [sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_task_runs_once_whatever_their_number_and_also_after_a_pause(tmp_path: Path):
    body = """
        import time
        for count in (0, 1, 2, 3, 5, 64, 1000):
            for again in range(50):
                counts = np.zeros(count, np.int64)
                count_all(counts)
                assert (counts == 1).all(), (count, again, counts)
                if again % 10 == 0:
                    time.sleep(0.002)
        print("good")
    """
    assert program_output(tmp_path, body) == "good"


def test_regions_within_regions_and_beside_each_other_run_each_task_once(tmp_path: Path):
    body = """
        import threading
        wrong = []

        def work(kernel):
            for _ in range(300):
                counts = np.zeros(40, np.int64)
                kernel(counts)
                if not (counts == 1).all():
                    wrong.append(counts)

        workers = [threading.Thread(target=work, args=(k,)) for k in (count_all, count_nested) * 2]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(wrong or "good")
    """
    assert program_output(tmp_path, body) == "good"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_alone(tmp_path: Path):
    body = """
        import os
        counts = np.zeros(64, np.int64)
        count_all(counts)
        child = os.fork()
        count_all(counts)
        if child == 0:
            os._exit(0 if (counts == 2).all() else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (counts == 2).all())
    """
    assert program_output(tmp_path, body) == "0 True"


def test_threads_that_have_nothing_to_do_sleep(tmp_path: Path):
    body = """
        import time
        count_all(np.zeros(64, np.int64))
        used, began = time.process_time(), time.perf_counter()
        while time.perf_counter() - began < 0.5:
            time.sleep(0.1)
        print("good" if time.process_time() - used < 0.1 else time.process_time() - used)
    """
    assert program_output(tmp_path, body) == "good"


def test_threads_of_the_child_that_reads_data_have_room_for_their_start():
    code = (
        "import threading\nfrom packtrain.data.token_cache import STACK_NBYTES\n"
        "threading.stack_size(STACK_NBYTES)\nimport numpy as np\nfrom packtrain import kernels\n"
        "x = np.ones(1 << 20, np.float32)\ny = np.empty_like(x)\n"
        "kernels.elementwise.scale(y, x, 2.0, 1.0)\nassert (y == 3).all() and kernels.threads() > 1\n"
    )
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert STACK_NBYTES >= (3 << 19) + (1 << 16)  # with a large L2 cache 1.5 MiB are touched
