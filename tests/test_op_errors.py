"""What ops and functions composed of them refuse: an error names the op, the fact with the specs, and the line."""

import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest

import packtrain as pt
from packtrain.dtypes import BLOCK_TYPES

Q8_0 = BLOCK_TYPES["q8_0"]
X, Y, V = pt.input("x", (4, 6)), pt.input("y", (3, 6)), pt.input("v", (6,))
HALF, IDS = pt.input("half", (4, 6), pt.f16), pt.input("ids", (4, 6), pt.i32)
PACKED, CUBE = pt.input("packed", (4, 32), Q8_0), pt.input("cube", (2, 4, 32), Q8_0)
IMAGE, FILTERS = pt.input("image", (2, 3, 7, 6)), pt.input("filters", (4, 2, 3, 3))

WRONG: dict[str, Callable[[], object]] = {
    # shapes that do not fit
    "add: a f32[4, 6] and b f32[3, 6] do not broadcast to one shape": lambda: pt.add(X, Y),
    "matmul: last axis of x f32[4, 6] (6) must equal last axis of w f32[2, 4] (4)":
        lambda: pt.matmul(X, pt.input("w", (2, 4))),
    "matmul: x is f32[6] and w is f32[2, 3, 7, 6]; w needs two axes, and x too where w has more":
        lambda: pt.matmul(V, IMAGE),
    "outer: a is f32[4, 6] and b is f32[3, 6]; their last axes but one must be equal": lambda: pt.outer(X, Y),
    "repeat: x is f32[4, 6]; shape (6, 6) must have multiples of its sizes": lambda: pt.repeat(X, shape=(6, 6)),
    "repeat: x is q8_0[4, 32]; shape (4, 64) must keep its quantized rows": lambda: pt.repeat(PACKED, shape=(4, 64)),
    "concat: the parts are f32[4, 6], f32[3, 6]; they may differ along axis 1 only": lambda: pt.concat([X, Y], axis=1),
    "concat: the parts are none; axis 0 must be one of each": lambda: pt.concat([], axis=0),
    "concat: the parts are f32[4, 6], f32[3, 6]; axis 2 must be one of each": lambda: pt.concat([X, Y], axis=2),
    "pad: before (1,) and after (0, 1) must be a number, 0 or more, for each axis of x f32[4, 6]":
        lambda: pt.pad(X, before=(1,), after=(0, 1)),
    "conv_2d: x is f32[2, 3, 7, 6] and w is f32[4, 2, 3, 3]; they must be f32[N, C, H, W] and f32[O, C, KH, KW]":
        lambda: pt.conv_2d(IMAGE, FILTERS),
    "conv_1d: x is f32[4, 6] and w is f32[3, 6]; they must be f32[N, C, L] and f32[O, C, K]": lambda: pt.conv_1d(X, Y),
    "conv_2d: stride is 2; it must be two whole numbers of at least 1, down and across":
        lambda: pt.conv_2d(IMAGE, pt.input("w", (4, 3, 3, 3)), stride=2),  # type: ignore[arg-type]
    "pool_2d: the window (9, 2) does not fit into f32[2, 3, 7, 6] with padding (0, 0)":
        lambda: pt.pool_2d(IMAGE, largest=True, window=(9, 2)),
    "pool_1d: x is f32[4, 6]; it must be f32[N, C, L]": lambda: pt.pool_1d(X, largest=True, window=2),
    "upscale: x is f32[6], factor 2; x needs two axes, factor 1 or more": lambda: pt.upscale(V, factor=2),
    "group_norm: x is f32[4, 6]; its second axis must be groups of equal size, 4 of them":
        lambda: pt.group_norm(X, groups=4, eps=1e-5),
    "norm: w is f32[4, 6]; it must be f32[6]": lambda: pt.norm(X, X, eps=1e-5),
    "soft_cross_entropy: logits f32[4, 6] and targets f32[3, 6] must be equal, weights f32[6] one for each row":
        lambda: pt.soft_cross_entropy(X, Y, V),
    "soft_max_sinks: x is f32[2, 3, 7, 6] and sinks f32[6]; they must be [B, H, T, S] and [H]":
        lambda: pt.soft_max_sinks(IMAGE, V),
    "alibi_slopes: heads is 0; it must be at least 1": lambda: pt.alibi_slopes(0),
    "get_rows_back: dy is f32[4, 6]; it must be f32[4, 6, 5]":
        lambda: pt.get_rows_back(X, IDS, shape=(9, 5)),
    "narrow_back: axis -1 is not an axis of dy f32[4, 6]": lambda: pt.narrow_back(X, axis=-1, start=0, size=9),
    "slice: start (0,), shape (1,) and step (1,) must have one number for each axis of x f32[4, 6]":
        lambda: pt.slice(X, start=(0,), shape=(1,)),
    "im2col_back: dy is f32[4, 6]; it must be f32[2, 5, 4, 27]": lambda: pt.im2col_back(
        X, shape=(2, 3, 7, 6), window=(3, 3), stride=(1, 1), padding=(0, 0), dilation=(1, 1)
    ),
    # types that an op does not take
    "add: a is i32[4, 6] and b is f32[4, 6]; both must be of types that can be read": lambda: pt.add(IDS, X),
    "mul: a is f16[4, 6] and b is f32[4, 6]; both must be f32": lambda: pt.mul(HALF, X),
    "silu: x is f16[4, 6]; it must be f32": lambda: pt.silu(HALF),
    "rms_norm: w is f16[6]; it must be f32[6]":
        lambda: pt.rms_norm(X, pt.input("w", (6,), pt.f16), eps=1e-5),
    "matmul: w is q8_0[2, 4, 32]; it must be f32, or a matrix of a type that can be read":
        lambda: pt.matmul(pt.input("z", (2, 3, 32)), CUBE),
    "cast: x is i64[4], a type that cannot be read": lambda: pt.cast(pt.input("n", (4,), pt.i64)),
    "cast: dtype is q8_0; it must be one of f32, f16, bf16": lambda: pt.cast(X, dtype=Q8_0),
    "narrow_back: dy is q8_0[4, 32]; it must be of numbers that can be added":
        lambda: pt.concat([PACKED, PACKED], axis=0),
    "zero_rows: x is f16[4, 6] and ids is i32[4, 6]; they must be f32 and i32": lambda: pt.zero_rows(HALF, IDS),
    "add: input 1 is 2.0; only tensors are inputs": lambda: pt.add(X, 2.0),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_what_is_refused_names_op_fact_and_line(said: str) -> None:
    with pytest.raises(pt.GraphError) as raised:
        WRONG[said]()
    first, line, *_ = str(raised.value).splitlines()
    assert first.startswith(said) and line.startswith("  at test_op_errors.py:")


def test_every_op_without_a_gradient_is_named_with_its_line() -> None:
    w = pt.weight("w", (3, 4))
    y = pt.silu_back(pt.soft_max_back(w, w, scale=1.0), w)
    with pytest.raises(pt.GraphError) as raised:
        pt.differentiate(pt.sum(y), [w])
    said = str(raised.value)
    assert "silu_back" in said and "soft_max_back" in said and "test_op_errors.py:" in said


def test_rows_of_any_type_are_repeated_and_added() -> None:
    packed = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    packed[:, :2] = np.float16([0.01]).view(np.uint8)
    blocks = packed.view(Q8_0.numpy)
    w = pt.constant("w", blocks, Q8_0)
    graph = pt.Graph({"many": pt.cast(pt.repeat(w, shape=(3, 4, 32))), "one": pt.cast(w)})
    outputs = pt.Session().executor(pt.place(graph))()
    np.testing.assert_array_equal(outputs["many"], np.tile(outputs["one"], (3, 2, 1)))


def test_a_wrong_call_names_keywords_and_usage() -> None:
    for call, sentence in (
        (lambda: pt.reshape(X, shpae=(6,)), "got an unexpected keyword argument 'shpae'; call reshape(x, *, shape)"),
        (lambda: pt.rms_norm(X), "missing 1 required keyword-only argument: 'eps'; call rms_norm(x, w=None, *, eps)"),
        (lambda: pt.mul(X, X, X), "mul: takes 2 positional arguments but 3 were given; call mul(a, b)"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=re.escape(sentence)):
            call()


def test_help_shows_the_signature_of_the_rule() -> None:
    assert [*inspect.signature(pt.rms_norm).parameters] == ["x", "w", "eps"]
    assert repr(pt.reshape) == "<op reshape(x, *, shape)>"
    assert (
        pt.reshape.__name__ == "reshape" and pt.reshape.__module__ == "packtrain.engine.ops.shape"
    )
