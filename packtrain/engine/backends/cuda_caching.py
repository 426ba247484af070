"""What PyTorch's caching allocator takes of a GPU for what kernels make while they run: its rules, on numbers.

What is free in a segment is split and joined again; segments are kept. The sizes are those of PyTorch 2.13
(c10/core/AllocatorConfig.h). Never compared with a GPU: a run says what was taken there, see `Backend.taken`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 512  # sizes are multiples of it
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20  # sizes up to the first come from segments of the second
LARGE, LARGE_SEGMENT = 10 << 20, 20 << 20  # larger ones below the first, likewise
ROUND = 2 << 20  # others have segments of their own, which are multiples of it
WORKSPACES = (2 * 4096 + 8 * 16 << 10,) * 2  # of cuBLAS and of cuBLASLt, as CONFIG asks for them
CONFIG = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8", "CUBLASLT_WORKSPACE_SIZE": "8320"}

Trace = tuple[int, ...]  # in order: bytes of what is made, and -1 - i where the i-th is dropped


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a segment, which is the list of its blocks in order."""

    nbytes: int
    segment: list["Block"]
    free: bool = True


class Caching:
    """An allocator; `reserved` are the bytes of all its segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self.segments: dict[bool, list[list[Block]]] = {True: [], False: []}

    def take(self, nbytes: int) -> Block:
        """The smallest free block that is large enough, split, or one of a new segment."""
        size = rounded(nbytes, BLOCK)
        small = size <= SMALL
        fit = [b for part in self.segments[small] for b in part if b.free and b.nbytes >= size]
        block = min(fit, key=lambda b: b.nbytes) if fit else self._segment(size)
        rest = block.nbytes - size
        if rest >= BLOCK if small else rest > SMALL:
            block.nbytes = size
            at = block.segment.index(block)
            block.segment.insert(at + 1, Block(rest, block.segment))
        block.free = False
        return block

    def drop(self, block: Block) -> None:
        """Free it, and join it with its neighbours."""
        block.free, at = True, block.segment.index(block)
        for left in (at, at - 1):
            pair = block.segment[left : left + 2] if left >= 0 else []
            if len(pair) == 2 and pair[0].free and pair[1].free:
                pair[0].nbytes += pair[1].nbytes
                del block.segment[left + 1]

    def replay(self, trace: Trace) -> None:
        """Take and drop, and drop at the end what is still there."""
        blocks, count = dict[int, Block](), 0
        for event in trace:
            if event < 0:
                self.drop(blocks.pop(-1 - event))
            else:
                blocks[count] = self.take(event)
                count += 1
        for block in blocks.values():
            self.drop(block)

    def _segment(self, size: int) -> Block:
        segment = list[Block]()
        segment.append(Block(segment_nbytes(size), segment))
        self.segments[size <= SMALL].append(segment)
        self.reserved += segment[0].nbytes
        return segment[0]


def rounded(nbytes: int, to: int) -> int:
    return max(-(-nbytes // to), 1) * to


def segment_nbytes(size: int) -> int:
    """Of the segment that is made for such a size."""
    if size < LARGE:
        return SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT
    return rounded(size, ROUND)


def buffers_nbytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments of buffers that stay."""
    allocator = Caching()
    for nbytes in filter(None, sizes):
        allocator.take(nbytes)
    return allocator.reserved


def room_nbytes(traces: Iterable[Trace]) -> int:
    """The segment that is made first, so that a larger tensor does not need one beside those of smaller ones: all
    large tensors that are there at once find room in it, if nothing is lost between them."""
    return max(map(_most, traces), default=0)


def pool_nbytes(traces: tuple[Trace, ...]) -> int:
    """What calls take that do this one after the other, again and again, with the workspaces of products."""
    allocator, before = Caching(), -1
    for nbytes in WORKSPACES:
        allocator.take(nbytes)
    allocator.drop(allocator.take(room_nbytes(traces) or BLOCK))
    while allocator.reserved > before:
        before = allocator.reserved
        for trace in traces:
            allocator.replay(trace)
    return allocator.reserved


def _most(trace: Trace) -> int:
    """The most bytes of large tensors at once."""
    sizes, now, peak = list[int](), 0, 0
    for event in trace:
        sizes += [rounded(event, BLOCK)] if event >= 0 else []
        size = sizes[-1 if event >= 0 else -1 - event]
        if size > SMALL:
            now += size if event >= 0 else -size
            peak = max(peak, now)
    return peak
