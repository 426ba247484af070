"""Carries numbers between ranks: gloo for those in the process's memory, NCCL for those on a GPU.

Sums are made in `exchange`: all_reduce of NCCL and gloo chooses ring or tree by the machine, and with it the order of
sums and their bits. NCCL and its stream are tested with a stand-in, and never ran on a GPU."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from packtrain.common.errors import InputError

SHARED_DEVICES = r"(?:torch:)?cpu(?::\d+)?|cuda"  # devices that several processes work on
SINGLE_PROCESS_DEVICES = r"numpy|mps|.*,.*"  # devices that only one process works on


def sends_from_device(device: str) -> bool:
    """Whether numbers are sent from a GPU's own memory, where an exchange then needs buffers."""
    return device == "cuda"


def check_device(device: str, has_cpu_blocks: bool = False) -> None:
    """Raise InputError for a device that several processes cannot use; `has_cpu_blocks`: some blocks are on the cpu."""
    if has_cpu_blocks and sends_from_device(device):
        raise InputError(
            f"--gpu-layers with --device {device} works in one process: NCCL carries what is on a GPU, not sums of"
            " blocks on the cpu; leave out --gpu-layers or --nproc"
        )
    if re.fullmatch(SHARED_DEVICES, device):
        return
    if re.fullmatch(r"cuda:\d+", device):
        fact = f"--device {device}: of several processes each takes a GPU of its own"
        raise InputError(f"{fact}; give --device cuda")
    is_single = re.fullmatch(SINGLE_PROCESS_DEVICES, device)
    cause = " works in one process" if is_single else ": several processes have no such device"
    raise InputError(f"--device {device}{cause}; give cpu, torch:cpu or cuda, or leave out --nproc")


def select_device(device: str) -> None:
    """If `device` is cuda, select this machine's GPU number LOCAL_RANK. Raises InputError if there is none."""
    if not sends_from_device(device):
        return
    cuda, local = import_module("torch").cuda, int(os.environ.get("LOCAL_RANK", 0))
    num_gpus = cuda.device_count() if cuda.is_available() else 0
    if local >= num_gpus:
        fact = f"--device cuda: process {local + 1} of this machine needs a GPU of its own"
        raise InputError(f"{fact}, and PyTorch finds {num_gpus}")
    cuda.set_device(local)


class Carrier:
    """A group of all ranks in torch.distributed, and buffers ("rooms") in the memory from which the group sends."""

    def __init__(self, device: str, timeout: Any) -> None:
        self.torch, self.dist = import_module("torch"), import_module("torch.distributed")
        self.device, backend = ("cuda", "nccl") if sends_from_device(device) else ("cpu", "gloo")
        self.group = self.dist.new_group(backend=backend, timeout=timeout)
        self.cuda = self.torch.cuda if self.device == "cuda" else None
        self.stream = self.cuda and self.cuda.Stream()  # runs beside the stream of the kernels

    def room(self, num_numbers: int) -> Any:
        """Allocate a flat f32 tensor in the memory from which numbers are sent."""
        return self.torch.zeros(num_numbers, dtype=self.torch.float32, device=self.device)

    def flat(self, array: Any) -> Any:
        """Return a flat tensor on the bytes of an array of NumPy or PyTorch."""
        tensor = array if isinstance(array, self.torch.Tensor) else self.torch.from_numpy(array)
        return tensor.view(-1)

    def mark_kernels(self) -> Any:
        """Return a CUDA event that occurs once all kernels started so far have ended; None without a GPU."""
        if self.cuda is None:
            return None
        kernel_mark = self.cuda.Event()
        kernel_mark.record()
        return kernel_mark

    @contextmanager
    def after_kernels(self, kernel_mark: Any) -> Iterator[None]:
        """Context manager: transfers of its block run beside kernels, after those before the mark, and end with it."""
        if self.cuda is None or self.stream is None:
            yield
            return
        with self.cuda.stream(self.stream):
            self.stream.wait_event(kernel_mark)
            yield
            self.stream.synchronize()

    def start_transfers(self, incoming: Any, outgoing: Any, rank: int) -> list[Any]:
        """Begin to send outgoing[i] to each rank i but `rank`, this one, and to receive incoming[i]; return transfers.

        All travel at once, each as a message: gloo's all_to_all leaves a link idle in one direction while it is busy in
        the other, and its gathers make copies.
        """
        peers = [peer for peer in range(len(incoming)) if peer != rank]
        transfers = [(self.dist.irecv, incoming[peer], peer) for peer in peers]
        transfers += [(self.dist.isend, outgoing[peer], peer) for peer in peers]
        operations = [self.dist.P2POp(op, tensor, i, self.group) for op, tensor, i in transfers]
        return [*self.dist.batch_isend_irecv(operations)]  # NCCL requires all operations at once
