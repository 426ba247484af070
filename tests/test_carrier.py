"""What carries numbers between ranks on a GPU, with a stand-in for CUDA and NCCL: on the CPU, and never on a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.distributed import exchange, transport
from packtrain.distributed.transport import Carrier, check_device, select_device

pytestmark = pytest.mark.torch


class Gpus:
    """`torch.cuda` of a machine with two, and torch.distributed as the second of two ranks. `log` is what is asked."""

    def __init__(self) -> None:
        self.log = list[Any]()
        self.distributed = SimpleNamespace(
            new_group=self.new_group,
            get_rank=lambda: 1,
            get_world_size=lambda: 2,
            irecv=self.irecv,
            isend=self.isend,
            P2POp=lambda op, tensor, peer, group: (op, tensor, peer),
            batch_isend_irecv=self.batch,
        )
        torch: Any = kernels.torch()
        self.torch = SimpleNamespace(
            cuda=self,
            zeros=lambda count, dtype, device: self.log.append(device) or torch.zeros(count),
            float32=torch.float32,
            Tensor=torch.Tensor,
            from_numpy=torch.from_numpy,
        )
        log = self.log

        class Stream:
            def wait_event(self, mark: Any) -> None:
                log.append(("wait", mark))

            def synchronize(self) -> None:
                log.append("synchronize")

        class Event:
            def record(self) -> None:
                log.append(("record", self))

        self.Stream, self.Event = Stream, Event

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, number: int) -> None:
        self.log.append(("device", number))

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.log.append("begin")
        yield
        self.log.append("end")

    def new_group(self, *, backend: str, timeout: Any) -> str:
        self.log.append(backend)
        return backend

    def irecv(self, tensor: Any, peer: int) -> None:
        """All that comes from the other is 7."""
        tensor.fill_(7)

    def isend(self, tensor: Any, peer: int) -> None:
        pass

    def batch(self, moves: list[Any]) -> list[Any]:
        self.log.append(len(moves))
        for operation, tensor, peer in moves:
            operation(tensor, peer)
        return [None] * len(moves)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    fake_gpus = Gpus()
    modules = {"torch": fake_gpus.torch, "torch.distributed": fake_gpus.distributed}
    monkeypatch.setattr(transport, "import_module", modules.__getitem__)
    return fake_gpus


def test_each_process_of_a_machine_takes_the_gpu_of_its_number(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    select_device("torch:cpu")
    assert not gpus.log
    select_device("cuda")
    assert gpus.log == [("device", 1)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match=r"process 3 of this machine needs a GPU .* finds 2"):
        select_device("cuda")


@pytest.mark.parametrize(
    "device, one",
    [
        ("cuda:1", "give --device cuda"),
        ("mps", "works in one process; give cpu, "),
        ("cpu,cpu:1", "works in one process"),
        ("foo", "several processes have no such device; give cpu, "),
    ],
)
def test_a_device_for_one_process_is_refused(device, one):
    with pytest.raises(InputError, match=f"--device {device}.*{one}"):
        check_device(device)


def test_blocks_on_the_cpu_beside_a_gpu_are_for_one_process():
    check_device("cpu:1", has_cpu_blocks=True)
    with pytest.raises(InputError, match="--gpu-layers with --device cuda works in one process"):
        check_device("cuda", has_cpu_blocks=True)


def test_numbers_on_a_gpu_travel_by_nccl_on_a_stream_after_the_kernels_that_made_them(gpus):
    by = Carrier("cuda", None)
    assert gpus.log == ["nccl"]
    sums = exchange.Exchange(by, lambda transfer: None, lambda: None)
    assert gpus.log == ["nccl", "cuda", "cuda"]
    del gpus.log[:]
    array = np.arange(40, dtype=np.float32)
    sums.submit(sums.all_reduce, [array])
    sums.wait_for_jobs()
    (_, mark), *rest = gpus.log
    # a message to the other and one from it, to add and to spread
    assert rest == ["begin", ("wait", mark), 2, 2, "synchronize", "end"]
    assert array.tolist() == [7.0] * 20 + [7.0 + x for x in range(20, 40)]
    assert sums.close()


def test_on_the_host_gloo_carries_and_nothing_waits(gpus):
    by = Carrier("torch:cpu", None)
    assert by.mark_kernels() is None
    with by.after_kernels(None):
        pass
    assert gpus.log == ["gloo"]
