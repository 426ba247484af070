"""Marks (pyproject.toml): tests that need what a checkout need not have are skipped without it, slow ones are listed.

slow.txt has the beginnings of the names of the tests that `make check` leaves out; exhaustive.txt those of tests with
many cases, each with a number N: `make test` runs every Nth case (0: none), and `make exhaustive` all others.
"""

import gc
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import packtrain.engine.optim  # noqa: F401  its ops are tested as all others
from packtrain.common.child_process import SELDOM
from tests.browser import browser_path
from tests.real import BASE

SHARED = Path(__file__).parent.parent.parent / "shared/data"
NEEDS = {
    "shared": (SHARED.exists(), "no shared data beside the checkout"),
    "torch": (find_spec("torch") is not None, "PyTorch is not installed"),
    "triton": (find_spec("triton") is not None, "Triton is not installed"),
    "transformers": (
        find_spec("transformers") is not None and find_spec("trl") is not None,
        "transformers and trl are not installed",
    ),
    "pyarrow": (find_spec("pyarrow") is not None, "the extra `data` is not installed"),
    "calamine": (find_spec("python_calamine") is not None, "the extra `data` is not installed"),
    "grammar": (find_spec("llguidance") is not None, "the extra `grammar` is not installed"),
    "notebook": (find_spec("nbclient") is not None, "nbclient is not installed"),
    "browser": (browser_path() is not None, "Playwright or a browser is not installed"),
    "real": (BASE.exists(), "no real base; `make real-base` fetches it"),
}
LONGEST = (  # files, longest first: two processes that begin with them end together
    "test_matrix_runs",
    "test_torch_backend",
    "test_ranks",
    "test_matrix",
    "test_triton",
    "test_finetune",
    "test_paths",
    "test_ranks_lost",
)
SLOW = tuple(Path(__file__).with_name("slow.txt").read_text().splitlines())
EXHAUSTIVE = [
    (name, int(step))
    for line in Path(__file__).with_name("exhaustive.txt").read_text().splitlines()
    for name, step in [line.rsplit(" ", 1)]
]

# tests that would begin later, in seconds since 1970, are skipped with a reason; .ci/run sets it
LAST_START = float(os.environ.get("TESTS_LAST_START", "inf"))
# index of the file with exhaustive cases that runs first, modulo their number; .ci/run sets it
ROTATION = int(os.environ.get("TESTS_ROTATION", "0"))

# read when kernels are loaded, here and by children
os.environ.setdefault("PACKTRAIN_DEBUG", "calls")
# threads of PyTorch that spin while they wait take the cores from tests beside them
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# a shell's background job ignores these, and so would the children of tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for name, step in EXHAUSTIVE:
        cases = [item for item in items if item.nodeid.startswith(name)]
        for number, item in enumerate(cases):
            if not step or number % step:
                item.add_marker(pytest.mark.exhaustive)
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        for mark, (available, reason) in NEEDS.items():
            if item.get_closest_marker(mark) and not available:
                item.add_marker(pytest.mark.skip(reason=reason))
    slow_counts = Counter(item.path for item in items if item.get_closest_marker("slow"))
    priority = {name: at for at, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (priority.get(item.path.stem, len(priority)), -slow_counts[item.path])
    )
    if ROTATION:  # what a slow machine has no time for is not the same at each commit
        paths = list(
            dict.fromkeys(item.path for item in items if item.get_closest_marker("exhaustive"))
        )
        order = {path: (at - ROTATION) % len(paths) for at, path in enumerate(paths)}
        items.sort(key=lambda item: order.get(item.path, len(paths)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > LAST_START:
        pytest.skip("NOT RUN: no time was left")


def pytest_collection_finish() -> None:
    """Thousands of tests are a third of a second in every collection of garbage, and runs ask for many."""
    freeze_objects()
    gc.set_threshold(SELDOM)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze what a file of tests leaves, such as loaded modules and kernels: later collections skip it."""
    yield
    if nextitem is None or nextitem.path != item.path:
        freeze_objects()


def freeze_objects() -> None:
    """Collect garbage once, and let later collections skip every object that exists now."""
    gc.collect()
    gc.freeze()
