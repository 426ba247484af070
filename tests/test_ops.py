"""Every op of the registry against its specification, finite differences, PyTorch, and itself run otherwise."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

import packtrain as pt
from packtrain.devtools.check.check_cases import STRAIGHT_THROUGH, execute
from packtrain.devtools.check.op_samples import graph_of, random_values, samples_of_op
from packtrain.engine import backends, ops
from packtrain.engine.backends import Target
from packtrain.engine.tensor import OPS
from tests import bit_checks, checks

NAMES = sorted(OPS)
TRAINED = [n for n in NAMES if n not in checks.NO_GRADIENT | STRAIGHT_THROUGH]
# views that exist only of some layouts; everything else takes any view
REFUSED = {"reshape": {"permuted x", "narrowed x", "repeated x"}}

VIEWS: dict[str, Callable[..., np.ndarray]] = {
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, axes: x.transpose(axes),
    "narrow": lambda x, axis, start, length: x.take(range(start, start + length), axis),
    "slice": lambda x, start, shape, step: x[
        tuple(
            slice(s, s + (n - 1) * k + 1, k)
            for s, n, k in zip(start, shape, step or (1,) * x.ndim, strict=True)
        )
    ],
    "diagonal": lambda x: np.diagonal(x, axis1=-2, axis2=-1),
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
    no_gradient = {name for name in NAMES if OPS[name].vjp_rule is None}
    assert no_gradient == checks.NO_GRADIENT


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
def test_the_specification_can_run_again(name: str) -> None:
    """What a kernel returns is called the next time, so that a specification returns nothing."""
    for call in samples_of_op(name)[:1]:
        graph = graph_of(call.results)
        executor = pt.Session().executor(pt.place(graph, Target((backends.numpy,))))
        for _ in range(2):
            execute(executor, random_values(graph))


@pytest.mark.parametrize("name", NAMES)
def test_any_view_can_be_an_input(name: str) -> None:
    assert bit_checks.check_strided(name) == REFUSED.get(name, set())


@cache
def none(*shape: int) -> pt.Tensor:
    return pt.input(f"x{shape}", shape)


NO_IDS = pt.constant("none", np.zeros(0), pt.i32)
NOTHING = {
    "matmul of no rows": lambda: ops.matmul(none(0, 8), none(5, 8)),
    "matmul by no rows": lambda: ops.matmul(none(3, 8), none(0, 8)),
    "matmul over nothing": lambda: ops.matmul(none(3, 0), none(5, 0), none(3, 5)),
    "out_prod over nothing": lambda: ops.out_prod(none(0, 3), none(0, 5)),
    "sum": lambda: ops.sum(none(0)),
    "sum_rows": lambda: ops.sum_rows(none(3, 0)),
    "sum_to": lambda: ops.sum_to(none(0, 4), shape=(4,)),
    "rms_norm": lambda: ops.rms_norm(none(0, 4), none(4), eps=1e-5),
    "rms_norm_back": lambda: ops.rms_norm_back(none(0, 4), none(0, 4), none(4), eps=1e-5)[1],
    "soft_max": lambda: ops.soft_max(none(0, 4)),
    "get_rows": lambda: ops.get_rows(none(4, 5), NO_IDS),
    "get_rows_back": lambda: ops.get_rows_back(none(0, 5), NO_IDS, shape=(4, 5)),
    "rope": lambda: ops.rope(none(0, 2, 4), ops.rope_table(NO_IDS, dims=4, base=1e4)),
    "attention": lambda: ops.attention(*[none(0, 3, 2, 8)] * 3, scale=1.0)[0],
    "cross_entropy": lambda: ops.cross_entropy(none(0, 5), NO_IDS, none(0))[0],
    "linear_cross_entropy": lambda: ops.linear_cross_entropy(none(0, 5), none(7, 5), NO_IDS, none(0))[4],
    "swiglu": lambda: ops.swiglu(none(0, 5), none(0, 5)),
    "cont": lambda: ops.cont(ops.narrow(none(3, 5), axis=0, start=1, length=0)),
    "conv_2d of no pictures": lambda: ops.conv_2d(none(0, 3, 5, 5), none(4, 3, 3, 3)),
    "conv_2d of no channels": lambda: ops.conv_2d(none(2, 0, 5, 5), none(4, 0, 3, 3)),
    "conv_2d_back of no filters": lambda: ops.conv_2d_back(
        none(2, 0, 3, 3), none(0, 3, 3, 3), size=(5, 5), stride=(1, 1), padding=(0, 0), dilation=(1, 1)
    ),
    "conv_2d_back_w of no pictures": lambda: ops.conv_2d_back_w(
        none(0, 4, 3, 3), none(0, 3, 5, 5), window=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1)
    ),
    "pool_2d": lambda: ops.pool_2d(none(2, 0, 4, 4), largest=True, window=(2, 2)),
    "im2col": lambda: ops.im2col(none(0, 3, 5, 5), window=(3, 3)),
    "cumsum": lambda: ops.cumsum(none(3, 0)),
    "log_soft_max": lambda: ops.log_soft_max(none(3, 0)),
    "norm": lambda: ops.norm(none(3, 0), eps=1e-5),
    "clamp": lambda: ops.clamp(none(0, 3), low=0.0),
    "add": lambda: ops.add(none(0, 5), none(5)),
    "argsort": lambda: ops.argsort(none(3, 0)),
    "concat": lambda: ops.concat([none(3, 0), none(3, 2)], axis=1),
    "repeat": lambda: ops.repeat(none(0, 3), shape=(0, 6)),
    "narrow_back": lambda: ops.narrow_back(none(0, 5), axis=0, start=1, size=3),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
def test_axes_of_no_elements(name: str) -> None:
    graph = pt.Graph({"y": NOTHING[name]()})
    inputs = checks.random_values(graph)
    checks.assert_all_close(checks.run_graph(graph, inputs), pt.interpret(graph, inputs), name)


def test_threads_change_no_bit() -> None:
    """In a process of its own, whose pool has more threads than this machine may have cores."""
    program = f"from tests import bit_checks\nfor name in {NAMES}: bit_checks.check_threads(name)"
    env = {**os.environ, "NUMBA_NUM_THREADS": "4"}
    process = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr


def test_views_are_numpys() -> None:
    """Views have no kernel, so no specification either; NumPy's own functions stand in."""
    assert set(VIEWS) == {name for name in NAMES if OPS[name].view}
    for name, view in VIEWS.items():
        for call in samples_of_op(name):
            graph = pt.Graph({"x": call.reads[0], "y": call.results[0]})
            outputs = checks.run_graph(graph, checks.random_values(graph))
            np.testing.assert_array_equal(outputs["y"], view(outputs["x"], **call.attrs))


def test_slopes_of_alibi_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(ops.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    first = ops.alibi_slopes(16)
    np.testing.assert_allclose(ops.alibi_slopes(12), [*ops.alibi_slopes(8), *first[:8:2]])
