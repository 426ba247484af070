"""Several processes train one model together: who takes part, what they exchange, and how they are started.

`rank()` is the number of this process; a process alone is rank 0 of 1, and its exchanges return their inputs.
PyTorch's gloo carries the bytes, NCCL between GPUs; sums are added here, in the order of the ranks, so that they have
equal bits each time and on each rank."""

from packtrain.distributed.exchange import BUCKET, rank_slice, rooms_nbytes
from packtrain.distributed.launch import free_port, launch
from packtrain.distributed.transport import check_device
from packtrain.distributed.world import (
    SINGLE_PROCESS, World, assume_world, current_world, is_distributed, join_world, rank,
)  # fmt: skip
