"""Several processes that train one model together: who takes part, what they exchange, and how they are started.

`here()` is this process among them; alone, it is rank 0 of 1 and every exchange returns what it is given.
PyTorch's gloo carries the bytes, NCCL between GPUs; sums are added here, in the order of the ranks, so that they have
the same bits each time and on each rank.
"""

from packtrain.distributed.exchange import BUCKET, part_of, rooms_nbytes
from packtrain.distributed.launch import free_port, launch
from packtrain.distributed.transport import check_device
from packtrain.distributed.world import ALONE, World, assumed, here, joined, rank, several

__all__ = [
    "ALONE", "BUCKET", "World", "assumed", "check_device", "free_port", "here", "joined", "launch",
    "part_of", "rank", "rooms_nbytes", "several",
]  # fmt: skip
