"""Writes a plan as a JSON trace for ui.perfetto.dev or chrome://tracing, in which a step lasts a microsecond.

Each memory space is a process: a counter of its live bytes, and threads on which buffers never overlap."""

import heapq
import json
from collections.abc import Iterator, Sequence
from typing import Any

from packtrain.engine.memory_plan import Buffer, Plan
from packtrain.planner.plan_view.scene import PlanScene, printable_text

TraceEvent = dict[str, Any]


def trace_json(plan: Plan, ops: Sequence[str] = ()) -> str:
    """Return the trace of all memory spaces as JSON text; `ops`, op names by step, become a track of their own."""
    events: list[TraceEvent] = []
    for process, arena in enumerate((a for a in plan.arenas if not a.name), 1):
        scene_events = _trace_events(PlanScene(plan, arena.space), ops)
        events += [{"pid": process, **event} for event in scene_events]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))


def _trace_events(scene: PlanScene, ops: Sequence[str]) -> Iterator[TraceEvent]:
    yield _metadata_event("process_name", 0, f"memory of {scene.space}")
    yield _metadata_event("thread_name", 0, "ops")
    for step, op in enumerate(ops):
        yield {"ph": "X", "tid": 0, "name": printable_text(op), "ts": step, "dur": 1}
    previous_nbytes = None
    for step, nbytes in enumerate([*scene.live_nbytes.sum(axis=0).tolist(), 0]):
        if nbytes != previous_nbytes:
            yield {"ph": "C", "name": "live bytes", "ts": step, "args": {"bytes": nbytes}}
        previous_nbytes = nbytes
    thread = 0
    for category in scene.used():
        buffers = [b for b in scene.buffers if b.category == category]
        for lane_number, lane in enumerate(_buffer_lanes(buffers), 1):
            thread += 1
            yield _metadata_event("thread_name", thread, f"{category} {lane_number}")
            sort_args = {"sort_index": thread}
            yield {"ph": "M", "tid": thread, "name": "thread_sort_index", "args": sort_args}
            yield from (_buffer_event(b, thread) for b in lane)


def _metadata_event(event_name: str, thread: int, name: str) -> TraceEvent:
    """Return the trace's event that gives a process or thread its name."""
    return {"ph": "M", "tid": thread, "name": event_name, "args": {"name": name}}


def _buffer_lanes(buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """Divide buffers into the fewest lists in which none overlap in time, as slices of a trace's thread must not."""
    lanes: list[list[Buffer]] = []
    lane_ends: list[tuple[int, int]] = []  # a heap: last end of each lane, its number
    for b in sorted(buffers, key=lambda b: (b.start, -b.nbytes)):
        if lane_ends and lane_ends[0][0] <= b.start:
            lane_index = heapq.heapreplace(lane_ends, (b.end, lane_ends[0][1]))[1]
        else:
            lane_index = len(lanes)
            lanes.append([])
            heapq.heappush(lane_ends, (b.end, lane_index))
        lanes[lane_index].append(b)
    return lanes


def _buffer_event(b: Buffer, thread: int) -> TraceEvent:
    event_args = {
        "op": printable_text(b.op), "bytes": b.nbytes, "offset": b.offset,
        "tensors": [printable_text(t) for t in b.tensors],
    }  # fmt: skip
    return {
        "ph": "X", "tid": thread, "cat": b.category, "name": printable_text(b.name), "ts": b.start,
        "dur": b.end - b.start, "args": event_args,
    }  # fmt: skip
