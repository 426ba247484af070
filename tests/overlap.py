"""Checks offsets of buffers in one address range, by other code than the packers'."""

from bisect import bisect_left

from packtrain.engine.packing.pack import Ints


def find_overlap(start: Ints, end: Ints, size: Ints, offsets: Ints) -> tuple[int, int] | None:
    """Return two buffers that share a byte at one time, or None."""
    bottoms, tops = offsets.tolist(), (offsets + size).tolist()
    start_events = [(t, 1, i) for i, t in enumerate(start.tolist())]
    end_events = [(t, 0, i) for i, t in enumerate(end.tolist())]
    lows: list[int] = []  # of alive buffers, which do not overlap: sorted, and so are their tops
    alive_buffers: list[int] = []
    for _, is_start, i in sorted(start_events + end_events):
        position = bisect_left(lows, bottoms[i])
        if not is_start:
            del lows[position], alive_buffers[position]
            continue
        for j in alive_buffers[max(position - 1, 0) : position + 1]:
            if bottoms[i] < tops[j] and bottoms[j] < tops[i]:
                return j, i
        lows.insert(position, bottoms[i])
        alive_buffers.insert(position, i)
    return None
