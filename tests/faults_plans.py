"""Planted faults in views, places, lifetimes, packing, running and verifying. See faults."""

import importlib
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pytest import MonkeyPatch

import packtrain as pt
from packtrain.engine import transfer_overlap
from packtrain.engine.backends import cuda_caching
from packtrain.engine.backends.host import Host
from packtrain.engine.executor import Executor, Session
from packtrain.engine.memory_plan import Plan, lifetimes
from packtrain.engine.ops import shape
from packtrain.engine.packing import pack
from packtrain.engine.placement import Placed
from packtrain.engine.step import FINISH_COPY
from packtrain.engine.transfers import TransferCopies
from packtrain.planner.checkpointing import BlockChain, middle_blocks
from packtrain.planner.plan_search import PlanSearch
from tests import bit_checks, online, plan_checks, pool_checks, search_checks, stream_checks
from tests.faults import (
    case_check,
    fault,
    parts_check,
    poisoned_check,
    sequences_check,
    spaces_check,
    verified_check,
    wrap_attribute,
)  # fmt: skip

# the functions of the same names hide these modules
packing = importlib.import_module("packtrain.engine.packing.pack")
planning = importlib.import_module("packtrain.engine.memory_plan.memory_plan")
verifying = importlib.import_module("packtrain.engine.memory_plan.plan_verifier")

# ---- views and places ------------------------------------------------------------------------------------------


def change_views(patch: MonkeyPatch, change: Any) -> None:
    """Bind views that were changed."""

    def wrong(arrays):
        def array_of(executor, t):
            t = change(t) if t.shared and t.call.op.view else t
            return arrays(executor, [t]).get(t)

        return lambda self, tensors: {t: array_of(self, t) for t in tensors}

    wrap_attribute(patch, Executor, "_arrays", wrong)


@fault("view", case_check)
def a_view_bound_at_the_start_of_its_storage(patch: MonkeyPatch) -> None:
    change_views(patch, lambda t: replace(t, offset=0))


@fault("view", case_check)
def a_view_bound_without_its_strides(patch: MonkeyPatch) -> None:
    change_views(patch, lambda t: replace(t, strides=t.spec.strides) if 0 not in t.strides else t)


@fault("view", partial(bit_checks.check_strided, "reshape"))
def a_reshape_that_joins_any_axes(patch: MonkeyPatch) -> None:
    patch.setattr(shape, "_strides_for", lambda x, shape: pt.Spec(shape, x.dtype).strides)


@fault("place", case_check)
def one_dense_copy_for_all_views_of_a_value(patch: MonkeyPatch) -> None:
    def wrong(copy):
        def by_storage(self, call, t, *rest):
            copies = [
                c for (v, _), c in self.copies.items() if v.base is t.base and v.spec == t.spec
            ]
            return copies[0] if copies else copy(self, call, t, *rest)

        return by_storage

    wrap_attribute(patch, TransferCopies, "_add_copy_step", wrong)


@fault("place", spaces_check)
def a_value_read_where_it_is_not(patch: MonkeyPatch) -> None:
    def wrong(bring):
        def bring_local(self, call, t, backend, accepts_strided):
            return bring(
                self, call, t, replace(backend, space=self.home[t.base].space), accepts_strided
            )

        return bring_local

    wrap_attribute(patch, TransferCopies, "bring_input", wrong)


@fault("place", parts_check)
def one_copy_for_all_views_of_a_value_in_another_space(patch: MonkeyPatch) -> None:
    def wrong(moved):
        def by_storage(self, call, t, backend):
            same_space = (v for v, space in self.copies if space == backend.space)
            matches = [v for v in same_space if v.base is t.base and v.spec == t.spec]
            return (
                self.copies[matches[0], backend.space] if matches else moved(self, call, t, backend)
            )

        return by_storage

    wrap_attribute(patch, TransferCopies, "_moved_input", wrong)


@fault("run", case_check)
def leaves_that_begin_where_their_buffer_does(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def at_zero(self, t):
            if t.base.kind == "constant":
                return rule(self, t)
            leaf = self._leaves[t.base.label]
            return leaf.backend.view(leaf.buffer, t.offset, t.spec, t.strides)

        return at_zero

    wrap_attribute(patch, Session, "array", wrong)


# ---- lifetimes -------------------------------------------------------------------------------------------------


def change_reads(patch: MonkeyPatch, change: Any) -> None:
    """Lifetimes from changed reads: by tensor, the steps in order."""

    def changed(rule):
        return lambda placed: {t: r for t, r in change(placed, rule(placed)).items() if r}

    wrap_attribute(patch, lifetimes, "_reading_steps", changed)


@fault("planner", verified_check, poisoned_check)
def a_value_freed_one_step_early(patch: MonkeyPatch) -> None:
    change_reads(patch, lambda placed, of: {t: [max(i - 1, 0) for i in r] for t, r in of.items()})


@fault("planner", verified_check, poisoned_check)
def outputs_that_are_not_kept_to_the_end(patch: MonkeyPatch) -> None:
    change_reads(
        patch,
        lambda placed, of: {
            t: [i for i in r if i < len(placed.steps)] or [0] for t, r in of.items()
        },
    )


@fault("planner", verified_check, poisoned_check)
def reads_through_a_view_that_do_not_count(patch: MonkeyPatch) -> None:
    def wrong(placed, of):
        direct_reads = {
            (t, i) for i, step in enumerate(placed.steps) for t in step.reads if t.base is t
        }
        return {
            t: [i for i in r if (t, i) in direct_reads or i == len(placed.steps)] or [0]
            for t, r in of.items()
        }

    change_reads(patch, wrong)


@fault("planner", sequences_check)
def bytes_that_are_used_again_before_a_barrier(patch: MonkeyPatch) -> None:
    patch.setattr(Placed, "released", lambda self, step: step + 1)


@fault("in place", sequences_check)
def in_place_over_a_value_that_is_read_beside(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def later_reads_only(self, step, index, i, *rest):
            before = self.reading_steps
            self.reading_steps = {t: [k for k in r if k >= i] for t, r in before.items()}
            result = rule(self, step, index, i, *rest)
            self.reading_steps = before
            return result

        return later_reads_only

    wrap_attribute(patch, lifetimes._LifetimeAnalysis, "_reusable_storage", wrong)


@fault("in place", verified_check, poisoned_check)
def in_place_over_a_value_that_is_read_later(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def early(self, step, index, i, *rest):
            before = self.reading_steps
            self.reading_steps = {t: [k for k in r if k <= i] for t, r in before.items()}
            result = rule(self, step, index, i, *rest)
            self.reading_steps = before
            return result

        return early

    wrap_attribute(patch, lifetimes._LifetimeAnalysis, "_reusable_storage", wrong)


@fault("in place", verified_check)
def in_place_over_a_value_that_is_read_twice(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def once(self, *args):
            before = self.reading_steps
            self.reading_steps = {t: sorted(set(r)) for t, r in before.items()}
            result = rule(self, *args)
            self.reading_steps = before
            return result

        return once

    wrap_attribute(patch, lifetimes._LifetimeAnalysis, "_reusable_storage", wrong)


@fault("in place", verified_check)
def in_place_over_a_value_that_is_read_transposed(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def with_base_reads(self, step, *rest):
            changed = copy(step)  # not `replace`, which asks for workspaces of such inputs
            object.__setattr__(changed, "inputs", tuple(t and t.base for t in step.inputs))
            return rule(self, changed, *rest)

        return with_base_reads

    wrap_attribute(patch, lifetimes._LifetimeAnalysis, "_reusable_storage", wrong)


def change_storages(patch: MonkeyPatch, change: Any) -> None:
    """Plans from changed storages."""

    def changed(rule):
        return lambda placed, **options: change(placed, rule(placed, **options))

    wrap_attribute(patch, planning, "storage_lifetimes", changed)


def shift_workspaces(patch: MonkeyPatch, **shift: int) -> None:
    def change(placed, storages):
        for s in storages:
            for name, by in shift.items() if s.category == "workspace" else ():
                setattr(s, name, getattr(s, name) + by)
        return storages

    change_storages(patch, change)


@fault("planner", verified_check)
def a_workspace_that_is_not_planned(patch: MonkeyPatch) -> None:
    change_storages(
        patch, lambda placed, storages: [s for s in storages if s.category != "workspace"]
    )


@fault("planner", verified_check)
def a_workspace_planned_for_the_next_step(patch: MonkeyPatch) -> None:
    shift_workspaces(patch, start=1, end=1)


@fault("planner", verified_check)
def a_workspace_too_small(patch: MonkeyPatch) -> None:
    shift_workspaces(patch, nbytes=-4)


travel = stream_checks.check_late, stream_checks.check_verified


@fault("planner", *travel)
def a_source_that_is_free_once_its_copy_has_begun(patch: MonkeyPatch) -> None:
    def changed(reads):
        def early(placed):
            local_steps = [
                replace(s, inputs=s.inputs[:1]) if s.op is FINISH_COPY else s for s in placed.steps
            ]
            return reads(replace(placed, steps=tuple(local_steps)))

        return early

    wrap_attribute(patch, lifetimes, "_reading_steps", changed)


@fault("planner", stream_checks.check_early, stream_checks.check_verified)
def a_copy_that_gets_its_bytes_when_it_arrives(patch: MonkeyPatch) -> None:
    def delayed_start(placed, storages):
        arrive_steps = {s.results[0]: i for i, s in enumerate(placed.steps) if s.op is FINISH_COPY}
        for s in storages:
            arrives = [arrive_steps[t] for t in s.tensors if t in arrive_steps]
            s.start = arrives[0] if arrives else s.start
        return storages

    change_storages(patch, delayed_start)


def change_routes(patch: MonkeyPatch, change: Any) -> None:
    """Copies that begin and arrive before other steps."""

    def changed(find_routes):
        def wrong(steps):
            routes = find_routes(steps)
            for route in routes.values():
                change(route, len(steps))
            return routes

        return wrong

    wrap_attribute(patch, transfer_overlap, "_find_transfers", changed)


@fault("place", stream_checks.check_early, stream_checks.check_verified)
def a_copy_that_begins_before_its_source_is_there(patch: MonkeyPatch) -> None:
    change_routes(patch, lambda route, steps: setattr(route, "begin_step", 0))


@fault("place", *travel)
def a_copy_that_is_waited_for_at_the_end(patch: MonkeyPatch) -> None:
    change_routes(patch, lambda route, steps: setattr(route, "end_step", steps))


@fault("planner", pool_checks.check_counted)
def what_kernels_take_beside_workspaces_not_counted(patch: MonkeyPatch) -> None:
    patch.setattr(planning, "pool_nbytes", lambda steps, space: 0)


@fault("planner", pool_checks.check_rules)
def free_blocks_of_a_segment_that_are_not_joined(patch: MonkeyPatch) -> None:
    patch.setattr(
        cuda_caching.CachingAllocator,
        "release",
        lambda self, block: setattr(block, "is_free", True),
    )


@fault("planner", pool_checks.check_rules, pool_checks.check_pool)
def tensors_of_a_pool_that_are_not_rounded(patch: MonkeyPatch) -> None:
    patch.setattr(cuda_caching, "round_up", lambda nbytes, to: nbytes)


@fault("planner", pool_checks.check_pool)
def a_pool_without_a_segment_for_all_at_once(patch: MonkeyPatch) -> None:
    patch.setattr(cuda_caching, "largest_room_nbytes", lambda traces: 0)


@fault("planner", verified_check, poisoned_check)
def an_input_that_gets_its_bytes_when_it_is_first_read(patch: MonkeyPatch) -> None:
    def delayed_input(placed, storages):
        for s in storages:
            if s.category == "input":
                reads = ([t.base for t in step.reads] for step in placed.steps)
                s.start = [s.tensors[0] in bases for bases in reads].index(True)
        return storages

    change_storages(patch, delayed_input)


# ---- packing ---------------------------------------------------------------------------------------------------


@fault("planner", verified_check)
def sizes_that_are_not_rounded_up(patch: MonkeyPatch) -> None:
    wrap_attribute(
        patch,
        planning,
        "lifetime_columns",
        lambda rule: lambda storages, alignment: rule(storages, 1),
    )


@fault("planner", partial(plan_checks.check_packer, pack), verified_check, poisoned_check)
def first_fit_that_forgets_the_last_step_of_a_buffer(patch: MonkeyPatch) -> None:
    def wrong(fit):
        return lambda start, end, *rest: fit(start, np.maximum(end - 1, start + 1), *rest)

    wrap_attribute(patch, packing, "first_fit", wrong)


@fault("planner", partial(plan_checks.check_packer, pack), verified_check, poisoned_check)
def first_fit_that_takes_a_gap_too_small(patch: MonkeyPatch) -> None:
    def wrong(fit):
        return lambda start, end, size, *rest: fit(start, end, np.maximum(size - 64, 64), *rest)

    wrap_attribute(patch, packing, "first_fit", wrong)


@fault("planner", plan_checks.check_lower_bound)
def a_lower_bound_over_closed_intervals(patch: MonkeyPatch) -> None:
    def wrong(rule):
        return lambda start, end, size: rule(start, end + 1, size)

    wrap_attribute(patch, plan_checks, "lower_bound", wrong)


@fault("planner", partial(plan_checks.check_trace, "freed blocks merge on both sides"))
def freed_blocks_that_do_not_merge(patch: MonkeyPatch) -> None:
    def wrong(self, offset, size):
        self.free.insert(sum(block < offset for block, _ in self.free), (offset, size))

    patch.setattr(online.Allocator, "release", wrong)


@fault("planner", partial(plan_checks.check_trace, "among equal blocks the last"))
def best_fit_that_takes_the_first_of_equal_blocks(patch: MonkeyPatch) -> None:
    patch.setattr(online, "reversed", list, raising=False)


# ---- running and verifying -------------------------------------------------------------------------------------


@fault("run", plan_checks.check_belonging)
def a_plan_that_serves_any_graph(patch: MonkeyPatch) -> None:
    patch.setattr(Plan, "check_belongs", lambda self, placed: None)


@fault("run", partial(plan_checks.check_session, [0, 1, 2]))
def outputs_that_are_no_copies(patch: MonkeyPatch) -> None:
    patch.setattr(Host, "read", lambda self, array: array)


@fault("verifier", partial(plan_checks.check_rejected, "a workspace over an input"))
def a_verifier_that_sees_no_overlap(patch: MonkeyPatch) -> None:
    patch.setattr(verifying, "_overlap", lambda a, b: False)


@fault("verifier", partial(plan_checks.check_rejected, "a result over an input that is read later"))
def a_verifier_that_trusts_every_read(patch: MonkeyPatch) -> None:
    patch.setattr(verifying._PlanReplay, "_check_not_overwritten", lambda self, *args: None)


@fault("verifier", partial(plan_checks.check_rejected, "over an input that is read twice"))
def a_verifier_that_permits_every_work_in_place(patch: MonkeyPatch) -> None:
    patch.setattr(verifying, "_may_overwrite", lambda step, k, x, t: True)


# ---- searching -------------------------------------------------------------------------------------------------

layered = replace(search_checks.SHAPE, num_micro_batches=2, layered=True)


@fault("search", partial(search_checks.check_alone, layered))
def a_block_that_begins_with_its_first_part_before_the_one_above_has_ended(
    patch: MonkeyPatch,
) -> None:
    def wrong(steps):
        def early(placed, built, parts):
            spans = steps(placed, built, parts)
            return {i: (spans.get(i + 1, (first,))[0], last) for i, (first, last) in spans.items()}

        return early

    wrap_attribute(patch, middle_blocks, "backward_steps", wrong)


@fault("search", partial(search_checks.check_smallest, replace(search_checks.SHAPE, max_norm=None)))
def embeddings_that_count_though_no_block_saves_them(patch: MonkeyPatch) -> None:
    patch.setattr(BlockChain, "_input_nbytes", property(lambda chain: chain.block.stream_nbytes))


@fault(
    "search",
    partial(search_checks.check_suggested_context, search_checks.LONG, 4),
    raised=pt.GraphError,
)
def a_shorter_context_in_as_many_tiles_as_the_long_one(patch: MonkeyPatch) -> None:
    patch.setattr(PlanSearch, "_could_fit_tiled", PlanSearch._could_fit)
