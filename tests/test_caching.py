"""What PyTorch's allocator takes of a GPU is counted: by its rules, with runs on the CPU, and never seen on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import packtrain as pt
from packtrain.engine.backends import Target, cuda_caching
from packtrain.engine.backends import cuda_graphs as recording
from packtrain.engine.backends import torch_backend as of_torch
from packtrain.engine.backends import torch_temporaries as measuring
from packtrain.engine.backends.torch_backend import TorchDevice
from packtrain.engine.executor import Executor
from packtrain.engine.memory_plan import size_text
from packtrain.engine.optim import AdamW
from packtrain.models.config import Config
from packtrain.planner.budget import device_refusal
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import find_fastest_shape
from packtrain.planner.plan_table import memory_rows
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from tests import pool_checks
from tests.test_recorded import Cuda
from tests.test_torch_backend import FAR, SHAPE, folder, train_losses

__all__ = ["folder"]  # a fixture
CUDA = TorchDevice(
    "cuda", "cuda"
)  # plans need no device: what kernels make is measured on tensors without values


@pytest.mark.parametrize("check", ["rules", "pool", "counted"])
def test_the_rules(check: str) -> None:
    getattr(pool_checks, f"check_{check}")()


@pytest.mark.torch
def test_what_a_run_makes_fits_into_the_pool_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps on the CPU, taken and dropped as they come; there are two such pools, one of graphs."""
    plans = make_plans(SHAPE, AdamW(), target=Target((CUDA,)))
    pool = plans.largest_plan.arena("cuda").pool_nbytes
    traces, original_run = list[tuple[int, ...]](), Executor._run_calls

    def traced(self: Executor, calls: list[Any], stop: Any, turns: Any) -> None:
        with measuring.allocation_meter()() as count:
            original_run(self, calls, stop, turns)
        traces.append(tuple(count.trace))

    monkeypatch.setattr(Executor, "_run_calls", traced)
    train_losses(Target.for_backend(FAR))
    allocator = cuda_caching.CachingAllocator()
    for nbytes in cuda_caching.WORKSPACES:
        allocator.allocate(nbytes)
    allocator.release(allocator.allocate(cuda_caching.largest_room_nbytes(traces) or 1))
    for trace in traces:
        allocator.replay(trace)
    assert len(traces) == 3 and all(map(len, traces)) and 2 * allocator.reserved <= pool


@pytest.mark.torch
def test_the_row_is_in_the_plan_and_in_its_limit() -> None:
    """Also in a search, and in what a refusal says. Larger pieces of the loss head make a larger pool."""
    shape = StepShape(Config(16_000, 256, 64, 2, 128, 2, 2), 8, 256, max_norm=1.0)
    request = PlanRequest(AdamW(), BackendRates(1e11, 1e10), target=Target((CUDA,)))
    full_plans = request.make_plans(shape)
    row = next(nbytes for name, nbytes, _ in memory_rows(full_plans, "cuda") if name == "pool")
    kernels, arena = (
        full_plans.largest_plan.arena("cuda").pool_nbytes,
        full_plans.largest_plan.arena("cuda").nbytes,
    )
    assert not [b for b in full_plans.largest_plan.buffers if b.category == "workspace"]
    assert row == full_plans.pool_nbytes("cuda") >= kernels > 2 * sum(cuda_caching.WORKSPACES)
    assert kernels > 2 * (256 * 16_000 * 4) + 2 * sum(
        cuda_caching.WORKSPACES
    )  # a piece of 256 logits
    buffers = cuda_caching.buffers_nbytes(full_plans._buffer_nbytes("cuda")) - sum(
        full_plans._buffer_nbytes("cuda")
    )
    assert row == kernels + buffers and arena + row < full_plans.nbytes_in("cuda")
    limit = full_plans.nbytes_in("cuda") - (8 << 20)
    answer = find_fastest_shape(shape, replace(request, limits={"cuda": limit}))
    limited_plans = request.make_plans(answer.shape)
    assert (
        answer.is_within_limits
        and answer.shape != shape
        and limited_plans.nbytes_in("cuda") <= limit
    )
    larger_pool = (
        request.make_plans(replace(shape, chunk=1024)).largest_plan.arena("cuda").pool_nbytes
    )
    assert larger_pool > kernels + 2 * (40 << 20)
    refused = device_refusal(replace(full_plans, baseline_nbytes=1), {"cuda": limit}, "")
    assert refused is not None and f"pool      {size_text(row):>10}" in refused


@pytest.mark.torch
def test_each_pool_gets_its_room_before_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a size; that of graphs where the first of them is recorded. With a stand-in for CUDA, on the CPU."""
    filled, cuda = list[int](), Cuda()
    for module in (recording, of_torch):
        monkeypatch.setattr(module, "cuda_of", lambda device: cuda)
    for name in ("ROOM_NBYTES", "GRAPH_POOLS"):
        monkeypatch.setattr(recording, name, {})
    monkeypatch.setattr(recording, "fill_pool", lambda device, nbytes: filled.append(nbytes))
    monkeypatch.setattr(cuda_caching, "MAX_SMALL_NBYTES", 512)  # what this model makes is small
    train_losses(Target.for_backend(FAR))
    train_losses(Target.for_backend(FAR))
    assert len(filled) == 2 and filled[0] == filled[1] > 0 and len(cuda.graphs) >= 2


@pytest.mark.torch
def test_a_run_says_what_was_taken_and_planned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "output": folder / "m.gguf", "device": "torch:cpu:1", "preset": "1m", "ctx": 32, "batch_size": 2, "iters": 1,
        "threads": 1, "sample_every": 0, "overwrite": True, "warmup_ratio": 0.0,
    }  # fmt: skip
    for peak_nbytes in (1 << 20, 1 << 40):
        monkeypatch.setattr(TorchDevice, "peak_reserved_nbytes", peak_nbytes)
        said = list[str]()
        done = pt.train(folder / "text.txt", on_message=said.append, **options)
        (line,) = (x for x in said if x.startswith("the memory of torch:cpu:1: peak"))
        exceeds_plan = peak_nbytes > done.plan.plans.nbytes_in("torch:cpu:1")
        assert ("PyTorch took more there than was planned" in line) == exceeds_plan
    end = (folder / "m.run/metrics.jsonl").read_text().splitlines()[-1]
    assert f'"peak_bytes": {peak_nbytes}' in end
