"""Convolutions of small images in packtrain and in PyTorch, forward and backward, f32, on the same cores.

`python -m benchmarks.convolution` prints milliseconds and their ratio: medians of turns taken one after the other.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import packtrain as pt
from packtrain import kernels
from packtrain.engine import ops

BATCH, TURNS = 500, 9
F = torch.nn.functional
Case = tuple[
    Callable[..., pt.Tensor], Callable[..., Any], tuple[tuple[int, ...], ...], tuple[int, ...]
]
ONE, TWO, IMAGES = (8, 1, 3, 3), (16, 8, 3, 3), (BATCH, 1, 28, 28)
EDGES = {"padding": (1, 1)}


def net(x: pt.Tensor, conv1_w: pt.Tensor, conv2_w: pt.Tensor) -> pt.Tensor:
    for w in (conv1_w, conv2_w):
        x = ops.pool_2d(ops.relu(ops.conv_2d(x, w, **EDGES)), largest=True, window=(2, 2))
    return x


def net_torch(x: Any, conv1_w: Any, conv2_w: Any) -> Any:
    for w in (conv1_w, conv2_w):
        x = F.max_pool2d(F.conv2d(x, w, **EDGES).relu(), 2)
    return x


def conv(x: pt.Tensor, w: pt.Tensor) -> pt.Tensor:
    return ops.conv_2d(x, w, **EDGES)


def conv_torch(x: Any, w: Any) -> Any:
    return F.conv2d(x, w, **EDGES)


# what is computed, in both, the shapes of its inputs, and which have a gradient
CASES: dict[str, Case] = {
    "1 to 8 channels, forward": (conv, conv_torch, (IMAGES, ONE), ()),
    "1 to 8 channels, gradient of the filters": (conv, conv_torch, (IMAGES, ONE), (1,)),
    "8 to 16 channels, forward": (conv, conv_torch, ((BATCH, 8, 28, 28), TWO), ()),
    "8 to 16 channels, both gradients": (conv, conv_torch, ((BATCH, 8, 28, 28), TWO), (0, 1)),
    "two layers with relu and pooling": (net, net_torch, (IMAGES, ONE, TWO), (1, 2)),
    "64 to 64 channels of 14x14, both gradients": (
        conv, conv_torch, ((64, 64, 14, 14), (64, 64, 3, 3)), (0, 1),
    ),
}  # fmt: skip


def build_pair(case: Case, values: list[np.ndarray]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The case in packtrain and in PyTorch: functions that compute it once."""
    make, peer, shapes, wrt = case
    leaves = [pt.weight(f"x{i}", shape) for i, shape in enumerate(shapes)]
    y = make(*leaves)
    loss = ops.sum(ops.sqr(y) if wrt else y)
    gradients = pt.differentiate(loss, [leaves[i] for i in wrt]) if wrt else {}
    graph = pt.Graph(
        {f"d/{t.label}": d for t, d in gradients.items()} | ({} if wrt else {"loss": loss})
    )
    session = pt.Session()
    run = session.executor(pt.place(graph))
    session.set({t.label: value for t, value in zip(leaves, values, strict=True)})
    tensors = [torch.tensor(value, requires_grad=i in wrt) for i, value in enumerate(values)]

    def theirs() -> list[np.ndarray]:
        y = peer(*tensors)
        if not wrt:
            return [y.sum().numpy()]
        return [g.numpy() for g in torch.autograd.grad(y.square().sum(), [tensors[i] for i in wrt])]

    return lambda: list(run().values()), theirs


def main() -> None:
    torch.set_num_threads(kernels.threads())
    rng = np.random.default_rng(0)
    print(f"{'ms, medians':44} packtrain  PyTorch  ratio   on {kernels.threads()} threads")
    for name, case in CASES.items():
        values = [rng.standard_normal(shape, np.float32) / 3 for shape in case[2]]
        pair = build_pair(case, values)
        for our_values, their_values in zip(*(step() for step in pair), strict=True):
            assert np.abs(our_values - their_values).max() <= 1e-3 * np.abs(their_values).max(), (
                name
            )
        seconds: tuple[list[float], list[float]] = [], []
        for _ in range(TURNS):
            for step, durations in zip(pair, seconds, strict=True):
                start_time = time.perf_counter()
                step()
                durations.append(time.perf_counter() - start_time)
        our_values, their_values = (1e3 * statistics.median(durations) for durations in seconds)
        print(f"{name:44} {our_values:9.1f} {their_values:8.1f} {our_values / their_values:6.2f}")


if __name__ == "__main__":
    main()
