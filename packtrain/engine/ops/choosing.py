"""Choosing tokens where the logits are: the likeliest of each row, and a random draw as in `inference.sampling`.

Settings, seeds and indices are inputs of each row, so that one plan serves any requests. Neither op has a gradient.
"""

import numpy as np

from packtrain import kernels
from packtrain.dtypes import f32, f64, i32, i64
from packtrain.engine.ops import torch_choosing
from packtrain.engine.ops.arrays import flatten, rows, run_replayable
from packtrain.engine.ops.costs import Cost
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


@op()
def candidates(x: Tensor, *, k: int) -> tuple[Spec, ...]:
    """Find the k largest values along the last axis, largest first; lower index on ties. ggml_top_k, ggml_get_rows.

    A value that is not finite counts as infinity, so that it comes first.

    x       (..., V)  f32
    ids     (..., k)  i32
    values  (..., k)  f32
    """
    require(x.dtype == f32 and len(x.shape) > 0, f"x is {x.spec}; it must be f32[..., V]")
    require(0 < k <= x.shape[-1], f"k is {k}; it must be 1 to {x.shape[-1]}, the last axis of x")
    shape = (*x.shape[:-1], k)
    return Spec(shape, i32), Spec(shape)


@candidates.kernel("numpy")
def candidates_numpy(out, x, *, k):
    ids, top_values = out
    x = np.where(np.isfinite(x), x, np.inf)
    ids[...] = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    top_values[...] = np.take_along_axis(x, ids, -1)


@candidates.kernel("cpu")
def candidates_cpu(out, x, *, k):
    return run_replayable(kernels.choosing.candidates, rows(out[0]), rows(out[1]), rows(x))


candidates.kernel("torch")(torch_choosing.candidates)
candidates.cost(lambda out, x, *, k: Cost(num_tasks=max(x.spec.size // x.shape[-1], 1)))


@candidates.samples
def candidates_samples():
    for n, v, k in ((1, 1, 1), (3, 8, 2), (5, 300, 40), (2, 5000, 33), (1, 32003, 128)):
        yield from candidates(input("x", (n, v)), k=k)
    yield from candidates(input("x", (2, 3, 4)), k=4)
    yield from candidates(constant("x", np.array([[1.0, 3, 3, 1, 3], [0, 0, 0, 0, 0]])), k=4)


@op()
def draw(ids: Tensor, x: Tensor, numbers: Tensor, counts: Tensor) -> Spec:
    """Draw one candidate per row by top-k, top-p, min-p and temperature; ggml has no such op.

    ids      (N, k)  i32
    x        (N, k)  f32  logits, the largest first
    numbers  (N, 3)  f64  temperature (0: the first), top-p, min-p
    counts   (N, 3)  i64  top-k (0: all), seed, index of the token in its text
    y        (N,)    i32  −1 − id where the first is infinity, see candidates

    Seed and index choose the token that sampling.Chain would choose: the first at which the running sum exceeds
    u times the total, u from Philox with the seed as key and the index as counter.
    """
    n = x.shape[0] if len(x.shape) == 2 else 0
    fits = ids.spec == Spec(x.shape, i32) and x.dtype == f32 and n > 0 and x.shape[1] > 0
    fits = fits and numbers.spec == Spec((n, 3), f64) and counts.spec == Spec((n, 3), i64)
    specs = ", ".join(f"{t.spec}" for t in (ids, x, numbers, counts))
    require(fits, f"the inputs are {specs}; i32[N, k], f32[N, k], f64[N, 3], i64[N, 3] are needed")
    return Spec((n,), i32)


@draw.kernel("numpy")
def draw_numpy(y, ids, x, numbers, counts):
    row_settings = zip(x.astype(float), numbers.tolist(), counts.tolist(), strict=True)
    for row, (logits, (temp, top_p, min_p), (k, seed, index)) in enumerate(row_settings):
        if logits[0] == np.inf:
            y[row] = -1 - ids[row, 0]
            continue
        logits = logits[: k or None] - logits[0]
        if top_p < 1:
            e = np.exp(logits)
            logits = logits[: np.searchsorted(np.cumsum(e / np.cumsum(e)[-1]), top_p) + 1]
        logits = logits[logits >= (min(np.log(min_p), 0) if min_p > 0 else -np.inf)]
        with np.errstate(over="ignore"):
            cumulative_weights = np.cumsum(np.exp(logits / temp)) if temp > 0 else np.ones(1)
        u = np.random.Generator(np.random.Philox(key=seed, counter=index)).random()
        choice = np.searchsorted(cumulative_weights, u * cumulative_weights[-1], side="right")
        y[row] = ids[row, min(choice, len(cumulative_weights) - 1)]


@draw.kernel("cpu")
def draw_cpu(y, ids, x, numbers, counts):
    inputs = rows(ids), rows(x), rows(numbers), rows(counts)
    return run_replayable(kernels.choosing.draw, flatten(y), *inputs)


draw.kernel("torch")(torch_choosing.draw)


@draw.samples
def draw_samples():
    for n, k in ((1, 1), (7, 5), (64, 40)):
        x = -np.sort(-np.random.default_rng(n).standard_normal((n, k)) * 2, axis=1)
        ids = (np.arange(n)[:, None] * 7 + np.arange(k)) % 1000
        numbers = np.array([[0.8, 0.95, 0.05], [1.5, 1.0, 0.0], [0.0, 0.5, 0.1]])[np.arange(n) % 3]
        counts = np.stack([np.arange(n) % 9, np.arange(n) * 2**55, np.arange(n) ** 3], 1)
        setting_inputs = constant("numbers", numbers, f64), constant("counts", counts, i64)
        yield draw(constant("ids", ids, i32), constant("x", x), *setting_inputs)
