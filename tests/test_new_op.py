"""An op is added by one room and its name in a list: the tests of all ops find it, and everything works with it.

What a room cannot say in a few lines of NumPy is a kernel, a function of arrays in a module that is listed, too.
"""

import re
from pathlib import Path

import pytest

from tests.copied import (
    SOURCE,
    copy_package,
    edit_file,
    link_tests,
    own_cache,
    packtrain_in,
    python_in,
)

ROOM = '''"""A smooth relu."""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32
from packtrain.engine.ops.arrays import flatten
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.ops.elementwise import mul, sigmoid
from packtrain.engine.tensor import Spec, Tensor, input, op, require


@op(inplace=(0,))
def toy_plus(x: Tensor) -> Spec:
    """y = log(1 + exp(x))."""
    require(x.dtype == f32, f"x is {x.spec}; it must be f32")
    return x.spec


@toy_plus.vjp
def toy_plus_vjp(dy, y, x):
    return (mul(dy, sigmoid(x)),)


@toy_plus.kernel("numpy")
def toy_plus_numpy(y, x):
    np.logaddexp(x, 0, out=y)


@toy_plus.kernel("cpu")
def toy_plus_cpu(y, x):
    kernels.toy.toy_plus(flatten(y), flatten(x))


toy_plus.cost(elementwise_cost(2.0))


@toy_plus.samples
def toy_plus_samples():
    for n in (1, 15, 40_000):
        yield toy_plus(input("x", (n,)))
'''
KERNEL = '''"""A loop of a test."""

import math

from packtrain.kernels.runtime.jit import kernel
from packtrain.kernels.runtime.kernel_types import f32


@kernel("out1, in1")
def toy_plus(y, x):
    for i in range(x.size):
        y[i] = max(x[i], f32(0)) + math.log1p(math.exp(-abs(x[i])))
'''
USE = """
import numpy as np
import packtrain as pt
from packtrain.planner.cost_model import BackendRates, graph_seconds

x, w = pt.input("x", (5, 8)), pt.weight("w", (3, 8))
y = pt.toy_plus(pt.matmul(x, w))
loss = pt.sum(pt.sqr(y))
(dw,) = pt.differentiate(loss, [w]).values()
graph = pt.Graph({"y": y, "loss": loss, "dw": dw})
assert "toy_plus(" in str(graph)
placed = pt.place(graph)
plan = pt.make_plan(placed)
pt.verify(plan, placed)
session = pt.Session()
run = session.executor(placed, plan)
random = np.random.default_rng(0)
given = {name: random.standard_normal(t.shape).astype(np.float32) for name, t in (("x", x), ("w", w))}
session.set({"w": given["w"]})
got, wanted = run({"x": given["x"]}), pt.interpret(graph, given)
z = given["x"] @ given["w"].T
np.testing.assert_allclose(got["y"], np.log1p(np.exp(z)), rtol=1e-5, atol=1e-5)
for name in wanted:
    np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-4)
quick, slow = (BackendRates(1e9, 1e9, kinds={"exp": rate}) for rate in (1e9, 1.0))
assert graph_seconds(placed, slow) - graph_seconds(placed, quick) > 2 * y.spec.size - 1
from tests import bit_checks
bit_checks.check_threads("toy_plus")
"""
LISTED = "tests/test_kernel_cache.py::test_what_each_module_imports_is_read_from_its_source"
VALUE, SLOPE = "test_the_value_is_the_specification", "test_the_gradient_is_the_slope"
TESTS = (
    *(VALUE, SLOPE, "test_in_place_gives_the_same_bits", "test_any_view_can_be_an_input"),
    "test_the_specification_can_run_again",
)
CHOSEN = "toy_plus or listed or declared or exported or layer or imports"
CHECKS = ("tests/test_ops.py", "tests/test_exports.py", "tests/test_layers.py", LISTED)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return own_cache(tmp_path_factory.mktemp("kernels"))


def copy_with_op(folder: Path) -> Path:
    """The package with the op, and the tests: two files and their names."""
    home = copy_package(folder)
    (home / "engine/ops/toy.py").write_text(ROOM)
    (home / "kernels/rowwise/toy.py").write_text(KERNEL)
    last = "from packtrain.engine.ops.gradient_clipping import accumulate, clip_gate, sum_squares\n"
    edit_file(
        home / "engine/ops/__init__.py",
        (last, f"from packtrain.engine.ops.toy import toy_plus\n{last}"),
    )
    link_tests(folder)
    return folder


def copy_with_example(folder: Path) -> Path:
    """The package with the op that CONTRIBUTING.md shows, added as it says, and the tests."""
    page = (SOURCE.parent / "CONTRIBUTING.md").read_text()
    (room,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    home = copy_package(folder)
    (home / "engine/ops/expm1.py").write_text(room)
    (line,) = re.findall(r"`(from packtrain\.engine\.ops\.expm1 import expm1)`", page)
    first = "from packtrain.engine.ops.unary_functions import (\n"
    edit_file(home / "engine/ops/__init__.py", (first, f"{line}\n{first}"))
    link_tests(folder)
    return folder


def op_outcomes(
    folder: Path, cache: dict[str, str], files: tuple[str, ...] = CHECKS, chosen: str = CHOSEN
) -> dict[str, str]:
    """What the tests of all ops say of the new one, by test."""
    tests = [*files, "-k", chosen, "-vv", "--tb=short", "-p", "no:cacheprovider"]
    done = python_in(folder, "-m", "pytest", *tests, **cache)
    results = re.findall(r"^tests/\S+::(\S+) (PASSED|FAILED|ERROR)", done.stdout, re.MULTILINE)
    assert results, done.stdout + done.stderr
    return dict(results)


def test_one_room_and_its_name_are_an_op(tmp_path: Path, cache: dict[str, str]) -> None:
    folder = copy_with_op(tmp_path)
    said = op_outcomes(folder, cache)
    assert set(said.values()) == {"PASSED"}, said
    assert {name for name in said if name.endswith("[toy_plus]")} == {
        f"{t}[toy_plus]" for t in TESTS
    }
    used = python_in(folder, "-c", USE, **cache, NUMBA_NUM_THREADS="4")
    assert used.returncode == 0, used.stderr


def test_the_example_of_the_page_for_contributors_works(
    tmp_path: Path, cache: dict[str, str]
) -> None:
    folder = copy_with_example(tmp_path)
    said = op_outcomes(folder, cache, CHECKS[:2], CHOSEN.replace("toy_plus", "expm1"))
    assert set(said.values()) == {"PASSED"} and {f"{t}[expm1]" for t in TESTS} <= {*said}, said
    checked = packtrain_in(folder, "check expm1", **cache)
    assert checked.returncode == 0 and "expm1                f32      cpu" in checked.stdout
    edit_file(
        folder / "packtrain/engine/ops/expm1.py", ('@expm1.kernel("cpu", strided=True)\n', "")
    )
    checked = packtrain_in(folder, "check expm1", **cache)
    assert checked.returncode == 1
    assert "expm1 has no kernel for cpu, and nothing was checked there" in checked.stderr
    assert "no kernel of" not in checked.stderr  # NumPy's did not run in its place


@pytest.mark.parametrize(
    ("file", "old", "new", "failing_test"),
    [
        ("engine/ops/toy.py", "sigmoid(x)", "sigmoid(y)", SLOPE),
        ("engine/ops/toy.py", "in (1, 15, 40_000)", "in ()", VALUE),
        ("kernels/rowwise/toy.py", "-abs(x[i])", "-x[i]", VALUE),
    ],
)
def test_what_a_room_says_wrong_is_found(
    file: str, old: str, new: str, failing_test: str, tmp_path: Path, cache: dict[str, str]
) -> None:
    folder = copy_with_op(tmp_path)
    edit_file(folder / "packtrain" / file, (old, new))
    said = op_outcomes(folder, cache, CHECKS[:1], f"{failing_test} and toy_plus")
    assert said == {f"{failing_test}[toy_plus]": "FAILED"}
