"""Importance matrices: for each matrix of a model the sums of squares of its inputs, in llama.cpp's files.

measure_importance computes them. save_importance and load_importance use the GGUF layout of llama-imatrix:
NAME.in_sum2 and NAME.counts, with a row for each expert of a stack."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.calibration import block_streams
from packtrain.conversion.calibration.calibrated_rounding import BlockProgress
from packtrain.engine.graph import Graph
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.models.model_file import ModelFile

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNKS, SIZE = (f"imatrix.{name}" for name in ("datasets", "chunk_count", "chunk_size"))


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """Sums over tokens, by the name of a matrix; `num_chunks` rows of `chunk_size` tokens of `source_text` were read.

    sums    (experts, columns)  sums of squared inputs; one row unless the matrix is a stack of experts
    counts  (experts,)          tokens that each expert saw
    """

    sums: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    source_text: str
    num_chunks: int
    chunk_size: int

    def weights(self, name: str) -> np.ndarray | None:
        """Return each input's mean square, f32 (experts, columns), 1 for experts without tokens; None if unknown."""
        if name not in self.sums:
            return None
        sums, counts = self.sums[name], self.counts[name][:, None]
        return np.where(counts > 0, sums / np.maximum(counts, np.float32(1)), np.float32(1))

    def metadata(self) -> dict[str, MetadataValue]:
        return {
            "general.type": MetadataValue("string", "imatrix"), DATASETS: MetadataValue("string", [self.source_text]),
            CHUNKS: MetadataValue("u32", self.num_chunks), SIZE: MetadataValue("u32", self.chunk_size),
        }  # fmt: skip


# ---- files -------------------------------------------------------------------------------------------------------


def save_importance(path: Path, importance: ImportanceMatrix) -> None:
    """Write an importance matrix to a file; a dense matrix has vectors, a stack of experts has a row for each."""
    tensors = {}
    for name in sorted(importance.sums):
        sums, counts = importance.sums[name], importance.counts[name]
        is_dense = len(sums) == 1
        tensors[name + SUMS] = sums[0] if is_dense else sums
        tensors[name + COUNTS] = counts if is_dense else counts[:, None]
    f32_tensors = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    write_gguf(path, importance.metadata(), f32_tensors)


def load_importance(path: Path) -> ImportanceMatrix:
    """Read an importance matrix from a file. Raises InputError if the file is none, or is not sound."""
    gguf = GGUF(path)
    if gguf.metadata.get("general.type") != "imatrix":
        fact = f"{path}: this is not an importance matrix"
        raise InputError(f"{fact}; `packtrain imatrix` or llama-imatrix writes one")
    sums, counts = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name in (value.removesuffix(SUMS) for value in gguf.entries if value.endswith(SUMS)):
        if name + COUNTS not in gguf.entries:
            raise InputError(f"{path}: {name}{COUNTS} is missing")
        total, seen = (gguf.array(name + suffix) for suffix in (SUMS, COUNTS))
        is_uneven = not total.size or not seen.size or total.size % seen.size
        if total.dtype != np.float32 or seen.dtype != np.float32 or is_uneven:
            fact = f"{path}: {name}{SUMS} and {name}{COUNTS} must be F32"
            raise InputError(f"{fact}, a row of sums for each count")
        if not (np.isfinite(total).all() and (total >= 0).all() and np.isfinite(seen).all()):
            raise InputError(f"{path}: {name}{SUMS} has values that are not finite, or below zero")
        sums[name], counts[name] = total.reshape(seen.size, -1), seen.reshape(-1)
    if not sums:
        raise InputError(f"{path}: there are no sums in it")
    source = gguf.metadata.get(DATASETS)
    first = source[0] if isinstance(source, list) and source else b""
    source_text = first.decode(errors="replace") if isinstance(first, bytes) else str(first)
    num_chunks, chunk_size = (gguf.metadata.get(key) for key in (CHUNKS, SIZE))
    chunk_numbers = (value if isinstance(value, int) else 0 for value in (num_chunks, chunk_size))
    return ImportanceMatrix(sums, counts, source_text, *chunk_numbers)


# ---- measuring ---------------------------------------------------------------------------------------------------


# by the name of a matrix: sums of squared inputs, and counts of tokens
RunningSums = dict[str, tuple[np.ndarray, np.ndarray]]


def measure_importance(
    model: ModelFile, groups: Sequence[Sequence[block_streams.TokenBatch]], source_text: str,
    report_block: BlockProgress = lambda block, blocks: None,
) -> ImportanceMatrix:  # fmt: skip
    """Sum the squared inputs of each matrix over all tokens but padding, a group of batches at a time; `source_text`
    names the data. Inputs that all experts read, as those of ffn_gate_exps, count for each. Raises InputError."""
    stored = {n: array for n, array in model.stored().items() if n in model.matrix_dtypes()}
    block_matrices = {name: array for name, array in stored.items() if name.startswith("blk.")}
    running_sums, num_blocks = RunningSums(), model.config.block_count
    for group_index, batches in enumerate(groups):
        streams = block_streams.StreamPair(model, block_matrices, batches)
        for i in range(num_blocks):
            _add_block(streams, streams.block(i), running_sums, stored)
            report_block(group_index * num_blocks + i + 1, len(groups) * num_blocks)
    sums, counts = (
        {name: pair[part].astype(np.float32) for name, pair in running_sums.items()}
        for part in (0, 1)
    )
    for name, running_sum in sums.items():
        if not np.isfinite(running_sum).all():
            raise InputError(f"the inputs of {name} are not finite; weights may be damaged")
    chunk_size = groups[0][0]["tokens"].shape[-1]
    masks = (~block_streams.padding_mask(batch) for batches in groups for batch in batches)
    num_rows = sum(int(mask.any(-1).sum()) for mask in masks)
    return ImportanceMatrix(sums, counts, source_text, num_rows, chunk_size)


def _add_block(
    streams: block_streams.StreamPair, block: block_streams.StreamBlock, running_sums: RunningSums,
    matrix_arrays: Mapping[str, np.ndarray],
) -> None:  # fmt: skip
    """Add the squared inputs of a block's matrices to `running_sums`, and advance the residual stream to the next."""
    shared_z = {n: shared_tensor for n, shared_tensor in block.shared.items() if n.startswith("z")}
    outputs = {"z": block.z, **shared_z}
    for number, site in enumerate(block.matrix_inputs):
        outputs[str(number)] = site.z
        if site.expert is not None:
            outputs |= dict(zip((f"{number} expert", f"{number} token"), site.expert, strict=True))
    for batch_index, outputs_read in streams.run_batches(Graph(outputs)):
        for number, site in enumerate(block.matrix_inputs):
            x = outputs_read[str(number)]
            x = x.reshape(-1, x.shape[-1])
            real_rows = streams.real_masks[batch_index].reshape(-1)
            if site.expert is not None:
                real_rows = real_rows[outputs_read[f"{number} token"]]
            for name, squares, counts in _input_sums(
                site, x, real_rows, outputs_read.get(f"{number} expert"), matrix_arrays
            ):
                total, token_count = running_sums.get(name, (0, 0))
                running_sums[name] = total + squares, token_count + counts
        streams.z[batch_index] = outputs_read["z"]
        streams.shared[batch_index] |= {name: outputs_read[name] for name in shared_z}


def _input_sums(
    site: block_streams.MatrixInput, x: np.ndarray, real_rows: np.ndarray, expert: np.ndarray | None,
    matrix_arrays: Mapping[str, np.ndarray],
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:  # fmt: skip
    """Yield (name, sums of squared inputs (experts, columns), token counts (experts,)) of each matrix that reads x
    (rows, columns). `real_rows` (rows,): not padding; `expert` (rows,): the expert that reads a row, or None."""
    for name in site.matrix_names:
        stacks = len(matrix_arrays[name]) if matrix_arrays[name].ndim > 2 else 1
        if expert is None:
            squares = np.einsum("tc,tc->c", x[real_rows], x[real_rows], dtype=np.float64)
            yield name, np.tile(squares, (stacks, 1)), np.full(stacks, int(real_rows.sum()))
            continue
        expert_inputs = [x[real_rows & (expert == i)] for i in range(stacks)]
        sums = [np.einsum("tc,tc->c", rows, rows, dtype=np.float64) for rows in expert_inputs]
        yield name, np.stack(sums), np.array([len(rows) for rows in expert_inputs])
