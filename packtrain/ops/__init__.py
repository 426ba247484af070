"""Every op, by name. One file per family; each op with every rule about it."""

from packtrain.ops.activation import dropout, geglu, geglu_back, swiglu, swiglu_back
from packtrain.ops.attention import attention, attention_back
from packtrain.ops.elementwise import (
    add,
    div,
    exp,
    log,
    mul,
    neg,
    relu,
    scale,
    sigmoid,
    silu,
    silu_back,
    sqr,
    sqrt,
    step,
    sub,
    tanh,
)  # fmt: skip
from packtrain.ops.experts import (
    experts,
    matmul_id,
    matmul_id_back,
    out_prod_id,
    weighted_rows,
    weighted_rows_back,
)
from packtrain.ops.index import get_rows, get_rows_back, set_rows, zero_rows
from packtrain.ops.loss import cross_entropy, cross_entropy_back, linear_cross_entropy
from packtrain.ops.matmul import matmul, matmul_back, out_prod
from packtrain.ops.norm import rms_norm, rms_norm_back
from packtrain.ops.reduce import broadcast_to, sum, sum_rows, sum_to
from packtrain.ops.rope import rope, rope_table
from packtrain.ops.routing import group_rows, take, take_back, top_k
from packtrain.ops.shape import concat, cont, narrow, narrow_back, permute, reshape, transpose
from packtrain.ops.softmax import soft_max, soft_max_back
from packtrain.ops.update import accumulate, clip_gate, sum_squares

__all__ = [
    "accumulate", "add", "attention", "attention_back", "broadcast_to", "clip_gate", "concat", "cont",
    "cross_entropy", "cross_entropy_back", "div", "dropout", "exp", "experts", "geglu", "geglu_back",
    "get_rows", "get_rows_back", "group_rows", "linear_cross_entropy", "log", "matmul", "matmul_back",
    "matmul_id", "matmul_id_back", "mul", "narrow", "narrow_back", "neg", "out_prod",
    "out_prod_id", "permute", "relu", "reshape", "rms_norm", "rms_norm_back", "rope", "rope_table",
    "scale", "set_rows", "sigmoid", "silu", "silu_back", "soft_max", "soft_max_back", "sqr", "sqrt", "step",
    "sub", "sum", "sum_rows", "sum_squares", "sum_to", "swiglu", "swiglu_back", "take", "take_back", "tanh",
    "top_k", "transpose", "weighted_rows", "weighted_rows_back", "zero_rows",
]  # fmt: skip
