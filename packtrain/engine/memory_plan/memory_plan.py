"""Plan: where every byte of a run lives, as data that prints, compares, verifies and goes to JSON."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from packtrain.engine.backends import HOST
from packtrain.engine.memory_plan import lifetimes
from packtrain.engine.memory_plan.lifetimes import lifetime_columns, storage_lifetimes
from packtrain.engine.packing import lower_bound, pack, packing_height
from packtrain.engine.placement import Placed
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import GraphError, spec_nbytes

Packer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
ArenaKey = tuple[str, str]  # a space, and the name of one of its arenas


@dataclass(frozen=True, slots=True)
class Buffer:
    """`nbytes` at `offset` of an arena during steps [start, end), used by `tensors` (names) one after another."""

    name: str
    op: str
    category: str
    space: str
    start: int
    end: int
    offset: int
    nbytes: int
    tensors: tuple[str, ...]
    arena: str = ""

    @property
    def place(self) -> ArenaKey:
        return self.space, self.arena


@dataclass(frozen=True, slots=True)
class Arena:
    """One allocation of a plan: its bytes, the most bytes alive at once (`lower_bound`), at `peak_step`, and bytes
    outside. Weights, states and constants of a space count in its arena without a name, rounded up to the alignment,
    and so do the bytes that kernels take beside their workspaces (see Backend.pool)."""

    space: str
    nbytes: int
    lower_bound: int
    peak_step: int
    weight_nbytes: int
    state_nbytes: int
    constant_nbytes: int
    name: str = ""
    pool_nbytes: int = 0

    @property
    def place(self) -> ArenaKey:
        return self.space, self.name

    @property
    def gap(self) -> float:
        """Share of bytes that packing lost over the lower bound; 0 proves that no plan is smaller."""
        return self.nbytes / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def outside_nbytes(self) -> int:
        return self.weight_nbytes + self.state_nbytes + self.constant_nbytes + self.pool_nbytes

    def __str__(self) -> str:
        arena_label = f"{self.space}: arena {self.name}".rstrip()
        return (
            f"{arena_label} {size_text(self.nbytes)}, gap {self.gap:.2%} over the lower bound "
            f"{size_text(self.lower_bound)} at step {self.peak_step}; outside it {size_text(self.outside_nbytes)}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every byte of a run lies, for the placed graph with this fingerprint and no other."""

    fingerprint: str
    steps: int
    arenas: tuple[Arena, ...]
    buffers: tuple[Buffer, ...] = field(repr=False)  # thousands

    def arena(self, space: str = HOST, name: str = "") -> Arena:
        """Return the arena of a memory space with this name; an arena of 0 bytes if the run does not use it."""
        unused = Arena(space, 0, 0, 0, 0, 0, 0, name)
        return next((a for a in self.arenas if a.place == (space, name)), unused)

    def peak(self, space: str = HOST, name: str = "") -> list[Buffer]:
        """Return the buffers of an arena that are alive at its fullest step, largest first."""
        at = self.arena(space, name).peak_step
        alive = [b for b in self.buffers if b.start <= at < b.end and b.place == (space, name)]
        return sorted(alive, key=lambda b: (-b.nbytes, b.offset))

    def check_belongs(self, placed: Placed) -> None:
        """Raise GraphError unless this plan was made for an equal graph, placed in the same way."""
        if placed.fingerprint != self.fingerprint:
            fact = f"the plan is for graph {self.fingerprint}"
            raise GraphError(f"{fact}, not for this graph {placed.fingerprint}; plan it again")

    def beyond(self, limits: Mapping[str, int]) -> str | None:
        """Return a message on the first memory space of which this plan needs more than its limit in bytes, or None."""
        for space in {a.space: None for a in self.arenas}:
            needed = sum(a.nbytes + a.outside_nbytes for a in self.arenas if a.space == space)
            if needed > limits.get(space, needed):
                has = size_text(limits[space])
                return f"this needs {size_text(needed)} of the memory of {space}, which has {has}"
        return None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Return the plan that `to_json` wrote; raise ValueError if the text is not a plan."""
        try:
            fields = json.loads(text)
            arenas = tuple(Arena(**a) for a in fields.pop("arenas"))
            buffers = [Buffer(**{**b, "tensors": (*b["tensors"],)}) for b in fields.pop("buffers")]
            return Plan(**fields, arenas=arenas, buffers=tuple(buffers))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not a plan in JSON: {error}") from None

    def __str__(self) -> str:
        lines = [f"plan of {self.steps} steps for graph {self.fingerprint}"]
        for a in self.arenas:
            lines.append(str(a))
            arena_buffers = [b for b in self.buffers if b.place == a.place]
            arena_buffers.sort(key=lambda b: (b.offset, b.start))
            lines.append(f"{'offset':>12} {'bytes':>12} {'steps':>13}  {'category':10}  buffer")
            lines += [
                f"{b.offset:>12,} {b.nbytes:>12,} {b.start:>6}{b.end - 1:>7}  {b.category:10}  "
                + (" = ".join(b.tensors) or b.name)
                for b in arena_buffers
            ]
        return "\n".join(lines)


def size_text(nbytes: int) -> str:
    """Return a number of bytes as a readable text: 1536 -> '1.5 KiB'."""
    scaled_size, unit = float(nbytes), 0
    while scaled_size >= 1024 and unit < 4:
        scaled_size, unit = scaled_size / 1024, unit + 1
    return f"{scaled_size:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{nbytes} B"


def make_plan(
    placed: Placed, *, packer: Packer = pack, reuse: bool = True,
    arenas: Mapping[str, str] | Callable[[str], str] = lifetimes.default_arena,
) -> Plan:  # fmt: skip
    """Return a Plan: an offset for all bytes of a placed graph's run, in one arena per memory space or in several.

    packer  (start, end, size) -> offsets, see pack
    reuse   False: nothing in place and no byte used twice, to find out whether the planner causes a wrong result
    arenas  name of a tensor -> name of its arena in the space where it lives; others are in one without a name
    """
    arena_of = arenas if callable(arenas) else lambda name: arenas.get(name, "")
    all_storages = storage_lifetimes(placed, reuse=reuse, arena_of=arena_of)
    if not callable(arenas):
        tensor_names = {placed.names[t] for s in all_storages for t in s.tensors}
        if unknown := sorted(arenas.keys() - {s.name for s in all_storages} - tensor_names):
            raise GraphError(f"arenas names {', '.join(unknown)}, which has no bytes in an arena")
    buffers: list[Buffer] = []
    arena_list: list[Arena] = []
    alignments = {b.space: b.alignment for b in placed.home.values()}
    arena_keys = {(space, "") for space in alignments} | {(s.space, s.arena) for s in all_storages}
    for arena_key in sorted(arena_keys):
        arena_storages = [s for s in all_storages if (s.space, s.arena) == arena_key]
        starts, stops, sizes = lifetime_columns(arena_storages, alignments[arena_key[0]])
        offsets = packer(starts, stops, sizes) if reuse else np.cumsum(sizes) - sizes
        outside_nbytes = _leaf_nbytes_by_kind(placed, arena_key, alignments[arena_key[0]])
        bounds = packing_height(sizes, offsets), *lower_bound(starts, stops, sizes)
        pool = 0 if arena_key[1] else pool_nbytes(placed.steps, arena_key[0])
        arena_list.append(Arena(arena_key[0], *bounds, *outside_nbytes, arena_key[1], pool))
        for s, offset in zip(arena_storages, offsets.tolist(), strict=True):
            tensors = tuple(map(placed.names.__getitem__, s.tensors))
            fields = s.name, s.op, s.category, s.space, s.start, s.end, offset, s.nbytes, tensors
            buffers.append(Buffer(*fields, s.arena))
    return Plan(placed.fingerprint, len(placed.steps), tuple(arena_list), tuple(buffers))


def pool_nbytes(steps: Iterable[KernelStep], space: str) -> int:
    """Return the bytes that kernels of these steps take of a memory space beside workspaces, such as temporaries."""
    pooled = [s for s in steps if s.backend.space == space]
    backends = {s.backend for s in pooled}
    calls = ((b, (c for s in pooled if s.backend is b and (c := s.op_call))) for b in backends)
    return sum(backend.pool(op_calls) for backend, op_calls in calls)


def _leaf_nbytes_by_kind(placed: Placed, place: ArenaKey, alignment: int) -> tuple[int, int, int]:
    """Return the bytes of weights, states and constants in the space of `place`, each rounded up to the alignment."""
    nbytes_by_kind = {"weight": 0, "state": 0, "constant": 0, "input": 0}
    for leaf in placed.graph.leaves:
        if (placed.home[leaf].space, "") == place:
            nbytes = spec_nbytes(leaf.spec.shape, leaf.spec.dtype)
            nbytes_by_kind[str(leaf.kind)] += -(-nbytes // alignment) * alignment
    return nbytes_by_kind["weight"], nbytes_by_kind["state"], nbytes_by_kind["constant"]
