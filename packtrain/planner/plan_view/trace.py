"""A plan as a trace for ui.perfetto.dev or chrome://tracing: JSON text. A step of the plan lasts a microsecond.

Each memory space is a process: a counter of its live bytes, and threads on which buffers never overlap.
"""

import heapq
import json
from collections.abc import Iterator, Sequence
from typing import Any

from packtrain.engine.memory_plan import Buffer, Plan
from packtrain.planner.plan_view.scene import Scene, make_scene, plain

Event = dict[str, Any]


def trace(plan: Plan, ops: Sequence[str] = ()) -> str:
    """The trace of all spaces.

    ops  the op name of each step, shown as a separate track
    """
    events: list[Event] = []
    for process, arena in enumerate((a for a in plan.arenas if not a.name), 1):
        scene = make_scene(plan, arena.space, title=arena.space)
        events += [{"pid": process, **event} for event in _events(scene, ops)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))


def _events(scene: Scene, ops: Sequence[str]) -> Iterator[Event]:
    yield _named("process_name", 0, f"memory of {scene.space}")
    yield _named("thread_name", 0, "ops")
    for step, op in enumerate(ops):
        yield {"ph": "X", "tid": 0, "name": plain(op), "ts": step, "dur": 1}
    before = None
    for step, nbytes in enumerate([*scene.live.sum(axis=0).tolist(), 0]):
        if nbytes != before:
            yield {"ph": "C", "name": "live bytes", "ts": step, "args": {"bytes": nbytes}}
        before = nbytes
    thread = 0
    for category in scene.used():
        buffers = [b for b in scene.buffers if b.category == category]
        for number, lane in enumerate(_lanes(buffers), 1):
            thread += 1
            yield _named("thread_name", thread, f"{category} {number}")
            order = {"sort_index": thread}
            yield {"ph": "M", "tid": thread, "name": "thread_sort_index", "args": order}
            yield from (_slice(b, thread) for b in lane)


def _named(kind: str, thread: int, name: str) -> Event:
    return {"ph": "M", "tid": thread, "name": kind, "args": {"name": name}}


def _lanes(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """The fewest lanes in which no two buffers overlap, as slices of a thread must not."""
    lanes: list[list[Buffer]] = []
    lane_ends: list[tuple[int, int]] = []  # a heap: last end of each lane, its number
    for b in sorted(buffers, key=lambda b: (b.start, -b.nbytes)):
        if lane_ends and lane_ends[0][0] <= b.start:
            number = heapq.heapreplace(lane_ends, (b.end, lane_ends[0][1]))[1]
        else:
            number = len(lanes)
            lanes.append([])
            heapq.heappush(lane_ends, (b.end, number))
        lanes[number].append(b)
    return lanes


def _slice(b: Buffer, thread: int) -> Event:
    about = {
        "op": plain(b.op),
        "bytes": b.nbytes,
        "offset": b.offset,
        "tensors": [plain(t) for t in b.tensors],
    }
    return {
        "ph": "X",
        "tid": thread,
        "cat": b.category,
        "name": plain(b.name),
        "ts": b.start,
        "dur": b.end - b.start,
        "args": about,
    }
