"""Choosing tokens where the logits are: the likeliest of each row, and a random draw as in `inference.sampling`.

Settings, seeds and indices are inputs of each row, so that one plan serves any requests. Also: indices of the largest
values, sorted indices, and counts of equal values. None of these ops has a gradient.
"""

import numpy as np

from packtrain.dtypes import f32, f64, i32, i64
from packtrain.engine.ops.arrays import assigned, compiled, f32_rows, flatten, rows
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.torch_kernels import top_k_indices, torch
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require


@op()
def argmax(x: Tensor) -> Spec:
    """Index of the first of the largest values along the last axis: x (..., C) f32, y (...) i32. ggml_argmax."""
    f32_rows(x)
    require(x.shape[-1] > 0, f"x is {x.spec}; its last axis must not be empty")
    return Spec(x.shape[:-1], i32)


_assign_argmax = assigned(lambda x: x.argmax(-1))
argmax.kernel("numpy")(_assign_argmax)
argmax.kernel("cpu", strided=True)(_assign_argmax)
argmax.kernel("torch", strided=True)(_assign_argmax)


@argmax.samples
def argmax_samples():
    yield argmax(input("x", (7, 33)))
    yield argmax(input("x", (2, 3, 5)))
    yield argmax(constant("x", np.array([1.0, 3.0, 3.0])))


@op()
def argsort(x: Tensor, *, descending: bool = False) -> Spec:
    """Indices that sort the last axis, equal values in order, largest first if `descending`. x (..., C) f32, y i32.
    ggml_argsort."""
    return Spec(f32_rows(x).shape, i32)


def _argsort_last_axis(x, *, descending):
    options = {"kind": "stable"} if isinstance(x, np.ndarray) else {"stable": True, "dim": -1}
    return (-x if descending else x).argsort(**options)


argsort.kernel("numpy")(assigned(_argsort_last_axis))
argsort.kernel("cpu", strided=True)(assigned(_argsort_last_axis))
argsort.kernel("torch", strided=True)(assigned(_argsort_last_axis))


@argsort.samples
def argsort_samples():
    yield argsort(input("x", (7, 33)))
    yield argsort(constant("x", np.array([2.0, 1.0, 2.0, 0.0])), descending=True)


@op()
def count_equal(a: Tensor, b: Tensor) -> Spec:
    """Count the equal elements: a, b (...) i32, y () i64. ggml_count_equal."""
    is_valid = a.spec == b.spec and a.dtype == i32
    require(is_valid, f"a is {a.spec} and b is {b.spec}; they must be equal i32")
    return Spec((), i64)


_assign_count = assigned(lambda a, b: np.count_nonzero(a == b))
count_equal.kernel("numpy")(_assign_count)
count_equal.kernel("cpu", strided=True)(_assign_count)
count_equal.kernel("torch", strided=True)(assigned(lambda a, b: (a == b).sum()))


@count_equal.samples
def count_equal_samples():
    a, b = np.arange(35).reshape(5, 7) % 3, np.arange(35).reshape(5, 7) % 4
    yield count_equal(constant("a", a, i32), constant("b", b, i32))
    yield count_equal(argmax(input("x", (300, 10))), constant("b", np.arange(300) % 10, i32))


# Philox4x64-10 (Salmon et al. 2011): factors, and what is added to the keys; as signed words
M0, M1, W0, W1 = (
    n - (1 << 64)
    for n in (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
)
LOW_WORD, ROUNDS = 0xFFFFFFFF, 10


@op()
def candidates(x: Tensor, *, k: int) -> tuple[Spec, ...]:
    """Find the k largest values along the last axis, largest first; lower index on ties. ggml_top_k, ggml_get_rows.

    A value that is not finite counts as infinity, so that it comes first.

    x       (..., V)  f32
    ids     (..., k)  i32
    values  (..., k)  f32
    """
    f32_rows(x)
    require(0 < k <= x.shape[-1], f"k is {k}; it must be 1 to {x.shape[-1]}, the last axis of x")
    shape = (*x.shape[:-1], k)
    return Spec(shape, i32), Spec(shape)


@candidates.kernel("numpy")
def candidates_numpy(out, x, *, k):
    ids, top_values = out
    x = np.where(np.isfinite(x), x, np.inf)
    ids[...] = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    top_values[...] = np.take_along_axis(x, ids, -1)


candidates.kernel("cpu")(compiled("choosing.candidates", rows, rows, rows))


@candidates.kernel("torch")
def candidates_torch(out, x, *, k):
    ids, top_values = (rows(t) for t in out)
    x = rows(x)
    x = torch.where(x.isfinite(), x, torch.inf)
    top_ids = top_k_indices(x, k)
    ids.copy_(top_ids)
    torch.gather(x, -1, top_ids, out=top_values)


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


draw.kernel("cpu")(compiled("choosing.draw", flatten, rows, rows, rows, rows))


def high_word(a, b):
    """Return the upper 64 bits of the 128-bit product of unsigned words a and b, which are i64 tensors."""
    a0, a1, b0, b1 = a & LOW_WORD, (a >> 32) & LOW_WORD, b & LOW_WORD, (b >> 32) & LOW_WORD
    middle_word = a1 * b0 + ((a0 * b0 >> 32) & LOW_WORD)
    cross_product = a0 * b1 + (middle_word & LOW_WORD)
    return a1 * b1 + ((middle_word >> 32) & LOW_WORD) + ((cross_product >> 32) & LOW_WORD)


def philox_uniform(seed, index):
    """Return the first number of NumPy's Generator(Philox(key=seed, counter=index)).random(), for i64 tensors."""
    a = index + 1
    b = torch.zeros_like(index)
    c = torch.zeros_like(index)
    d = torch.zeros_like(index)
    k0, k1 = seed.clone(), torch.zeros_like(seed)
    for _ in range(ROUNDS):
        h0, l0, h1, l1 = high_word(M0, a), M0 * a, high_word(M1, c), M1 * c
        a, b, c, d = h1 ^ b ^ k0, l1, h0 ^ d ^ k1, l0
        k0, k1 = k0 + W0, k1 + W1
    return ((a >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


@draw.kernel("torch")
def draw_torch(y, ids, x, numbers, counts):
    logits = x.double()
    logits = logits - logits[:, :1]
    temperature, top_p, min_p = (numbers[:, i : i + 1] for i in range(3))
    k, seed, index = (counts[:, i : i + 1] for i in range(3))
    candidate_index = torch.arange(x.shape[1], device=x.device)
    allowed = (candidate_index < k) | (k == 0)
    e = torch.where(allowed, logits.exp(), 0.0)
    cumulative_share = (e / e.cumsum(-1)[:, -1:]).cumsum(-1)
    allowed &= (candidate_index <= (cumulative_share < top_p).sum(-1, keepdim=True)) | (top_p >= 1)
    min_logit = torch.where(min_p > 0, min_p, 1.0).log().clamp_(max=0)
    allowed &= (logits >= min_logit) | (min_p <= 0)
    has_temperature = temperature > 0
    allowed &= has_temperature | (candidate_index == 0)
    e = torch.where(allowed, (logits / torch.where(has_temperature, temperature, 1.0)).exp(), 0.0)
    total = e.cumsum(-1)
    num_skipped = ((total <= philox_uniform(seed, index) * total[:, -1:]) & allowed).sum(
        -1, keepdim=True
    )
    choice = torch.minimum(num_skipped, allowed.sum(-1, keepdim=True) - 1)
    first_ids = ids[:, :1].long()
    chosen_ids = torch.where(
        x[:, :1] == torch.inf, -1 - first_ids, ids.long().gather(1, choice.clamp(min=0))
    )
    y.copy_(chosen_ids[:, 0])


@draw.samples
def draw_samples():
    for n, k in ((1, 1), (7, 5), (64, 40)):
        x = -np.sort(-np.random.default_rng(n).standard_normal((n, k)) * 2, axis=1)
        ids = (np.arange(n)[:, None] * 7 + np.arange(k)) % 1000
        numbers = np.array([[0.8, 0.95, 0.05], [1.5, 1.0, 0.0], [0.0, 0.5, 0.1]])[np.arange(n) % 3]
        counts = np.stack([np.arange(n) % 9, np.arange(n) * 2**55, np.arange(n) ** 3], 1)
        setting_inputs = constant("numbers", numbers, f64), constant("counts", counts, i64)
        yield draw(constant("ids", ids, i32), constant("x", x), *setting_inputs)
