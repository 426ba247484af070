"""Products whose factors are rounded to bf16: both backends round alike, and threads change no bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.devtools.bench.training import of_preset
from packtrain.devtools.check.check_cases import run_graph
from packtrain.dtypes import BLOCK_TYPES, i32
from packtrain.engine import backends, ops
from packtrain.engine.interpreter import interpret
from packtrain.engine.ops.arrays import round_to_bf16
from packtrain.engine.tensor import Tensor, constant, input
from packtrain.kernels.quant.quantized_arrays import quantize
from packtrain.models.model_file import open_model
from packtrain.workflows.eval_data import EvaluateSettings
from packtrain.workflows.evaluation import evaluate
from packtrain.workflows.text_generation import GenerateSettings, generate
from tests.architectures import random_model
from tests.checks import assert_same_bits

pytestmark = pytest.mark.skipif(not kernels.panels.HALF, reason="this CPU has no AVX512_BF16")

SHAPES = ((1, 1, 1), (3, 15, 16), (4, 48, 7), (9, 65, 33), (70, 300, 129), (130, 97, 1100), (64, 31, 515))  # fmt: skip
BF16_PRECISION = {"precision": "bf16"}
AMX = pytest.mark.skipif(not kernels.panels.AMX, reason="this CPU has no AMX")
PRECISIONS = ("bf16", pytest.param("bf16x3", marks=AMX))


def values(graph: pt.Graph, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    leaves = (leaf for leaf in graph.leaves if leaf.kind == "input")
    input_specs = {leaf.label: leaf.spec for leaf in leaves}
    return {
        name: rng.integers(0, 50, spec.shape).astype(np.int32)
        if spec.dtype == i32
        else rng.standard_normal(spec.shape).astype(np.float32)
        for name, spec in input_specs.items()
    }


def check_one_thread(
    ours: dict[str, np.ndarray], graph: pt.Graph, inputs: dict[str, np.ndarray]
) -> None:
    count = kernels.threads()
    kernels.set_threads(1)
    try:
        assert_same_bits(run_graph(graph, inputs, (backends.cpu,)), ours, "threads")
    finally:
        kernels.set_threads(count)


def check_backends(outputs: dict[str, Tensor]) -> None:
    """Both backends give the same up to the order of sums; one thread gives what all give."""
    graph = pt.Graph(outputs)
    inputs = values(graph)
    ours, spec = (
        run_graph(graph, inputs, (backend,)) for backend in (backends.cpu, backends.numpy)
    )
    for name in outputs:
        scale = max(1.0, float(np.abs(spec[name]).max()))
        assert np.abs(ours[name] - spec[name]).max() <= 2e-5 * scale, name
    check_one_thread(ours, graph, inputs)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_round_alike_on_both_backends(m: int, n: int, k: int, precision: str) -> None:
    options = {"precision": precision}
    x, w, dy = input("x", (m, k)), input("w", (n, k)), input("dy", (m, n))
    check_backends({"y": ops.matmul(x, w, input("acc", (m, n)), **options)})
    check_backends(
        {"dx": ops.matmul(dy, ops.transpose(w), **options), "dw": ops.out_prod(dy, x, **options)}
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["q8_0", "q4_K", "q5_0"])
def test_products_with_packed_weights_round_alike(name: str, precision: str) -> None:
    options = {"precision": precision}
    dense_weights = np.random.default_rng(1).standard_normal((75, 768)).astype(np.float32)
    w = constant("w", quantize(dense_weights, BLOCK_TYPES[name]), BLOCK_TYPES[name])
    check_backends({"y": ops.matmul(input("x", (33, 768)), w, **options)})
    check_backends({"dx": ops.matmul_back(input("dy", (33, 75)), w, **options)})


@pytest.mark.parametrize(
    ("precision", "bound"), [("bf16", 2**-8), pytest.param("bf16x3", 1e-5, marks=AMX)]
)
def test_the_head_rounds_alike(precision: str, bound: float) -> None:
    options = {"precision": precision}
    x, w = input("x", (70, 33)), input("w", (150, 33))
    targets, weights = input("targets", (70,), i32), input("weights", (70,))
    loss, losses, right, dx, dw = ops.linear_cross_entropy(
        x, w, targets, weights, chunk=64, **options
    )
    graph = pt.Graph({"loss": loss, "losses": losses, "right": right, "dx": dx, "dw": dw})
    inputs = values(graph)
    ours, spec = (
        run_graph(graph, inputs, (backend,)) for backend in (backends.cpu, backends.numpy)
    )
    for (
        name,
        expected,
    ) in spec.items():  # probabilities at the edge between two bf16 round either way
        assert np.abs(ours[name] - expected).max() <= bound * max(
            1.0, float(np.abs(expected).max())
        ), name


@pytest.mark.parametrize("c", [577, 680, 819, 1365, 2048])
def test_heads_whose_rows_do_not_fill_tiles(c: int) -> None:
    rng = np.random.default_rng(3)
    x, w = input("x", (64, c)), input("w", (6000, c))
    targets, weights = input("targets", (64,), i32), input("weights", (64,))
    outputs = ops.linear_cross_entropy(
        x, w, targets, weights, chunk=64, softcap=2.5, **BF16_PRECISION
    )
    graph = pt.Graph({str(i): one for i, one in enumerate(outputs)})
    inputs = values(graph) | {"w": rng.standard_normal((6000, c)).astype(np.float32) / 16}
    # some of its logits are infinite before the cap
    inputs["x"][0] = np.where(np.arange(c) < 1, 3e38, 0.0)
    inputs["w"][7, 0] = 1e20
    ours, spec = (run_graph(graph, inputs, (one,)) for one in (backends.cpu, backends.numpy))
    assert np.allclose(ours["1"], spec["1"], atol=1e-4)
    for name in ("3", "4"):
        scale = float(np.nanmax(np.abs(spec[name])))
        assert np.nanmax(np.abs(ours[name] - spec[name])) <= 2**-8 * max(1.0, scale), name


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_K"])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize(("v", "chunk"), [(37, 64), (1500, 16), (6000, 64)])
def test_a_head_of_several_slices_and_chunks(
    v: int, chunk: int, softcap: float, dtype: str
) -> None:
    rng = np.random.default_rng(2)
    x, b, weights = input("x", (300, 256)), input("b", (v,)), input("weights", (300,))
    dense_weights = rng.standard_normal((v, 256)).astype(np.float32) / 8
    w = input("w", dense_weights.shape)
    if dtype != "f32":
        w = constant("w", quantize(dense_weights, BLOCK_TYPES[dtype]), BLOCK_TYPES[dtype])
    targets = input("targets", (300,), i32)
    options = {"chunk": chunk, "softcap": softcap, "precision": "bf16"}
    outputs = ops.linear_cross_entropy(x, w, targets, weights, b, **options)
    graph = pt.Graph({str(i): one for i, one in enumerate(outputs)})
    inputs = values(graph) | {"targets": rng.integers(-v // 4, v, 300).astype(np.int32)}
    inputs |= {"w": dense_weights} if dtype == "f32" else {}
    ours, spec = (run_graph(graph, inputs, (one,)) for one in (backends.cpu, backends.numpy))
    for name, expected in spec.items():
        assert np.abs(ours[name] - expected).max() <= 2**-8 * max(
            1.0, float(np.abs(expected).max())
        ), name
        has_large_error = np.abs(ours[name] - expected) > 1e-3 * float(np.abs(expected).max())
        assert has_large_error.mean() <= 0.01, name  # probabilities at the edge between two bf16
    check_one_thread(ours, graph, inputs)


def test_rounding_is_to_even_and_keeps_what_is_not_finite() -> None:
    x = np.float32([1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf, 3.4e38, 1e-40])
    assert round_to_bf16(x)[:5].tolist() == [1.0, 1 + 4 * 2**-8, np.inf, -np.inf, np.inf]
    assert np.isnan(round_to_bf16(np.float32([np.nan]))).all()
    y = np.full((5, 8), np.nan, np.float32)
    graph = pt.Graph({"y": ops.matmul(input("x", (5, 8)), input("w", (3, 8)), **BF16_PRECISION)})
    assert np.isnan(
        run_graph(graph, {"x": y, "w": np.ones((3, 8), np.float32)}, (backends.cpu,))["y"]
    ).all()


def test_gradients_take_the_precision_of_their_product() -> None:
    w = pt.weight("w", (16, 8))
    y = ops.sum(ops.matmul(input("x", (5, 8)), w, **BF16_PRECISION))
    graph = pt.Graph({"dw": pt.differentiate(y, [w])[w]})
    products = [call for call in graph.calls if call.op.name in ("matmul", "out_prod")]
    assert products and all(call.attrs["precision"] == "bf16" for call in products)


@pytest.mark.parametrize(
    ("precision", "flag", "absent"), [("bf16", "HALF", "AVX512_BF16"), ("bf16x3", "AMX", "AMX")]
)
def test_without_the_instruction_the_product_is_refused(
    precision: str, flag: str, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.panels, flag, False)
    y = ops.matmul(input("x", (5, 8)), input("w", (3, 8)), precision=precision)
    graph = pt.Graph({"y": y})
    with pytest.raises(InputError, match=f"precision {precision}: this CPU has no {absent}"):
        run_graph(graph, values(graph), (backends.cpu,))


def test_other_precisions_are_refused() -> None:
    with pytest.raises(
        pt.GraphError, match="precision is bf61; it must be one of f32, bf16, bf16x3"
    ):
        ops.matmul(input("x", (5, 8)), input("w", (3, 8)), precision="bf61")


def test_a_prompt_is_read_in_it_and_a_few_tokens_are_not(tmp_path: Path) -> None:
    random_model(tmp_path / "m.gguf", "llama")
    model = open_model(tmp_path / "m.gguf")
    half = replace(model, config=replace(model.config, precision="bf16"))
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 128).tolist()
    exact, rounded = (pt.Context(variant, cells=160, cache="f32") for variant in (model, half))
    a, b = exact.decode(ids), rounded.decode(ids)
    relative_error = np.abs(a - b).max() / np.abs(a).max()
    assert 1e-5 < relative_error < 0.03
    exact.remove(0), rounded.remove(0)
    assert np.array_equal(exact.decode(ids[:33]), rounded.decode(ids[:33]))


@pytest.mark.parametrize(
    ("task", "precision", "absent"),
    [
        (GenerateSettings, "bf16", "AVX512_BF16"),
        (EvaluateSettings, "bf16", "AVX512_BF16"),
        (EvaluateSettings, "bf16x3", "AMX"),
    ],
)
def test_without_the_instruction_the_commands_refuse_it(
    task: type, precision: str, absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(tmp_path / "m.gguf", "llama")
    monkeypatch.setattr(
        "packtrain.training.training_job.supports_precision", lambda precision: False
    )
    with pytest.raises(InputError, match=f"--precision {precision}: this CPU has no {absent}"):
        if task is GenerateSettings:
            generate(
                GenerateSettings(tmp_path / "m.gguf", prompt="a", precision=precision), Events()
            )
        else:
            options = {"data": tmp_path / "m.gguf", "precision": precision}
            evaluate(EvaluateSettings((tmp_path / "m.gguf",), **options), Events())


@AMX
def test_bf16x3_is_nearly_f32() -> None:
    """Of a product and of the gradients of a loss; what bf16 loses is beside it."""
    errors = {}
    for precision in ("f32", "bf16x3", "bf16"):
        options = {"precision": precision}
        x, w, v = (
            pt.weight(n, s) for n, s in (("x", (70, 515)), ("w", (129, 515)), ("v", (300, 129)))
        )
        targets, weights = input("targets", (70,), i32), input("weights", (70,))
        y = ops.matmul(x, w, **options)
        loss = ops.linear_cross_entropy(y, v, targets, weights, chunk=64, **options)[0]
        outputs = {"y": y} | {str(t.label): g for t, g in pt.differentiate(loss, [x, w, v]).items()}
        graph = pt.Graph(outputs)
        rng = np.random.default_rng(0)
        inputs = values(graph) | {
            t.label: rng.standard_normal(t.shape).astype(np.float32)
            / np.float32(np.sqrt(t.shape[1]))
            for t in (x, w, v)
        }
        ours, expected = run_graph(graph, inputs, (backends.cpu,)), interpret(graph, inputs)
        errors[precision] = [
            np.linalg.norm(ours[n] - expected[n]) / np.linalg.norm(expected[n]) for n in expected
        ]
    assert max(errors["f32"]) < 2e-6 and max(errors["bf16x3"]) < 2e-5
    assert min(errors["bf16"]) > 1e-3


@AMX
def test_steps_in_bf16x3_follow_f32() -> None:
    losses = {}
    for precision in ("f32", "bf16x3", "bf16"):
        training = of_preset("1m", precision)
        losses[precision] = np.array([training.step() for _ in range(6)])
    max_errors = {name: np.abs(loss - losses["f32"]).max() for name, loss in losses.items()}
    assert losses["f32"][-1] < losses["f32"][0] - 0.05
    assert max_errors["bf16x3"] < 2e-5 < max_errors["bf16"] < 0.05
