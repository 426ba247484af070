"""Embeddings of texts: outputs of the last norm for their tokens, pooled; several texts in one batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.inference.kv_cache import Context
from packtrain.inference.kv_cache.kv_cells import SEQUENCES
from packtrain.models.model_file import ModelFile

POOLINGS = "mean", "cls", "last", "none"
POOLING_BY_TYPE = {0: "mean", 1: "mean", 2: "cls", 3: "last"}  # llama_pooling_type; 0 says none
MAX_BATCH_TOKENS = 2048  # tokens of texts that are read together
MAX_ABS_VALUE = 32760.0  # largest value with a norm of 0, so that values fit 16 bits


def model_pooling(model: ModelFile) -> str:
    """Return the pooling that the model's file names. Raises InputError for one that is not supported."""
    key = f"{model.config.architecture}.pooling_type"
    pooling_type: Any = model.gguf.metadata.get(key, 1)
    if pooling_type not in POOLING_BY_TYPE:
        fact = f"{model.gguf.path}: {key} is {pooling_type!r}, which is not supported"
        raise InputError(f"{fact}; choose one with --pooling")
    return POOLING_BY_TYPE[pooling_type]


def pool_hidden(hidden: np.ndarray, pooling: str) -> np.ndarray:
    """Return one vector (C,) of hidden (T, C): "mean", first ("cls"), last ("last"); "none": all vectors."""
    if pooling == "none":
        return hidden
    if pooling == "mean":
        return np.asarray(hidden.mean(0, dtype=np.float64), np.float32)
    return np.asarray(hidden[0 if pooling == "cls" else -1])


def normalize_vector(vector: np.ndarray, norm: int) -> np.ndarray:
    """Divide a vector by its norm (1 taxicab, 2 Euclidean, p); 0: to a largest magnitude of 32760; -1: not at all."""
    if norm < 0:
        return vector
    magnitudes = np.abs(vector.astype(np.float64))
    max_magnitude = float(magnitudes.max())
    if max_magnitude == 0:
        return vector
    divisor = max_magnitude / MAX_ABS_VALUE
    if norm:
        divisor = max_magnitude * float(((magnitudes / max_magnitude) ** norm).sum()) ** (1 / norm)
    return (vector / divisor).astype(np.float32)


def context_dimensions(lengths: Sequence[int]) -> tuple[int, int]:
    """Return (cells, sequences) of a context that embeds texts of these lengths, in tokens, in batches."""
    return max(*lengths, min(sum(lengths), MAX_BATCH_TOKENS)), min(len(lengths), SEQUENCES)


def batches(lengths: Sequence[int], cells: int, sequences: int) -> Iterator[range]:
    """Yield ranges of indices of texts, of these lengths in tokens, that fit the cells and sequences of a batch."""
    batch_start = 0
    while batch_start < len(lengths):
        end, used = batch_start + 1, lengths[batch_start]
        while end < len(lengths) and end - batch_start < sequences and used + lengths[end] <= cells:
            used, end = used + lengths[end], end + 1
        yield range(batch_start, end)
        batch_start = end


def check_texts(texts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Raise InputError unless every text has at least one and at most `max_tokens` tokens."""
    for number, ids in enumerate(texts, 1):
        if not ids:
            raise InputError(f"text {number} has no tokens; an embedding needs one")
        if len(ids) > max_tokens:
            raise InputError(
                f"text {number} has {plural(len(ids), 'token')} and the context {max_tokens:,}; give a shorter one or"
                " a larger --ctx"
            )


def embed_texts(
    context: Context, texts: Sequence[Sequence[int]], pooling: str
) -> Iterator[np.ndarray]:
    """Yield each text's vector (C,), or (T, C) for "none"; `context`: hidden, of `context_dimensions`. InputError."""
    lengths = [len(ids) for ids in texts]
    for batch in batches(lengths, context.cache.num_cells, context.pools.sequences):
        tokens = [id for i in batch for id in texts[i]]
        seqs = [i - batch.start for i in batch for _ in texts[i]]
        hidden = context.decode(tokens, seqs, wanted=range(len(tokens)))
        for seq in range(len(batch)):
            context.remove(seq)
        if not np.isfinite(hidden).all():
            raise InputError("the embeddings are not finite; weights of the model may be damaged")
        end_offsets = np.cumsum([lengths[i] for i in batch])
        for text_rows in np.split(hidden, end_offsets[:-1]):
            yield pool_hidden(text_rows, pooling)
