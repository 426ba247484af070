"""Checks of what PyTorch's allocator takes by its rules, and that plans count it; without PyTorch. See faults_plans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import packtrain as pt
from packtrain.engine.backends import Host, OpCall, Target
from packtrain.engine.backends.cuda_caching import CachingAllocator, buffers_nbytes, pool_nbytes
from packtrain.engine.memory_plan import make_plan
from packtrain.engine.placement import place

MIB = 1 << 20


def check_rules() -> None:
    """Each number is counted by hand from the allocator's sizes."""
    for sizes, mib in (
        ([], 0),
        ([1], 2),
        ([1] * 4096, 2),  # of 512 bytes each
        ([1] * 4097, 4),
        ([MIB] * 3, 4),
        ([MIB + 1], 20),
        ([9 * MIB] * 2, 20),
        ([9 * MIB] * 3, 40),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20),
        ([10 * MIB], 10),
        ([11 * MIB], 12),
        ([11 * MIB, MIB, MIB + 1], 12 + 2 + 20),  # 1 MiB that is left is not split off
    ):
        assert buffers_nbytes(sizes) == mib * MIB, (sizes[:3], len(sizes))
    allocator = CachingAllocator()
    blocks = [allocator.allocate(9 * MIB) for _ in range(2)]
    for block in blocks:
        allocator.release(block)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 20 * MIB, "what is free side by side is one"
    allocator.release(allocator.allocate(3 * MIB))
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 40 * MIB


def check_pool() -> None:
    """Workspaces of products are 2 × 8.125 MiB, in 20; temporaries beside each other are in one segment."""
    for traces, mib in (
        (((12 * MIB, -1), (24 * MIB, -1)), 20 + 24),
        (((30 * MIB, 20 * MIB, -1, -2),), 20 + 50),
        (
            ((12 * MIB, 11 * MIB, -1, 30 * MIB, -2, -3), (1, -1)),
            20 + 42 + 30 + 2,
        ),  # 30 beside a hole
        (((1000, 1000),), 20 + 2),
        (((3 * MIB, -1),), 20),
    ):
        assert pool_nbytes(traces) == mib * MIB, (traces, pool_nbytes(traces) / MIB)


@dataclass(frozen=True, slots=True)
class Pooled(Host):
    """A memory whose kernels take 1,000 bytes each, of which it keeps all."""

    def pool(self, op_calls: Iterable[OpCall], buffers: Sequence[int] = ()) -> int:
        return 1000 * len([*op_calls])


def check_counted() -> None:
    pooled, x = Pooled("cpu", "there"), pt.input("x", (8,))
    graph = pt.Graph({"y": pt.ops.silu(pt.ops.silu(x))})
    plan = make_plan(place(graph, Target((pooled,))))
    arena = plan.arena("there")
    assert arena.pool_nbytes == arena.outside_nbytes == 2000
    assert plan.beyond({"there": arena.nbytes + 2000}) is None
    assert plan.beyond({"there": arena.nbytes + 1999}) is not None
