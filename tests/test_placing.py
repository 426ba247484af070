"""Placement over several memories: the same results wherever calls run, few splits, and each copy made once."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.dtypes import i32
from packtrain.engine import backends, ops
from packtrain.engine.backends import HOST, Backend, Host, Target
from packtrain.engine.optim import AdamW
from packtrain.engine.optim.adamw import opt_step_adamw
from packtrain.engine.placement import Placed, place
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Call, Kernel, Op, Tensor
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training.training_engine import TrainingEngine
from tests import checks, plan_checks
from tests.random_graphs import random_case

FAR, THIRD = Host("cpu", "far"), Host("cpu", "third")
CONFIG = Config(64, 16, 32, 4, 64, 2, 2)
SHAPE = StepShape(CONFIG, 2, 16, max_norm=1.0)
BLOCKS = range(CONFIG.block_count)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are as fast in one, also on a machine that has other work."""
    threads = kernels.threads()
    kernels.set_threads(1)
    yield
    kernels.set_threads(threads)


def separate_memory() -> Backend:
    """PyTorch's kernels, in a memory that the host does not look at."""
    from packtrain.engine.backends.torch_backend import TorchDevice

    return TorchDevice("apart", "cpu")


# ---- a llama, cut between any two blocks ---------------------------------------------------------------------


def block_homes(first: int, to: Backend, tied: bool = True) -> dict[str, Backend]:
    """Blocks from this one on, with what follows them, and their moments."""
    blocks = [f"blk.{i}." for i in BLOCKS if i >= first]
    rest = (*blocks, *([] if tied else ["output_norm", "output."]))
    remote_names = [name for name in transformer.weights(CONFIG) if name.startswith(rest)]
    return {f"{kind}{name}": to for name in remote_names for kind in ("", "m/", "v/")}


def train_losses(on: Target, count: int = 4, is_replanned: bool = False) -> list[float]:
    """Of some steps; `is_replanned` plans anew in the middle and goes on with what the first engine has."""
    engine = TrainingEngine(make_plans(SHAPE, AdamW(), target=on), AdamW())
    transformer.initialize_weights(CONFIG, 0, engine.session.fill)
    ids = np.random.default_rng(0).integers(0, 64, (count, 2, 17)).astype(np.int32)
    pos, seq = np.tile(np.arange(16, dtype=np.int32), (2, 1)), np.zeros((2, 16), np.int32)
    step_losses = []
    for i, x in enumerate(ids):
        if is_replanned and i == count // 2:
            new_engine = TrainingEngine(make_plans(SHAPE, AdamW(), target=on), AdamW())
            new_engine.session.set({name: engine.session.get(name) for name in engine.plans.leaves})
            engine = new_engine
        batch = {"tokens": x[:, :-1], "targets": x[:, 1:], "pos": pos, "seq": seq}
        batch["weights"] = np.ones((2, 16), np.float32)
        step_losses.append(engine.step([batch], i + 1, 1e-2).loss)
    return step_losses


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    return train_losses(backends.CPU)


@pytest.mark.parametrize("first", BLOCKS)
def test_every_cut_of_a_llama_gives_the_same_bits(first: int, expected_losses: list[float]) -> None:
    on = Target((backends.cpu,), block_homes(first, FAR))
    assert train_losses(on) == train_losses(on, is_replanned=True) == expected_losses


def test_three_memories_in_turn_give_the_same_bits(expected_losses: list[float]) -> None:
    """Block by block, there and back."""
    placement = block_homes(1, FAR) | block_homes(2, THIRD) | block_homes(3, FAR)
    assert train_losses(Target((backends.cpu,), placement)) == expected_losses


@pytest.mark.torch
@pytest.mark.parametrize("first", BLOCKS)
def test_every_cut_between_the_cpu_and_pytorch(first: int, expected_losses: list[float]) -> None:
    on = Target((backends.cpu,), block_homes(first, separate_memory()))
    cut_losses = train_losses(on)
    assert cut_losses == train_losses(on, is_replanned=True)
    np.testing.assert_allclose(cut_losses, expected_losses, rtol=1e-5)


def space_copies(placed: Placed) -> list[KernelStep]:
    """Copies from one space to another."""
    return [s for s in placed.steps if placed.home[s.reads[0].base].space != s.backend.space]


def split_spaces(placed: Placed) -> list[str]:
    """The spaces of the splits, in order."""
    return [space for space, _ in itertools.groupby(s.backend.space for s in placed.steps)]


@pytest.mark.parametrize("first", [i for i in BLOCKS if i])
def test_a_llama_over_two_memories_has_two_splits(first: int) -> None:
    """Forward, with its own output matrix; what crosses is the stream, positions and what is made of them."""
    weights = transformer.weights(CONFIG)
    output = pt.weight("output.weight", (CONFIG.vocab_size, CONFIG.embedding_length))
    forward = transformer.loss(CONFIG, weights | {"output.weight": output}, 2, 16, chunk=16)
    remote_homes = block_homes(first, FAR, tied=False) | {"output.weight": FAR}
    placed = place(pt.Graph({"loss": forward.loss}), Target((backends.cpu, FAR), remote_homes))
    assert split_spaces(placed) == [HOST, "far"]
    assert len(space_copies(placed)) <= 6, [
        placed.names[s.results[0]] for s in space_copies(placed)
    ]
    moved = [placed.names[s.inputs[0]] for s in space_copies(placed) if s.inputs[0] is not None]
    assert sorted(moved) == sorted(set(moved))
    for step in placed.steps:
        block = next((n for n in map(placed.names.get, step.results) if n and n[:4] == "blk."), "")
        if block and step.op is step.call.op:
            assert (step.backend is FAR) == (int(block.split(".")[1]) >= first), block


@pytest.mark.parametrize("first", [i for i in BLOCKS if i])
def test_a_step_crosses_few_times(first: int) -> None:
    """There with the stream, back to the tied output matrix, and so the gradients; last the updates."""
    plans = make_plans(SHAPE, AdamW(), target=Target((backends.cpu,), block_homes(first, FAR)))
    placed = plans.placed_graphs["step"]
    assert split_spaces(placed)[:5] == [HOST, "far", HOST, "far", HOST]
    assert len(split_spaces(placed)) <= 7
    stream = SHAPE.micro_batch_size * SHAPE.seq_len * CONFIG.embedding_length * 4
    large = [s for s in space_copies(placed) if s.results[0].spec.nbytes >= stream]
    assert len(large) == 4  # the stream and its gradient, twice each, and no weight
    for name in ("blk.0.ffn_down.weight", f"blk.{first}.ffn_down.weight"):
        (gradient_step,) = (s for s in placed.steps if placed.names[s.results[0]] == f"d/{name}")
        assert gradient_step.backend.space == next(
            b.space for t, b in placed.home.items() if t.name == name
        )


# ---- cut anywhere, and at random -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PartialBackend:
    """Another backend, which has kernels for some calls only."""

    wrapped_backend: Backend
    can_run: Callable[[tuple[Tensor | None, ...]], bool] = field(compare=False)

    def __getattr__(self, name: str) -> object:
        return getattr(self.wrapped_backend, name)

    def kernel(self, op: Op[..., object], inputs: tuple[Tensor | None, ...]) -> Kernel | None:
        return (
            self.wrapped_backend.kernel(op, inputs)
            if op is ops.cont or self.can_run(inputs)
            else None
        )


def partial_backends(every: list[Backend], chosen: dict[int, int]) -> list[Backend]:
    """The backends, each with the calls for which it was chosen; those of no call anywhere."""

    def runs_only(number: int) -> Callable[[tuple[Tensor | None, ...]], bool]:
        return lambda inputs: chosen.get(id(inputs), number) == number

    return [PartialBackend(backend, runs_only(number)) for number, backend in enumerate(every)]  # type: ignore[misc]


def run_twice(placed: Placed, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of two runs, whose bytes are NaN before they are written and after they are freed; both are the same."""
    plan = pt.make_plan(placed)
    pt.verify(plan, placed)
    run = pt.Session().executor(placed, plan)
    with pt.debug("poison"):
        first = checks.execute(run, inputs)
        checks.assert_same_bits(checks.execute(run, inputs), first, "a second run")
    return first


def test_a_step_cut_before_any_call_gives_the_same_bits() -> None:
    """Forward and backward, in every memory's own bytes: the rest runs elsewhere, on copies of the weights, too."""
    config = Config(32, 16, 16, 1, 16, 2, 1)
    weights = transformer.weights(config)
    forward = transformer.loss(config, weights, 1, 8, chunk=8)
    gradients = pt.differentiate(forward.loss, list(weights.values()))
    graph = pt.Graph({"loss": forward.loss, **{f"d/{w.name}": d for w, d in gradients.items()}})
    rng = np.random.default_rng(0)
    inputs = {
        leaf.label: rng.integers(0, 8, leaf.shape) if leaf.dtype == i32 else rng.random(leaf.shape, np.float32)
        for leaf in graph.leaves if leaf.kind != "constant"
    }  # fmt: skip
    inputs |= {"pos": np.arange(8).reshape(1, 8), "seq": np.zeros((1, 8), int)}
    expected = checks.run_graph(graph, inputs)
    calls = [call for call in graph.calls if not call.op.view]
    for count in range(len(calls) + 1):
        chosen = {id(call.inputs): int(at >= count) for at, call in enumerate(calls)}
        placed = place(graph, Target(tuple(partial_backends([backends.cpu, FAR], chosen))))
        got = run_twice(placed, inputs)
        checks.assert_same_bits(got, expected, f"cut before call {count}")


def written_together(calls: tuple[Call, ...]) -> dict[Tensor, Tensor]:
    """For each leaf that a call writes, the first of those that it is written with."""
    first = dict[Tensor, Tensor]()
    for call in calls:
        leaves = [t.base for i in call.op.writes if (t := call.inputs[i]) is not None]
        first |= {leaf: first.get(leaves[0], leaves[0]) for leaf in leaves}
    return first


def place_at_random(graph: pt.Graph, every: list[Backend], seed: int) -> Placed:
    """Leaves anywhere, and calls that write none of them on any backend."""
    rng = np.random.default_rng(seed)
    tied = written_together(graph.calls)
    at = {leaf: int(rng.integers(len(every))) for leaf in graph.leaves}
    at |= {leaf: at[first] for leaf, first in tied.items()}
    chosen = {id(call.inputs): int(rng.integers(len(every))) for call in graph.calls}
    for call in graph.calls:
        if call.op.writes:
            leaf = call.inputs[call.op.writes[0]]
            assert leaf is not None
            chosen[id(call.inputs)] = at[leaf.base]
    on = partial_backends(every, chosen)
    leaf_homes = {leaf.label: on[at[leaf]] for leaf in graph.leaves if leaf.kind != "constant"}
    return place(graph, Target(tuple(on), leaf_homes))


@pytest.mark.parametrize("seed", range(100))
def test_random_placements_over_three_memories_give_the_same_bits(seed: int) -> None:
    """Run twice, placed anew and run twice again; leaves are set for each run."""
    case = random_case(1000 + seed)
    expected = checks.run_graph(case.graph, case.values)
    all_backends = [backends.cpu, FAR, THIRD]
    got = run_twice(place_at_random(case.graph, all_backends, seed), case.values)
    checks.assert_same_bits(got, expected, f"seed {seed}")
    once_more = run_twice(place_at_random(case.graph, all_backends, seed), case.values)
    checks.assert_same_bits(once_more, expected, f"seed {seed}, placed again")


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(100))
def test_random_placements_with_pytorch_differ_by_rounding(seed: int) -> None:
    """On the host's own arrays and in a memory of its own, among the cpu's."""
    from packtrain.engine.backends.torch_backend import TorchHost

    case = random_case(2000 + seed)
    expected = checks.run_graph(case.graph, case.values)
    placed = place_at_random(
        case.graph, [backends.cpu, TorchHost("torch:cpu"), separate_memory()], seed
    )
    checks.assert_all_close(run_twice(placed, case.values), expected, f"seed {seed}")


# ---- copies --------------------------------------------------------------------------------------------------


def test_what_several_calls_read_elsewhere_is_copied_once_a_run() -> None:
    """Also through views; and an updated leaf anew, after its update."""
    x, w = pt.input("x", (6, 4)), pt.weight("w", (6, 4))
    s = pt.state("s", (6, 4))
    y = ops.tanh(x)
    first = ops.mul(ops.add(y, w), y)
    transposed = ops.matmul(ops.transpose(y), ops.transpose(w))
    old_state = ops.mul(ops.cont(s), w)
    (new_state,) = ops.set_rows(s, y, pt.constant("ids", np.arange(6), i32))
    total = ops.add(ops.add(first, old_state), ops.mul(w, new_state))
    graph = pt.Graph({"total": total, "turned": transposed}, [new_state])
    rng = np.random.default_rng(0)
    inputs = {n: rng.random((6, 4), np.float32) for n in ("x", "w", "s")}
    expected = checks.run_graph(graph, inputs)
    placed = place(graph, Target((backends.cpu, FAR), {"w": FAR}))
    moved = [placed.names[s.results[0]] for s in space_copies(placed)]
    assert sorted(moved) == ["cont on far", "set_rows on far", "tanh on far"], moved
    run = pt.Session().executor(placed)
    checks.assert_same_bits(checks.execute(run, inputs), expected, "first")
    new_inputs = inputs | {"x": rng.random((6, 4), np.float32), "w": rng.random((6, 4), np.float32)}
    checks.assert_same_bits(
        checks.execute(run, new_inputs), checks.run_graph(graph, new_inputs), "with other inputs"
    )


def test_one_backend_goes_on_after_a_call_that_it_cannot_run() -> None:
    """What is read beside its weights later counts then, too."""
    x, other, w = pt.input("x", (6, 4)), pt.input("other", (6, 4)), pt.weight("w", (4, 4))
    y = ops.matmul(ops.mul(ops.gelu(x), other), w)
    (limited_backend,) = partial_backends([FAR], {})
    limited_backend = replace(limited_backend, can_run=lambda inputs: inputs != (x,))  # type: ignore[type-var]
    with pytest.warns(UserWarning, match=r"no kernel of \['cpu'\] for \['gelu'\]"):
        placed = place(pt.Graph({"y": y}), Target((limited_backend,)))
    on = [(s.op.name, s.backend.space) for s in placed.steps if s.source is None]
    assert on == [("gelu", HOST), ("mul", "far"), ("matmul", "far")], str(placed)


def test_small_parts_are_copied_alone() -> None:
    plan_checks.check_parts()


def test_leaves_written_by_one_call_live_together() -> None:
    w, m, v = pt.weight("w", (4,)), pt.state("m", (4,)), pt.state("v", (4,))
    hyper, gate = pt.constant("hyper", np.zeros(7)), pt.constant("gate", np.ones(()))
    graph = pt.Graph([], opt_step_adamw(w, ops.tanh(w), m, v, hyper, gate, decay=False))
    with pytest.raises(pt.GraphError, match="cannot write m, which lives on far"):
        place(graph, Target((backends.cpu,), {"m": FAR}))
