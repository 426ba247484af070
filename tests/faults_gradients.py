"""Planted faults in the gradients of ops, in differentiate and in recomputation. See faults."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pytest import MonkeyPatch

import packtrain as pt
from packtrain.engine import autodiff, ops, row_tiles
from packtrain.engine.ops import loss
from packtrain.engine.tensor import OPS
from tests import tile_checks
from tests.faults import (
    fault,
    gradient_check,
    recompute_check,
    replace_kernel,
    replace_vjp,
    slope_check,
    wrap_attribute,
)
from tests.test_recompute import test_a_higher_rank_is_less_memory_and_more_work

# ---- gradients of single ops -----------------------------------------------------------------------------------


@fault("vjp", gradient_check("rope"))
def rope_turned_the_same_way_in_backward(patch: MonkeyPatch) -> None:
    def wrong(dy, y, x, table, *, neox, inverse):
        return ops.rope(dy, table, neox=neox, inverse=inverse), None

    replace_vjp(patch, "rope", lambda rule: wrong)


@fault("vjp", gradient_check("sqrt"))
def sqrt_without_its_half(patch: MonkeyPatch) -> None:
    replace_vjp(patch, "sqrt", lambda rule: lambda dy, y, x: (ops.div(dy, y),))


@fault("vjp", gradient_check("div"))
def div_with_the_wrong_sign(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def positive(dy, y, a, b):
            da, db = rule(dy, y, a, b)
            return da, ops.neg(db)

        return positive

    replace_vjp(patch, "div", wrong)


@fault("vjp", gradient_check("narrow"))
def narrow_back_at_the_start(patch: MonkeyPatch) -> None:
    def wrong(dy, y, x, *, axis, start, length):
        return (ops.narrow_back(dy, axis=axis, start=0, size=x.shape[axis]),)

    replace_vjp(patch, "narrow", lambda rule: wrong)


@fault("vjp", gradient_check("permute"), raised=pt.GraphError)
def permute_turned_the_same_way_in_backward(patch: MonkeyPatch) -> None:
    replace_vjp(
        patch, "permute", lambda rule: lambda dy, y, x, *, axes: (ops.permute(dy, axes=axes),)
    )


@fault("vjp", gradient_check("sum_rows"))
def a_sum_that_is_differentiated_as_a_mean(patch: MonkeyPatch) -> None:
    def wrong(dy, y, x):
        return (ops.broadcast_to(ops.scale(dy, by=1 / x.shape[-1]), shape=x.shape),)

    replace_vjp(patch, "sum_rows", lambda rule: wrong)


@fault("vjp", gradient_check("broadcast_to"))
def a_repeated_value_that_gets_the_gradient_of_its_first_copy(patch: MonkeyPatch) -> None:
    def wrong(dy, y, x, *, shape):
        for axis in range(len(shape) - len(x.shape)):
            dy = ops.narrow(dy, axis=axis, start=0, length=1)
        dense = ops.reshape(ops.cont(dy), shape=shape[len(shape) - len(x.shape) :])
        return (ops.sum_to(dense, shape=x.shape),)

    replace_vjp(patch, "broadcast_to", lambda rule: wrong)


@fault("vjp", gradient_check("matmul"))
def matmul_that_adds_its_addend_twice_in_backward(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def doubled(dy, y, x, w, acc, **attrs):
            dx, dw, dacc = rule(dy, y, x, w, acc, **attrs)
            return dx, dw, dacc and ops.add(dacc, dacc)

        return doubled

    replace_vjp(patch, "matmul", wrong)


@fault("vjp", gradient_check("linear_cross_entropy"))
def a_loss_that_is_always_differentiated_as_the_last_value(patch: MonkeyPatch) -> None:
    patch.setattr(loss, "_scale_grad", lambda dloss, d: d)


@fault("vjp", gradient_check("set_rows"))
def set_rows_that_leaves_the_gradient_of_what_it_overwrote(patch: MonkeyPatch) -> None:
    def wrong(rule):
        return lambda dy, *rest: (dy[0], *rule(dy, *rest)[1:])

    replace_vjp(patch, "set_rows", wrong)


@fault("vjp", gradient_check("dropout"))
def dropout_of_other_elements_in_backward(patch: MonkeyPatch) -> None:
    def wrong(dy, y, x, key, *, p, stream):
        return ops.dropout(dy, key, p=p, stream=stream + 1), None

    replace_vjp(patch, "dropout", lambda rule: wrong)


@fault("vjp", gradient_check("soft_max"))
def soft_max_without_its_scale_in_backward(patch: MonkeyPatch) -> None:
    replace_vjp(patch, "soft_max", lambda rule: lambda *args, scale: rule(*args, scale=1.0))


@fault("vjp", gradient_check("attention"))
def attention_with_the_gradients_of_keys_and_values_swapped(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def swapped(*args, **attrs):
            dq, dk, dv, *rest = rule(*args, **attrs)
            return dq, dv, dk, *rest

        return swapped

    replace_vjp(patch, "attention", wrong)


@fault("vjp", gradient_check("attention"))
def attention_with_the_gradient_of_sinks_turned_around(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def negated(*args, **attrs):
            *rest, dsinks = rule(*args, **attrs)
            return *rest, None if dsinks is None else ops.neg(dsinks)

        return negated

    replace_vjp(patch, "attention", wrong)


@fault("vjp", gradient_check("get_rows"))
def get_rows_that_shifts_its_ids_in_backward(patch: MonkeyPatch) -> None:
    def wrong(dy, y, w, ids):
        shifted = pt.constant("shifted", np.maximum(ids.value - 1, 0), pt.i32)
        return ops.get_rows_back(dy, shifted, shape=w.shape), None

    replace_vjp(patch, "get_rows", lambda rule: wrong)


# ---- differentiate ---------------------------------------------------------------------------------------------


@fault("gradient", slope_check)
def a_gradient_that_replaces_the_earlier_one(patch: MonkeyPatch) -> None:
    patch.setattr(autodiff, "add", lambda before, d: d)


@fault("gradient", slope_check)
def a_folded_gradient_that_loses_the_earlier_one(patch: MonkeyPatch) -> None:
    """Says that an op adds to the earlier gradient, but does not write it so."""

    def wrong(fold):
        def forgets(self, call, call_grads, newest):
            previous = list(call_grads)
            folded = fold(self, call, call_grads, newest)
            call_grads[:] = previous
            return folded

        return forgets

    wrap_attribute(patch, autodiff._Backward, "_fold_into_acc", wrong)


@fault("gradient", slope_check)
def a_folded_gradient_that_counts_twice(patch: MonkeyPatch) -> None:
    wrap_attribute(
        patch,
        autodiff._Backward,
        "_fold_into_acc",
        lambda fold: lambda *args: fold(*args) and set(),
    )


# ---- recomputation ---------------------------------------------------------------------------------------------


@fault("recomputation", recompute_check)
def recomputation_from_values_that_were_not_kept(patch: MonkeyPatch) -> None:
    def wrong(recompute):
        def stale(self, call, passing):
            copies, self.copies = self.copies, {}
            result = recompute(self, call, {})
            self.copies = copies
            return result

        return stale

    wrap_attribute(patch, autodiff._Recomputation, "_copy_call", wrong)


@fault("recomputation", recompute_check)
def recomputation_of_nothing(patch: MonkeyPatch) -> None:
    patch.setattr(autodiff._Recomputation, "_unsaved_values", lambda self, calls: set())


@fault("recomputation", recompute_check)
def dropout_of_other_elements_when_recomputed(patch: MonkeyPatch) -> None:
    def wrong(recompute):
        def other(self, call, passing):
            if call.op is OPS["dropout"]:
                changed = {**call.attrs, "stream": call.attrs["stream"] + 1}
                twin = replace(call, attrs=changed)
                object.__setattr__(twin, "results", call.results)
                call = twin
            return recompute(self, call, passing)

        return other

    wrap_attribute(patch, autodiff._Recomputation, "_copy_call", wrong)


@fault("recomputation", test_a_higher_rank_is_less_memory_and_more_work)
def values_of_a_low_rank_that_stay_for_ever(patch: MonkeyPatch) -> None:
    patch.setattr(autodiff._Recomputation, "rank", lambda self, t: self.max_rank)


@fault("recomputation", recompute_check, raised=pt.GraphError)
def recomputation_of_a_write(patch: MonkeyPatch) -> None:
    def wrong(unsaved_values):
        def with_writes(self, calls):
            written = [t for call in calls if call.op.writes for t in call.results]
            earlier = [t for t in written if t.call.serial <= self.last_kept_serial]
            return unsaved_values(self, calls).union(earlier)

        return with_writes

    wrap_attribute(patch, autodiff._Recomputation, "_unsaved_values", wrong)


@fault("gradient", slope_check)
def a_gradient_that_is_used_before_it_is_complete(patch: MonkeyPatch) -> None:
    """At the last use of a value, not at its first."""

    def wrong(backward):
        last = {t: call for call in backward.calls for t in call.reads if t in set(backward.wrt)}
        done: dict[Any, list[Any]] = {}
        for t in backward.wrt:
            done.setdefault(last.get(t), []).append(t)
        return done

    patch.setattr(autodiff._Backward, "_first_uses", wrong)


# ---- tiles of rows ---------------------------------------------------------------------------------------------

tiled_check = partial(tile_checks.check_gradients, "llama experts")


@fault("tiles", tiled_check)
def a_tile_that_reads_the_rows_of_the_first(patch: MonkeyPatch) -> None:
    def wrong(tile):
        return lambda x, at, count: tile(x, at if x.ndim == 3 else 0, count)

    wrap_attribute(patch, row_tiles, "_tile_rows", wrong)


@fault("tiles", tiled_check)
def gradients_of_keys_that_are_added_to_those_of_values(patch: MonkeyPatch) -> None:
    sums = ops.attention_back_sums

    def swapped(dk, dv, *rest, **attrs):
        values, keys, dq = sums(dv, dk, *rest, **attrs)
        return keys, values, dq

    patch.setattr(ops, "attention_back_sums", swapped)
    patch.setattr(row_tiles, "_program", row_tiles._program.__wrapped__)  # none is cached


@fault("tiles", tiled_check)
def gradients_of_weights_from_the_last_tile_alone(patch: MonkeyPatch) -> None:
    def wrong(start):
        def begin(*args):
            run = start(*args)
            return lambda tiles: run(tiles | {"fresh": np.float32(1), "fresh.0": np.float32(1)})

        return begin

    wrap_attribute(patch, row_tiles, "_executed", wrong)


@fault("tiles", tiled_check)
def a_gradient_of_rows_that_forgets_what_it_is_added_to(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch,
        "tiled_back",
        lambda run: lambda out, acc, *tensors, **attrs: run(out, None, *tensors, **attrs),
    )
