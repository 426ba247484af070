"""A model of PyTorch's caching allocator: how many bytes of a GPU it reserves for the temporaries of kernels.

Free parts of a segment are split and joined; segments are never given back. The sizes are those of PyTorch 2.13
(c10/core/AllocatorConfig.h). Never compared with a GPU: a run reports real use, see `Backend.peak_reserved_nbytes`."""

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK_NBYTES = 512  # allocations are multiples of it
# allocations up to MAX_SMALL come from small segments, others below MAX_LARGE from large ones; each larger allocation
# has a segment of its own, a multiple of SEGMENT_MULTIPLE
MAX_SMALL_NBYTES, SMALL_SEGMENT_NBYTES = 1 << 20, 2 << 20
MAX_LARGE_NBYTES, LARGE_SEGMENT_NBYTES = 10 << 20, 20 << 20
SEGMENT_MULTIPLE = 2 << 20
WORKSPACES = (2 * 4096 + 8 * 16 << 10,) * 2  # of cuBLAS and cuBLASLt, as CUBLAS_ENVIRONMENT asks
CUBLAS_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8", "CUBLASLT_WORKSPACE_SIZE": "8320"}

Trace = tuple[int, ...]  # in order: bytes of an allocation, or -1 - i where the i-th is freed


@dataclass(eq=False, slots=True)
class SegmentBlock:
    """A range of bytes of a segment, free or allocated; `segment` lists all blocks of the segment in order."""

    nbytes: int
    segment: list["SegmentBlock"]
    is_free: bool = True


class CachingAllocator:
    """A simulation of PyTorch's allocator for one GPU; `reserved` counts the bytes of all its segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self.segments: dict[bool, list[list[SegmentBlock]]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> SegmentBlock:
        """Return the smallest free block of `nbytes` or more, and split off its rest; add a segment if none."""
        size = round_up(nbytes, BLOCK_NBYTES)
        small = size <= MAX_SMALL_NBYTES
        fit = [b for part in self.segments[small] for b in part if b.is_free and b.nbytes >= size]
        block = min(fit, key=lambda b: b.nbytes) if fit else self._add_segment(size)
        rest_nbytes = block.nbytes - size
        if rest_nbytes >= BLOCK_NBYTES if small else rest_nbytes > MAX_SMALL_NBYTES:
            block.nbytes = size
            block_index = block.segment.index(block)
            block.segment.insert(block_index + 1, SegmentBlock(rest_nbytes, block.segment))
        block.is_free = False
        return block

    def release(self, block: SegmentBlock) -> None:
        """Free the block and join it with free neighbours."""
        block.is_free, block_index = True, block.segment.index(block)
        for left_index in (block_index, block_index - 1):
            neighbours = block.segment[left_index : left_index + 2] if left_index >= 0 else []
            if len(neighbours) == 2 and neighbours[0].is_free and neighbours[1].is_free:
                neighbours[0].nbytes += neighbours[1].nbytes
                del block.segment[left_index + 1]

    def replay(self, trace: Trace) -> None:
        """Allocate and free as a Trace says, then free all remaining blocks."""
        blocks, num_allocated = dict[int, SegmentBlock](), 0
        for event in trace:
            if event < 0:
                self.release(blocks.pop(-1 - event))
            else:
                blocks[num_allocated] = self.allocate(event)
                num_allocated += 1
        for block in blocks.values():
            self.release(block)

    def _add_segment(self, size: int) -> SegmentBlock:
        """Reserve a segment for an allocation of `size` bytes and return its only block, which is free."""
        segment, nbytes = list[SegmentBlock](), round_up(size, SEGMENT_MULTIPLE)
        if size < MAX_LARGE_NBYTES:
            nbytes = SMALL_SEGMENT_NBYTES if size <= MAX_SMALL_NBYTES else LARGE_SEGMENT_NBYTES
        segment.append(SegmentBlock(nbytes, segment))
        self.segments[size <= MAX_SMALL_NBYTES].append(segment)
        self.reserved += segment[0].nbytes
        return segment[0]


def round_up(nbytes: int, multiple: int) -> int:
    return max(-(-nbytes // multiple), 1) * multiple


def buffers_nbytes(sizes: Iterable[int]) -> int:
    """Return the bytes that the allocator reserves for buffers of these sizes, none of which is freed."""
    allocator = CachingAllocator()
    for nbytes in filter(None, sizes):
        allocator.allocate(nbytes)
    return allocator.reserved


def largest_room_nbytes(traces: Iterable[Trace]) -> int:
    """Return the most bytes of large tensors that a trace holds at once: a segment of so many bytes, reserved first,
    spares the segments that a larger tensor would need beside those of smaller ones."""
    return max(map(_peak_large_nbytes, traces), default=0)


def pool_nbytes(traces: tuple[Trace, ...]) -> int:
    """Return the bytes that the allocator reserves for calls with these traces, however often they are repeated."""
    allocator, previous_reserved = CachingAllocator(), -1
    for nbytes in WORKSPACES:
        allocator.allocate(nbytes)
    allocator.release(allocator.allocate(largest_room_nbytes(traces) or BLOCK_NBYTES))
    while allocator.reserved > previous_reserved:
        previous_reserved = allocator.reserved
        for trace in traces:
            allocator.replay(trace)
    return allocator.reserved


def _peak_large_nbytes(trace: Trace) -> int:
    """Return the most bytes of large tensors (over 1 MiB) that are alive at once in a trace."""
    allocation_nbytes, current_nbytes, peak_nbytes = list[int](), 0, 0
    for event in trace:
        allocation_nbytes += [round_up(event, BLOCK_NBYTES)] if event >= 0 else []
        event_nbytes = allocation_nbytes[-1 if event >= 0 else -1 - event]
        if event_nbytes > MAX_SMALL_NBYTES:
            current_nbytes += event_nbytes if event >= 0 else -event_nbytes
            peak_nbytes = max(peak_nbytes, current_nbytes)
    return peak_nbytes
