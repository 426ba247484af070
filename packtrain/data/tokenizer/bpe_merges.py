"""The byte-pair merge loop, shared by both kinds of vocabulary, with different costs."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise


def merge(parts: list[bytes], cost: Callable[[bytes, bytes], float | None]) -> list[bytes]:
    """Join adjacent parts, the cheapest pair first (leftmost on a tie), until no pair has a cost."""
    parts, count = parts.copy(), len(parts)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    heap = [
        (price, i, i + 1, len(a) + len(b))
        for i, (a, b) in enumerate(pairwise(parts))
        if (price := cost(a, b)) is not None
    ]
    heapify(heap)
    while heap:
        _, left, right, size = heappop(heap)
        a, b = parts[left], parts[right]
        if not a or not b or len(a) + len(b) != size:
            continue  # stale: one of them has been joined since
        parts[left], parts[right] = a + b, b""
        after[left] = after[right]
        if after[left] < count:
            before[after[left]] = left
        for i, j in ((before[left], left), (left, after[left])):
            if i >= 0 and j < count and (price := cost(parts[i], parts[j])) is not None:
                heappush(heap, (price, i, j, len(parts[i]) + len(parts[j])))
    return [part for part in parts if part]
