"""Stretches of calls as CUDA graphs, with a stand-in for CUDA: on the CPU, and never on a GPU.

While the stand-in records, operations of PyTorch change nothing; to replay is to run them again, on the same tensors.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain import distributed, kernels
from packtrain.distributed import current_world, world
from packtrain.engine import ops
from packtrain.engine.backends import Target
from packtrain.engine.backends import cuda_graphs as recording
from packtrain.engine.backends.torch_backend import TorchDevice
from packtrain.engine.backends.torch_temporaries import kernel_footprint
from packtrain.engine.executor import Session
from packtrain.engine.optim import AdamW, Optimizer, accumulation_graph
from packtrain.engine.optim.lbfgs import LBFGS
from packtrain.engine.placement import place
from packtrain.planner import rank_exchange
from packtrain.training import gradient_sums
from tests.test_torch_backend import FAR, train_losses

pytestmark = pytest.mark.torch


def storages(of: Any) -> dict[int, Any]:
    torch: Any = kernels.torch()
    leaves = torch.utils._pytree.tree_leaves(of)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t for t in tensors}


class Cuda:
    """What `torch.cuda` has for graphs. fails: what an operation says that cannot be recorded."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.graphs, self.replays, self.pools = fails, list[Any](), 0, 0
        cuda = self

        class CUDAGraph:
            def __init__(self) -> None:
                self.ops = list[tuple[Any, ...]]()
                cuda.graphs.append(self)

            def replay(self) -> None:
                cuda.replays += 1
                for function, args, named, recorded in self.ops:
                    replayed = function(*args, **named)
                    before, tree = storages((args, named)), kernels.torch().utils._pytree
                    for old, new in zip(*map(tree.tree_leaves, (recorded, replayed)), strict=True):
                        if old.untyped_storage().data_ptr() not in before:
                            old.copy_(new)

        self.CUDAGraph = CUDAGraph

    def graph_pool_handle(self) -> object:
        self.pools += 1
        return self.pools

    def device(self, name: str) -> Any:
        return nullcontext()

    def graph(self, graph: Any, *, pool: Any, capture_error_mode: str) -> Any:
        torch: Any = kernels.torch()
        assert pool == 1 and capture_error_mode == "thread_local"
        fails = self.fails

        class Recording(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
            def __enter__(self) -> Any:
                self.saved_storages = dict[int, tuple[Any, Any]]()
                self.fresh = set[int]()
                return super().__enter__()

            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if fails or function is torch.ops.aten._local_scalar_dense.default:
                    raise RuntimeError(fails or "operation not permitted when stream is capturing")
                arg_storages = storages((args, kwargs))
                for at in arg_storages.keys() - self.saved_storages.keys() - self.fresh:
                    storage = arg_storages[at].untyped_storage()
                    self.saved_storages[at] = storage, storage.clone()
                output = function(*args, **(kwargs or {}))
                self.fresh |= storages(output).keys() - self.saved_storages.keys()
                graph.ops.append((function, args, kwargs or {}, output))
                return output

            def __exit__(self, *error: Any) -> None:
                super().__exit__(*error)
                for storage, before in self.saved_storages.values():
                    storage.copy_(before)

        return Recording()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    fake_cuda = Cuda()
    monkeypatch.setattr(recording, "cuda_of", lambda device: fake_cuda)
    monkeypatch.setattr(recording, "FAILED_DEVICES", set())
    monkeypatch.setattr(recording, "GRAPH_POOLS", {})
    yield fake_cuda


@pytest.mark.parametrize("optimizer, count", [(AdamW(), 20), (LBFGS(), 3)], ids=["adamw", "lbfgs"])
def test_steps_have_the_same_bits(optimizer: Optimizer, count: int, cuda: Cuda) -> None:
    """Batches and numbers of a step change; L-BFGS also does other things in each run of a graph."""
    with pt.debug("norecord"):
        expected = train_losses(Target.for_backend(FAR), count, optimizer)
    assert not cuda.graphs
    assert (
        train_losses(Target.for_backend(FAR), count, optimizer) == expected
        and len(set(expected)) == count
    )
    assert cuda.graphs and cuda.replays >= 3 * (count - 1) and cuda.pools == 1
    assert all(len(graph.ops) >= recording.MIN_GRAPH_CALLS for graph in cuda.graphs)


def test_what_cannot_be_recorded_runs_call_by_call_and_says_why(cuda: Cuda) -> None:
    with pt.debug("norecord"):
        expected = train_losses(Target.for_backend(FAR), 4)
    cuda.fails = "no room for a pool"
    with pytest.warns(UserWarning, match="its calls run one by one, .* no room for a pool") as said:
        assert train_losses(Target.for_backend(FAR), 4) == expected
    assert len(said) == 1 and not cuda.replays


def chain_of_ops(ids: pt.Tensor, x: pt.Tensor) -> pt.Tensor:
    for _ in range(5):
        x = ops.sqr(ops.scale(x, by=0.5, bias=1.0))
    x = ops.get_rows(x, ids)
    for _ in range(5):
        x = ops.silu(ops.scale(x, by=0.5))
    return ops.scale(x, by=2.0)


def test_ids_are_checked_between_two_graphs(cuda: Cuda) -> None:
    y = chain_of_ops(pt.input("ids", (2,), pt.i32), pt.input("x", (4, 3)))
    run = Session().executor(place(pt.Graph({"y": y}), Target.for_backend(FAR)))
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for ids in ([0, 1], [3, 2], [1, 1]):
        inputs = {"ids": np.array(ids, np.int32), "x": x + ids[0]}
        with pt.debug("norecord"):
            expected = Session().executor(place(pt.Graph({"y": y}), Target.for_backend(FAR)))(
                inputs
            )
        assert np.array_equal(run(inputs)["y"], expected["y"])
    assert len(cuda.graphs) == 1 + 2 and cuda.replays == 4  # the first keeps the pool
    with pytest.raises(IndexError, match="index 4 at position 1 is outside"):
        run({"ids": np.array([0, 4], np.int32), "x": x})


def test_copies_from_another_memory_are_between_graphs(cuda: Cuda) -> None:
    other_memory = TorchDevice("farther", "cpu")
    w = pt.weight("w", (3,))
    x = ops.mul(pt.input("x", (4, 3)), w)
    for _ in range(5):
        x = ops.scale(x, by=0.5)
    v = pt.weight("v", (3,))
    y = ops.mul(x, v)
    for _ in range(5):
        y = ops.scale(y, by=0.5)
    placed = place(pt.Graph({"y": y}), Target((FAR,), {"v": other_memory}))
    session = Session()
    run = session.executor(placed)
    session.set({"w": np.full(3, 64.0), "v": np.full(3, 16.0)})
    for start in range(3):
        x0 = np.arange(start, start + 12, dtype=np.float32).reshape(4, 3)
        assert np.array_equal(run({"x": x0})["y"], x0)
    assert len(placed.copies) >= 1 and len(cuda.graphs) == 1 + 2


def test_sums_leave_for_other_ranks_when_the_graph_that_makes_them_has_run(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the call that would make them, which is a part of a graph that is launched later."""
    monkeypatch.setattr(rank_exchange, "BUCKET", 4)
    sent = list[Any]()

    class TwoRankWorld(distributed.World):
        world_size = 2

        def start_all_reduce(self, arrays: Any) -> None:
            sent.extend(array.clone() for array in arrays)

    monkeypatch.setattr(world, "_current_world", TwoRankWorld())
    w = [pt.weight(f"w{i}", (8,)) for i in range(3)]
    h = pt.input("x", (8,))
    for param in w:
        h = ops.mul(h, param)
    session = Session()
    micro = session.executor(
        place(accumulation_graph({"loss": ops.sum(h)}, w), Target.for_backend(FAR))
    )
    session.set({param.label: np.full(8, 2.0) for param in w})
    shape = SimpleNamespace(moment_share=None)
    plans: Any = SimpleNamespace(
        leaves={param.label: param for param in w}, trained_names=[], shape=shape
    )
    exchanged = gradient_sums.GradientExchange(session, plans, micro)
    for start in range(4):
        sent.clear()
        exchanged.begin_step()
        inputs = {"x": np.arange(start, start + 8, dtype=np.float32), "fresh": np.ones(())}
        micro(inputs, stop=exchanged.make_sender())
        for _, leaves in exchanged.buckets[exchanged.num_sent :]:
            current_world().start_all_reduce([session.array(leaf) for leaf in leaves])
        assert len(sent) == 3
        for array in sent:
            assert array.tolist() == (4 * inputs["x"]).tolist()
    assert cuda.replays == 3


def test_which_calls_need_the_host() -> None:
    x, ids = pt.input("x", (4, 8)), pt.input("ids", (2,), pt.i32)
    pos = pt.input("pos", (2, 4), pt.i32)
    is_independent = {}
    for t in (ops.silu(x), ops.get_rows(x, ids), ops.rope_table(pos, dims=8, base=1e4)):
        assert t.call is not None
        is_independent[t.call.op.name] = kernel_footprint(
            t.call.op, t.call.inputs, t.call.attrs
        ).is_recordable
    assert is_independent == {"silu": True, "get_rows": False, "rope_table": True}


def test_a_plan_bound_anew_is_recorded_anew(cuda: Cuda) -> None:
    """A larger plan of the session moves its arena: addresses of graphs would be those of the old one."""
    session = Session()
    y = chain_of_ops(pt.input("ids", (2,), pt.i32), pt.input("x", (4, 3)))
    run = session.executor(place(pt.Graph({"y": y}), Target.for_backend(FAR)))
    inputs = {"ids": np.array([0, 1], np.int32), "x": np.ones((4, 3), np.float32)}
    first = [run(inputs)["y"] for _ in range(3)]
    big = pt.Graph({"z": ops.scale(pt.input("x", (1000, 300)), by=2.0)})
    session.executor(place(big, Target.for_backend(FAR)))
    second = [run(inputs)["y"] for _ in range(3)]
    assert all(np.array_equal(output, first[0]) for output in (*first, *second))
    assert len(cuda.graphs) == 1 + 4
