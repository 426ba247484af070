"""Plan: where every byte of a run lives, as data that prints, compares, verifies and goes to JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from packtrain.backends import HOST
from packtrain.packing import height, lower_bound, pack
from packtrain.place import Placed
from packtrain.planning.lifetimes import columns, storages
from packtrain.tensor import GraphError

Packer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Buffer:
    """`nbytes` at `offset` of a space's arena during steps [start, end), used by `tensors` one after another."""

    name: str
    op: str
    category: str
    space: str
    start: int
    end: int
    offset: int
    nbytes: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arena:
    """One memory space: its bytes, the most bytes alive at once and when, and the bytes outside the arena."""

    space: str
    nbytes: int
    lower_bound: int
    peak_step: int
    weight_nbytes: int
    state_nbytes: int
    constant_nbytes: int

    @property
    def gap(self) -> float:
        """Bytes lost to packing, as a fraction of the lower bound; 0: proved optimal."""
        return self.nbytes / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def outside(self) -> int:
        return self.weight_nbytes + self.state_nbytes + self.constant_nbytes

    def __str__(self) -> str:
        return (
            f"{self.space}: arena {size_text(self.nbytes)}, gap {self.gap:.2%} over the lower bound "
            f"{size_text(self.lower_bound)} at step {self.peak_step}; outside it {size_text(self.outside)}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Offsets of everything in a run of the placed graph with this fingerprint, and of no other graph."""

    fingerprint: str
    steps: int
    arenas: tuple[Arena, ...]
    buffers: tuple[Buffer, ...]

    def arena(self, space: str = HOST) -> Arena:
        """The arena of a space; empty if the run does not use it."""
        unused = Arena(space, 0, 0, 0, 0, 0, 0)
        return next((a for a in self.arenas if a.space == space), unused)

    def peak(self, space: str = HOST) -> list[Buffer]:
        """The buffers alive at the fullest step, largest first."""
        at = self.arena(space).peak_step
        alive = [b for b in self.buffers if b.space == space and b.start <= at < b.end]
        return sorted(alive, key=lambda b: (-b.nbytes, b.offset))

    def check_belongs(self, placed: Placed) -> None:
        """Raise GraphError unless this plan belongs to an equal graph, placed in the same way."""
        if placed.fingerprint != self.fingerprint:
            raise GraphError(
                f"the plan is for graph {self.fingerprint}, not for this graph {placed.fingerprint}; plan it again"
            )

    def beyond(self, limits: Mapping[str, int]) -> str | None:
        """A message about a space that would exceed its limit, or None."""
        for a in self.arenas:
            needed = a.nbytes + a.outside
            if needed > limits.get(a.space, needed):
                has = size_text(limits[a.space])
                return f"this needs {size_text(needed)} of the memory of {a.space}, which has {has}"
        return None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Raise ValueError if the text is not a plan."""
        try:
            fields = json.loads(text)
            arenas = tuple(Arena(**a) for a in fields.pop("arenas"))
            buffers = tuple(
                Buffer(**{**b, "tensors": tuple(b["tensors"])}) for b in fields.pop("buffers")
            )
            return Plan(**fields, arenas=arenas, buffers=buffers)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not a plan in JSON: {error}") from None

    def __str__(self) -> str:
        lines = [f"plan of {self.steps} steps for graph {self.fingerprint}"]
        for a in self.arenas:
            lines.append(str(a))
            rows = sorted(
                (b for b in self.buffers if b.space == a.space), key=lambda b: (b.offset, b.start)
            )
            lines.append(f"{'offset':>12} {'bytes':>12} {'steps':>13}  {'category':10}  buffer")
            lines += [
                f"{b.offset:>12,} {b.nbytes:>12,} {b.start:>6}{b.end - 1:>7}  {b.category:10}  "
                + (" = ".join(b.tensors) or b.name)
                for b in rows
            ]
        return "\n".join(lines)


def size_text(nbytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{nbytes} B"


def make_plan(placed: Placed, *, packer: Packer = pack, reuse: bool = True) -> Plan:
    """Offsets for every storage of the arena, one arena per memory space.

    packer  (start, end, size) -> offsets, see pack
    reuse   False: nothing in place and no byte used twice, to find out whether the planner causes a wrong
            result
    """
    names = placed.names
    buffers: list[Buffer] = []
    arenas: list[Arena] = []
    found = storages(placed, reuse=reuse)
    for space, alignment in sorted({(b.space, b.alignment) for b in placed.home.values()}):
        here = [s for s in found if s.space == space]
        start, end, size = columns(here, alignment)
        offsets = packer(start, end, size) if reuse else np.cumsum(size) - size
        bound, at = lower_bound(start, end, size)
        outside = {"weight": 0, "state": 0, "constant": 0, "input": 0}
        for leaf in placed.graph.leaves:
            outside[str(leaf.kind)] += leaf.spec.nbytes * (placed.home[leaf].space == space)
        arenas.append(
            Arena(
                space,
                height(size, offsets),
                bound,
                at,
                outside["weight"],
                outside["state"],
                outside["constant"],
            )
        )
        for s, offset in zip(here, offsets.tolist(), strict=True):
            tensors = tuple(names[t] for t in s.tensors)
            buffers.append(
                Buffer(s.name, s.op, s.category, space, s.start, s.end, offset, s.nbytes, tensors)
            )
    return Plan(placed.fingerprint, len(placed.steps), tuple(arenas), tuple(buffers))
