"""Planned arenas of the presets' training steps, beside their lower bound and ggml's best fit.

    python -m benchmarks.packing

Also the lower bound of the written order beside two depth-first orders, which read the same graph from its
outputs, first input first (left) or last input first (right).
"""

import time
from collections.abc import Iterable

import numpy as np

import packtrain as pt
from packtrain.models import llama
from packtrain.place import Placed, Step
from packtrain.plan import best_fit, size_text
from packtrain.plan.lifetimes import storages
from packtrain.plan.pack import lower_bound
from packtrain.tensor import Call
from packtrain.train.optim import AdamW, training

ROWS = {"1m": 4, "15m": 4, "110m": 1}


def step_graph(preset: str, recompute: bool, max_norm: float | None) -> pt.Graph:
    config = llama.PRESETS[preset]
    weights = llama.weights(config)
    made = llama.loss(config, weights, ROWS[preset], config.context_length)
    keep = made.blocks if recompute else None
    return training(
        {"loss": made.loss}, list(weights.values()), AdamW(), keep=keep, max_norm=max_norm
    )


def depth_first(graph: pt.Graph, *, left: bool) -> list[Call]:
    """The calls in the order of a depth-first walk from the outputs; writes after all that read the leaf before."""
    readers: dict[pt.Tensor, list[Call]] = {}
    for call in graph.calls:
        for t in call.reads:
            if t.base.kind in ("weight", "state") and not call.op.writes:
                readers.setdefault(t.base, []).append(call)
    order: dict[Call, None] = {}
    stack = [(t.call, False) for t in (*graph.updates, *graph.outputs.values()) if t.call]
    stack = stack[::-1] if left else stack
    while stack:
        call, ready = stack.pop()
        if call in order:
            continue
        if ready:
            order[call] = None
            continue
        stack.append((call, True))
        inner = [t.call for t in call.reads if t.call]
        for index in call.op.writes:
            leaf = call.inputs[index]
            assert leaf is not None
            inner += readers.get(leaf.base, [])
        stack.extend((c, False) for c in (inner[::-1] if left else inner) if c not in order)
    return list(order)


def bound_of(placed: Placed, order: Iterable[Call]) -> int:
    """The lower bound of the same steps in another order, nothing done in place differently."""
    steps: dict[Call, list[Step]] = {}
    for step in placed.steps:
        steps.setdefault(step.call, []).append(step)
    moved = [step for call in order for step in steps.get(call, ())]
    assert len(moved) == len(placed.steps)
    made = storages(Placed(placed.graph, tuple(moved), placed.home, placed.names))
    columns = (
        [s.start for s in made],
        [s.end for s in made],
        [-(-s.nbytes // 64) * 64 for s in made],
    )
    return lower_bound(*(np.array(c, np.int64) for c in columns))[0]


def main() -> None:
    head = (
        "preset",
        "recompute",
        "clip",
        "ops",
        "lower bound",
        "arena",
        "gap",
        "best_fit",
        "plan s",
    )
    print(
        ("{:8} {:9} {:>4} {:>6} {:>12} {:>12} {:>8} {:>9} {:>7}" + 2 * " {:>12}").format(
            *head, "left", "right"
        )
    )
    for preset in ROWS:
        for recompute in (False, True):
            for max_norm in (None, 1.0):
                graph = step_graph(preset, recompute, max_norm)
                placed = pt.place(graph)
                began = time.perf_counter()
                plan = pt.make_plan(placed)
                seconds = time.perf_counter() - began
                arena, online = plan.arena(), pt.make_plan(placed, packer=best_fit).arena()
                others = [bound_of(placed, depth_first(graph, left=left)) for left in (True, False)]
                print(
                    f"{preset:8} {'blocks' if recompute else 'none':9} {max_norm or '-':>4} {len(placed.steps):6} "
                    f"{size_text(arena.lower_bound):>12} {size_text(arena.nbytes):>12} {arena.gap:8.3%} "
                    f"{online.gap:9.3%} {seconds:7.3f} {size_text(others[0]):>12} {size_text(others[1]):>12}"
                )


if __name__ == "__main__":
    main()
