"""The backward pass of attention for one tile of queries of many, whose gradients of keys and values are sums."""

import numpy as np

from packtrain import kernels
from packtrain.engine.ops.attention import (
    attention_back,
    attention_back_cost,
    attention_back_numpy,
    attention_back_samples,
    attention_back_workspace,
    position_arrays,
)  # fmt: skip
from packtrain.engine.tensor import Spec, Tensor, constant, op, state


@op(writes=(0, 1), inplace={2: (4,)})
def attention_back_sums(
    dk: Tensor, dv: Tensor, fresh: Tensor, dy: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    q_pos: Tensor | None = None, k_pos: Tensor | None = None, q_seq: Tensor | None = None, k_seq: Tensor | None = None,
    length: Tensor | None = None, *, scale: float, window: int = 0, softcap: float = 0.0,
) -> tuple[Spec, ...]:  # fmt: skip
    """attention_back with running sums: dk and dv are added to theirs, or start them; dq is the last result.

    dk, dv  as k  f32
    fresh   ()    f32  not 0 where the sums start
    """
    dq_spec, *sum_specs = attention_back.rule(dy, y, lse, q, k, v, scale=scale)
    k.spec.require(dk=dk, dv=dv)
    Spec(()).require(fresh=fresh)
    return *sum_specs, dq_spec


@attention_back_sums.kernel("numpy")
def attention_back_sums_numpy(out, dk, dv, fresh, *inputs, **attrs):
    dq, *gradients = (np.empty(x.shape, out[2].dtype) for x in (out[2], dk, dv))
    attention_back_numpy((dq, *gradients), *inputs, **attrs)
    out[2][...] = dq
    for total, gradient in zip((dk, dv), gradients, strict=True):
        total[...] = gradient if fresh else total + gradient


@attention_back_sums.workspace("cpu")
def attention_back_sums_workspace(dk, dv, fresh, *inputs, **attrs):
    return attention_back_workspace(*inputs)


@attention_back_sums.kernel("cpu")
def attention_back_sums_cpu(
    out, dk, dv, fresh, dy, y, lse, q, k, v, *mask_inputs, scale, window, softcap, work=()
):
    arrays = (out[2], dk, dv, *(work or (dk, dv))), dy, y, lse, q, k, v
    options = *position_arrays(*mask_inputs), scale, window, softcap
    kernels.attention_back.attention_back(*arrays, *options, int(fresh == 0))


@attention_back_sums.cost
def attention_back_sums_cost(out, dk, dv, fresh, *inputs, **attrs):
    return attention_back_cost(out, *inputs, **attrs)


@attention_back_sums.samples
def attention_back_sums_samples():
    for number, dq in enumerate(attention_back_samples()):
        if dq.index == 0:
            k, fresh = dq.call.inputs[4], constant("fresh", np.array(number % 2, np.float32))
            totals = (state(name, k.shape) for name in ("dk", "dv"))
            yield from attention_back_sums(*totals, fresh, *dq.call.inputs, **dq.call.attrs)
