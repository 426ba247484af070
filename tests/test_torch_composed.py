"""Functions composed of ops against their peers in PyTorch: values and all gradients, in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import packtrain as pt
from packtrain import ops
from tests import checks

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Case(NamedTuple):
    make: Callable[..., pt.Tensor]
    peer: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def with_sinks(x, sinks):
    column = sinks[None, :, None, None].expand(*x.shape[:3], 1)
    return torch.cat([x, column], -1).softmax(-1)[..., :-1]


def to_all(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    return y.transpose(1, 2)


DISTANCE = -np.abs(np.arange(5)[:, None] - np.arange(7)).astype(np.float64)
F = torch.nn.functional
CASES = {
    "mean": Case(ops.mean, torch.mean, ((3, 5),)),
    "mean_rows": Case(ops.mean_rows, lambda x: x.mean(-1, keepdim=True), ((3, 5),)),
    "mean_squared_error": Case(ops.mean_squared_error, F.mse_loss, ((3, 5), (3, 5))),
    "norm": Case(
        lambda x, w, b: ops.norm(x, w, b, eps=1e-5),
        lambda x, w, b: F.layer_norm(x, (9,), w, b, 1e-5),
        ((4, 9), (9,), (9,)),
    ),
    "group_norm": Case(
        lambda x: ops.group_norm(x, groups=3, eps=1e-5), lambda x: F.group_norm(x, 3, eps=1e-5), ((2, 6, 4, 5),)
    ),
    "l2_norm": Case(lambda x: ops.l2_norm(x, eps=1e-6), lambda x: F.normalize(x, dim=-1, eps=1e-6), ((4, 9),)),
    "upscale": Case(
        lambda x: ops.upscale(x, factor=3), lambda x: F.interpolate(x, scale_factor=3, mode="nearest"), ((2, 3, 4, 5),)
    ),
    "pad": Case(
        lambda x: ops.pad(x, before=(1, 0), after=(2, 3)), lambda x: F.pad(x, (0, 3, 1, 2)), ((4, 5),)
    ),
    "gelu_erf": Case(ops.gelu_erf, F.gelu, ((4, 9),)),
    "add_cast": Case(ops.add_cast, torch.add, ((4, 9), (4, 9))),
    "conv_2d": Case(ops.conv_2d, F.conv2d, ((2, 3, 7, 6), (4, 3, 3, 2))),
    "conv_2d apart": Case(
        lambda x, w: ops.conv_2d(x, w, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        lambda x, w: F.conv2d(x, w, None, (2, 1), (1, 2), (1, 2)),
        ((2, 3, 7, 6), (4, 3, 3, 2)),
    ),
    "conv_1d": Case(
        lambda x, w: ops.conv_1d(x, w, stride=2, padding=1, dilation=2),
        lambda x, w: F.conv1d(x, w, None, 2, 1, 2),
        ((2, 3, 11), (4, 3, 3)),
    ),
    "pool_1d": Case(
        lambda x: ops.pool_1d(x, largest=False, window=3, stride=2, padding=1),
        lambda x: F.avg_pool1d(x, 3, 2, 1),
        ((2, 3, 11),),
    ),
    "soft_max_sinks": Case(ops.soft_max_sinks, with_sinks, ((2, 3, 5, 7), (3,))),
    "alibi": Case(
        lambda x, slopes: ops.alibi(x, slopes, pt.constant("distance", DISTANCE)),
        lambda x, slopes: x + slopes[:, None, None] * torch.tensor(DISTANCE),
        ((2, 3, 5, 7), (3,)),
    ),
    "attention_to_all": Case(
        lambda q, k, v: ops.attention_to_all(q, k, v, scale=0.3), to_all, ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    ),
    "soft_cross_entropy": Case(
        lambda x, t, w: ops.soft_cross_entropy(x, t, w)[0],
        lambda x, t, w: (F.cross_entropy(x, t, reduction="none") * w).sum(),
        ((4, 9), (4, 9), (4,)),
    ),
    "batched matmul": Case(ops.matmul, lambda x, w: x @ w.mT, ((2, 1, 5, 8), (3, 4, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pytorch_agrees(name: str) -> None:
    make, peer, shapes = CASES[name]
    rng = np.random.default_rng(3)
    given = {f"x{i}": rng.standard_normal(shape) for i, shape in enumerate(shapes)}
    leaves = [pt.input(label, value.shape) for label, value in given.items()]
    y = make(*leaves)
    loss = ops.sum(checks.dense(y))
    found = {f"d/{t.label}": d for t, d in pt.differentiate(loss, leaves).items()}
    got = pt.interpret(pt.Graph({"y": y} | found), given)
    tensors = [torch.tensor(value, requires_grad=True) for value in given.values()]
    want = peer(*tensors)
    weights = (
        np.random.default_rng(7).standard_normal(y.shape).astype(np.float32)
    )  # as in checks.dense
    (want * torch.tensor(weights)).sum().backward()
    checks.close(got["y"], want.detach().numpy(), name)
    for label, t in zip(given, tensors, strict=True):
        checks.close(got[f"d/{label}"], t.grad.numpy(), f"d/{label} of {name}")


def test_slopes_of_alibi_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(ops.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    first = ops.alibi_slopes(16)
    np.testing.assert_allclose(ops.alibi_slopes(12), [*ops.alibi_slopes(8), *first[:8:2]])
