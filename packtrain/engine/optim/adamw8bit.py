"""AdamW whose moments of large tensors take one byte a value: blocks of 256, each with a scale."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from packtrain import kernels
from packtrain.dtypes import DTYPES
from packtrain.engine.ops.arrays import flatten, run_replayable
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.torch_kernels import CHUNK, chunk_bounds, torch
from packtrain.engine.optim.adamw import AdamW
from packtrain.engine.optim.optimizer import StepInputs, Tensors
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state, weight

BLOCK = 256
MIN_SIZE = 4096  # smaller tensors, such as norms, keep moments in f32
NUM_DECADES = 7
i8 = DTYPES["i8"]


@dataclass(frozen=True, slots=True)
class AdamW8bit(AdamW):
    """AdamW with blockwise quantized moments. Dettmers et al. 2021, arXiv 2110.02861. The second moment v is stored as
    its quantized root, which spans half as many decades: with gradients of four decades in a block, weights end 6 %
    away from those with moments in f32; with v itself quantized, 17 % away."""

    name: ClassVar[str] = "adamw8bit"
    note: ClassVar[str] = "keeps AdamW's moments in 8 bits, a quarter of their bytes"
    kernels: ClassVar[tuple[str, ...]] = ("elementwise", "update")
    by_parts: ClassVar[bool] = False

    def states(self, w: Tensor) -> Tensors:
        if w.spec.size < MIN_SIZE:
            return AdamW.states(self, w)
        return coded_moments(w)

    def update(self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs) -> Tensors:
        if w.spec.size < MIN_SIZE:
            return AdamW.update(self, w, g, *states, step_inputs=step_inputs)
        m, m_scale, v, v_scale = states
        read = g, m, m_scale, v, v_scale, step_inputs.hyper, step_inputs.gate
        results = opt_moments_adamw8bit(*read)
        return self.step_along(w, results, step_inputs)


def coded_moments(w: Tensor) -> Tensors:
    """Return the state leaves of a weight's moments in 8 bits: codes and scales of m, and of v."""
    return *coded_leaves("m", w), *coded_leaves("v", w)


def coded_leaves(kind: str, w: Tensor) -> Tensors:
    """Return the state leaves of moment `kind` of w in 8 bits: codes, and the scale of each block of 256."""
    num_blocks = -(-w.spec.size // BLOCK)
    codes = state(f"{kind}8/{w.name}", (num_blocks, BLOCK), i8)
    return codes, state(f"{kind}8_scale/{w.name}", (num_blocks,))


def decode(lib, codes, scale, levels):
    """Return values of codes (B, 256), signed if their type is: scale (B,) * levels[code]; `lib`: numpy or torch."""
    return (
        lib.sign(codes)
        * levels[lib.abs(codes * lib.ones_like(codes, dtype=lib.int64))]
        * scale[:, None]
    )


def encode(lib, values, limits):
    """Return signed codes of values (B, 256) by `limits`, see code_table, and blocks' scales (B,), largest sizes."""
    largest = lib.amax(lib.abs(values), -1)
    units = values / (largest + (largest == 0))[:, None]
    return lib.sign(values) * lib.searchsorted(limits, lib.abs(units)), largest


@cache
def code_table(signed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the levels of codes 0, 1, … from 0 to 1, and tables that find the code of a number: section 2.2 of
    arXiv 2110.02861. A signed code also has the negative levels.

    levels  (128,) or (256,)  f32  decade e of the seven below 1 has 2^e levels, evenly spaced; unsigned twice as many
    limits  as many           f32  limits[c] is halfway between levels c and c + 1, the last is infinite; the code of a
                                   number is how many limits are below it
    starts  (3073,)           u8   by a number's upper 16 bits, from those of 2^-24 on: the code of the smallest number
                                   with these bits; larger ones have this code or the next
    """
    decades = []
    for decade in range(NUM_DECADES):
        edges = np.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1)
        decades.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - NUM_DECADES))
    levels = np.concatenate([[0], *decades, *([] if signed else [[1]])]).astype(np.float32)
    levels[-1] = 1  # the largest value of a block is exact
    limits = np.append((levels[1:] + levels[:-1]) / 2, np.float32(np.inf))
    first, last = np.array([2.0**-24, 1.0], np.float32).view(np.int32)
    edges = np.arange(first, last + 1, 1 << 16, dtype=np.int32).view(np.float32)
    return levels, limits, np.searchsorted(limits, edges).astype(np.uint8)


@op(writes=(1, 2, 3, 4), inplace={4: (0,)})
def opt_moments_adamw8bit(
    g: Tensor, m: Tensor, m_scale: Tensor, v: Tensor, v_scale: Tensor, hyper: Tensor, gate: Tensor,
) -> tuple[Spec, ...]:  # fmt: skip
    """Update AdamW's moments in 8 bits; return their handles, and the direction = m / (sqrt(v / c2) + eps) of the step
    from the moments before they are rounded, or 0 if the gate is not finite. See opt_moments_adamw.

        g, direction      (...)     f32   N values
        m, v              (B, 256)  i8    B = ceil(N / 256); codes of m, and, unsigned, of the root of v
        m_scale, v_scale  (B,)      f32   the largest size of a block; a value is scale * level of its code
        hyper             (7,)      f32   see HYPER; lr, weight_decay and c1 play no part
        gate              ()        f32
    A root above 0 is rounded to no less than the first level, as a step divides by it.
    """
    Spec(g.shape).require(g=g)
    codes, scales = Spec((-(-g.spec.size // BLOCK), BLOCK), i8), Spec((m.shape[0],))
    require(m.spec == v.spec == codes, f"m is {m.spec}, v {v.spec}; both must be {codes}")
    scales.require(m_scale=m_scale, v_scale=v_scale)
    Spec((7,)).require(hyper=hyper)
    Spec(()).require(gate=gate)
    return m.spec, m_scale.spec, v.spec, v_scale.spec, g.spec


def _update_moments(lib, tables, direction, g, m, m_scale, v, v_scale, hyper, gate):
    """Write the step's direction (N,) and the moments for gradient g (N,); tables: (levels, limits) of m and of v."""
    _, beta1, beta2, eps, _, _, c2 = hyper
    (m_levels, m_limits), (v_levels, v_limits) = tables
    gradient = lib.zeros_like(m, dtype=g.dtype)
    gradient.reshape(-1)[: len(g)] = g * gate
    new_m = beta1 * decode(lib, m, m_scale, m_levels) + (1 - beta1) * gradient
    old_root = decode(lib, v.view(lib.uint8), v_scale, v_levels)
    new_root = lib.sqrt(beta2 * old_root**2 + (1 - beta2) * gradient * gradient)
    step = new_m / (new_root / lib.sqrt(c2) + eps)
    m_codes, m_max = encode(lib, new_m, m_limits)
    v_codes, root_max = encode(lib, new_root, v_limits)
    v_codes = v_codes + ((v_codes == 0) & (new_root > 0))
    direction[...], is_finite = 0, lib.isfinite(gate)
    old_values = direction, m, m_scale, v.view(lib.uint8), v_scale
    new_values = step.reshape(-1)[: len(g)], m_codes, m_max, v_codes, root_max
    for old, new in zip(old_values, new_values, strict=True):
        old[...] = lib.where(is_finite, new, old)


@opt_moments_adamw8bit.kernel("numpy")
def opt_moments_adamw8bit_numpy(out, g, *states):
    tables = [code_table(signed)[:2] for signed in (True, False)]
    _update_moments(np, tables, out[4].reshape(-1), g.reshape(-1), *states)


@opt_moments_adamw8bit.kernel("cpu")
def opt_moments_adamw8bit_cpu(out, g, m, m_scale, v, v_scale, hyper, gate):
    m_codes, v_codes = flatten(m).view(np.uint8), flatten(v).view(np.uint8)
    states = m_codes, m_scale, v_codes, v_scale, hyper, flatten(gate)
    tables = *code_table(True), *code_table(False)
    return run_replayable(kernels.update.adamw8bit, flatten(out[4]), flatten(g), *states, *tables)


@opt_moments_adamw8bit.kernel("torch")
def opt_moments_adamw8bit_torch(out, g, *states):
    *moments, hyper, gate = states
    tables = [[torch.from_numpy(t).to(g.device) for t in code_table(s)[:2]] for s in (True, False)]
    flat_g, direction = g.reshape(-1), out[4].view(-1)
    for start, end in chunk_bounds(len(moments[0]), CHUNK // BLOCK, g):
        span, blocks = slice(start * BLOCK, end * BLOCK), [x[start:end] for x in moments]
        _update_moments(torch, tables, direction[span], flat_g[span], *blocks, hyper, gate)


opt_moments_adamw8bit.cost(lambda out, g, *inputs: Cost({"exp": 8 * g.spec.size}))


@opt_moments_adamw8bit.samples
def opt_moments_adamw8bit_samples():
    hyper = constant("hyper", np.array([1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975]))
    for n, gate in ((17, 0.5), (256, np.nan), (70_000, 1.0)):
        states, gate = coded_moments(weight("w", (n,))), constant("gate", np.array(gate))
        yield from opt_moments_adamw8bit(input("g", (n,)), *states, hyper, gate)
