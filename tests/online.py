"""ggml's allocator: online best fit, which allocates and frees in order without looking ahead. Knows no tensors.

`best_fit` runs it over lifetimes, as the baseline of `pack`. `follow` runs one allocator per memory space over
steps that write and read buffers, in ggml's order, optionally with barriers. Rules from ggml-alloc.c.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

ENDLESS = 1 << 62  # size of an allocator that only measures
BARRIER = -1  # in a sequence of steps


class NoSpace(MemoryError):
    """No free block is large enough. The message has both sizes."""


@dataclass(slots=True)
class Allocator:
    """Free blocks (offset, size), in order, of `nbytes` bytes at address `base`; `nbytes_used` is the maximum used.

    Offsets count from the base; their addresses are multiples of the alignment, a power of two.
    """

    alignment: int = 1
    nbytes: int = ENDLESS
    base: int = 0
    nbytes_used: int = field(init=False)
    free: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"alignment ({self.alignment}) must be a power of two")
        self.reset()

    def reset(self) -> None:
        """Free everything and reset the maximum."""
        skipped = -self.base % self.alignment
        self.nbytes_used = 0
        self.free = [(skipped, self.nbytes - skipped)] if self.nbytes > skipped else []

    def take(self, size: int) -> int:
        """Allocate `size` bytes, rounded up to the alignment, in the smallest block that fits (of equal ones the
        last); in the last block, which may be endless, only if no other fits. Returns the offset."""
        size = self._rounded(size)
        fitting = [k for k, (_, free) in enumerate(self.free) if free >= size]
        if not fitting:
            largest = max((free for _, free in self.free), default=0)
            raise NoSpace(f"{size} bytes are needed, the largest free block has {largest}")
        inner_blocks = [k for k in fitting if k < len(self.free) - 1]
        at = min(reversed(inner_blocks or fitting), key=lambda k: self.free[k][1])
        offset, free = self.free[at]
        self.free[at : at + 1] = [(offset + size, free - size)] if free > size else []
        self.nbytes_used = max(self.nbytes_used, offset + size)
        return offset

    def release(self, offset: int, size: int) -> None:
        """Free bytes, merging them with free neighbours. Raises ValueError for bytes that are free already."""
        size = self._rounded(size)
        at = sum(block < offset for block, _ in self.free)
        lower_end = sum(self.free[at - 1]) if at else 0
        upper_start = self.free[at][0] if at < len(self.free) else self.nbytes
        if not lower_end <= offset <= offset + size <= upper_start:
            raise ValueError(f"{size} bytes at {offset} are not all taken")
        first_block, last_block = at, at
        if at and sum(self.free[at - 1]) == offset:
            first_block, offset, size = at - 1, self.free[at - 1][0], self.free[at - 1][1] + size
        if at < len(self.free) and self.free[at][0] == offset + size:
            last_block, size = at + 1, size + self.free[at][1]
        self.free[first_block:last_block] = [(offset, size)]

    def _rounded(self, size: int) -> int:
        if size < 0:
            raise ValueError(f"{size} bytes: a size is at least 0")
        return -(-size // self.alignment) * self.alignment


def best_fit(start: Ints, end: Ints, size: Ints) -> Ints:
    """Offsets (n,) by ggml's allocator for buffers in order of start; each is freed at its end."""
    allocator = Allocator()
    offsets = np.zeros(len(size), np.int64)
    allocations = [(int(s), 1, i) for i, s in enumerate(start)]
    releases = [(int(e), 0, i) for i, e in enumerate(end)]
    for _, taking, i in sorted(allocations + releases):
        if taking:
            offsets[i] = allocator.take(int(size[i]))
        else:
            allocator.release(int(offsets[i]), int(size[i]))
    return offsets


@dataclass(frozen=True, slots=True)
class BufferUse:
    """One step: the buffers that it writes, name -> (space, bytes), and the names of those that it reads."""

    makes: Mapping[str, tuple[str, int]]
    reads: Sequence[str] = ()


def replay_steps(
    steps: Sequence[BufferUse],
    allocators: Mapping[str, Allocator],
    sequence: Sequence[int] | None = None,
) -> dict[str, int]:
    """The offset of every buffer in its space; buffers that are never read are never freed.

    A step allocates its buffers while those that it reads are still alive; then buffers after their last read are
    freed.

    sequence  indices of the steps in execution order, and BARRIERs; with these, bytes are only freed at barriers
    """
    readers: dict[str, int] = {}
    for step in steps:
        for name in step.reads:
            readers[name] = readers.get(name, 0) + 1
    placed: dict[str, int] = {}
    sizes = {name: nbytes for step in steps for name, nbytes in step.makes.items()}
    waiting: list[str] = []
    for number in range(len(steps)) if sequence is None else sequence:
        if number != BARRIER:
            for name, (space, size) in steps[number].makes.items():
                placed[name] = allocators[space].take(size)
            waiting += steps[number].reads
        if number == BARRIER or sequence is None:
            for name in waiting:
                readers[name] -= 1
                if not readers[name]:
                    space, size = sizes[name]
                    allocators[space].release(placed[name], size)
            waiting = []
    return placed
