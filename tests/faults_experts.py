"""Planted faults in routing, in products by expert and in weighted sums. See faults."""

import numpy as np
from pytest import MonkeyPatch

from tests.faults import fault, inplace_check, replace_kernel, value_check


@fault("kernel", value_check("top_k"))
def top_k_that_prefers_the_last_of_equal_ones(patch: MonkeyPatch) -> None:
    def wrong(ids, x, *, k):
        ids[...] = np.argsort(x, axis=-1, kind="stable")[..., ::-1][..., :k]

    replace_kernel(patch, "top_k", lambda run: wrong)


@fault("kernel", value_check("group_rows"))
def group_rows_that_turns_equal_ones_around(patch: MonkeyPatch) -> None:
    def wrong(run):
        def reversed_run(out, ids, *, groups, work):
            run(out, ids[::-1].copy(), groups=groups, work=work)
            out[0][...] = len(ids) - 1 - out[0]
            out[2][...] = out[2][::-1].copy()

        return reversed_run

    replace_kernel(patch, "group_rows", wrong)


@fault("kernel", value_check("take_back"))
def take_back_where_the_last_write_wins(patch: MonkeyPatch) -> None:
    def wrong(dx, dy, ids, *, width):
        dx[...] = 0
        np.put_along_axis(dx, ids, dy, -1)

    replace_kernel(patch, "take_back", lambda run: wrong)


@fault("kernel", value_check("matmul_id"))
def matmul_id_with_the_matrix_of_the_next_expert(patch: MonkeyPatch) -> None:
    def wrong(run):
        return lambda y, x, w, ids, acc: run(y, x, np.roll(w, -1, 0), ids, acc)

    replace_kernel(patch, "matmul_id", wrong)


@fault("kernel", value_check("out_prod_id"))
def out_prod_id_that_gives_the_first_row_of_an_expert_to_the_one_before(patch: MonkeyPatch) -> None:
    def wrong(run):
        def early(y, a, b, ids, acc, *, count):
            first = np.flatnonzero(np.diff(ids, prepend=ids[:1]))
            ids = ids.copy()
            ids[first] -= 1
            run(y, a, b, ids, acc, count=count)

        return early

    replace_kernel(patch, "out_prod_id", wrong)


@fault("kernel", value_check("weighted_rows"))
def weighted_rows_without_the_last_weight(patch: MonkeyPatch) -> None:
    def wrong(run):
        def short(y, x, ids, weights, acc):
            weights = weights.copy()
            weights[..., 1:] = 0
            run(y, x, ids, weights, acc)

        return short

    replace_kernel(patch, "weighted_rows", wrong)


@fault("in place", inplace_check("weighted_rows_back"))
def weighted_rows_back_that_writes_dx_before_it_reads_x(patch: MonkeyPatch) -> None:
    def wrong(out, dy, x, ids, weights):
        dx, dweights = out
        if dx is not None:
            dx[ids] = weights[..., None] * dy[..., None, :]
        if dweights is not None:
            dweights[...] = (dy[..., None, :] * x[ids]).sum(-1)

    replace_kernel(patch, "weighted_rows_back", lambda run: wrong)


@fault("kernel", value_check("matmul_id_back"))
def matmul_id_back_that_forgets_what_it_adds_to(patch: MonkeyPatch) -> None:
    replace_kernel(
        patch, "matmul_id_back", lambda run: lambda dx, dy, w, ids, acc: run(dx, dy, w, ids, None)
    )


@fault("kernel", value_check("matmul_id"))
def matmul_id_with_the_packed_matrix_of_the_last_expert(patch: MonkeyPatch) -> None:
    def wrong(run):
        def last(y, x, w, ids, acc):
            run(y, x, w if w.dtype == np.float32 else np.repeat(w[-1:], len(w), 0), ids, acc)

        return last

    replace_kernel(patch, "matmul_id", wrong)


@fault("kernel", value_check("candidates"))
def candidates_that_prefer_the_last_of_equal_ones(patch: MonkeyPatch) -> None:
    def wrong(out, x, **attrs):
        out[0][...] = np.argsort(x, axis=-1, kind="stable")[..., ::-1][..., : out[0].shape[-1]]
        out[1][...] = np.take_along_axis(x, out[0], -1)

    replace_kernel(patch, "candidates", lambda run: wrong)


@fault("kernel", value_check("draw"))
def a_draw_by_the_index_before(patch: MonkeyPatch) -> None:
    def wrong(run):
        def shifted_run(y, ids, x, numbers, counts, **attrs):
            run(y, ids, x, numbers, counts - [0, 0, 1] * (counts[:, 2:] > 0), **attrs)

        return shifted_run

    replace_kernel(patch, "draw", wrong)
