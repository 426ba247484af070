"""The backend `torch`: its kernels beside the specification, its memory, and runs beside the cpu's.

`torch:cpu` is asked for as a user does; a device whose memory the host does not look at is played by the CPU.
"""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.cli.main import main
from packtrain.devtools.check.check_cases import check_values
from packtrain.devtools.check.op_samples import (
    graph_of,
    random_values,
    samples_of_op,
    typed_samples,
)
from packtrain.dtypes import READABLE, Dtype, f32
from packtrain.engine import backends, ops
from packtrain.engine.backends import HOST, Host, Target, target
from packtrain.engine.backends import torch_temporaries as measuring
from packtrain.engine.backends.torch_backend import BACKENDS as DEVICES_OF_TORCH
from packtrain.engine.backends.torch_backend import TorchDevice, TorchHost, as_tensor
from packtrain.engine.executor import Executor
from packtrain.engine.interpreter import interpret
from packtrain.engine.optim import AdamW, Optimizer
from packtrain.engine.placement import place
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import OPS, Call
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training.training_engine import TrainingEngine
from tests import bit_checks, checks, models
from tests.architectures import CONFIGS, DEEP, random_weights
from tests.real import BASE
from tests.test_ops import NOTHING, REFUSED

pytestmark = pytest.mark.torch
ONLY_ON_CPU = {
    "tiled",
    "tiled_back",
    "attention_back_sums",
}  # the search takes tiles of rows on the CPU alone
COMPUTED = sorted(name for name, op in OPS.items() if not op.view and name not in ONLY_ON_CPU)
TORCH_CPU, FAR = TorchHost("torch:cpu"), TorchDevice("far", "cpu")
GPU = "cuda" if find_spec("torch") and kernels.torch().cuda.is_available() else None
ELSEWHERE = (FAR, DEVICES_OF_TORCH[GPU]) if GPU else (FAR,)
DEVICES = ("torch:cpu", GPU) if GPU else ("torch:cpu",)
WORDS = "bal cem dis hor fin gut"
SIZES = {"threads": 1, "sample_every": 0, "warmup_ratio": 0.0, "overwrite": True}


# ---- kernels -------------------------------------------------------------------------------------------------


def test_all_ops_but_those_listed_have_a_kernel() -> None:
    assert {
        name for name, op in OPS.items() if not op.view and "torch" not in op.kernels
    } == ONLY_ON_CPU


@pytest.mark.parametrize("name", COMPUTED)
def test_the_value_is_the_specification(name: str) -> None:
    """Also from a memory of its own."""
    checks.assert_passed(check_values(name, (TORCH_CPU, *ELSEWHERE)))


@pytest.mark.parametrize("name", [n for n in COMPUTED if any(OPS[n].inplace.values())])
def test_in_place_gives_the_same_bits(name: str) -> None:
    bit_checks.check_inplace(name, ("torch",))


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("device", DEVICES)
def test_any_view_can_be_an_input(name: str, device: str) -> None:
    on = DEVICES_OF_TORCH[device]
    assert bit_checks.check_strided(name, on) == REFUSED.get(name, set())


@pytest.mark.parametrize("name", [n for n in COMPUTED if OPS[n].optional])
def test_results_can_be_left_out(name: str) -> None:
    bit_checks.check_optional(name, (TORCH_CPU,))


@pytest.mark.parametrize("name", NOTHING)
def test_axes_of_no_elements(name: str) -> None:
    graph = pt.Graph({"y": NOTHING[name]()})
    leaf_values = checks.random_values(graph)
    for backend in (TORCH_CPU, *ELSEWHERE):
        actual = checks.run_graph(graph, leaf_values, (backend,))
        checks.assert_all_close(actual, pt.interpret(graph, leaf_values), name)


@pytest.mark.parametrize("dtype", READABLE, ids=str)
def test_blocks_are_unpacked_bit_for_bit(dtype: Dtype) -> None:
    """All bytes, also scales that are infinite, NaN or denormal."""
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (64, 5 * dtype.block_nbytes), np.uint8).view(dtype.numpy)
    w = pt.constant("w", packed, dtype)
    graph = pt.Graph({"y": ops.cast(w, dtype=f32)})
    expected = dequantize(packed)
    for backend in (TORCH_CPU, *ELSEWHERE):
        actual = checks.run_graph(graph, {}, (backend,))["y"]
        np.testing.assert_array_equal(
            actual.view(np.int32)[~np.isnan(expected)], expected.view(np.int32)[~np.isnan(expected)]
        )
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))


def test_an_input_with_an_axis_of_one_element_is_overwritten() -> None:
    """Whatever its stride is, which says nothing."""
    broadcast = ops.broadcast_to(ops.tanh(pt.input("x", (1, 16))), shape=(1, 16))
    graph = pt.Graph({"y": ops.sqr(broadcast)})
    leaf_values = random_values(graph)
    expected = checks.run_graph(graph, leaf_values)
    for backend in (TORCH_CPU, *ELSEWHERE):
        checks.assert_all_close(
            checks.run_graph(graph, leaf_values, (backend,)), expected, backend.name
        )


def test_random_numbers_are_those_of_the_cpu() -> None:
    """Dropout of more than is computed at a time, and stochastic rounding: the same bits, seed by seed."""
    n = (1 << 20) + 77
    x = pt.input("x", (n,))
    for seed in (0, -5, 1 << 62):
        key = pt.constant("key", np.array([seed, 9, 5]), pt.i64)
        graph = pt.Graph({"y": ops.dropout(x, key, p=0.3, stream=0xDEADBEEF)})
        inputs = {"x": np.ones(n, np.float32)}
        checks.assert_same_bits(
            checks.run_graph(graph, inputs, (TORCH_CPU,)),
            checks.run_graph(graph, inputs),
            f"seed {seed}",
        )


def test_ids_outside_are_reported_as_on_the_cpu() -> None:
    w, ids = pt.weight("w", (4, 3)), pt.input("ids", (2,), pt.i32)
    graph = pt.Graph({"y": ops.get_rows(w, ids)})
    inputs = {"w": np.zeros((4, 3), np.float32), "ids": np.array([0, 4], np.int32)}
    for backend in (backends.cpu, TORCH_CPU, *ELSEWHERE):
        with pytest.raises(
            IndexError, match="get_rows: index 4 at position 1 is outside the 4 rows"
        ):
            checks.run_graph(graph, inputs, (backend,))


# ---- memory --------------------------------------------------------------------------------------------------


def all_calls(name: str) -> Iterator[Call]:
    yield from samples_of_op(name)
    yield from (typed_case.call for typed_case in typed_samples(name))


@pytest.mark.parametrize("name", COMPUTED)
def test_temporaries_stay_within_what_is_declared(name: str) -> None:
    for call in all_calls(name):
        declared = sum(s.nbytes for s in TORCH_CPU.workspaces(call.op, call.inputs, call.attrs))
        graph = pt.Graph({str(i): t for i, t in enumerate(call.inputs) if t is not None})
        leaf_values = pt.interpret(graph, random_values(graph_of(call.results)), np.float32)
        arguments = [None if t is None else leaf_values[str(i)] for i, t in enumerate(call.inputs)]
        fresh = [np.empty(t.dtype.array_shape(t.shape), t.dtype.numpy) for t in call.results]
        written_inputs = [arguments[i] for i in call.op.writes]
        results = (*written_inputs, *fresh[len(written_inputs) :])
        tensors = [
            as_tensor(x) for x in (results if call.returns_tuple else results[0], *arguments)
        ]
        call.op.kernels["torch"].run(*tensors, **call.attrs)  # tables of types are made once
        with measuring.allocation_meter()() as count:
            call.op.kernels["torch"].run(*tensors, **call.attrs)
        assert count.peak_nbytes <= declared, (
            name,
            [str(t) for t in call.inputs],
            count.most,
            declared,
        )


def test_a_meter_counts_what_is_alive() -> None:
    torch = kernels.torch()
    x = torch.ones(10)
    with measuring.allocation_meter()() as count:
        y = x + 1
        y.add_(1)
        z = y * 2
        del y
        z.view(2, 5)
        _ = x * 2
    assert (count.peak_nbytes, count.current_nbytes) == (80, 80)


def test_backends_are_pickled() -> None:
    for backend in (TORCH_CPU, FAR):
        assert pickle.loads(pickle.dumps(backend)) == backend


def test_a_memory_apart_holds_any_array() -> None:
    """Views at offsets, of any strides and no elements; what was written is read."""
    buffer = FAR.alloc(1000)
    spec = pt.Spec((3, 5), f32)
    transposed = FAR.view(buffer, 512, spec, (4, 12))
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    FAR.write(transposed, values)
    np.testing.assert_array_equal(FAR.read(transposed), values)
    flat = FAR.view(buffer, 512, pt.Spec((15,), f32), (4,))
    np.testing.assert_array_equal(FAR.read(flat), values.T.reshape(-1))
    assert FAR.overlap(flat, transposed) and FAR.all_finite(flat)
    other_view = FAR.view(buffer, 512 + 64, pt.Spec((2,), pt.i64), (8,))
    none = FAR.view(buffer, 0, pt.Spec((0, 5), f32), (20, 4))
    assert not FAR.overlap(flat, other_view) and FAR.read(none).shape == (0, 5)
    FAR.fill(flat, 255)
    assert not FAR.all_finite(flat) and FAR.window(flat) is None
    assert not FAR.read(other_view).any()


def test_what_a_device_has_not_is_held_as_bytes() -> None:
    """Of f64 on `mps`: another backend computes with it, and that is said."""
    poor = TorchDevice("mps", "cpu")
    (call,) = (
        c for c in samples_of_op("draw") if c.inputs[0] is not None and c.inputs[0].shape == (7, 5)
    )
    operands = [
        pt.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(call.inputs) if t is not None
    ]
    graph = pt.Graph({"y": ops.draw(*operands), "z": ops.scale(operands[1], by=2.0)})
    leaf_values = {f"x{i}": t.value for i, t in enumerate(call.inputs) if t is not None}
    with pytest.warns(UserWarning, match=r"no kernel of \['mps'\] for \['draw'\]; using numpy's"):
        actual = checks.run_graph(graph, leaf_values, (poor,))
    checks.assert_same_bits(actual, checks.run_graph(graph, leaf_values), "draw")


# ---- devices -------------------------------------------------------------------------------------------------


def test_what_is_missing_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    if not GPU:
        assert main(["check", "add", "--device", "cuda"]) == 2
        said = capsys.readouterr().err.strip()
        assert said.endswith("--device cuda: PyTorch finds no such device on this machine"), said
    hidden = (
        "import sys; sys.modules['torch'] = None; import importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a);"
        "from packtrain.cli.main import main; sys.exit(main(['check', 'add', '--device', 'torch:cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "--device torch:cpu needs PyTorch" in done.stderr and "packtrain[torch]" in done.stderr


# ---- runs ----------------------------------------------------------------------------------------------------


def run_training(device: str, folder: Path, **settings: object) -> np.ndarray:
    run = pt.train(
        folder / "text.txt", output=folder / "m.gguf", device=device, **{**SIZES, **settings}
    )
    return np.array(run.losses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    rows = [f"{WORDS} {i % 17} {WORDS[: i % 20]}" for i in range(400)]
    (folder / "text.txt").write_text("\n".join(rows))
    return folder


def check_losses(got: np.ndarray, expected: np.ndarray, count: int) -> None:
    assert len(got) == len(expected) == count
    np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_training_is_that_of_the_cpu(folder: Path, device: str) -> None:
    options = {"preset": "1m", "iters": 50, "ctx": 32, "batch_size": 4, "lr": 3e-4}
    expected = run_training("cpu", folder, **options)
    check_losses(run_training(device, folder, **options), expected, 50)
    assert expected[-1] < 0.7 * expected[0]


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """A trained model in Q4_K."""
    sizes = {
        "dim": 256,
        "ffn": 256,
        "layers": 2,
        "heads": 4,
        "vocab_size": 300,
        "ctx": 32,
        "batch_size": 2,
    }
    pt.train(folder / "text.txt", output=folder / "b.gguf", iters=12, **SIZES, **sizes)
    pt.quantize(folder / "b.gguf", folder / "q.gguf", "q4_k_m")
    return folder / "q.gguf"


def run_finetune(
    folder: Path, base: Path, device: str, iters: int = 12, **settings: Any
) -> np.ndarray:
    done = pt.finetune(
        base, folder / "text.txt", output=folder / "t.gguf", device=device, iters=iters, ctx=32,
        batch_size=2, lora_dropout=0.1, lr=0.001, threads=1, overwrite=True, **settings,
    )  # fmt: skip
    return np.array(done.losses)


def generate_and_evaluate(base: Path, device: str) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and losses of a text."""
    ids = pt.generate(base, "bal cem", n_predict=24, temp=0, device=device).ids
    losses = pt.evaluate(base, base.parent / "text.txt", ctx=32, device=device).losses[str(base)]
    return list(ids), losses


@pytest.mark.parametrize("device", DEVICES)
def test_lora_on_a_quantized_file_is_that_of_the_cpu(folder: Path, base: Path, device: str) -> None:
    expected = run_finetune(folder, base, "cpu", 50)
    check_losses(run_finetune(folder, base, device, 50), expected, 50)
    assert expected[-1] < 0.7 * expected[0]


@pytest.mark.real
def test_lora_on_the_real_base_is_that_of_the_cpu(folder: Path) -> None:
    expected, actual = (
        run_finetune(folder, BASE, d, 2, merge="none", val_split=0.0) for d in ("cpu", "torch:cpu")
    )
    check_losses(actual, expected, 2)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("device", DEVICES)
def test_generation_gives_the_same_tokens(base: Path, device: str) -> None:
    (ids, device_losses), (expected_ids, losses) = (
        generate_and_evaluate(base, d) for d in (device, "cpu")
    )
    assert ids == expected_ids and len(ids) == 24
    np.testing.assert_allclose(device_losses, losses, rtol=1e-4, atol=1e-4)


def test_a_memory_apart_gives_the_same_bits(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels on views of one tensor, and the base copied there."""
    local_results = (
        run_finetune(folder, base, "torch:cpu"),
        *generate_and_evaluate(base, "torch:cpu"),
    )
    monkeypatch.setitem(DEVICES_OF_TORCH, "torch:cpu", TorchDevice("torch:cpu", "cpu"))
    remote_results = (
        run_finetune(folder, base, "torch:cpu"),
        *generate_and_evaluate(base, "torch:cpu"),
    )
    for actual, expected in zip(remote_results, local_results, strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [n for n in CONFIGS if CONFIGS[n].block_count <= DEEP])
def test_gradients_of_every_architecture(name: str, device: str) -> None:
    config = CONFIGS[name]
    leaves = transformer.weights(config)
    loss_graph = transformer.loss(config, leaves, 2, 20, chunk=16)
    gradients = pt.differentiate(loss_graph.loss, [w for w in leaves.values() if w.role != "table"])
    graph = pt.Graph(
        {"losses": loss_graph.losses, **{f"d/{w.name}": d for w, d in gradients.items()}}
    )
    read = {leaf.label for leaf in graph.leaves}
    weights = {n: w for n, w in random_weights(config).items() if n in read}
    batch = models.seeded_batch(config, 2, 20)
    actual, expected = (
        models.bind_graph(graph, weights, backend=b)(batch)
        for b in (DEVICES_OF_TORCH[device], backends.cpu)
    )
    far_names = [
        n
        for n in expected
        if checks.max_difference(actual[n], expected[n]) > checks.error_limit(actual[n])
    ]
    near_names = [n for n in expected if n not in far_names]
    checks.assert_all_close(
        {n: actual[n] for n in near_names}, {n: expected[n] for n in near_names}, name
    )
    if not far_names:
        return
    # f32 can be no nearer to float64 than its weights' own rounding lets it: where one ulp of each moves a gradient
    # further than the limit, that is how far PyTorch may be
    true = interpret(graph, {**weights, **batch})
    moved = [interpret(graph, {**an_ulp_off(weights, seed), **batch}) for seed in range(3)]
    for n in far_names:
        want_32 = np.asarray(true[n], np.float32)
        error = checks.max_difference(actual[n], want_32)
        ulp_error = max(
            checks.max_difference(np.asarray(perturbed[n], np.float32), want_32)
            for perturbed in moved
        )
        assert error <= max(ulp_error, checks.error_limit(actual[n])), (
            f"{name}: {n}: off by {error:.3g}, an ulp of the weights moves it by {ulp_error:.3g}"
        )


def an_ulp_off(weights: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """f32 weights in float64, each moved by up to an ulp; others as they are."""
    rng, ulp = np.random.default_rng(seed), float(np.finfo(np.float32).eps)
    return {
        n: w * (1 + ulp * rng.uniform(-1, 1, w.shape)) if w.dtype == np.float32 else w
        for n, w in weights.items()
    }


SHAPE = StepShape(Config(64, 16, 32, 2, 64, 2, 2), 2, 16, max_norm=1.0)


def train_losses(on: Target, count: int = 3, by: Optimizer = AdamW()) -> list[float]:  # noqa: B008
    shape = replace(
        SHAPE, num_evaluations=by.evaluations, max_norm=None if by.first_length else 1.0
    )
    engine = TrainingEngine(make_plans(shape, by, target=on), by)
    transformer.initialize_weights(SHAPE.config, 0, engine.session.fill)
    ids = np.random.default_rng(0).integers(0, 64, (count, 2, 17)).astype(np.int32)
    pos, seq = np.tile(np.arange(16, dtype=np.int32), (2, 1)), np.zeros((2, 16), np.int32)
    ones = np.ones((2, 16), np.float32)
    batches = [
        {"tokens": x[:, :-1], "targets": x[:, 1:], "weights": ones, "pos": pos, "seq": seq}
        for x in ids
    ]
    return [engine.step([batch], i + 1, 1e-2).loss for i, batch in enumerate(batches)]


def test_a_step_allocates_nothing_but_what_its_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call within its own workspace, or within the pool of its device, and nothing of it is left when it ends: its
    results are in the arena."""
    counts = list[tuple[str, int, int, int]]()
    original_run = Executor._run_calls

    def run_metered(self: Executor, calls: list[Any], stop: Any, turns: Any) -> None:
        pool = self.plan.arena("far").pool_nbytes

        def metered_call(step: KernelStep, call: Any) -> Any:
            planned = pool or sum(spec.nbytes for spec in step.workspaces)

            def call_metered() -> None:
                with measuring.allocation_meter()() as count:
                    call()
                counts.append((step.op.name, count.peak_nbytes, planned, count.current_nbytes))

            return call_metered

        original_run(
            self,
            [metered_call(*pair) for pair in zip(self.placed.steps, calls, strict=True)],
            stop,
            turns,
        )

    for backend in (TORCH_CPU, FAR):
        train_losses(Target.for_backend(backend))  # tables of types are made once
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "_run_calls", run_metered)
            train_losses(Target.for_backend(backend))
        exceeded = [
            metered_call
            for metered_call in counts
            if metered_call[1] > metered_call[2] or metered_call[3]
        ]
        assert counts and not exceeded, (backend.name, exceeded)
    assert any(max_nbytes for _, max_nbytes, _, _ in counts), "the meter saw nothing"


@pytest.mark.parametrize("device", DEVICES)
def test_running_again_changes_nothing(device: str) -> None:
    torch_threads = kernels.threads()
    kernels.set_threads(1)
    try:
        assert train_losses(target(device)) == train_losses(target(device))
        np.testing.assert_allclose(
            train_losses(Target.for_backend(FAR)), train_losses(backends.CPU), rtol=1e-5
        )
    finally:
        kernels.set_threads(torch_threads)


class PartialTorch(TorchHost):
    """`torch` for some calls."""


class PartialHost(Host):
    """The cpu for others."""


def test_each_op_alone_runs_among_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train_losses(backends.CPU)
    placed = make_plans(SHAPE, AdamW()).placed_graphs["step"]
    names = sorted({step.op.name for step in placed.steps})
    assert len(names) > 15
    for name in names:
        monkeypatch.setattr(
            PartialTorch,
            "kernel",
            lambda _, op, inputs, metered_call=name: (
                TORCH_CPU.kernel(op, inputs) if op.name == metered_call else None
            ),
        )
        monkeypatch.setattr(
            PartialHost,
            "kernel",
            lambda _, op, inputs, metered_call=name: (
                op.kernels["cpu"] if op.name != metered_call else None
            ),
        )
        on = Target((PartialTorch("torch:cpu"), PartialHost("cpu")))
        backs = {
            s.backend.name
            for s in make_plans(SHAPE, AdamW(), target=on).placed_graphs["step"].steps
        }
        assert backs == {"cpu", "torch:cpu"}, (name, backs)
        np.testing.assert_allclose(train_losses(on, 2), expected[:2], rtol=1e-5, err_msg=name)


def test_a_graph_that_is_cut_anywhere_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls by PyTorch, the others by the cpu, in one space and without copies."""
    x, w = pt.input("x", (5, 8)), pt.weight("w", (8, 8))
    y = x
    for _ in range(2):
        y = ops.rms_norm(ops.add(y, ops.silu(ops.matmul(y, w))), eps=1e-5)
    loss = ops.sum(ops.mul(y, y))
    graph = pt.Graph({"loss": loss, "dw": pt.differentiate(loss, [w])[w]})
    leaf_values = random_values(graph)
    expected = checks.run_graph(graph, leaf_values)
    calls = [call for call in graph.calls if not call.op.view]
    original_kernel = TORCH_CPU.kernel

    for count in range(len(calls) + 1):
        ours = [call.inputs for call in calls[:count]]

        def kernel(self, op, inputs, ours=ours):  # type: ignore[no-untyped-def]
            return (
                original_kernel(op, inputs)
                if any(inputs is call_inputs for call_inputs in ours)
                else None
            )

        monkeypatch.setattr(PartialTorch, "kernel", kernel)
        placed = place(graph, Target((PartialTorch("torch:cpu"), backends.cpu)))
        assert sum(s.backend.name == "torch:cpu" for s in placed.steps) == count
        assert len(placed.steps) == len(calls) and {b.space for b in placed.home.values()} == {HOST}
        checks.assert_all_close(
            checks.execute(pt.Session().executor(placed), leaf_values), expected, f"cut at {count}"
        )


def test_a_run_keeps_to_its_plan(folder: Path) -> None:
    """Temporaries are PyTorch's own allocations, beside an arena that has room for them."""
    script = (
        "import sys, packtrain as pt; f = sys.argv[1];"
        "done = pt.train(f + '/text.txt', output=f + '/p.gguf', preset='1m', ctx=256, batch_size=8, iters=2,"
        " device='torch:cpu', threads=1, sample_every=0, overwrite=True);"
        "plans = done.plan.plans;"
        "work = max(b.nbytes for b in plans.plans['step'].buffers if b.category == 'workspace');"
        "print(done.peak_nbytes, plans.total_nbytes, work)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    peak, planned, work = map(int, completed.stdout.split())
    assert work > 4 << 20 and 0.9 * planned < peak <= planned
