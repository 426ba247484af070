"""Encodes many texts on several threads: token ids of batches of texts, in the texts' order.

Texts come in pieces, so that a text may be larger than memory. Ids do not depend on the threads."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from packtrain.data.tokenizer.compiled import CompiledEncoder
from packtrain.data.tokenizer.tokenizer import TextParts, Tokenizer
from packtrain.kernels.runtime.environment import allowed_cpus

BATCH_CHARACTERS = 1 << 18  # characters that a thread encodes at a time
MAX_THREADS = 8

TextStretch = tuple[TextParts, bool]  # parts of a text, and whether the text ends with them
IdChunk = tuple[np.ndarray, bool]


def encode_all(
    tokenizer: Tokenizer, pieces: Iterable[tuple[str, bool]], threads: int | None = None
) -> Iterator[IdChunk]:
    """Encode texts on several threads. They come as pieces (text, whether it is its text's last); yields in order (ids
    i32, whether they are their text's last). Ids are those of `Tokenizer.encode_pieces`."""
    num_threads = threads or min(allowed_cpus(), MAX_THREADS)
    encoders = SimpleQueue[CompiledEncoder]()

    def encode(batch: list[TextStretch], encoder: CompiledEncoder | None) -> list[IdChunk]:
        id_arrays = tokenizer.arrays([parts for parts, _ in batch], encoder)
        if encoder is not None:
            encoders.put(encoder)
        return [(ids, is_last) for ids, (_, is_last) in zip(id_arrays, batch, strict=True)]

    futures: deque[Future[list[IdChunk]]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for batch in _stretch_batches(tokenizer.stretches(pieces)):
            encoder = None
            if tokenizer.use_compiled:
                encoder = tokenizer.new_encoder() if encoders.empty() else encoders.get()
            futures.append(pool.submit(encode, batch, encoder))
            if len(futures) > num_threads:
                yield from futures.popleft().result()
        while futures:
            yield from futures.popleft().result()


def _stretch_batches(stretches: Iterable[TextStretch]) -> Iterator[list[TextStretch]]:
    batch, num_characters = list[TextStretch](), 0
    for parts, is_last in stretches:
        batch.append((parts, is_last))
        num_characters += sum(len(part) for part in parts if isinstance(part, str))
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
