"""The state of sequences: cells, tokens, keys and values; as bytes with a version, a checksum and their origin."""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from packtrain.context.pools import ContextError, Pools
from packtrain.models.cache import CacheFull, bit
from packtrain.models.cached import Cache
from packtrain.models.config import Config
from packtrain.models.file import ModelFile
from packtrain.planning import size_text
from packtrain.run import Session

MAGIC, VERSION = b"PTCS", 1
HEAD = struct.Struct("<4sII")  # magic, version, bytes of the description
DIGEST = 32
SAMPLED = 4096  # bytes of each tensor that identify a model


@dataclass(frozen=True, slots=True)
class Origin:
    """What a state belongs to: digests of a model and of its adapters, the cache's type, and whether it has a ring."""

    model: str = ""
    adapters: str = ""
    cache: str = ""
    ring: bool = False


NAMES = {"model": "model", "adapters": "adapters", "cache": "type of cache", "ring": "--swa-full"}


def origin_of(model: ModelFile, cache: Cache) -> Origin:
    digest, added = hashlib.sha256(), hashlib.sha256()
    digest.update(repr(replace(model.config, lora=None)).encode())
    for name in model.gguf.entries:
        sample = model.gguf.array(name).reshape(-1)[:SAMPLED].tobytes()[:SAMPLED]
        digest.update(name.encode() + sample)
    for name, value in sorted(model.added.items()):
        added.update(name.encode() + value.tobytes())
    adapters = added.hexdigest() if model.added else ""
    return Origin(digest.hexdigest(), adapters, cache.dtype.name, cache.ring > 0)


def leaves_of(config: Config, cache: Cache) -> dict[str, list[str]]:
    """The names of the leaves of each pool."""
    leaves = dict[str, list[str]]()
    for i in range(config.block_count):
        leaves.setdefault(cache.pool(config, i), []).extend((f"cache.k.{i}", f"cache.v.{i}"))
    return leaves


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
    """Sequences out of a context: their numbers, and their cells by pool."""

    seqs: list[int]
    parts: dict[str, Part]

    @classmethod
    def of(
        cls, pools: Pools, leaves: dict[str, list[str]], session: Session, seqs: list[int],
        only: str = "",
    ) -> "Stored":  # fmt: skip
        """Copies of the cells of sequences, of all pools or only one."""
        parts = dict[str, Part]()
        for pool, cells in pools.pools.items():
            if only not in ("", pool):
                continue
            every = sum(map(bit, set(seqs)))
            there = np.flatnonzero(cells.sets & every)
            sets = np.zeros(len(there), np.int64)
            for i, seq in enumerate(seqs):
                sets[cells.sets[there] & bit(seq) != 0] |= bit(i)
            tokens = pools.tokens[there] if pool == "cell_" else np.zeros(0, np.int32)
            part = parts[pool] = Part(cells.pos[there], sets, tokens)
            part.rows = {name: session.view(name)[there] for name in leaves.get(pool, ())}
        return cls(list(seqs), parts)

    def put(self, pools: Pools, session: Session, to: Sequence[int]) -> None:
        """Put the cells into a context, as these sequences, whose cells there are freed. Raises CacheFull."""
        theirs = sum(map(bit, set(to)))
        homes = {pool: self._homes(pools, pool, theirs, to) for pool in self.parts}
        for pool, part in self.parts.items():
            cells, there = pools.pools[pool], homes[pool]
            cells.put(np.arange(len(cells)), cells.pos, cells.sets & ~theirs)
            sets = np.zeros(len(there), np.int64)
            for i, seq in enumerate(to):
                sets[part.sets & bit(i) != 0] |= bit(seq)
            cells.put(there, part.pos, sets)
            if pool == "cell_":
                pools.tokens[there] = part.tokens
            for name, rows in part.rows.items():
                session.fill(name, partial(put_rows, at=there, rows=rows))

    def _homes(self, pools: Pools, pool: str, theirs: int, to: Sequence[int]) -> np.ndarray:
        """A cell for each of a part's, free once `theirs` are."""
        cells, part = pools.pools[pool], self.parts[pool]
        if pool == "ring_":
            pools.expire(len(part.pos))
        kept, cells.sets = cells.sets, cells.sets & ~theirs
        try:
            first = [next(seq for i, seq in enumerate(to) if own & bit(i)) for own in part.sets]
            return cells.find(np.array(first, np.int32))
        except CacheFull as error:
            raise CacheFull(f"the state does not fit: {error}") from None
        finally:
            cells.sets = kept


def put_rows(array: np.ndarray, at: np.ndarray, rows: np.ndarray) -> None:
    array[at] = rows


# ---- as bytes


def to_bytes(stored: Stored, origin: Origin) -> bytes:
    """Head, description, arrays, and the SHA-256 of all before it."""
    listed, data = dict[str, list[list[object]]](), list[bytes]()
    for pool, part in stored.parts.items():
        arrays = {"pos": part.pos, "sets": part.sets, "tokens": part.tokens} | part.rows
        listed[pool] = [[n, a.dtype.str, [*a.shape], a.nbytes] for n, a in arrays.items()]
        data += [a.tobytes() for a in arrays.values()]
    about = json.dumps({"origin": asdict(origin), "seqs": stored.seqs, "parts": listed}).encode()
    whole = b"".join((HEAD.pack(MAGIC, VERSION, len(about)), about, *data))
    return whole + hashlib.sha256(whole).digest()


def of_bytes(state: bytes, origin: Origin, leaves: dict[str, np.ndarray]) -> Stored:
    """The state in these bytes. Raises ContextError if they are damaged, or of another origin.

    leaves  arrays of the context by name, whose types and shapes those of the state have
    """
    if state[:4] != MAGIC:
        raise ContextError("this is not a state of a context; save one with packtrain")
    whole, digest = memoryview(state)[:-DIGEST], state[-DIGEST:]
    if len(state) < HEAD.size + DIGEST or hashlib.sha256(whole).digest() != digest:
        raise ContextError(
            f"the state is damaged: its {size_text(len(state))} do not match its checksum"
        )
    _, version, size = HEAD.unpack(whole[: HEAD.size])
    if version != VERSION:
        raise ContextError(
            f"the state has version {version}; this packtrain reads version {VERSION}"
        )
    about = json.loads(bytes(whole[HEAD.size : HEAD.size + size]))
    for name, value in asdict(origin).items():
        if about["origin"][name] != value:
            raise ContextError(
                f"the state was saved with another {NAMES[name]}; use the same, or read the text anew"
            )
    parts, at = dict[str, Part](), HEAD.size + size
    for pool, listed in about["parts"].items():
        arrays = dict[str, np.ndarray]()
        for name, dtype, shape, nbytes in listed:
            kind = leaves[name].dtype if name in leaves else np.dtype(dtype)
            arrays[name] = np.frombuffer(whole[at : at + nbytes], kind).reshape(shape)
            at += nbytes
        pos, sets, tokens = (arrays.pop(name) for name in ("pos", "sets", "tokens"))
        parts[pool] = Part(pos, sets, tokens, arrays)
    return Stored(about["seqs"], parts)
