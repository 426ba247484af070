"""Planted faults in kernels, in what they do in place, and in updates. See faults."""

from collections.abc import Callable
from functools import partial

import numpy as np
from pytest import MonkeyPatch

import packtrain as pt
from packtrain import kernels
from packtrain.engine.ops.arrays import floats
from packtrain.engine.tensor import OPS
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from tests import bit_checks
from tests.faults import (
    Change,
    case_check,
    fault,
    inplace_check,
    poisoned_check,
    replace_kernel,
    value_check,
)

# ---- kernels ---------------------------------------------------------------------------------------------------


@fault("kernel", value_check("matmul"))
def a_product_that_starts_at_the_second_block(patch: MonkeyPatch) -> None:
    def with_rolled_weights(run):
        return lambda y, x, w, acc, **attrs: run(
            y, x, np.roll(w, 1, -1) if w.dtype.names else w, acc, **attrs
        )

    replace_kernel(patch, "matmul", with_rolled_weights)


@fault("kernel", value_check("matmul_back"))
def a_gradient_through_packed_weights_that_forgets_the_earlier_one(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch,
        "matmul_back",
        lambda run: lambda dx, dy, w, acc, **attrs: run(dx, dy, w, None, **attrs),
    )


@fault("kernel", value_check("rms_norm"))
def rms_norm_without_eps(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "rms_norm", lambda run: lambda y, x, w, *, eps: run(y, x, w, eps=0.0))


@fault("kernel", value_check("norm"))
def norm_with_the_variance_around_zero(patch: MonkeyPatch) -> None:
    def wrong(y, x, w, b, *, eps):
        u = (x - x.mean(-1, keepdims=True)) / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        y[...] = u * (1 if w is None else w) + (0 if b is None else b)

    replace_kernel(patch, "norm", lambda run: wrong)


@fault("kernel", value_check("add"))
def a_sum_with_packed_rows_one_block_late(patch: MonkeyPatch) -> None:
    def with_rolled_addend(run):
        return lambda y, a, b, **work: run(y, np.roll(a, 1, -1) if a.dtype.names else a, b, **work)

    replace_kernel(patch, "add", with_rolled_addend)


@fault("kernel", value_check("conv_2d"))
def a_convolution_whose_windows_are_never_apart(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch,
        "conv_2d",
        lambda run: lambda y, x, w, **attrs: run(y, x, w, **attrs | {"dilation": (1, 1)}),
    )


@fault("kernel", value_check("conv_2d_back"))
def a_gradient_of_pictures_without_their_last_column(patch: MonkeyPatch) -> None:
    def wrong(run):
        def short(dx, dy, w, **attrs):
            run(dx, dy, w, **attrs)
            dx[..., -1] = 0

        return short

    replace_kernel(patch, "conv_2d_back", wrong)


@fault("kernel", value_check("conv_2d_back_w"))
def a_gradient_of_filters_from_all_pictures_but_one(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch,
        "conv_2d_back_w",
        lambda run: lambda dw, dy, x, **attrs: run(dw, dy[:-1], x[:-1], **attrs),
    )


@fault("kernel", value_check("short_conv"))
def a_convolution_that_sees_the_sample_before(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch, "short_conv", lambda run: lambda y, x, w, seq, work: run(y, x, w, None, work)
    )


@fault("kernel", value_check("short_conv_back_w"))
def a_gradient_of_filters_with_the_sample_before(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch,
        "short_conv_back_w",
        lambda run: lambda dw, dy, x, seq, **attrs: run(dw, dy, x, None, **attrs),
    )


@fault("kernel", value_check("ssm_scan"))
def a_scan_that_goes_on_into_the_next_sample(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch,
        "ssm_scan",
        lambda run: (
            lambda y, x, delta, a, skip, seq, **attrs: run(y, x, delta, a, skip, None, **attrs)
        ),
    )


@fault("kernel", value_check("ssm_scan_cells"))
def a_scan_that_begins_with_nothing(patch: MonkeyPatch) -> None:
    def wrong(run):
        def forgotten(*args, **attrs):
            *leading_args, source, target = args
            return run(*leading_args, np.full_like(source, -1), target, **attrs)

        return forgotten

    replace_kernel(patch, "ssm_scan_cells", wrong)


@fault("kernel", value_check("delta_rule"))
def a_delta_rule_that_reads_the_keys_of_another_group(patch: MonkeyPatch) -> None:
    def wrong(run):
        return lambda *args, tiled, **attrs: run(*args, tiled=not tiled, **attrs)

    replace_kernel(patch, "delta_rule", wrong)


@fault("kernel", value_check("delta_rule_back"))
def a_gradient_of_delta_rules_without_the_decays(patch: MonkeyPatch) -> None:
    def wrong(run):
        return lambda out, dy, x, decay, *args, **attrs: run(out, dy, x, decay * 0, *args, **attrs)

    replace_kernel(patch, "delta_rule_back", wrong)


@fault("kernel", value_check("rms_norm_back"))
def rms_norm_back_without_the_mean(patch: MonkeyPatch) -> None:
    def wrong(out, dy, x, w, acc, *, eps, work):
        r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        for d, gradient in zip(out, (dy * r * (1 if w is None else w), (dy * x * r)), strict=True):
            if d is not None:
                d[...] = gradient.reshape(-1, *d.shape).sum(0)

    replace_kernel(patch, "rms_norm_back", lambda run: wrong)


@fault("kernel", value_check("soft_max"))
def soft_max_without_subtracting_the_maximum(patch: MonkeyPatch) -> None:
    def wrong(y, x, mask, *, scale):
        e = np.exp(scale * x + (0 if mask is None else mask))
        total = e.sum(-1, keepdims=True)
        y[...] = e / np.where(total == 0, 1, total)

    replace_kernel(patch, "soft_max", lambda run: wrong)


@fault("kernel", value_check("soft_max"))
def soft_max_with_the_mask_of_another_row(patch: MonkeyPatch) -> None:
    def with_rolled_mask(run):
        return lambda y, x, mask, *, scale: run(
            y, x, mask if mask is None else np.roll(mask, 1, 0), scale=scale
        )

    replace_kernel(patch, "soft_max", with_rolled_mask)


@fault("kernel", value_check("attention"))
def attention_that_sees_the_next_position(patch: MonkeyPatch) -> None:
    def ahead(run):
        def wrong(out, q, k, v, q_pos, k_pos, *rest, **rule):
            q_pos = None if q_pos is None else q_pos + 1
            run(out, q, k, v, q_pos, k_pos, *rest, **rule)

        return wrong

    replace_kernel(patch, "attention", ahead)


@fault("kernel", value_check("attention"))
def attention_across_segments(patch: MonkeyPatch) -> None:
    def blind(run):
        def wrong(out, q, k, v, q_pos, k_pos, q_seq, k_seq, *rest, **rule):
            run(out, q, k, v, q_pos, k_pos, None, None, *rest, **rule)

        return wrong

    replace_kernel(patch, "attention", blind)


@fault("kernel", value_check("attention"))
def attention_beyond_the_cells_in_use(patch: MonkeyPatch) -> None:
    def long(run):
        return lambda out, *inputs, **rule: run(out, *inputs[:-2], None, inputs[-1], **rule)

    replace_kernel(patch, "attention", long)


@fault("kernel", value_check("attention"))
def attention_that_forgets_its_sinks(patch: MonkeyPatch) -> None:
    def forgetful(run):
        return lambda out, *inputs, **rule: run(out, *inputs[:-1], None, **rule)

    replace_kernel(patch, "attention", forgetful)


@fault("kernel", value_check("attention_cells"))
def attention_cells_with_the_sink_of_another_head(patch: MonkeyPatch) -> None:
    def with_rolled_sinks(run):
        def wrong(y, *inputs, **rule):
            *leading_inputs, sinks = inputs
            return run(y, *leading_inputs, None if sinks is None else np.roll(sinks, 1), **rule)

        return wrong

    replace_kernel(patch, "attention_cells", with_rolled_sinks)


@fault("kernel", value_check("attention"))
def attention_with_heads_dealt_in_turn(patch: MonkeyPatch) -> None:
    def dealt(run):
        def wrong(out, q, k, *rest, **rule):
            heads = np.arange(q.shape[2]).reshape(-1, k.shape[2]).T.ravel()
            y, lse = np.empty_like(out[0]), np.empty_like(out[1])
            run((y, lse), np.ascontiguousarray(q[:, :, heads]), k, *rest, **rule)
            out[0][:, :, heads], out[1][:, heads] = y, lse

        return wrong

    replace_kernel(patch, "attention", dealt)


@fault("kernel", value_check("attention"))
def attention_with_a_window_that_is_one_too_wide(patch: MonkeyPatch) -> None:
    def wide(run):
        return lambda *args, window, **rule: run(*args, window=window + (window > 0), **rule)

    replace_kernel(patch, "attention", wide)


@fault("kernel", value_check("attention"))
def attention_with_chunks_that_are_windows(patch: MonkeyPatch) -> None:
    def sliding(run):
        return lambda *args, window, **rule: run(*args, window=abs(window), **rule)

    replace_kernel(patch, "attention", sliding)


@fault("kernel", value_check("attention_back"))
def attention_back_without_the_slope_of_the_cap(patch: MonkeyPatch) -> None:
    def flat(run):
        return lambda *args, softcap, **rule: run(*args, softcap=0.0, **rule)

    replace_kernel(patch, "attention_back", flat)


@fault("kernel", value_check("attention_back_sums"))
def sums_of_attention_back_that_start_with_every_tile(patch: MonkeyPatch) -> None:
    def fresh_run(run):
        return lambda out, dk, dv, fresh, *rest, **attrs: run(
            out, dk, dv, np.ones_like(fresh), *rest, **attrs
        )

    replace_kernel(patch, "attention_back_sums", fresh_run)


@fault("kernel", value_check("rope_table"))
def rope_table_that_blends_from_the_other_end(patch: MonkeyPatch) -> None:
    def with_reversed_blend(run):
        return lambda *args, blend, **attrs: run(
            *args, blend=blend and (-blend[1], -blend[0]), **attrs
        )

    replace_kernel(patch, "rope_table", with_reversed_blend)


@fault("kernel", value_check("attention_back"))
def attention_back_without_delta(patch: MonkeyPatch) -> None:
    def wrong(run):
        return lambda out, dy, y, *rest, **attrs: run(out, dy, np.zeros_like(y), *rest, **attrs)

    replace_kernel(patch, "attention_back", wrong)


@fault("kernel", value_check("rope"))
def rope_with_the_other_pairs(patch: MonkeyPatch) -> None:
    def other(run):
        return lambda y, x, t, *, neox, inverse: run(y, x, t, neox=not neox, inverse=inverse)

    replace_kernel(patch, "rope", other)


@fault("kernel", value_check("rope"))
def rope_that_drops_what_it_does_not_turn(patch: MonkeyPatch) -> None:
    def short(run):
        def wrong(y, x, table, **attrs):
            run(y, x, table, **attrs)
            y[..., 2 * table.shape[-2] :] = 0

        return wrong

    replace_kernel(patch, "rope", short)


@fault("kernel", value_check("swiglu_back"))
def swiglu_back_with_its_results_swapped(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "swiglu_back", lambda run: lambda out, *args: run(out[::-1], *args))


@fault("kernel", value_check("set_rows"))
def set_rows_that_takes_minus_one_for_the_last_row(patch: MonkeyPatch) -> None:
    def wrong(out, leaf, x, ids):
        leaf[ids] = x

    replace_kernel(patch, "set_rows", lambda run: wrong)


@fault("kernel", value_check("get_rows"))
def get_rows_that_takes_minus_one_for_the_last_row(patch: MonkeyPatch) -> None:
    def wrong(y, w, ids):
        y[...] = w[ids]

    replace_kernel(patch, "get_rows", lambda run: wrong)


@fault("kernel", value_check("get_rows_back"))
def get_rows_back_where_the_last_write_wins(patch: MonkeyPatch) -> None:
    def wrong(dw, dy, ids, acc, *, shape):
        dw[...] = 0 if acc is None else acc
        dw[ids] += dy

    replace_kernel(patch, "get_rows_back", lambda run: wrong)


@fault("kernel", value_check("sum"))
def a_sum_that_loses_the_tail_of_its_last_vector(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "sum", lambda run: lambda y, x: run(y, x[: max(len(x) // 16 * 16, 1)]))


@fault("kernel", value_check("neg"))
def an_op_without_samples(patch: MonkeyPatch) -> None:
    patch.setattr(OPS["neg"], "sample_rule", None)


@fault("kernel", value_check("matmul"))
def matmul_that_forgets_what_it_adds_to(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch, "matmul", lambda run: lambda y, x, w, acc, **attrs: run(y, x, w, None, **attrs)
    )


@fault("kernel", value_check("matmul"))
def matmul_without_its_last_columns(patch: MonkeyPatch) -> None:
    def short(run):
        def wrong(y, x, w, acc, **attrs):
            run(y, x, w, acc, **attrs)
            y[..., y.shape[-1] // 16 * 16 :] = 0

        return wrong

    replace_kernel(patch, "matmul", short)


@fault("kernel", value_check("dropout"))
def dropout_that_does_not_scale(patch: MonkeyPatch) -> None:
    def wrong(run):
        def unscaled(y, x, key, *, p, stream):
            run(y, x, key, p=p, stream=stream)
            y *= 1 - p

        return unscaled

    replace_kernel(patch, "dropout", wrong)


@fault("kernel", value_check("cross_entropy"))
def cross_entropy_of_rows_without_target(patch: MonkeyPatch) -> None:
    def wrong(run):
        return lambda out, logits, targets, weights: run(
            out, logits, np.maximum(targets, 0), weights
        )

    replace_kernel(patch, "cross_entropy", wrong)


@fault("kernel", value_check("linear_cross_entropy"))
def linear_cross_entropy_that_replaces_dw_by_the_last_chunk(patch: MonkeyPatch) -> None:
    def wrong(run):
        def last_only(out, x, w, targets, weights, b, *, chunk, **attrs):
            run(out, x, w, targets, weights, b, chunk=chunk, **attrs)
            if out[4] is not None:
                last_start = (targets.size - 1) // chunk * chunk
                last_weights = np.where(np.arange(targets.size) < last_start, 0, weights.ravel())
                scratch = [np.empty_like(t) for t in out]
                run(
                    scratch,
                    x,
                    w,
                    targets,
                    last_weights.reshape(weights.shape),
                    b,
                    chunk=chunk,
                    **attrs,
                )
                out[4][...] = scratch[4]

        return last_only

    replace_kernel(patch, "linear_cross_entropy", wrong)


@fault("kernel", partial(bit_checks.check_optional, "linear_cross_entropy"))
def linear_cross_entropy_that_needs_dx_for_dw(patch: MonkeyPatch) -> None:
    def wrong(run):
        def needs(out, *args, **attrs):
            run(out, *args, **attrs)
            if out[3] is None and out[4] is not None:
                out[4][...] = 0

        return needs

    replace_kernel(patch, "linear_cross_entropy", wrong)


@fault("kernel", partial(bit_checks.check_strided, "add"))
def a_kernel_that_says_it_takes_views_and_reads_them_in_memory_order(patch: MonkeyPatch) -> None:
    def wrong(y, a, b):
        a, b = np.broadcast_to(a, y.shape), np.broadcast_to(b, y.shape)
        y[...] = (a.ravel("K") + b.ravel("K")).reshape(y.shape)

    replace_kernel(patch, "add", lambda run: wrong)


@fault("kernel", partial(bit_checks.check_threads, "sum", (1, 2)))
def a_sum_whose_parts_depend_on_the_threads(patch: MonkeyPatch) -> None:
    def wrong(y, x):
        parts = [part.sum(dtype=np.float32) for part in np.array_split(x, kernels.threads())]
        y[...] = np.float32(sum(parts))

    replace_kernel(patch, "sum", lambda run: wrong)


# ---- in place --------------------------------------------------------------------------------------------------


@fault("in place", inplace_check("rms_norm"), poisoned_check)
def rms_norm_that_uses_its_result_as_scratch(patch: MonkeyPatch) -> None:
    def wrong(y, x, w, *, eps):
        np.multiply(x, x, out=y)
        r = 1 / np.sqrt(y.mean(-1, keepdims=True) + eps)
        y[...] = x * r * (1 if w is None else w)

    replace_kernel(patch, "rms_norm", lambda run: wrong)


@fault("in place", inplace_check("swiglu_back"), poisoned_check)
def swiglu_back_that_writes_one_result_before_the_other_is_computed(patch: MonkeyPatch) -> None:
    def wrong(out, dy, gate, up):
        s = 1 / (1 + np.exp(-gate))
        out[0][...] = dy * up * s * (1 + gate * (1 - s))
        out[1][...] = dy * gate * s

    replace_kernel(patch, "swiglu_back", lambda run: wrong)


@fault("in place", inplace_check("get_rows_back"), poisoned_check)
def get_rows_back_that_clears_its_result_before_it_adds(patch: MonkeyPatch) -> None:
    def wrong(dw, dy, ids, acc, *, shape):
        dw[...] = 0
        np.add.at(dw, ids[ids >= 0], dy[ids >= 0])
        if acc is not None:
            dw += acc

    replace_kernel(patch, "get_rows_back", lambda run: wrong)


@fault("in place", case_check)
def an_op_that_permits_what_its_kernel_cannot(patch: MonkeyPatch) -> None:
    patch.setattr(OPS["matmul"], "inplace", {0: (0, 2)})


# ---- updates ---------------------------------------------------------------------------------------------------


@fault("update", value_check("opt_step_adamw"))
def adamw_with_decay_in_the_gradient(patch: MonkeyPatch) -> None:
    def coupled(run):
        def wrong(out, w, g, m, v, hyper, gate, key, *, decay, stream):
            coupled = g + hyper[4] * floats(w) * decay
            run(out, w, coupled, m, v, hyper, gate, key, decay=False, stream=stream)

        return wrong

    replace_kernel(patch, "opt_step_adamw", coupled)


def with_gate(change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def changed(run):
        def wrong(out, w, g, m, v, hyper, gate, key, **attrs):
            run(out, w, g, m, v, hyper, change(gate), key, **attrs)

        return wrong

    return changed


@fault("update", value_check("opt_step_adamw"))
def adamw_that_does_not_clip(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "opt_step_adamw", with_gate(lambda gate: gate / gate))


@fault("update", value_check("opt_step_adamw"))
def adamw_that_takes_a_step_of_zero_where_it_should_take_none(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "opt_step_adamw", with_gate(np.nan_to_num))


@fault("update", value_check("opt_step_adamw"))
def adamw_without_bias_correction(patch: MonkeyPatch) -> None:
    def wrong(run):
        def uncorrected(out, w, g, m, v, hyper, *rest, **attrs):
            ones = np.ones(2, np.float32)
            run(out, w, g, m, v, np.concatenate([hyper[:5], ones]), *rest, **attrs)

        return uncorrected

    replace_kernel(patch, "opt_step_adamw", wrong)


@fault("update", value_check("opt_step_sgd"))
def bf16_that_are_rounded_to_the_nearest(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "opt_step_sgd", to_nearest)


def to_nearest(run):
    """An optimizer step whose bf16 weights are rounded to the nearest."""

    def step(out, w, *args, **attrs):
        if args[-1] is None:
            run(out, w, *args, **attrs)
            return
        unpacked = dequantize(w)
        run(out, unpacked, *args[:-1], None, **attrs)
        w[...] = quantize(unpacked, pt.bf16)

    return step


@fault("update", value_check("opt_step_adamw"))
def bf16_that_are_rounded_by_the_same_numbers_in_every_step(patch: MonkeyPatch) -> None:
    def wrong(run):
        return lambda *args, **attrs: run(
            *args[:-1], args[-1] if args[-1] is None else args[-1] * 0, **attrs
        )

    replace_kernel(patch, "opt_step_adamw", wrong)


def with_moments(change: Callable[..., None]) -> Change:
    """A kernel of adamw8bit after which `change` gets the moments: m, m_scale, v, v_scale."""

    def changed(run):
        def wrong(out, g, *states, **attrs):
            run(out, g, *states, **attrs)
            change(*out[:4])

        return wrong

    return changed


@fault("update", value_check("opt_moments_adamw8bit"))
def moments_in_8_bits_with_the_scale_of_the_next_block(patch: MonkeyPatch) -> None:
    def roll(m, m_scale, v, v_scale):
        m_scale[...] = np.roll(m_scale, -1)

    replace_kernel(patch, "opt_moments_adamw8bit", with_moments(roll))


@fault("update", value_check("opt_momentum8bit"))
def momentum_in_8_bits_with_the_scale_of_the_next_block(patch: MonkeyPatch) -> None:
    def rolled(run):
        def wrong(out, *inputs):
            run(out, *inputs)
            out[1][...] = np.roll(out[1], -1)

        return wrong

    replace_kernel(patch, "opt_momentum8bit", rolled)


@fault("update", value_check("opt_moments_adamw8bit"))
def moments_in_8_bits_one_level_too_low(patch: MonkeyPatch) -> None:
    def lower(m, m_scale, v, v_scale):
        v.view(np.uint8)[...] -= v.view(np.uint8) > 1

    replace_kernel(patch, "opt_moments_adamw8bit", with_moments(lower))


@fault("update", value_check("opt_moments_adamw8bit"))
def moments_in_8_bits_that_a_bad_step_changes(patch: MonkeyPatch) -> None:
    def finite(run):
        def wrong(out, g, m, m_scale, v, v_scale, hyper, gate):
            run(out, g, m, m_scale, v, v_scale, hyper, np.nan_to_num(gate))

        return wrong

    replace_kernel(patch, "opt_moments_adamw8bit", finite)


@fault("update", value_check("clip_gate"))
def a_norm_without_its_root(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "clip_gate", lambda run: lambda y, x, **attrs: run(y, x * x, **attrs))


@fault("update", value_check("sum_squares"))
def a_norm_of_the_last_gradient_only(patch: MonkeyPatch) -> None:
    replace_kernel(patch, "sum_squares", lambda run: lambda y, x, acc: run(y, x, None))
