"""The state of sequences: cells, tokens, keys and values; as bytes with a version, a checksum and their origin.

From saved states a text can go back further than the ring of cells of a window reaches."""

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
from packtrain.inference.kv_cache.cell_pools import STATE, CellMove, CellPools, ContextError
from packtrain.inference.kv_cache.kv_cells import CacheFull, bit
from packtrain.models.cached_transformer import CacheLayout
from packtrain.models.config import Config
from packtrain.models.model_file import ModelFile

MAGIC, VERSION = b"PTCS", 3
HEAD = struct.Struct("<4sII")  # magic, version, bytes of the description
DIGEST_NBYTES = 32
SAMPLE_SIZE = 4096  # bytes of each tensor that identify a model
Leaves = Mapping[str, Mapping[str, np.ndarray]]  # arrays of a context by pool and name


@dataclass(frozen=True, slots=True)
class StateOrigin:
    """The context that a state fits: digests of model and adapters, the cache's type, and whether it has a ring.

    long  keys are rotated by the model's rope factors for long contexts
    """

    model: str = ""
    adapters: str = ""
    cache: str = ""
    ring: bool = False
    long: bool = False


ORIGIN_LABELS = {
    "model": "model", "adapters": "adapters", "cache": "type of cache", "ring": "swa_full",
    "long": "kind of rope factors, for a shorter or longer context",
}  # fmt: skip


def state_origin(model: ModelFile, cache: CacheLayout) -> StateOrigin:
    """Return what identifies this model and cache, by samples of all tensors, so that states of others are refused."""
    digest, adapter_digest = hashlib.sha256(), hashlib.sha256()
    digest.update(repr(replace(model.config, lora=None, flash=True)).encode())
    for name in model.gguf.entries:
        sample = model.gguf.array(name).reshape(-1)[:SAMPLE_SIZE].tobytes()[:SAMPLE_SIZE]
        digest.update(name.encode() + sample)
    for name, value in sorted(model.adapter_values.items()):
        adapter_digest.update(name.encode() + value.tobytes())
    adapter_hash = adapter_digest.hexdigest() if model.adapter_values else ""
    is_long = 0 < model.config.short_context < cache.max_context
    return StateOrigin(digest.hexdigest(), adapter_hash, cache.dtype.name, cache.ring > 0, is_long)


def leaf_names(config: Config, cache: CacheLayout) -> dict[str, list[str]]:
    """Return by pool the names of the leaves (graph state) that hold the keys and values, or states, of its cells."""
    names_by_pool = dict[str, list[str]]()
    for i in range(config.block_count):
        leaf_labels = (leaf.label for leaf in cache.leaves(config, i).values())
        names_by_pool.setdefault(cache.pool(config, i), []).extend(leaf_labels)
    state_names = [leaf.label for leaf in cache.scan_states(config).values()]
    return names_by_pool | ({STATE: state_names} if state_names else {})


def views(pools: CellPools, leaves: Mapping[str, list[str]], session: Session) -> Leaves:
    """Return the session's arrays of keys, values and states, by pool and leaf."""
    return {pool: {n: session.view(n) for n in leaves.get(pool, ())} for pool in pools.pools}


@dataclass(slots=True)
class SavedCells:
    """Saved cells of a pool: positions, the sequences of each cell (bit i: the i-th saved one), and tokens.

    leaf_rows  keys and values of these cells by leaf, as stored
    """

    pos: np.ndarray
    sets: np.ndarray
    tokens: np.ndarray
    leaf_rows: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True)
class SavedSequences:
    """Sequences saved from a context: their numbers, their cells by pool, and their adapter scales."""

    seqs: list[int]
    parts: dict[str, SavedCells]
    scales: list[list[float]] = field(default_factory=list)

    @classmethod
    def from_pools(
        cls, pools: CellPools, leaves: dict[str, list[str]], session: Session, seqs: list[int],
        has_all_pools: bool = True,
    ) -> "SavedSequences":  # fmt: skip
        """Return a copy of sequences' cells (`leaves`: see leaf_names); not has_all_pools: of ring and states only."""
        parts = dict[str, SavedCells]()
        for pool, pool_cells in pools.pools.items():
            if pool == "cell_" and not has_all_pools:
                continue
            sets = np.zeros(len(pool_cells), np.int64)
            for i, seq in enumerate(seqs):
                sets[pool_cells.of(seq, pools.first_needed_pos(pool, seq))] |= bit(i)
            used_cells = np.flatnonzero(sets)
            tokens = (
                pools.tokens[used_cells] if pool == "cell_" else np.zeros(len(used_cells), np.int32)
            )
            rows = {name: session.view(name)[used_cells] for name in leaves.get(pool, ())}
            parts[pool] = SavedCells(pool_cells.pos[used_cells], sets[used_cells], tokens, rows)
        return cls(list(seqs), parts)

    def target_seqs(self, seqs: Sequence[int] | None) -> list[int]:
        """Return the sequences to restore to: `seqs`, or the saved numbers if None. Raises ContextError."""
        new_seqs = [*(self.seqs if seqs is None else seqs)]
        if len(new_seqs) != len(self.seqs):
            fact = f"the state has {len(self.seqs)} sequences; {len(new_seqs)} are given for them"
            raise ContextError(fact)
        if len({*new_seqs}) < len(new_seqs):
            raise ContextError(f"each saved sequence needs its own; these are {new_seqs}")
        return new_seqs

    def restore_cells(self, pools: CellPools, session: Session, to: Sequence[int]) -> None:
        """Put the saved cells into a context as the sequences `to`, whose own cells are freed. Raises CacheFull."""
        target_mask = sum(map(bit, set(to)))
        homes = {pool: self._find_cells(pools, pool, target_mask, to) for pool in self.parts}
        for pool, saved_cells in self.parts.items():
            cells, target_cells = pools.pools[pool], homes[pool]
            cells.assign_cells(np.arange(len(cells)), cells.pos, cells.sets & ~target_mask)
            seq_masks = np.zeros(len(target_cells), np.int64)
            for i, seq in enumerate(to):
                seq_masks[saved_cells.sets & bit(i) != 0] |= bit(seq)
            cells.assign_cells(target_cells, saved_cells.pos, seq_masks)
            if pool == "cell_":
                pools.tokens[target_cells] = saved_cells.tokens
            for leaf_name, saved_rows in saved_cells.leaf_rows.items():
                session.fill(leaf_name, partial(put_rows, at=target_cells, rows=saved_rows))

    def _find_cells(
        self, pools: CellPools, pool: str, target_mask: int, to: Sequence[int]
    ) -> np.ndarray:
        """Find a cell, i32, for each saved one of a pool, free once the sequences in the bit mask `target_mask` are
        dropped; `to`: new numbers of the saved sequences. Raises CacheFull."""
        cells, part = pools.pools[pool], self.parts[pool]
        if pool == "ring_":
            pools.expire_ring(len(part.pos), target_mask)
        first_seqs = [
            next(seq for i, seq in enumerate(to) if cell_seqs & bit(i)) for cell_seqs in part.sets
        ]
        try:
            return cells.find_free_cells(np.array(first_seqs, np.int32), target_mask)
        except CacheFull as error:
            raise CacheFull(f"the state does not fit: {error}") from None


def move_states(session: Session, leaf_labels: Sequence[str], move: CellMove) -> None:
    """Copy scan states of sequences within the session, from cells `move.source` to `move.to`."""
    for leaf_label in leaf_labels:
        state_rows = session.view(leaf_label)[move.source]
        session.fill(leaf_label, partial(put_rows, at=move.to, rows=state_rows))


def put_rows(array: np.ndarray, at: np.ndarray, rows: np.ndarray) -> None:
    array[at] = rows


# ---- as bytes


def pack_state(stored: SavedSequences, origin: StateOrigin) -> bytes:
    """Return sequences as bytes: head, description, the arrays of each part, and the SHA-256 of all of them."""
    parts = stored.parts.items()
    cell_counts = {pool: len(saved_cells.pos) for pool, saved_cells in parts}
    description = {
        "origin": asdict(origin), "seqs": stored.seqs, "cells": cell_counts, "scales": stored.scales,
    }  # fmt: skip
    description_json = json.dumps(description).encode()
    data = (a.tobytes() for _, p in parts for a in (p.pos, p.sets, p.tokens, *p.leaf_rows.values()))
    payload = b"".join((HEAD.pack(MAGIC, VERSION, len(description_json)), description_json, *data))
    return payload + hashlib.sha256(payload).digest()


def unpack_state(state: bytes, origin: StateOrigin, leaves: Leaves) -> SavedSequences:
    """Parse a saved KV cache state for `leaves`. Raises ContextError if it is damaged or of another model or cache."""
    if state[:4] != MAGIC:
        raise ContextError("this is not a state of a context; save one with packtrain")
    payload, digest = memoryview(state)[:-DIGEST_NBYTES], state[-DIGEST_NBYTES:]
    if len(state) < HEAD.size + DIGEST_NBYTES or hashlib.sha256(payload).digest() != digest:
        fact = f"the state is damaged: its {size_text(len(state))} do not match its checksum"
        raise ContextError(fact)
    _, version, size = HEAD.unpack(payload[: HEAD.size])
    if version != VERSION:
        fact = f"the state has version {version}; this packtrain reads version {VERSION}"
        raise ContextError(fact)
    saved_origin, seqs, counts, scales = _parse_meta(bytes(payload[HEAD.size : HEAD.size + size]))
    for name, value in asdict(origin).items():
        if getattr(saved_origin, name) != value:
            fact = f"the state was saved with another {ORIGIN_LABELS[name]}"
            raise ContextError(f"{fact}; use the same, or read the text anew")
    cells_by_pool = _cells(payload[HEAD.size + size :], counts, leaves)
    for saved_cells in cells_by_pool.values():
        is_owned = (saved_cells.sets > 0) & (saved_cells.sets < bit(len(seqs)))
        if not is_owned.all() or not (saved_cells.pos >= 0).all():
            raise ContextError("the state is damaged: its cells belong to none of its sequences")
    return SavedSequences(seqs, cells_by_pool, scales)


def _parse_meta(text: bytes) -> tuple[StateOrigin, list[int], dict[str, int], list[list[float]]]:
    """Parse a state's description: origin, sequences, cells by pool, adapter scales. Raises ContextError."""
    try:
        description = json.loads(text)
        cell_counts = {pool: int(num_cells) for pool, num_cells in description["cells"].items()}
        seqs = [int(seq) for seq in description["seqs"]]
        scales = [[float(scale) for scale in description["scales"][i]] for i in range(len(seqs))]
        return StateOrigin(**description["origin"]), seqs, cell_counts, scales
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        raise ContextError("the state is damaged: its description cannot be read") from None


def _cells(data: memoryview, counts: Mapping[str, int], leaves: Leaves) -> dict[str, SavedCells]:
    """Parse saved cells; counts: cells by pool; leaves: arrays of the same types by pool. Raises ContextError."""
    parts, at = dict[str, SavedCells](), 0
    for pool, named in leaves.items():
        num_cells, arrays = counts.get(pool, -1), list[np.ndarray]()
        array_kinds = (
            *((np.dtype(array_dtype), ()) for array_dtype in ("i4", "i8", "i4")),
            *((a.dtype, a.shape[1:]) for a in named.values()),
        )
        for array_dtype, shape in array_kinds:
            array_end = at + num_cells * array_dtype.itemsize * math.prod(shape)
            if not at <= array_end <= len(data):
                raise ContextError(f"the state is damaged: it has no {num_cells:,} cells")
            arrays.append(np.frombuffer(data[at:array_end], array_dtype).reshape(num_cells, *shape))
            at = array_end
        pos, seq_masks, cell_tokens, *rows = arrays
        parts[pool] = SavedCells(pos, seq_masks, cell_tokens, dict(zip(named, rows, strict=True)))
    return parts


REREAD_MESSAGE = "sequence {}: no checkpoint is left of its window; its text is read anew"


@dataclass(slots=True)
class StateCheckpoints:
    """At most `max_checkpoints` saved windows or states a sequence, `token_spacing` tokens apart; old ones go first."""

    max_checkpoints: int
    token_spacing: int
    saved_states: list[tuple[int, int, SavedSequences]] = field(default_factory=list)

    def is_due(self, seq: int, position: int) -> bool:
        """Return whether, at this position, a sequence has read `token_spacing` tokens since its last saved state."""
        last = max((at for owner_seq, at, _ in self.saved_states if owner_seq == seq), default=0)
        return position >= last + self.token_spacing

    def add_state(self, seq: int, position: int, stored: SavedSequences) -> None:
        self.saved_states.append((seq, position, stored))
        states_of_seq = [state for state in self.saved_states if state[0] == seq]
        if len(states_of_seq) > self.max_checkpoints:
            self.saved_states = [s for s in self.saved_states if s is not states_of_seq[0]]

    def latest_state(self, seq: int, position: int) -> tuple[int, SavedSequences] | None:
        """Return (position, saved state) of a sequence's last state up to a position; None if none is left."""
        candidates = [
            (at, saved_sequences)
            for owner_seq, at, saved_sequences in self.saved_states
            if owner_seq == seq and at <= position
        ]
        return max(candidates, key=lambda candidate: candidate[0], default=None)

    def drop_after(self, seq: int, since: int) -> None:
        """Drop states saved of a sequence above position `since`, from which on it changes; one at `since` stays."""
        self.saved_states = [s for s in self.saved_states if s[0] != seq or s[1] <= since]
