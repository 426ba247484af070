"""AdamW: two moments for each value, and decoupled weight decay."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from packtrain import kernels
from packtrain.common.options import OPTIMIZER
from packtrain.dtypes import f32
from packtrain.engine import ops
from packtrain.engine.backends import triton
from packtrain.engine.ops.arrays import flatten, floats, run_replayable
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.torch_kernels import real, torch
from packtrain.engine.optim import weights
from packtrain.engine.optim.optimizer import Optimizer, StepInputs, Tensors, moment
from packtrain.engine.optim.sgd import opt_step_sgd
from packtrain.engine.optim.weights import decay_axes, parts_of, sampled, stored, stream_of, write
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, state

GPU_ADAMW = triton.lazy_kernel("update", "adamw")
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "1 - beta1**t", "1 - beta2**t")


@dataclass(frozen=True, slots=True)
class AdamW(Optimizer):
    """AdamW: weight decay is decoupled from the gradient. Loshchilov & Hutter, arXiv 1711.05101."""

    name: ClassVar[str] = "adamw"
    hyper: ClassVar[tuple[str, ...]] = HYPER
    kernels: ClassVar[tuple[str, ...]] = ("update",)
    by_parts: ClassVar[bool] = True

    lr: float = 1e-3
    beta1: float = OPTIMIZER(0.9, "AdamW: decay of the first moment", min_value=0, max_value=0.9999)
    beta2: float = OPTIMIZER(0.95, "AdamW: decay of the second moment", min_value=0, max_value=0.99999)  # fmt: skip
    eps: float = OPTIMIZER(
        1e-8, "AdamW: added to the root of the second moment", min_value=1e-16, max_value=1
    )
    weight_decay: float = 0.1
    decay_axes: int = decay_axes()
    away: bool = field(default=False, kw_only=True)  # moments live in another memory than weights

    def numbers(self, t: int, lr: float) -> tuple[float, ...]:
        """Return the numbers of step t for the optimizer's op: rate, betas, eps, decay, bias corrections."""
        corrections = 1 - self.beta1**t, 1 - self.beta2**t
        return lr, self.beta1, self.beta2, self.eps, self.weight_decay, *corrections

    def states(self, w: Tensor) -> Tensors:
        return moment("m", w), moment("v", w)

    def update(self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs) -> Tensors:
        m, v = states
        if self.away:
            moments = opt_moments_adamw(g, m, v, step_inputs.hyper, step_inputs.gate)
            return self.step_along(w, moments, step_inputs)
        read = w, g, m, v, step_inputs.hyper, step_inputs.gate, step_inputs.key(w)
        use_decay = len(w.spec.shape) >= self.decay_axes
        return opt_step_adamw(*read, decay=use_decay, stream=stream_of(w))

    def step_along(
        self, w: Tensor, moments_result: tuple[Tensor, ...], step_inputs: StepInputs
    ) -> Tensors:
        """Write w's update along the direction, last of `moments_result`; return the handles of moments and w."""
        *handles, direction = moments_result
        parts = (ops.narrow(step_inputs.hyper, axis=0, start=at, length=1) for at in (0, 4, 5))
        lr, weight_decay, c1 = parts
        numbers = ops.concat([lr, weight_decay, ops.div(lr, c1)], axis=0)
        gate = ops.div(step_inputs.gate, step_inputs.gate)  # 1, or NaN
        op_inputs = w, direction, numbers, gate, step_inputs.key(w)
        use_decay = len(w.shape) >= self.decay_axes
        return *handles, *opt_step_sgd(*op_inputs, decay=use_decay, stream=stream_of(w))

    def without_decay(self) -> Optimizer:
        return replace(self, weight_decay=0.0)

    def with_offloaded_state(self) -> Optimizer:
        return replace(self, away=True)


@op(writes=(0, 2, 3))
def opt_step_adamw(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, hyper: Tensor, gate: Tensor, key: Tensor | None = None, *, decay: bool,
    stream: int = 0,
) -> tuple[Spec, ...]:  # fmt: skip
    """One AdamW step in one pass; returns the new handles of w, m and v. ggml_opt_step_adamw.

    g' = gate * g;  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2
    w = w (1 - lr * weight_decay) - lr (m / c1) / (sqrt(v / c2) + eps)

        w        (...)  f32, or bf16: stochastic rounding by uniform(seed, step, stream, index)
        g, m, v  (...)  f32
        hyper    (7,)   f32   see HYPER: c1 and c2 are inputs, so one plan serves every step
        gate     ()     f32   see clip_gate; nothing changes if it is not finite
        key      (2,)   i64   seed and step, only for bf16
    Loshchilov & Hutter 2019, arXiv 1711.05101.
    """
    weights.require_weight(w, key, g, m, v)
    Spec((7,)).require(hyper=hyper)
    Spec(()).require(gate=gate)
    return w.spec, m.spec, v.spec


@opt_step_adamw.kernel("numpy")
def opt_step_adamw_numpy(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    if not np.isfinite(gate):
        return
    lr, beta1, beta2, eps, weight_decay, c1, c2 = hyper
    g = g * gate
    m[...] = beta1 * m + (1 - beta1) * g
    v[...] = beta2 * v + (1 - beta2) * g * g
    decayed = floats(w) * (1 - lr * weight_decay * decay)
    write(w, decayed - lr * (m / c1) / (np.sqrt(v / c2) + eps), key, stream)


@opt_step_adamw.kernel("cpu")
def opt_step_adamw_cpu(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    dtype_number, weight_bytes, rounding_key = stored(w, key, stream)
    state_args = flatten(g), flatten(m), flatten(v), hyper, float(decay), flatten(gate)
    args = dtype_number, weight_bytes, *state_args, rounding_key
    call = run_replayable(kernels.update.adamw, *args)
    return call if key is None else None  # the rounding key changes with the step


@opt_step_adamw.kernel("torch")
def opt_step_adamw_torch(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    lr, beta1, beta2, eps, weight_decay, c1, c2 = hyper.unbind()
    is_finite = gate.isfinite()
    for chunk_start, (w_chunk, grad, m_chunk, v_chunk) in parts_of(w, g, m, v):
        grad = grad * gate
        torch.where(is_finite, (m_chunk * beta1).add_(grad * (1 - beta1)), m_chunk, out=m_chunk)
        squares = grad.square_().mul_(1 - beta2)
        torch.where(is_finite, (v_chunk * beta2).add_(squares), v_chunk, out=v_chunk)
        step = (m_chunk / c1).mul_(lr).div_((v_chunk / c2).sqrt_().add_(eps))
        decayed = real(w_chunk) * (1 - lr * weight_decay * decay)
        weights.write_torch(w_chunk, decayed.sub_(step), key, stream, chunk_start, is_finite)


@opt_step_adamw.kernel("cuda")
def opt_step_adamw_cuda(out, w, g, m, v, hyper, gate, key, *, decay, stream):
    if key is None:
        GPU_ADAMW(w, g, m, v, hyper, gate, decay)
    else:
        opt_step_adamw_torch(out, w, g, m, v, hyper, gate, key, decay=decay, stream=stream)


@opt_step_adamw.cost
def opt_step_adamw_cost(out, w, *inputs, decay, stream):
    # a root, two divisions, a random number
    return Cost({"exp": (2 if w.dtype == f32 else 4) * w.spec.size})


@opt_step_adamw.samples
def opt_step_adamw_samples():
    hyper = constant("hyper", np.array([1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975]))
    for w, key, gate, decay in sampled():
        g, m, v = input("g", w.shape), state("m", w.shape), state("v", w.shape)
        yield from opt_step_adamw(w, g, m, v, hyper, gate, key, decay=decay, stream=7)


@op(writes=(1, 2))
def opt_moments_adamw(
    g: Tensor, m: Tensor, v: Tensor, hyper: Tensor, gate: Tensor
) -> tuple[Spec, ...]:
    """Update AdamW's moments where they live in another memory than the weight; return the handles of m and v, and the
    direction = m / (sqrt(v / c2) + eps) of the step, or 0 if the gate is not finite. See opt_step_adamw.

        g, m, v, direction  (...)  f32
        hyper               (7,)   f32   see HYPER; lr, weight_decay and c1 play no part
        gate                ()     f32
    A step of lr / c1 along the direction then rounds as often as opt_step_adamw does, so kernels of the cpu on both
    sides give the bits that they give without offloading.
    A gradient out and a step back move half of what two moments would each way (ZeRO-Offload, arXiv 2101.06840).
    """
    Spec(g.shape).require(g=g, m=m, v=v)
    Spec((7,)).require(hyper=hyper)
    Spec(()).require(gate=gate)
    return m.spec, v.spec, g.spec


def _moments_kernel(step_kernel):
    """Return a kernel of opt_moments_adamw: it steps a weight of 0 at a rate of -1, which gives the direction."""

    def write_direction(out, g, m, v, hyper, gate):
        hyper = hyper + 0  # a copy
        out[2][...], hyper[0], hyper[5] = 0, -1, 1
        step_kernel(None, out[2], g, m, v, hyper, gate, None, decay=False, stream=0)

    return write_direction


opt_moments_adamw.kernel("numpy")(_moments_kernel(opt_step_adamw_numpy))
opt_moments_adamw.kernel("cpu")(_moments_kernel(opt_step_adamw_cpu))
opt_moments_adamw.kernel("torch")(_moments_kernel(opt_step_adamw_torch))
opt_moments_adamw.cost(lambda out, g, *inputs: Cost({"exp": 2 * g.spec.size}))


@opt_moments_adamw.samples
def opt_moments_adamw_samples():
    hyper = constant("hyper", np.array([1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975]))
    for w, key, gate, _ in sampled():
        if key is None:
            g, m, v = input("g", w.shape), state("m", w.shape), state("v", w.shape)
            yield from opt_moments_adamw(g, m, v, hyper, gate)
