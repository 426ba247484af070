"""Token ids of many texts, in their order, on several threads: batches of texts, each encoded by one thread at a time.

Texts come in pieces, so that one may be larger than memory. Ids do not depend on the threads.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from packtrain.data.tokenizer.compiled import Lane
from packtrain.data.tokenizer.tokenizer import Parts, Tokenizer
from packtrain.kernels.runtime import allowed_cpus

BATCH = 1 << 18  # characters that a thread encodes at a time
MOST_THREADS = 8

Stretch = tuple[Parts, bool]  # of a text, and whether it ends there
Ids = tuple[np.ndarray, bool]


def encode_all(
    tokenizer: Tokenizer, pieces: Iterable[tuple[str, bool]], threads: int | None = None
) -> Iterator[Ids]:
    """Ids of (piece, whether its text ends with it), as `encode_pieces` gives them for each text.

    Yields (ids i32, whether the text ends with them), in order.
    """
    count = threads or min(allowed_cpus(), MOST_THREADS)
    lanes = SimpleQueue[Lane]()

    def encode(batch: list[Stretch], lane: Lane | None) -> list[Ids]:
        id_arrays = tokenizer.arrays([parts for parts, _ in batch], lane)
        if lane is not None:
            lanes.put(lane)
        return [(ids, is_last) for ids, (_, is_last) in zip(id_arrays, batch, strict=True)]

    waiting: deque[Future[list[Ids]]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for batch in _batches(tokenizer.stretches(pieces)):
            lane = None
            if tokenizer.compiles:
                lane = tokenizer.lane() if lanes.empty() else lanes.get()
            waiting.append(pool.submit(encode, batch, lane))
            if len(waiting) > count:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def _batches(stretches: Iterable[Stretch]) -> Iterator[list[Stretch]]:
    batch, size = list[Stretch](), 0
    for parts, is_last in stretches:
        batch.append((parts, is_last))
        size += sum(len(part) for part in parts if isinstance(part, str))
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
