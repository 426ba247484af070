"""Plans as a printed table, as rows of a picture, and as plain data."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from packtrain.common.text import clock, plural, speed_text
from packtrain.distributed import rooms_nbytes
from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan import size_text
from packtrain.planner.block_extrapolation import reached
from packtrain.planner.step_shape import CHUNK
from packtrain.planner.training_plans import Plans, counted, held_nbytes, leaves, runs

NEARLY_ALL = 0.95  # share of learnt tokens from which they are not counted apart


def as_data(
    plans: Plans,
    seconds: float,
    budget: int | None = None,
    minimum: int | None = None,
    before: float = 0.0,
) -> dict[str, Any]:
    """The plan as plain data for JSON; sizes in bytes, null without a budget or a minimum."""
    arena = plans.largest.arena(plans.target.space)
    total = plans.total_nbytes
    record: dict[str, Any] = {
        "weights_bytes": plans.weight_nbytes,
        "mapped_bytes": plans.mapped_nbytes,
        "state_bytes": plans.state_nbytes,
        "gradient_bytes": plans.gradient_nbytes,
        "arena_bytes": arena.nbytes,
        "lower_bound_bytes": arena.lower_bound,
        "loop_bytes": plans.loop_nbytes,
        "baseline_bytes": plans.baseline,
        "total_bytes": total,
        "minimum_bytes": minimum,
        "budget_bytes": budget,
        "fits": budget is None or total <= budget,
        "seconds_per_step": seconds,
        "seconds_before_step_1": before,
        "buffers": [asdict(buffer) for buffer in plans.largest.buffers],
    }
    limits = plans.target.limits
    space_records: dict[str, Any] = {
        s: {"bytes": plans.nbytes_in(s), "pool_bytes": plans.pool_nbytes(s), "limit": limits.get(s)}
        for s in plans.spaces
    }
    if space_records:
        step = [plans.placed[name] for name in runs(plans.shape)]
        record["splits"] = [[b.space for b, _ in p.splits] for p in step]
        record["offloaded_bytes"] = put_away_nbytes(plans)
        record["copies_bytes"] = [[c.results[0].spec.nbytes for c in p.copies] for p in step]
    return record | ({"spaces": space_records} if space_records else {})


def _parameters(plans: Plans) -> str:
    """Number and types of trained parameters."""
    counts = Counter[str]()
    for leaf in leaves(plans.shape)[1]:
        counts[str(leaf.dtype)] += leaf.spec.size
    first, *other_texts = (f"{n:,} {{}}in {dtype}" for dtype, n in counts.items())
    return ", ".join(
        [first.format("parameters "), *(template.format("") for template in other_texts)]
    )


def parts(plans: Plans, space: str = HOST) -> list[tuple[str, int, str]]:
    """Memory of a space outside the arena: what, bytes, why."""
    local_leaves = (leaf for leaf in plans.kept.values() if plans.target.home(leaf).space == space)
    resident_nbytes = held_nbytes(local_leaves, plans.target)
    mapped = counted(plans.shape, plans.leaves.values(), plans.target, space) - resident_nbytes
    entries = [
        ("base", mapped, "mapped from its file" if space == HOST else "copied from its file"),
        ("weights", plans.nbytes_of("weight", "table", space=space), _parameters(plans)),
        (
            "optimizer",
            plans.nbytes_of("moment", "cache", space=space),
            "moments of the optimizer, and a cache for samples",
        ),
        ("gradients", plans.nbytes_of("sum", space=space), "sums over micro-batches"),
        ("exchange", rooms_nbytes(plans.shape.ranks, space), "what processes send to each other"),
        (
            "pool",
            plans.pool_nbytes(space),
            "PyTorch's own, for its tensors" + (" and what kernels make" if space != HOST else ""),
        ),
    ]
    if space == HOST:
        entries += [
            ("loop", plans.loop_nbytes, "executors, batches, files, progress"),
            ("process", plans.baseline, "interpreter, kernels, threads, as measured"),
        ]
    return [part for part in entries if part[1]]


def rows(plans: Plans, spare_nbytes: int = 0) -> list[str]:
    """The table of bytes; with `spare_nbytes`, its total is a sufficient budget."""
    lines = [line for space in plans.spaces for line in _rows_apart(plans, space)]
    *entries, loop, process = parts(plans)
    entries += [*_arena(plans, HOST), loop, process]
    if spare_nbytes:
        planning = max(plans.searching - plans.total_nbytes, 0)
        entries += [("planning", planning, "by which the search before the run needs more")] * bool(
            planning
        )
        entries += [("spare", spare_nbytes - planning, "by which a process differs from the next")]
    entries.append(("total", plans.total_nbytes + spare_nbytes, ""))
    base = plans.shape.base
    if base is not None and not base.strict and not plans.target.apart:
        entries.append(("base", plans.mapped_nbytes, "mapped from its file, not in the total"))
    return [*lines, *(["in this process"] if lines else []), *map(_line, entries)]


def _rows_apart(plans: Plans, space: str) -> Iterator[str]:
    """The table of a memory other than the process's."""
    limit = plans.target.limits.get(space)
    yield f"in the memory of {space}" + ("" if limit is None else f", which has {size_text(limit)}")
    yield from map(_line, [*parts(plans, space), *_arena(plans, space)])
    yield _line(("total", plans.nbytes_in(space), ""))


def _arena(plans: Plans, space: str) -> Iterator[tuple[str, int, str]]:
    """The row of the arena, if there is one."""
    arena = plans.largest_in(space).arena(space)
    bound = "at its lower bound" if arena.gap == 0 else f"{arena.gap:.1%} over its lower bound"
    if arena.nbytes or space == plans.target.space:
        yield "arena", arena.nbytes, f"activations, gradients, workspaces; {bound}"


def _line(row: tuple[str, int, str]) -> str:
    name, nbytes, reason = row
    return f"  {name:<10}{size_text(nbytes):>10}  {reason}".rstrip()


def choices(plans: Plans) -> list[str]:
    """The choices that save memory, as texts."""
    shape = plans.shape
    num_recomputed = sum(
        call.phase == "recomputed" and not call.op.view
        for placed in plans.placed.values()
        for call in placed.graph.calls
    )
    lines = [f"{plural(num_recomputed, 'operation')} recomputed"] if num_recomputed else []
    offloaded_nbytes = put_away_nbytes(plans)
    lines += (
        [f"{size_text(offloaded_nbytes)} of activations wait in the memory of this process"]
        if offloaded_nbytes
        else []
    )
    lines += ["a first pass measures the gradient norm"] if shape.two_passes else []
    note = f"gradients of {shape.twice} of {reached(shape)} blocks are computed twice, first for their norm"
    lines += [note] if shape.twice else []
    lines += ["micro-batches go through each block in turn"] if shape.layered else []
    lines += [f"loss head {shape.chunk} tokens at a time"] if shape.chunk != CHUNK else []
    return lines


def put_away_nbytes(plans: Plans) -> int:
    """Bytes of activations that wait in the process's memory for the backward pass."""
    copies = (s for name in runs(plans.shape) for s in plans.placed[name].put_away)
    host_sizes = [s.results[0].spec.nbytes for s in copies if s.backend.space == HOST]
    return sum(host_sizes) // plans.shape.graphs


def crossings(plans: Plans) -> list[str]:
    """Of a step over several memories: its splits, and what is copied between them."""
    placed = [(plans.placed[name], count) for name, count in runs(plans.shape).items()]
    if len({s.backend.space for p, _ in placed for s in p.steps}) < 2:
        return []
    copies = [(s.results[0].spec.nbytes, count) for p, count in placed for s in p.copies]
    nbytes = sum(size * count for size, count in copies)
    splits = sum(len(p.splits) * count for p, count in placed)
    times = sum(count for _, count in copies)
    return [
        f"  crosses   {splits} splits a step, {plural(times, 'copy', 'copies')} of {size_text(nbytes)}"
    ]


def text(plans: Plans, seconds: float, steps: int, learnt: int, before: float = 0.0) -> str:
    """The plan as a printed table; `learnt` is the number of tokens that a step trains on, `before` the seconds in
    which the base writes texts before step 1."""
    shape, positions = plans.shape, plans.shape.positions
    times = f" × {shape.micros} micro-batches" if shape.micros > 1 else ""
    counts = "" if learnt > NEARLY_ALL * positions else f", {learnt:,} of them learnt"
    writes = (
        f" and {clock(before)} before, in which the base writes texts for replay" if before else ""
    )
    first = f"a step is {shape.rows} × {shape.time}{times} = {positions:,} tokens{counts}"
    return "\n".join(
        [
            "; ".join([first, *choices(plans)]),
            *rows(plans),
            *crossings(plans),
            f"  expected  {seconds:>7.3f} s a step, {speed_text(positions / seconds)}, "
            f"{clock(seconds * steps)} for {plural(steps, 'step')}{writes}",
        ]
    )
