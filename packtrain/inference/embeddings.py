"""Embeddings of texts: what the last norm gives for their tokens, pooled; several texts in one batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.inference.kv_cache import Context
from packtrain.models.kv_cell_table import SEQUENCES
from packtrain.models.model_file import ModelFile

POOLINGS = "mean", "cls", "last"
STORED = {0: "mean", 1: "mean", 2: "cls", 3: "last"}  # llama_pooling_type; 0 says none
BATCH = 2048  # tokens of texts that are read together
LARGEST = 32760.0  # with a norm of 0, of values that fit 16 bits


def pooling_of(model: ModelFile) -> str:
    """How the file pools. Raises InputError for what is no pooling of tokens."""
    key = f"{model.config.architecture}.pooling_type"
    stored: Any = model.gguf.metadata.get(key, 1)
    if stored not in STORED:
        raise InputError(
            f"{model.gguf.path}: {key} is {stored!r}, which is not supported; choose one with --pooling"
        )
    return STORED[stored]


def pooled(hidden: np.ndarray, pooling: str) -> np.ndarray:
    """One vector (C,) of those of a text's tokens, (T, C)."""
    if pooling == "mean":
        return np.asarray(hidden.mean(0, dtype=np.float64), np.float32)
    return np.asarray(hidden[0 if pooling == "cls" else -1])


def normalized(vector: np.ndarray, norm: int) -> np.ndarray:
    """Divided by its norm: 1 taxicab, 2 Euclidean, p; 0: the largest value becomes 32760; -1: as it is."""
    if norm < 0:
        return vector
    wide = np.abs(vector.astype(np.float64))
    largest = float(wide.max())
    if largest == 0:
        return vector
    size = largest / LARGEST
    if norm:
        size = largest * float(((wide / largest) ** norm).sum()) ** (1 / norm)
    return (vector / size).astype(np.float32)


def room(lengths: Sequence[int]) -> tuple[int, int]:
    """Cells and sequences of a context that embeds texts of so many tokens."""
    cells = max(*lengths, min(sum(lengths), BATCH))
    return cells, min(len(lengths), SEQUENCES)


def batches(lengths: Sequence[int], cells: int, sequences: int) -> Iterator[range]:
    """Which texts are read together, in order."""
    begin = 0
    while begin < len(lengths):
        end, used = begin + 1, lengths[begin]
        while end < len(lengths) and end - begin < sequences and used + lengths[end] <= cells:
            used, end = used + lengths[end], end + 1
        yield range(begin, end)
        begin = end


def check_texts(texts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise InputError unless every text has tokens, and at most so many."""
    for number, ids in enumerate(texts, 1):
        if not ids:
            raise InputError(f"text {number} has no tokens; an embedding needs one")
        if len(ids) > max_tokens:
            raise InputError(
                f"text {number} has {plural(len(ids), 'token')} and the context {max_tokens:,}; give a shorter one or"
                " a larger --ctx"
            )


def embeddings(
    context: Context, texts: Sequence[Sequence[int]], pooling: str
) -> Iterator[np.ndarray]:
    """The vector (C,) of each text; the context is `hidden` and has `room` for them."""
    lengths = [len(ids) for ids in texts]
    for batch in batches(lengths, context.cache.cells, context.pools.sequences):
        tokens = [id for i in batch for id in texts[i]]
        seqs = [i - batch.start for i in batch for _ in texts[i]]
        hidden = context.decode(tokens, seqs, wanted=range(len(tokens)))
        for seq in range(len(batch)):
            context.remove(seq)
        if not np.isfinite(hidden).all():
            raise InputError("the embeddings are not finite; weights of the model may be damaged")
        end_offsets = np.cumsum([lengths[i] for i in batch])
        for rows in np.split(hidden, end_offsets[:-1]):
            yield pooled(rows, pooling)
