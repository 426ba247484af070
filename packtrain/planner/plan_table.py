"""Shows plans as a printed table, as rows for a picture, and as plain data."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any

from packtrain.common.text import clock, plural, speed_text
from packtrain.distributed import rooms_nbytes
from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan import Buffer, size_text
from packtrain.planner.block_extrapolation import num_reached_blocks
from packtrain.planner.step_shape import DEFAULT_CHUNK
from packtrain.planner.training_plans import MAPPED, TrainingPlans, leaves, runs

BUFFER_FIELDS = tuple(field.name for field in fields(Buffer))
buffer_values = attrgetter(*BUFFER_FIELDS)
NEARLY_ALL = 0.95  # share of trained tokens above which their number is not printed


def plan_data(
    plans: TrainingPlans, seconds: float, budget_nbytes: int | None = None, min_budget: int | None = None,
    before: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the plan as plain data for `packtrain plan --json`; sizes in bytes, null without a budget or a minimum. A
    step takes `seconds`; `before` seconds pass before the first."""
    arena = plans.largest_plan.arena(plans.target.space)
    total_nbytes = plans.total_nbytes
    plan_record: dict[str, Any] = {
        "weights_bytes": plans.weight_nbytes, "mapped_bytes": plans.mapped_nbytes, "state_bytes": plans.state_nbytes,
        "gradient_bytes": plans.gradient_nbytes, "arena_bytes": arena.nbytes, "lower_bound_bytes": arena.lower_bound,
        "loop_bytes": plans.loop_nbytes, "baseline_bytes": plans.baseline_nbytes, "total_bytes": total_nbytes,
        "minimum_bytes": min_budget, "budget_bytes": budget_nbytes,
        "fits": budget_nbytes is None or total_nbytes <= budget_nbytes, "seconds_per_step": seconds,
        "window_bytes": plans.window.nbytes if plans.window else None, "seconds_before_step_1": before,
        "buffers": [dict(zip(BUFFER_FIELDS, b, strict=True)) for b in map(buffer_values, plans.largest_plan.buffers)],
    }  # fmt: skip
    limits = plans.target.limits
    space_records: dict[str, Any] = {
        s: {"bytes": plans.nbytes_in(s), "pool_bytes": plans.pool_nbytes(s), "limit": limits.get(s)}
        for s in plans.device_spaces
    }
    if space_records:
        step = [plans.placed_graphs[name] for name in runs(plans.shape)]
        plan_record["splits"] = [[backend.space for backend, _ in placed.splits] for placed in step]
        plan_record["offloaded_bytes"] = offloaded_activation_nbytes(plans)
        plan_record["copies_bytes"] = [[c.results[0].spec.nbytes for c in p.copies] for p in step]
    return plan_record | ({"spaces": space_records} if space_records else {})


def _parameter_counts(plans: TrainingPlans) -> str:
    counts = Counter[str]()
    for leaf in leaves(plans.shape.config, plans.shape.base)[1]:
        counts[leaf.spec.dtype.name] += math.prod(leaf.spec.shape)
    first_text, *other_texts = [f"{n:,} {{}}in {dtype}" for dtype, n in counts.items()]
    return ", ".join([first_text.format("parameters "), *(text.format("") for text in other_texts)])


def memory_rows(plans: TrainingPlans, space: str = HOST) -> list[tuple[str, int, str]]:
    """Return the rows (name, bytes, reason) of what a memory space holds beside the arena, without empty ones."""
    mapped = plans.role_nbytes(MAPPED, space=space) * (space != HOST)
    moments, world_size = plans.role_nbytes("moment", "cache", space=space), plans.shape.world_size
    allocator_text = "PyTorch's own, for its tensors"
    allocator_text += " and what kernels make" if space != HOST else ""
    table_rows = [
        ("base", mapped, "mapped from its file" if space == HOST else "copied from its file"),
        ("weights", plans.role_nbytes("weight", "table", space=space), _parameter_counts(plans)),
        ("optimizer", moments, "moments of the optimizer, and a cache for samples"),
        ("gradients", plans.role_nbytes("sum", space=space), "sums over micro-batches"),
        ("exchange", rooms_nbytes(world_size, space), "what processes send to each other"),
        ("pool", plans.pool_nbytes(space), allocator_text),
    ]
    if space == HOST:
        table_rows += [
            ("loop", plans.loop_nbytes, "executors, batches, files, progress"),
            ("process", plans.baseline_nbytes, "interpreter, kernels, threads, as measured"),
        ]
    return [row for row in table_rows if row[1]]


def table_lines(plans: TrainingPlans, spare_nbytes: int = 0) -> list[str]:
    """Return the lines of the table of bytes by memory; with `spare_nbytes` on top, the total suffices as a budget."""
    device_lines = [line for space in plans.device_spaces for line in _device_lines(plans, space)]
    *entries, loop_row, process_row = memory_rows(plans)
    entries += [*_arena_row(plans, HOST), loop_row, process_row]
    if spare_nbytes:
        planning = max(plans.search_nbytes - plans.total_nbytes, 0)
        if planning:
            entries.append(("planning", planning, "more than the run, while it is planned"))
        entries += [("spare", spare_nbytes - planning, "by which a process differs from the next")]
    entries.append(("total", plans.total_nbytes + spare_nbytes, ""))
    if plans.window is not None:
        base_text = f"of the base, which has {size_text(plans.mapped_nbytes)}"
        if plans.window.read_nbytes:
            base_text += f"; a step reads {size_text(plans.window.read_nbytes)} from its file"
        entries += [
            ("pages", plans.window.nbytes, base_text),
            ("resident", plans.total_nbytes + plans.window.nbytes, "private memory and pages"),
        ]
    elif plans.shape.base is not None and not plans.target.is_separate:
        entries.append(("base", plans.mapped_nbytes, "mapped from its file, not in the total"))
    return [*device_lines, *(["in this process"] if device_lines else []), *map(_row_line, entries)]


def _device_lines(plans: TrainingPlans, space: str) -> Iterator[str]:
    limit = plans.target.limits.get(space)
    yield f"in the memory of {space}" + ("" if limit is None else f", which has {size_text(limit)}")
    yield from map(_row_line, [*memory_rows(plans, space), *_arena_row(plans, space)])
    yield _row_line(("total", plans.nbytes_in(space), ""))


def _arena_row(plans: TrainingPlans, space: str) -> Iterator[tuple[str, int, str]]:
    """Yield the arena's row of the memory table, if the space has an arena."""
    arena = plans.largest_plan_in(space).arena(space)
    bound_text = "at its lower bound" if arena.gap == 0 else f"{arena.gap:.1%} over its lower bound"
    if arena.nbytes or space == plans.target.space:
        yield "arena", arena.nbytes, f"activations, gradients, workspaces; {bound_text}"


def _row_line(memory_row: tuple[str, int, str]) -> str:
    name, nbytes, reason = memory_row
    return f"  {name:<10}{size_text(nbytes):>10}  {reason}".rstrip()


def choice_texts(plans: TrainingPlans) -> list[str]:
    """Return a text for each choice of the search that saves memory, such as "12 operations recomputed"."""
    shape = plans.shape
    calls = [call for placed in plans.placed_graphs.values() for call in placed.graph.calls]
    num_recomputed = len([c for c in calls if c.phase == "recomputed" and not c.op.view])
    lines = [f"{plural(num_recomputed, 'operation')} recomputed"] if num_recomputed else []
    if nbytes := offloaded_activation_nbytes(plans):
        lines.append(f"{size_text(nbytes)} of activations wait in the memory of this process")
    lines += ["a first pass measures the gradient norm"] if shape.two_passes else []
    note = (
        f"gradients of {shape.num_two_pass_blocks} of {num_reached_blocks(shape)} blocks are computed twice,"
        " first for their norm"
    )
    lines += [note] if shape.num_two_pass_blocks else []
    lines += ["micro-batches go through each block in turn"] if shape.layered else []
    num_tiles = shape.num_row_tiles
    lines += [f"blocks in {num_tiles} tiles of their rows"] if num_tiles > 1 else []
    lines += [f"loss head {shape.chunk} tokens at a time"] if shape.chunk != DEFAULT_CHUNK else []
    return lines


def offloaded_activation_nbytes(plans: TrainingPlans) -> int:
    """Return the bytes of activations that wait in the process's memory for the backward pass."""
    copy_steps = (s for name in runs(plans.shape) for s in plans.placed_graphs[name].offloads)
    host_sizes = [s.results[0].spec.nbytes for s in copy_steps if s.backend.space == HOST]
    return sum(host_sizes) // plans.shape.num_passes


def copy_lines(plans: TrainingPlans) -> list[str]:
    """Return a line on a step over several memories: its splits by device, and the copies between them; [] for one."""
    placed = [(plans.placed_graphs[name], num_runs) for name, num_runs in runs(plans.shape).items()]
    if len({step.backend.space for p, _ in placed for step in p.steps}) < 2:
        return []
    copy_sizes = [(s.results[0].spec.nbytes, num_runs) for p, num_runs in placed for s in p.copies]
    nbytes = sum(copy_nbytes * num_runs for copy_nbytes, num_runs in copy_sizes)
    num_splits = sum(len(p.splits) * num_runs for p, num_runs in placed)
    num_copies = sum(num_runs for _, num_runs in copy_sizes)
    return [
        f"  crosses   {num_splits} splits a step, {plural(num_copies, 'copy', 'copies')} of {size_text(nbytes)}"
    ]


def plan_text(
    plans: TrainingPlans, seconds: float, num_steps: int, num_trained: int, before: float = 0.0
) -> str:
    """Return the plan as `packtrain plan` prints it: a run of `num_steps` steps, of `seconds` each and of `num_trained`
    tokens that the loss counts; `before` seconds pass before the first."""
    shape, num_positions = plans.shape, plans.shape.num_positions
    times = f" × {shape.num_micro_batches} micro-batches" if shape.num_micro_batches > 1 else ""
    counts = "" if num_trained > NEARLY_ALL * num_positions else f", {num_trained:,} of them learnt"
    replay_text = (
        f" and {clock(before)} before, in which the base writes texts for replay" if before else ""
    )
    summary = f"a step is {shape.micro_batch_size} × {shape.seq_len}{times} = {num_positions:,} tokens{counts}"
    return "\n".join(
        [
            "; ".join([summary, *choice_texts(plans)]), *table_lines(plans), *copy_lines(plans),
            f"  expected  {seconds:>7.3f} s a step, {speed_text(num_positions / seconds)}, "
            f"{clock(seconds * num_steps)} for {plural(num_steps, 'step')}{replay_text}",
        ]
    )  # fmt: skip
