"""The data of every picture of a plan: buffers, live bytes, levels, the largest buffers at the peak, the total.

Nothing is drawn here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import numpy as np

from packtrain.common.text import plural
from packtrain.engine.memory_plan import Arena, Buffer, Plan, size_text

COLORS = {  # by category, from the bottom of a stack up; distinct on white and black, and for the colour-blind
    "input": "#8a99ad", "activation": "#2f7ed8", "recomputed": "#8abcf0",  # which is hatched, too
    "gradient": "#e4761b", "workspace": "#f0c02e", "output": "#17a37b",
}  # fmt: skip
CATEGORIES = list(COLORS)
NUM_PEAK_BUFFERS = 10  # rows of the table of the largest buffers at the peak
READING_HINT = (
    "Each rectangle is a buffer: its width is its lifetime in ops, its height its size;"
    " the lower chart shows the bytes alive at each op."
)
DASHES = {"bound": "6 3", "arena": "9 3 2 3", "budget": "2 3", "measured": ""}  # by kind of line

MemoryRow = tuple[str, int, str]  # name, bytes, reason
MemorySamples = Sequence[tuple[float, int]]  # step, bytes of the process


@dataclass(frozen=True, slots=True)
class SceneLevel:
    """A horizontal line in the picture: the arena's size, its lower bound, or what the budget leaves for it."""

    line_kind: str
    legend_text: str
    nbytes: int


class SceneOptions(TypedDict, total=False):
    """Optional keywords of functions that draw a plan.

    rows           (name, bytes, reason) of all memory outside the arena; by default weights and states
    budget_nbytes  budget for the rows and the arena together
    measured       measured bytes of the process: the peak, or samples (step of the plan, bytes)
    """

    title: str
    budget_nbytes: int | None
    rows: Sequence[MemoryRow] | None
    measured: int | MemorySamples | None
    space: str


@dataclass(frozen=True)
class PlanScene:
    """One memory space of a plan, with its unnamed arena and the memory around it; fields as in SceneOptions."""

    plan: Plan
    space: str = "host"
    title: str = "plan"
    rows: Sequence[MemoryRow] | None = None
    budget_nbytes: int | None = None
    measured: int | MemorySamples | None = None

    @property
    def heading(self) -> str:
        return printable_text(self.title)

    @property
    def arena(self) -> Arena:
        return self.plan.arena(self.space)

    @cached_property
    def buffers(self) -> list[Buffer]:
        return [b for b in self.plan.buffers if b.space == self.space and not b.arena]

    @cached_property
    def last(self) -> int:
        """Length of the time axis in steps; outputs live one step longer than the graph."""
        return max([b.end for b in self.buffers], default=1)

    @cached_property
    def live_nbytes(self) -> np.ndarray:
        """Bytes alive at each step, by category: int64 (categories, steps)."""
        change = np.zeros((len(CATEGORIES), self.last + 1), np.int64)
        for b in self.buffers:
            category_index = CATEGORIES.index(b.category)
            change[category_index, b.start] += b.nbytes
            change[category_index, b.end] -= b.nbytes
        return np.asarray(change.cumsum(axis=1)[:, :-1])

    @property
    def memory_rows(self) -> Sequence[MemoryRow]:
        """Memory outside the arena; without `rows`, what the plan itself records."""
        arena = self.arena
        recorded_rows = [
            ("weights", arena.weight_nbytes, "trained and frozen weights"),
            ("state", arena.state_nbytes, "kept between runs"), ("constants", arena.constant_nbytes, "fixed values"),
        ]  # fmt: skip
        return [row for row in recorded_rows if row[1]] if self.rows is None else self.rows

    @property
    def outside_nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.memory_rows)

    @property
    def total_nbytes(self) -> int:
        return self.outside_nbytes + self.arena.nbytes

    @property
    def samples(self) -> list[tuple[float, int]]:
        """(step, bytes) points of measured memory less what lies outside the arena; a peak gives a flat line."""
        samples = [] if self.measured is None else self.measured
        if isinstance(samples, int):
            samples = [(0, samples), (self.last, samples)]
        return [(step, max(nbytes - self.outside_nbytes, 0)) for step, nbytes in samples]

    @property
    def measured_peak(self) -> int | None:
        if self.measured is None or isinstance(self.measured, int):
            return self.measured
        return max((nbytes for _, nbytes in self.measured), default=None)

    @property
    def measured_text(self) -> str:
        return "" if self.measured_peak is None else f"measured {size_text(self.measured_peak)}"

    @property
    def levels(self) -> list[SceneLevel]:
        """Horizontal lines of the picture; a budget that leaves nothing, or far more than the arena, has no line."""
        arena = self.arena
        arena_text = size_text(arena.nbytes)
        if arena.gap == 0:
            levels = [SceneLevel("bound", f"arena = lower bound {arena_text}", arena.nbytes)]
        else:
            bound_level = SceneLevel(
                "bound", f"lower bound {size_text(arena.lower_bound)}", arena.lower_bound
            )
            levels = [bound_level, SceneLevel("arena", f"arena {arena_text}", arena.nbytes)]
        left = (self.budget_nbytes or 0) - self.outside_nbytes
        if 0 < left <= 2 * arena.nbytes:
            levels.append(SceneLevel("budget", f"budget leaves {size_text(left)}", left))
        return levels

    @property
    def legend_lines(self) -> list[tuple[str, str]]:
        """(kind, text) of every horizontal line for the legend: a text beside the line would be struck through."""
        measured_lines = [("measured", self.measured_text)] if self.samples else []
        return [*((level.line_kind, level.legend_text) for level in self.levels), *measured_lines]

    @property
    def max_nbytes(self) -> int:
        """Bytes at the top of the picture: the highest line, with a margin."""
        heights = [level.nbytes for level in self.levels] + [nbytes for _, nbytes in self.samples]
        return int(1.08 * max(heights)) + 1

    @property
    def summary(self) -> str:
        """One line of text about the plan: ops, buffers, arena, total, budget, measurement."""
        arena = self.arena
        place = "at its lower bound" if arena.gap == 0 else f"{arena.gap:.2%} over its lower bound"
        facts = [
            plural(self.plan.steps, "op"), plural(len(self.buffers), "buffer"),
            f"arena {size_text(arena.nbytes)}, {place}", f"{size_text(self.total_nbytes)} in all",
        ]  # fmt: skip
        if self.budget_nbytes is not None:
            facts.append(f"budget {size_text(self.budget_nbytes)}")
        if self.measured_text:
            facts.append(self.measured_text)
        return " · ".join(facts)

    @property
    def peak_buffers(self) -> tuple[list[Buffer], list[Buffer]]:
        """The buffers alive at the peak, the largest first: those of the table, and the others."""
        buffers = self.plan.peak(self.space)
        return buffers[:NUM_PEAK_BUFFERS], buffers[NUM_PEAK_BUFFERS:]

    def share(self, nbytes: int) -> float:
        """Return the share that `nbytes` has of the bytes alive at the peak."""
        return nbytes / max(self.arena.lower_bound, 1)

    def used(self) -> list[str]:
        """Return the categories of buffers that occur in this plan, in the order of COLORS."""
        present_categories = {b.category for b in self.buffers}
        return [category for category in CATEGORIES if category in present_categories]


def fullest_steps(live: np.ndarray, num_spans: int) -> np.ndarray:
    """Return the step of most bytes of `live` (categories, steps) in each of `num_spans` equal time spans, int64."""
    total, edges = live.sum(axis=0), np.linspace(0, live.shape[1], num_spans + 1).astype(np.int64)
    spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return np.array([a + int(total[a : max(b, a + 1)].argmax()) for a, b in spans], np.int64)


def printable_text(text: str, max_length: int = 80) -> str:
    """Return a text from a file that is safe to show: no control characters, at most `max_length` characters."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"
