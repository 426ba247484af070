"""The data of every picture of a plan: buffers, live bytes, levels, the largest buffers at the peak, the total.

Nothing is drawn here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import numpy as np

from packtrain.common.text import plural
from packtrain.engine.memory_plan import Arena, Buffer, Plan, size_text

COLORS = {  # by category, from the bottom of a stack up; distinct on white and black, and for the colour-blind
    "input": "#8a99ad",
    "activation": "#2f7ed8",
    "recomputed": "#8abcf0",  # and hatched
    "gradient": "#e4761b",
    "workspace": "#f0c02e",
    "output": "#17a37b",
}
CATEGORIES = list(COLORS)
OWNERS = 10  # rows of the table of the largest buffers at the peak
READING = (
    "Each rectangle is a buffer: its width is its lifetime in ops, its height its size;"
    " the lower chart shows the bytes alive at each op."
)
DASHES = {"bound": "6 3", "arena": "9 3 2 3", "budget": "2 3", "measured": ""}  # of lines, by kind

Row = tuple[str, int, str]  # what, bytes, why
Samples = Sequence[tuple[float, int]]  # step, bytes of the process


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line in the picture: the arena, its lower bound, or what the budget leaves for it."""

    kind: str
    text: str
    nbytes: int


@dataclass(frozen=True)
class Scene:
    """One memory space of a plan, with its surroundings; of its arenas the one without a name.

    rows           memory outside the arena
    budget_nbytes  for the rows and the arena together
    measured       measured bytes of the process (rows and arena): the peak, or samples (step of the plan, bytes)
    """

    plan: Plan
    space: str
    title: str
    rows: Sequence[Row]
    budget_nbytes: int | None
    measured: int | Samples | None

    @property
    def arena(self) -> Arena:
        return self.plan.arena(self.space)

    @cached_property
    def buffers(self) -> list[Buffer]:
        return [b for b in self.plan.buffers if b.place == (self.space, "")]

    @cached_property
    def last(self) -> int:
        """Steps of the time axis; outputs live one step longer than the graph."""
        return max((b.end for b in self.buffers), default=1)

    @cached_property
    def live(self) -> np.ndarray:
        """Bytes alive at each step, by category: int64 (categories, steps)."""
        change = np.zeros((len(CATEGORIES), self.last + 1), np.int64)
        for b in self.buffers:
            kind = CATEGORIES.index(b.category)
            change[kind, b.start] += b.nbytes
            change[kind, b.end] -= b.nbytes
        return np.asarray(change.cumsum(axis=1)[:, :-1])

    @property
    def outside(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.rows)

    @property
    def total(self) -> int:
        return self.outside + self.arena.nbytes

    @property
    def samples(self) -> list[tuple[float, int]]:
        """Measured bytes over the steps, minus those outside the arena. A peak alone is a horizontal line."""
        measured = self.measured
        if measured is None:
            return []
        if isinstance(measured, int):
            measured = [(0, measured), (self.last, measured)]
        return [(step, max(nbytes - self.outside, 0)) for step, nbytes in measured]

    @property
    def measured_peak(self) -> int | None:
        if self.measured is None or isinstance(self.measured, int):
            return self.measured
        return max((nbytes for _, nbytes in self.measured), default=None)

    @property
    def measured_text(self) -> str:
        return "" if self.measured_peak is None else f"measured {size_text(self.measured_peak)}"

    @property
    def levels(self) -> list[Level]:
        """Horizontal lines. A budget that leaves nothing, or far more than the arena takes, has none."""
        arena = self.arena
        size = size_text(arena.nbytes)
        if arena.gap == 0:
            levels = [Level("bound", f"arena = lower bound {size}", arena.nbytes)]
        else:
            bound = Level("bound", f"lower bound {size_text(arena.lower_bound)}", arena.lower_bound)
            levels = [bound, Level("arena", f"arena {size}", arena.nbytes)]
        left = (self.budget_nbytes or 0) - self.outside
        if 0 < left <= 2 * arena.nbytes:
            levels.append(Level("budget", f"budget leaves {size_text(left)}", left))
        return levels

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Kind and text of every horizontal line, for the legend: a text in the drawing would be struck through."""
        measured = [("measured", self.measured_text)] if self.samples else []
        return [*((level.kind, level.text) for level in self.levels), *measured]

    @property
    def top(self) -> int:
        """Height of the picture in bytes, with a margin."""
        heights = [level.nbytes for level in self.levels] + [nbytes for _, nbytes in self.samples]
        return int(1.08 * max(heights)) + 1

    @property
    def summary(self) -> str:
        """The plan in one line."""
        arena = self.arena
        place = "at its lower bound" if arena.gap == 0 else f"{arena.gap:.2%} over its lower bound"
        facts = [
            plural(self.plan.steps, "op"),
            plural(len(self.buffers), "buffer"),
            f"arena {size_text(arena.nbytes)}, {place}",
            f"{size_text(self.total)} in all",
        ]
        if self.budget_nbytes is not None:
            facts.append(f"budget {size_text(self.budget_nbytes)}")
        if self.measured_text:
            facts.append(self.measured_text)
        return " · ".join(facts)

    @property
    def owners(self) -> list[Buffer]:
        """The buffers alive at the peak, the largest first."""
        return self.plan.peak(self.space)

    def share(self, nbytes: int) -> float:
        """Share of the bytes alive at the peak."""
        return nbytes / max(self.arena.lower_bound, 1)

    def used(self) -> list[str]:
        """Categories that occur, in order."""
        present = {b.category for b in self.buffers}
        return [category for category in CATEGORIES if category in present]


class About(TypedDict, total=False):
    """What a picture of a plan can say besides, as keywords.

    rows           (what, bytes, why) of all memory outside the arena; by default weights and states
    budget_nbytes  for the rows and the arena together
    measured       measured bytes of the process: the peak, or samples (step of the plan, bytes)
    """

    title: str
    budget_nbytes: int | None
    rows: Sequence[Row] | None
    measured: int | Samples | None
    space: str


def make_scene(
    plan: Plan,
    space: str = "host",
    *,
    title: str = "plan",
    rows: Sequence[Row] | None = None,
    budget_nbytes: int | None = None,
    measured: int | Samples | None = None,
) -> Scene:
    """Build the scene; without rows, memory outside the arena is what the plan itself knows."""
    if rows is None:
        arena = plan.arena(space)
        candidates = [
            ("weights", arena.weight_nbytes, "trained and frozen weights"),
            ("state", arena.state_nbytes, "kept between runs"),
            ("constants", arena.constant_nbytes, "fixed values"),
        ]
        rows = [row for row in candidates if row[1]]
    return Scene(plan, space, plain(title), rows, budget_nbytes, measured)


def fullest(live: np.ndarray, parts: int) -> np.ndarray:
    """Split time into equal parts; returns the step with the most live bytes of each, int64 (parts,)."""
    total, edges = live.sum(axis=0), np.linspace(0, live.shape[1], parts + 1).astype(np.int64)
    spans = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return np.array([a + int(total[a : max(b, a + 1)].argmax()) for a, b in spans], np.int64)


def plain(text: str, max_length: int = 80) -> str:
    """A name that is safe to show: without control characters, at most `max_length` long."""
    shown = "".join(c if c.isprintable() else "�" for c in text)
    return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"
