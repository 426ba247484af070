"""Every op of the registry against its specification, finite differences, PyTorch, and itself run otherwise."""

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import packtrain as pt
from packtrain import ops
from packtrain.tensor import OPS
from tests import bit_checks, checks

NAMES = sorted(OPS)
TRAINED = [n for n in NAMES if n not in checks.NO_GRADIENT | {"rope_table"}]  # of indices
# views that exist only of some layouts; everything else takes any view
REFUSED = {"reshape": {"permuted x", "narrowed x", "repeated x"}}

VIEWS: dict[str, Callable[..., np.ndarray]] = {
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, axes: x.transpose(axes),
    "narrow": lambda x, axis, start, length: x.take(range(start, start + length), axis),
    "broadcast_to": lambda x, shape: np.broadcast_to(x, shape),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_value_is_the_specification(name: str) -> None:
    checks.check_value(name)


@pytest.mark.parametrize("name", [n for n in NAMES if OPS[n].optional])
def test_results_can_be_left_out(name: str) -> None:
    bit_checks.check_optional(name)


@pytest.mark.parametrize("name", TRAINED)
def test_the_gradient_is_the_slope(name: str) -> None:
    checks.check_gradient(name)


def test_ops_without_gradient_are_listed() -> None:
    without = {name for name in NAMES if OPS[name].vjp_rule is None}
    assert without == checks.NO_GRADIENT


def test_a_gradient_that_no_rule_gives_is_refused() -> None:
    w = pt.weight("w", (3, 2, 2))
    y = ops.rope(pt.input("x", (3, 1, 4)), ops.sqr(w))
    with pytest.raises(
        pt.GraphError, match=r"rope: no gradient for its input .*sqr\n  at test_ops"
    ):
        pt.differentiate(ops.sum(y), [w])


@pytest.mark.parametrize("name", [n for n in NAMES if any(OPS[n].inplace.values())])
def test_in_place_gives_the_same_bits(name: str) -> None:
    bit_checks.check_inplace(name)


@pytest.mark.parametrize("name", NAMES)
def test_any_view_can_be_an_input(name: str) -> None:
    assert bit_checks.check_strided(name) == REFUSED.get(name, set())


def test_threads_change_no_bit() -> None:
    """In a process of its own, whose pool has more threads than this machine may have cores."""
    program = f"from tests import bit_checks\nfor name in {NAMES}: bit_checks.check_threads(name)"
    env = {**os.environ, "NUMBA_NUM_THREADS": "4"}
    made = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def test_views_are_numpys() -> None:
    """Views have no kernel, so no specification either; NumPy's own functions stand in."""
    assert set(VIEWS) == {name for name in NAMES if OPS[name].view}
    for name, view in VIEWS.items():
        for call in checks.samples(name):
            graph = pt.Graph({"x": call.reads[0], "y": call.results[0]})
            made = checks.run(graph, checks.values(graph))
            np.testing.assert_array_equal(made["y"], view(made["x"], **call.attrs))
