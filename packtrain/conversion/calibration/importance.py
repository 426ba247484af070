"""Importance matrices: for each matrix of a model the sums of squares of its inputs, in llama.cpp's files.

measure(model, batches) gives them; save and load are the GGUF form that llama-imatrix writes: NAME.in_sum2 and
NAME.counts, for stacks of experts a row each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.calibration.block_streams import Batch, Block, Site, Streams, padding
from packtrain.conversion.calibration.calibrated_rounding import Done
from packtrain.engine.graph import Graph
from packtrain.gguf import GGUF, Value, write
from packtrain.models.model_file import ModelFile

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNKS, SIZE = (f"imatrix.{name}" for name in ("datasets", "chunk_count", "chunk_size"))


@dataclass(frozen=True, slots=True)
class Importance:
    """Sums over tokens, by the name of a matrix.

    sums    (experts, columns)  of squared inputs; one row unless it is a stack of experts
    counts  (experts,)          tokens that each one saw
    source  the data, as text;  chunks  how many rows of `size` tokens were read
    """

    sums: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    source: str
    chunks: int
    size: int

    def weights(self, name: str) -> np.ndarray | None:
        """The mean square of each input, f32 (experts, columns), ones for an expert without tokens; None if unknown."""
        if name not in self.sums:
            return None
        sums, counts = self.sums[name], self.counts[name][:, None]
        return np.where(counts > 0, sums / np.maximum(counts, np.float32(1)), np.float32(1))

    def metadata(self) -> dict[str, Value]:
        return {
            "general.type": Value("string", "imatrix"),
            DATASETS: Value("string", [self.source]),
            CHUNKS: Value("u32", self.chunks),
            SIZE: Value("u32", self.size),
        }


# ---- files -------------------------------------------------------------------------------------------------------


def save(path: Path, importance: Importance) -> None:
    """Write the file. A dense matrix has vectors, a stack of experts a row for each."""
    tensors = {}
    for name in sorted(importance.sums):
        sums, counts = importance.sums[name], importance.counts[name]
        dense = len(sums) == 1
        tensors[name + SUMS] = sums[0] if dense else sums
        tensors[name + COUNTS] = counts if dense else counts[:, None]
    write(path, importance.metadata(), {n: np.asarray(t, np.float32) for n, t in tensors.items()})


def load(path: Path) -> Importance:
    """Read the file. Raises InputError if it is not an importance matrix, or not a sound one."""
    gguf = GGUF(path)
    if gguf.metadata.get("general.type") != "imatrix":
        raise InputError(
            f"{path}: this is not an importance matrix; `packtrain imatrix` or llama-imatrix writes one"
        )
    sums, counts = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name in (n.removesuffix(SUMS) for n in gguf.entries if n.endswith(SUMS)):
        if name + COUNTS not in gguf.entries:
            raise InputError(f"{path}: {name}{COUNTS} is missing")
        total, seen = (gguf.array(name + end) for end in (SUMS, COUNTS))
        uneven = not total.size or not seen.size or total.size % seen.size
        if total.dtype != np.float32 or seen.dtype != np.float32 or uneven:
            raise InputError(
                f"{path}: {name}{SUMS} and {name}{COUNTS} must be F32, a row of sums for each count"
            )
        if not (np.isfinite(total).all() and (total >= 0).all() and np.isfinite(seen).all()):
            raise InputError(f"{path}: {name}{SUMS} has values that are not finite, or below zero")
        sums[name], counts[name] = total.reshape(seen.size, -1), seen.reshape(-1)
    if not sums:
        raise InputError(f"{path}: there are no sums in it")
    source = gguf.metadata.get(DATASETS)
    first = source[0] if isinstance(source, list) and source else b""
    text = first.decode(errors="replace") if isinstance(first, bytes) else str(first)
    chunks, size = (gguf.metadata.get(key) for key in (CHUNKS, SIZE))
    numbers = (n if isinstance(n, int) else 0 for n in (chunks, size))
    return Importance(sums, counts, text, *numbers)


# ---- measuring ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, squares: np.ndarray, count: np.ndarray) -> None:
        self.sums[name] = self.sums.get(name, 0) + squares
        self.counts[name] = self.counts.get(name, 0) + count


def measure(
    model: ModelFile,
    groups: Sequence[Sequence[Batch]],
    source: str,
    done: Done = lambda block, blocks: None,
) -> Importance:
    """The sums over all tokens that are not padding, a group of batches at a time.

    The inputs of a stack of experts that all of them read, as of ffn_gate_exps, count for each expert.
    """
    stored = {name: array for name, array in model.stored().items() if name in model.types()}
    matrices = {name: array for name, array in stored.items() if name.startswith("blk.")}
    running_sums, count = _Sums(), model.config.block_count
    for number, batches in enumerate(groups):
        streams = Streams(model, matrices, batches)
        for i in range(count):
            _read(streams, streams.block(i), running_sums, stored)
            done(number * count + i + 1, len(groups) * count)
    sums = {name: total.astype(np.float32) for name, total in running_sums.sums.items()}
    for name, total in sums.items():
        if not np.isfinite(total).all():
            raise InputError(f"the inputs of {name} are not finite; weights may be damaged")
    size = groups[0][0]["tokens"].shape[-1]
    rows = sum(int((~padding(b)).any(-1).sum()) for batches in groups for b in batches)
    counts = {n: total.astype(np.float32) for n, total in running_sums.counts.items()}
    return Importance(sums, counts, source, rows, size)


def _read(
    streams: Streams, block: Block, running_sums: _Sums, stored: Mapping[str, np.ndarray]
) -> None:
    """Add the inputs of a block's matrices, and advance through it."""
    shared_z = {
        name: shared_tensor for name, shared_tensor in block.shared.items() if name.startswith("z")
    }
    outputs = {"z": block.z, **shared_z}
    for number, site in enumerate(block.sites):
        outputs[str(number)] = site.z
        if site.expert is not None:
            outputs |= dict(zip((f"{number} expert", f"{number} token"), site.expert, strict=True))
    for at, outputs_read in streams.through(Graph(outputs)):
        for number, site in enumerate(block.sites):
            x = outputs_read[str(number)]
            x = x.reshape(-1, x.shape[-1])
            real = streams.real[at].reshape(-1)
            if site.expert is not None:
                real = real[outputs_read[f"{number} token"]]
            for name, squares, counts in _sums(
                site, x, real, outputs_read.get(f"{number} expert"), stored
            ):
                running_sums.add(name, squares, counts)
        streams.z[at] = outputs_read["z"]
        streams.shared[at] |= {name: outputs_read[name] for name in shared_z}


def _sums(
    site: Site,
    x: np.ndarray,
    real: np.ndarray,
    expert: np.ndarray | None,
    stored: Mapping[str, np.ndarray],
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """For each matrix of a site the sums (experts, columns) and counts."""
    for name in site.names:
        stacks = len(stored[name]) if stored[name].ndim > 2 else 1
        if expert is None:
            squares = np.einsum("tc,tc->c", x[real], x[real], dtype=np.float64)
            yield name, np.tile(squares, (stacks, 1)), np.full(stacks, int(real.sum()))
            continue
        chosen = [x[real & (expert == i)] for i in range(stacks)]
        sums = [np.einsum("tc,tc->c", rows, rows, dtype=np.float64) for rows in chosen]
        yield name, np.stack(sums), np.array([len(rows) for rows in chosen])
