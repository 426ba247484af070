"""The state of sequences: cells, tokens, keys and values; as bytes with a version, a checksum and their origin."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from packtrain.engine.executor import Session
from packtrain.engine.memory_plan import size_text
from packtrain.inference.kv_cache.cell_pools import STATE, ContextError, Move, Pools
from packtrain.models.cached_transformer import Cache
from packtrain.models.config import Config
from packtrain.models.kv_cell_table import CacheFull, bit
from packtrain.models.model_file import ModelFile

MAGIC, VERSION = b"PTCS", 3
HEAD = struct.Struct("<4sII")  # magic, version, bytes of the description
DIGEST = 32
SAMPLED = 4096  # bytes of each tensor that identify a model
Leaves = Mapping[str, Mapping[str, np.ndarray]]  # arrays of a context by pool and name


@dataclass(frozen=True, slots=True)
class Origin:
    """What a state belongs to: digests of a model and of its adapters, the cache's type, and whether it has a ring.

    long  keys are rotated by the model's rope factors for long contexts
    """

    model: str = ""
    adapters: str = ""
    cache: str = ""
    ring: bool = False
    long: bool = False


NAMES = {
    "model": "model", "adapters": "adapters", "cache": "type of cache", "ring": "swa_full",
    "long": "kind of rope factors, for a shorter or longer context",
}  # fmt: skip


def origin_of(model: ModelFile, cache: Cache) -> Origin:
    digest, added = hashlib.sha256(), hashlib.sha256()
    digest.update(repr(replace(model.config, lora=None, flash=True)).encode())
    for name in model.gguf.entries:
        sample = model.gguf.array(name).reshape(-1)[:SAMPLED].tobytes()[:SAMPLED]
        digest.update(name.encode() + sample)
    for name, value in sorted(model.added.items()):
        added.update(name.encode() + value.tobytes())
    adapters = added.hexdigest() if model.added else ""
    long = 0 < model.config.short_context < cache.context
    return Origin(digest.hexdigest(), adapters, cache.dtype.name, cache.ring > 0, long)


def leaves_of(config: Config, cache: Cache) -> dict[str, list[str]]:
    """The names of the leaves of each pool."""
    leaves = dict[str, list[str]]()
    for i in range(config.block_count):
        names = (leaf.label for leaf in cache.leaves(config, i).values())
        leaves.setdefault(cache.pool(config, i), []).extend(names)
    states = [leaf.label for leaf in cache.states(config).values()]
    return leaves | ({STATE: states} if states else {})


def views(pools: Pools, leaves: Mapping[str, list[str]], session: Session) -> Leaves:
    """The arrays of each pool by name."""
    return {pool: {n: session.view(n) for n in leaves.get(pool, ())} for pool in pools.pools}


@dataclass(slots=True)
class Part:
    """Cells of a pool: positions, the set of each one's sequences (bit i: the i-th saved), and tokens.

    rows  keys and values by leaf, of these cells, as stored
    """

    pos: np.ndarray
    sets: np.ndarray
    tokens: np.ndarray
    rows: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True)
class Stored:
    """Sequences out of a context: their numbers, their cells by pool, and the scales of their adapters."""

    seqs: list[int]
    parts: dict[str, Part]
    scales: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(
        cls, pools: Pools, leaves: dict[str, list[str]], session: Session, seqs: list[int],
        cells: bool = True,
    ) -> "Stored":  # fmt: skip
        """Copies of the cells of sequences; of all pools, or not of those that go back anywhere."""
        parts = dict[str, Part]()
        for pool, pool_cells in pools.pools.items():
            if pool == "cell_" and not cells:
                continue
            sets = np.zeros(len(pool_cells), np.int64)
            for i, seq in enumerate(seqs):
                sets[pool_cells.of(seq, pools.begin(pool, seq))] |= bit(i)
            used_cells = np.flatnonzero(sets)
            tokens = (
                pools.tokens[used_cells] if pool == "cell_" else np.zeros(len(used_cells), np.int32)
            )
            rows = {name: session.view(name)[used_cells] for name in leaves.get(pool, ())}
            parts[pool] = Part(pool_cells.pos[used_cells], sets[used_cells], tokens, rows)
        return cls(list(seqs), parts)

    def homes(self, seqs: Sequence[int] | None) -> list[int]:
        """The sequences that will be those saved: these, or of the same numbers. Raises ContextError."""
        to = [*(self.seqs if seqs is None else seqs)]
        if len(to) != len(self.seqs):
            raise ContextError(
                f"the state has {len(self.seqs)} sequences; {len(to)} are given for them"
            )
        if len({*to}) < len(to):
            raise ContextError(f"one sequence cannot take several of a state; these are {to}")
        return to

    def put(self, pools: Pools, session: Session, to: Sequence[int]) -> None:
        """Put the cells into a context, as these sequences, whose cells there are freed. Raises CacheFull."""
        target_mask = sum(map(bit, set(to)))
        homes = {pool: self._homes(pools, pool, target_mask, to) for pool in self.parts}
        for pool, part in self.parts.items():
            cells, target_cells = pools.pools[pool], homes[pool]
            cells.put(np.arange(len(cells)), cells.pos, cells.sets & ~target_mask)
            sets = np.zeros(len(target_cells), np.int64)
            for i, seq in enumerate(to):
                sets[part.sets & bit(i) != 0] |= bit(seq)
            cells.put(target_cells, part.pos, sets)
            if pool == "cell_":
                pools.tokens[target_cells] = part.tokens
            for name, rows in part.rows.items():
                session.fill(name, partial(put_rows, at=target_cells, rows=rows))

    def _homes(self, pools: Pools, pool: str, target_mask: int, to: Sequence[int]) -> np.ndarray:
        """A cell for each of a part's, free once `target_mask` are."""
        cells, part = pools.pools[pool], self.parts[pool]
        if pool == "ring_":
            pools.expire(len(part.pos), target_mask)
        first = [
            next(seq for i, seq in enumerate(to) if cell_seqs & bit(i)) for cell_seqs in part.sets
        ]
        try:
            return cells.find(np.array(first, np.int32), target_mask)
        except CacheFull as error:
            raise CacheFull(f"the state does not fit: {error}") from None


def move_rows(session: Session, names: Sequence[str], move: Move) -> None:
    """Copy states to others."""
    for name in names:
        rows = session.view(name)[move.source]
        session.fill(name, partial(put_rows, at=move.to, rows=rows))


def put_rows(array: np.ndarray, at: np.ndarray, rows: np.ndarray) -> None:
    array[at] = rows


# ---- as bytes


def to_bytes(stored: Stored, origin: Origin) -> bytes:
    """Head, description, the arrays of each part, and the SHA-256 of all before it."""
    parts = stored.parts.items()
    counts = {pool: len(part.pos) for pool, part in parts}
    description = {
        "origin": asdict(origin),
        "seqs": stored.seqs,
        "cells": counts,
        "scales": stored.scales,
    }
    text = json.dumps(description).encode()
    data = (a.tobytes() for _, p in parts for a in (p.pos, p.sets, p.tokens, *p.rows.values()))
    payload = b"".join((HEAD.pack(MAGIC, VERSION, len(text)), text, *data))
    return payload + hashlib.sha256(payload).digest()


def of_bytes(state: bytes, origin: Origin, leaves: Leaves) -> Stored:
    """The state in these bytes. Raises ContextError if they are damaged, or of another origin."""
    if state[:4] != MAGIC:
        raise ContextError("this is not a state of a context; save one with packtrain")
    payload, digest = memoryview(state)[:-DIGEST], state[-DIGEST:]
    if len(state) < HEAD.size + DIGEST or hashlib.sha256(payload).digest() != digest:
        raise ContextError(
            f"the state is damaged: its {size_text(len(state))} do not match its checksum"
        )
    _, version, size = HEAD.unpack(payload[: HEAD.size])
    if version != VERSION:
        raise ContextError(
            f"the state has version {version}; this packtrain reads version {VERSION}"
        )
    saved_origin, seqs, counts, scales = _described(bytes(payload[HEAD.size : HEAD.size + size]))
    for name, value in asdict(origin).items():
        if getattr(saved_origin, name) != value:
            raise ContextError(
                f"the state was saved with another {NAMES[name]}; use the same, or read the text anew"
            )
    parts = _parts(payload[HEAD.size + size :], counts, leaves)
    for part in parts.values():
        owned = (part.sets > 0) & (part.sets < bit(len(seqs)))
        if not owned.all() or not (part.pos >= 0).all():
            raise ContextError("the state is damaged: its cells belong to no sequence of it")
    return Stored(seqs, parts, scales)


def _described(text: bytes) -> tuple[Origin, list[int], dict[str, int], list[list[float]]]:
    """What the description says: the origin, the sequences, the number of cells of each pool, scales of adapters."""
    try:
        description = json.loads(text)
        counts = {pool: int(count) for pool, count in description["cells"].items()}
        seqs = [int(seq) for seq in description["seqs"]]
        scales = [[float(scale) for scale in description["scales"][i]] for i in range(len(seqs))]
        return Origin(**description["origin"]), seqs, counts, scales
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        raise ContextError("the state is damaged: its description cannot be read") from None


def _parts(data: memoryview, counts: Mapping[str, int], leaves: Leaves) -> dict[str, Part]:
    parts, at = dict[str, Part](), 0
    for pool, named in leaves.items():
        count, arrays = counts.get(pool, -1), list[np.ndarray]()
        kinds = (
            *((np.dtype(kind), ()) for kind in ("i4", "i8", "i4")),
            *((a.dtype, a.shape[1:]) for a in named.values()),
        )
        for kind, shape in kinds:
            end = at + count * kind.itemsize * math.prod(shape)
            if not at <= end <= len(data):
                raise ContextError(f"the state is damaged: it has no {count:,} cells")
            arrays.append(np.frombuffer(data[at:end], kind).reshape(count, *shape))
            at = end
        pos, sets, tokens, *rows = arrays
        parts[pool] = Part(pos, sets, tokens, dict(zip(named, rows, strict=True)))
    return parts
