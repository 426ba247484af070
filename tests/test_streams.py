"""Copies between memories while other steps run: begun early, arrived before they are read. On no GPU yet."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain import Graph
from packtrain.dtypes import DTYPES, Dtype
from packtrain.engine import ops
from packtrain.engine.backends import Backend, SeparateHost, Target, cpu, cuda_graphs
from packtrain.engine.backends.host import BACKENDS
from packtrain.engine.backends.torch_backend import TorchDevice
from packtrain.engine.memory_plan import PlanError, verify
from packtrain.engine.placement import place
from packtrain.engine.step import BEGIN_COPY, FINISH_COPY
from packtrain.planner import cost_model
from packtrain.planner.cost_model import BackendRates
from tests import stream_checks
from tests.stream_checks import BUSY, WAITING, Streamed
from tests.test_offload import gradients
from tests.test_spread import folder, one_thread, run_training

__all__ = ["folder", "one_thread"]
LATE_BACKEND = Streamed("cpu", "cpu:1")


@pytest.mark.parametrize("check", ["late", "early", "verified"])
def test_random_graphs_give_the_bits_of_one_memory(check: str) -> None:
    getattr(stream_checks, f"check_{check}")()


@pytest.mark.parametrize("seed", range(4))
def test_activations_that_wait_elsewhere_change_no_bit(seed: int) -> None:
    _, resident_grads = gradients(None, cpu)
    BUSY["most"] = 0
    for is_late in (True, False):
        placed, moved = gradients(seed, replace(LATE_BACKEND, is_late=is_late))
        assert len(placed.offloads) > 10 and not WAITING
        for name, value in resident_grads.items():
            assert moved[name].tobytes() == value.tobytes(), name
        begin_steps = {s.results[0]: i for i, s in enumerate(placed.steps) if s.op is BEGIN_COPY}
        step_gaps = [
            i - begin_steps[s.reads[0]] for i, s in enumerate(placed.steps) if s.op is FINISH_COPY
        ]
        assert len(step_gaps) == len(placed.copies) and np.mean(step_gaps) > 3
    assert 1 <= BUSY["most"] <= 2, "one copy at a time each way"


def test_training_with_values_that_wait_elsewhere_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments, gradients on their way to them and steps on their way back, and activations."""
    options: dict[str, Any] = {"device": "cpu:1", "offload": "all", "layers": 4, "iters": 3}
    resident_run = run_training(folder, **options)
    monkeypatch.setitem(BACKENDS, "cpu:1", LATE_BACKEND)
    got = run_training(folder, **options)
    assert got.losses == resident_run.losses and not WAITING
    crossed = [
        p
        for p in got.plan.plans.placed_graphs.values()
        if any(s.op is FINISH_COPY for s in p.steps)
    ]
    assert len(crossed) >= 1
    (device_nbytes, host_nbytes), (base_device_nbytes, base_host_nbytes) = (
        [trained_run.plan.plans.nbytes_in(s) for s in ("cpu:1", "host")]
        for trained_run in (got, resident_run)
    )
    assert device_nbytes <= 1.25 * base_device_nbytes and host_nbytes <= 1.25 * base_host_nbytes, (
        "what travels takes little more room"
    )


def chain(other_backend: Backend) -> pt.Placed:
    """A weight that is read in another memory, and then updated."""
    w, x = pt.weight("w", (8,)), pt.input("x", (8,))
    v = pt.weight("v", (8,))
    y = ops.mul(ops.mul(x, w), v)
    for _ in range(4):
        y = ops.silu(y)
    return place(Graph({"y": y}), Target((other_backend,), {"w": cpu, "x": cpu}))


def test_the_verifier_sees_what_is_touched_before_it_has_arrived() -> None:
    placed = chain(LATE_BACKEND)
    verify(pt.make_plan(placed), placed)
    begin, end = (
        next(i for i, s in enumerate(placed.steps) if s.op is op)
        for op in (BEGIN_COPY, FINISH_COPY)
    )
    steps = placed.steps
    reader = next(i for i, s in enumerate(steps) if steps[end].results[0] in s.reads)
    early = (
        *steps[:end],
        steps[reader],
        steps[end],
        *steps[end + 1 : reader],
        *steps[reader + 1 :],
    )
    for wrong in (early, (*steps[:end], *steps[end + 1 :])):
        changed = replace(placed, steps=wrong)
        with pytest.raises((PlanError, KeyError)):
            verify(pt.make_plan(changed), changed)
    source = tuple(steps[begin].reads)
    writes = replace(steps[reader], op=ops.cont, results=source, inputs=source)
    changed = replace(placed, steps=(*steps[:end], writes, *steps[end:]))
    with pytest.raises(PlanError, match="or its source, before it has arrived"):
        verify(pt.make_plan(changed), changed)


def test_what_travels_beside_work_is_not_waited_for() -> None:
    """A copy of 1 s beside 24 calls of 0.1 s; with less work, what is left of it."""
    rates = BackendRates(1e12, 1e12, call=0.1, region=0.0, link=32 / 1.0)
    for calls, seconds, hidden in ((30, 3.2, 1.1), (4, 1.3, 0.4)):
        y, z = pt.input("y", (8,)), ops.silu(pt.input("z", (8,)))
        for _ in range(calls):
            y = ops.silu(y)
        graph = Graph({"y": ops.mul(y, z)})
        sync, overlapped = (
            cost_model.graph_seconds(place(graph, Target((backend,), {"z": cpu})), rates)
            for backend in (SeparateHost("cpu", "cpu:1"), LATE_BACKEND)
        )
        assert overlapped == pytest.approx(seconds, abs=0.01), calls
        assert sync == pytest.approx(seconds + hidden, abs=0.01), calls


class Cuda:
    """What `torch.cuda` has for streams, and a line of what was done."""

    def __init__(self) -> None:
        self.done = list[str]()
        self.cudaError = type("cudaError", (), {"success": 0})

    def Stream(self, device: str) -> "Cuda":
        return self

    def wait_stream(self, of: str) -> None:
        self.done.append(f"wait for {of}")

    def current_stream(self, device: str) -> str:
        return f"the kernels of {device}"

    def stream(self, stream: "Cuda") -> "Cuda":
        return self

    def __enter__(self) -> None:
        self.done.append("copy beside them")

    def __exit__(self, *error: object) -> None:
        self.done.append("begun")

    def synchronize(self) -> None:
        self.done.append("there")

    def cudart(self) -> "Cuda":
        return self

    def cudaHostRegister(self, begins: int, nbytes: int, flags: int) -> int:
        self.done.append(f"lock {nbytes}")
        return 0

    def cudaHostUnregister(self, begins: int) -> int:
        self.done.append("unlock")
        return 0


@pytest.mark.torch
def test_a_gpu_copies_on_a_stream_after_its_kernels_into_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in: the CPU plays the device, and copies at once."""
    from packtrain.engine.backends import torch_backend as of_torch

    cuda = Cuda()
    for module in (cuda_graphs, of_torch):
        monkeypatch.setattr(module, "cuda_of", lambda device: cuda)
    monkeypatch.setattr(cuda_graphs, "STREAMS", {})
    monkeypatch.setattr(TorchDevice, "recorded_calls", lambda self, op_calls, calls: calls)
    monkeypatch.setattr(TorchDevice, "reserve", lambda self, op_calls: None)
    far_backend = TorchDevice("cuda", "cpu")
    placed = chain(far_backend)
    session = pt.Session()
    run = session.executor(placed)
    locked = session.buffer("host").nbytes
    session.set({"w": np.full(8, 3.0), "v": np.full(8, 2.0)})
    x = np.ones(8, np.float32)
    for _ in range(3):
        assert np.allclose(run({"x": x})["y"], chain_of(6.0))
    copies = len(placed.copies)
    turn = ["wait for the kernels of cpu", "copy beside them", "begun"]
    assert cuda.done[0] == f"lock {locked}" and copies >= 1
    assert [x for x in cuda.done[1:] if x != "there"] == turn * copies * 3
    assert cuda.done.count("there") == copies * 3
    del run, session
    assert cuda.done[-1] == "unlock"


@pytest.mark.torch
@pytest.mark.parametrize(
    "dtype", [DTYPES[name] for name in ("f32", "bf16", "q8_0", "i32")], ids=str
)
def test_arrays_of_any_type_travel_both_ways(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(cuda_graphs, "cuda_of", lambda device: cuda)
    monkeypatch.setattr(cuda_graphs, "STREAMS", {})
    far_backend, spec = TorchDevice("cuda", "cpu"), pt.Spec((3, 32), dtype)
    raw = np.random.default_rng(0).integers(0, 255, spec.nbytes, dtype=np.uint8)
    host_array = cpu.view(raw, 0, spec, spec.strides)
    device_array = far_backend.view(far_backend.alloc(spec.nbytes), 0, spec, spec.strides)
    back = cpu.view(cpu.alloc(spec.nbytes), 0, spec, spec.strides)
    far_backend.begin_copy(device_array, host_array, cpu)
    far_backend.wait_for_copies()
    far_backend.begin_copy(back, device_array, cpu)
    far_backend.wait_for_copies()
    assert back.tobytes() == raw.tobytes()


def chain_of(y: float) -> np.ndarray:
    for _ in range(4):
        y = y / (1 + np.exp(-y))
    return np.full(8, y, np.float32)
