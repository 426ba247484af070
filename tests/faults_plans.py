"""Planted faults in views, places, lifetimes, packing, running and verifying. See faults."""

import importlib
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pytest import MonkeyPatch

import packtrain as pt
from benchmarks import online
from packtrain.engine import transfer_overlap
from packtrain.engine.backends import cuda_caching
from packtrain.engine.backends.host import Host
from packtrain.engine.executor import Executor, Session
from packtrain.engine.memory_plan import Plan, lifetimes
from packtrain.engine.ops import shape
from packtrain.engine.packing import pack
from packtrain.engine.placement import Placed
from packtrain.engine.step import ARRIVE
from packtrain.engine.transfers import Copies
from packtrain.planner.checkpointing import block_costs
from tests import bit_checks, plan_checks, pool_checks, search_checks, stream_checks
from tests.faults import (
    around,
    fault,
    graphs,
    parts,
    poisoned,
    sequences,
    spaces,
    verified,
)  # fmt: skip

# the functions of the same names hide these modules
packing = importlib.import_module("packtrain.engine.packing.pack")
planning = importlib.import_module("packtrain.engine.memory_plan.memory_plan")
verifying = importlib.import_module("packtrain.engine.memory_plan.plan_verifier")

# ---- views and places ------------------------------------------------------------------------------------------


def shown(patch: MonkeyPatch, change: Any) -> None:
    """Bind views that were changed."""

    def wrong(array):
        return lambda self, t: array(self, change(t) if t.shared and t.call.op.view else t)

    around(patch, Executor, "_array", wrong)


@fault("view", graphs)
def a_view_bound_at_the_start_of_its_storage(patch: MonkeyPatch) -> None:
    shown(patch, lambda t: replace(t, offset=0))


@fault("view", graphs)
def a_view_bound_without_its_strides(patch: MonkeyPatch) -> None:
    shown(patch, lambda t: replace(t, strides=t.spec.strides) if 0 not in t.strides else t)


@fault("view", partial(bit_checks.check_strided, "reshape"))
def a_reshape_that_joins_any_axes(patch: MonkeyPatch) -> None:
    patch.setattr(shape, "_strides_for", lambda x, shape: pt.Spec(shape, x.dtype).strides)


@fault("place", graphs)
def one_dense_copy_for_all_views_of_a_value(patch: MonkeyPatch) -> None:
    def wrong(copy):
        def by_storage(self, call, t, *rest):
            copies = [c for (v, _), c in self.made.items() if v.base is t.base and v.spec == t.spec]
            return copies[0] if copies else copy(self, call, t, *rest)

        return by_storage

    around(patch, Copies, "_copy", wrong)


@fault("place", spaces)
def a_value_read_where_it_is_not(patch: MonkeyPatch) -> None:
    def wrong(bring):
        def near(self, call, t, backend, taken):
            return bring(self, call, t, replace(backend, space=self.home[t.base].space), taken)

        return near

    around(patch, Copies, "bring", wrong)


@fault("place", parts)
def one_copy_for_all_views_of_a_value_in_another_space(patch: MonkeyPatch) -> None:
    def wrong(moved):
        def by_storage(self, call, t, backend):
            same_space = (v for v, space in self.made if space == backend.space)
            matches = [v for v in same_space if v.base is t.base and v.spec == t.spec]
            return (
                self.made[matches[0], backend.space] if matches else moved(self, call, t, backend)
            )

        return by_storage

    around(patch, Copies, "_moved", wrong)


@fault("run", graphs)
def leaves_that_begin_where_their_buffer_does(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def at_zero(self, t):
            if t.base.kind == "constant":
                return rule(self, t)
            leaf = self._leaves[t.base.label]
            return leaf.backend.view(leaf.buffer, t.offset, t.spec, t.strides)

        return at_zero

    around(patch, Session, "array", wrong)


# ---- lifetimes -------------------------------------------------------------------------------------------------


def reads(patch: MonkeyPatch, change: Any) -> None:
    """Lifetimes from changed reads: by tensor, the steps in order."""

    def changed(rule):
        return lambda placed: {t: r for t, r in change(placed, rule(placed)).items() if r}

    around(patch, lifetimes, "_reads", changed)


@fault("planner", verified, poisoned)
def a_value_freed_one_step_early(patch: MonkeyPatch) -> None:
    reads(patch, lambda placed, of: {t: [max(i - 1, 0) for i in r] for t, r in of.items()})


@fault("planner", verified, poisoned)
def outputs_that_are_not_kept_to_the_end(patch: MonkeyPatch) -> None:
    reads(
        patch,
        lambda placed, of: {
            t: [i for i in r if i < len(placed.steps)] or [0] for t, r in of.items()
        },
    )


@fault("planner", verified, poisoned)
def reads_through_a_view_that_do_not_count(patch: MonkeyPatch) -> None:
    def wrong(placed, of):
        direct_reads = {
            (t, i) for i, step in enumerate(placed.steps) for t in step.reads if t.base is t
        }
        return {
            t: [i for i in r if (t, i) in direct_reads or i == len(placed.steps)] or [0]
            for t, r in of.items()
        }

    reads(patch, wrong)


@fault("planner", sequences)
def bytes_that_are_used_again_before_a_barrier(patch: MonkeyPatch) -> None:
    patch.setattr(Placed, "released", lambda self, step: step + 1)


@fault("in place", sequences)
def in_place_over_a_value_that_is_read_beside(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def alone(self, step, index, i, *rest):
            before = self.reads
            self.reads = {t: [k for k in r if k >= i] for t, r in before.items()}
            result = rule(self, step, index, i, *rest)
            self.reads = before
            return result

        return alone

    around(patch, lifetimes._Lives, "_dying", wrong)


@fault("in place", verified, poisoned)
def in_place_over_a_value_that_is_read_later(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def early(self, step, index, i, *rest):
            before = self.reads
            self.reads = {t: [k for k in r if k <= i] for t, r in before.items()}
            result = rule(self, step, index, i, *rest)
            self.reads = before
            return result

        return early

    around(patch, lifetimes._Lives, "_dying", wrong)


@fault("in place", verified)
def in_place_over_a_value_that_is_read_twice(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def once(self, *given):
            before = self.reads
            self.reads = {t: sorted(set(r)) for t, r in before.items()}
            result = rule(self, *given)
            self.reads = before
            return result

        return once

    around(patch, lifetimes._Lives, "_dying", wrong)


@fault("in place", verified)
def in_place_over_a_value_that_is_read_transposed(patch: MonkeyPatch) -> None:
    def wrong(rule):
        def whole(self, step, *rest):
            changed = replace(step, inputs=tuple(t and t.base for t in step.inputs))
            return rule(self, changed, *rest)

        return whole

    around(patch, lifetimes._Lives, "_dying", wrong)


def planned(patch: MonkeyPatch, change: Any) -> None:
    """Plans from changed storages."""

    def changed(rule):
        return lambda placed, **given: change(placed, rule(placed, **given))

    around(patch, planning, "storages", changed)


def workspaces(patch: MonkeyPatch, **shift: int) -> None:
    def change(placed, made):
        for s in made:
            for name, by in shift.items() if s.category == "workspace" else ():
                setattr(s, name, getattr(s, name) + by)
        return made

    planned(patch, change)


@fault("planner", verified)
def a_workspace_that_is_not_planned(patch: MonkeyPatch) -> None:
    planned(patch, lambda placed, made: [s for s in made if s.category != "workspace"])


@fault("planner", verified)
def a_workspace_planned_for_the_next_step(patch: MonkeyPatch) -> None:
    workspaces(patch, start=1, end=1)


@fault("planner", verified)
def a_workspace_too_small(patch: MonkeyPatch) -> None:
    workspaces(patch, nbytes=-4)


travel = stream_checks.check_late, stream_checks.check_verified


@fault("planner", *travel)
def a_source_that_is_free_once_its_copy_has_begun(patch: MonkeyPatch) -> None:
    def changed(reads):
        def early(placed):
            local_steps = [
                replace(s, inputs=s.inputs[:1]) if s.op is ARRIVE else s for s in placed.steps
            ]
            return reads(replace(placed, steps=tuple(local_steps)))

        return early

    around(patch, lifetimes, "_reads", changed)


@fault("planner", stream_checks.check_early, stream_checks.check_verified)
def a_copy_that_gets_its_bytes_when_it_arrives(patch: MonkeyPatch) -> None:
    def late(placed, made):
        arrive_steps = {s.results[0]: i for i, s in enumerate(placed.steps) if s.op is ARRIVE}
        for s in made:
            arrives = [arrive_steps[t] for t in s.tensors if t in arrive_steps]
            s.start = arrives[0] if arrives else s.start
        return made

    planned(patch, late)


def travelling(patch: MonkeyPatch, change: Any) -> None:
    """Copies that begin and arrive before other steps."""

    def changed(ways):
        def wrong(steps):
            routes = ways(steps)
            for route in routes.values():
                change(route, len(steps))
            return routes

        return wrong

    around(patch, transfer_overlap, "_ways", changed)


@fault("place", stream_checks.check_early, stream_checks.check_verified)
def a_copy_that_begins_before_its_source_is_there(patch: MonkeyPatch) -> None:
    travelling(patch, lambda way, steps: setattr(way, "begin", 0))


@fault("place", *travel)
def a_copy_that_is_waited_for_at_the_end(patch: MonkeyPatch) -> None:
    travelling(patch, lambda way, steps: setattr(way, "end", steps))


@fault("planner", pool_checks.check_counted)
def what_kernels_take_beside_workspaces_not_counted(patch: MonkeyPatch) -> None:
    patch.setattr(planning, "pool_nbytes", lambda steps, space: 0)


@fault("planner", pool_checks.check_rules)
def free_blocks_of_a_segment_that_are_not_joined(patch: MonkeyPatch) -> None:
    patch.setattr(cuda_caching.Caching, "drop", lambda self, block: setattr(block, "free", True))


@fault("planner", pool_checks.check_rules, pool_checks.check_pool)
def tensors_of_a_pool_that_are_not_rounded(patch: MonkeyPatch) -> None:
    patch.setattr(cuda_caching, "rounded", lambda nbytes, to: nbytes)


@fault("planner", pool_checks.check_pool)
def a_pool_without_a_segment_for_all_at_once(patch: MonkeyPatch) -> None:
    patch.setattr(cuda_caching, "room_nbytes", lambda traces: 0)


@fault("planner", verified, poisoned)
def an_input_that_gets_its_bytes_when_it_is_first_read(patch: MonkeyPatch) -> None:
    def late(placed, made):
        for s in made:
            if s.category == "input":
                reads = ([t.base for t in step.reads] for step in placed.steps)
                s.start = [s.tensors[0] in bases for bases in reads].index(True)
        return made

    planned(patch, late)


# ---- packing ---------------------------------------------------------------------------------------------------


@fault("planner", verified)
def sizes_that_are_not_rounded_up(patch: MonkeyPatch) -> None:
    around(patch, planning, "columns", lambda rule: lambda here, alignment: rule(here, 1))


@fault("planner", partial(plan_checks.check_packer, pack), verified, poisoned)
def first_fit_that_forgets_the_last_step_of_a_buffer(patch: MonkeyPatch) -> None:
    def wrong(fit):
        return lambda start, end, *rest: fit(start, np.maximum(end - 1, start + 1), *rest)

    around(patch, packing, "first_fit", wrong)


@fault("planner", partial(plan_checks.check_packer, pack), verified, poisoned)
def first_fit_that_takes_a_gap_too_small(patch: MonkeyPatch) -> None:
    def wrong(fit):
        return lambda start, end, size, *rest: fit(start, end, np.maximum(size - 64, 64), *rest)

    around(patch, packing, "first_fit", wrong)


@fault("planner", plan_checks.check_lower_bound)
def a_lower_bound_over_closed_intervals(patch: MonkeyPatch) -> None:
    def wrong(rule):
        return lambda start, end, size: rule(start, end + 1, size)

    around(patch, plan_checks, "lower_bound", wrong)


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
    patch.setattr(verifying._Replay, "_check_whole", lambda self, *given: None)


@fault("verifier", partial(plan_checks.check_rejected, "over an input that is read twice"))
def a_verifier_that_permits_every_work_in_place(patch: MonkeyPatch) -> None:
    patch.setattr(verifying, "_may_overwrite", lambda step, k, x, t: True)


# ---- searching -------------------------------------------------------------------------------------------------

layered = replace(search_checks.SHAPE, micros=2, layered=True)


@fault("search", partial(search_checks.check_alone, layered))
def a_block_that_begins_with_its_first_part_before_the_one_above_has_ended(
    patch: MonkeyPatch,
) -> None:
    def wrong(steps):
        def early(placed, built, parts):
            spans = steps(placed, built, parts)
            return {i: (spans.get(i + 1, (first,))[0], last) for i, (first, last) in spans.items()}

        return early

    around(patch, block_costs, "backward_steps", wrong)
