"""Every op, by name. One file per family, with every rule about its ops."""

import types

from packtrain.engine.ops.activation import dropout, geglu, geglu_back, swiglu, swiglu_back
from packtrain.engine.ops.attention import attention, attention_back, attention_cells
from packtrain.engine.ops.attention_sums import attention_back_sums
from packtrain.engine.ops.choosing import argmax, argsort, candidates, count_equal, draw
from packtrain.engine.ops.composed import (
    alibi, alibi_slopes, attention_to_all, group_norm, l2_norm, mean, mean_squared_error, soft_max_sinks, upscale,
)  # fmt: skip
from packtrain.engine.ops.convolution import conv_1d, conv_2d, conv_2d_back, conv_2d_back_w
from packtrain.engine.ops.delta import delta_rule, delta_rule_back, delta_rule_cells
from packtrain.engine.ops.diagonal import diag, diag_mask_inf, diag_mask_zero, diagonal
from packtrain.engine.ops.elementwise import (
    add, add_cast, cast, div, exp, log, mul, neg, relu, scale, sigmoid, silu, silu_back, sqr, sqrt, step, sub, tanh,
)  # fmt: skip
from packtrain.engine.ops.experts import (
    matmul_id, matmul_id_back, out_prod_id, weighted_rows, weighted_rows_back,
)  # fmt: skip
from packtrain.engine.ops.index import get_rows, get_rows_back, set_rows, zero_rows
from packtrain.engine.ops.loss import cross_entropy, cross_entropy_back, linear_cross_entropy
from packtrain.engine.ops.matmul import matmul, matmul_back, out_prod, outer
from packtrain.engine.ops.norm import mean_rows, norm, rms_norm, rms_norm_back
from packtrain.engine.ops.windows import im2col, im2col_back, pool_1d, pool_2d, pool_2d_back
from packtrain.engine.ops.reduce import broadcast_to, cumsum, repeat, sum, sum_rows, sum_to
from packtrain.engine.ops.region import acc, pad, set, slice
from packtrain.engine.ops.rope import grown, rope, rope_table
from packtrain.engine.ops.rounded import matmul_rounded, rounded
from packtrain.engine.ops.routing import experts, group_rows, take, take_back, top_k
from packtrain.engine.ops.scan import short_conv_states, ssm_scan, ssm_scan_back, ssm_scan_cells
from packtrain.engine.ops.shape import (
    concat, cont, narrow, narrow_back, permute, reshape, transpose,
)  # fmt: skip
from packtrain.engine.ops.short_conv import (
    short_conv, short_conv_back, short_conv_back_w, short_conv_cells,
)  # fmt: skip
from packtrain.engine.ops.softmax import log_soft_max, soft_cross_entropy, soft_max, soft_max_back
from packtrain.engine.ops.stored_values import matmul_stored, stored_sum
from packtrain.engine.ops.unary_functions import (
    abs, clamp, cos, elu, erf, gelu, gelu_erf, gelu_quick, leaky_relu, sgn, sin, softplus,
)  # fmt: skip
from packtrain.engine.ops.gradient_clipping import accumulate, clip_gate, sum_squares

# all that is imported above but modules
__all__ = sorted(
    name
    for name, value in vars().items()
    if name[0] != "_" and not isinstance(value, types.ModuleType)
)
