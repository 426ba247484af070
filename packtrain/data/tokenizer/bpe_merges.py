"""The byte-pair merge loop, which BPE and SentencePiece vocabularies share, with different costs."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise


def merge_parts(symbols: list[bytes], cost: Callable[[bytes, bytes], float | None]) -> list[bytes]:
    """Join adjacent parts, the cheapest pair first (leftmost on a tie), until no pair has a cost."""
    symbols, num_parts = symbols.copy(), len(symbols)
    previous, following = list(range(-1, num_parts - 1)), list(range(1, num_parts + 1))
    heap = [
        (price, i, i + 1, len(a) + len(b))
        for i, (a, b) in enumerate(pairwise(symbols))
        if (price := cost(a, b)) is not None
    ]
    heapify(heap)
    while heap:
        _, left, right, merged_length = heappop(heap)
        a, b = symbols[left], symbols[right]
        if not a or not b or len(a) + len(b) != merged_length:
            continue  # stale: a part of the pair has been joined since
        symbols[left], symbols[right] = a + b, b""
        following[left] = following[right]
        if following[left] < num_parts:
            previous[following[left]] = left
        for i, j in ((previous[left], left), (left, following[left])):
            if i >= 0 and j < num_parts and (price := cost(symbols[i], symbols[j])) is not None:
                heappush(heap, (price, i, j, len(symbols[i]) + len(symbols[j])))
    return [part for part in symbols if part]
