"""Weights that are trained in bf16: how a step rounds them, their gradients, and what training makes of them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import packtrain as pt
from packtrain.dtypes import Dtype
from packtrain.engine.optim import ROUNDING, SGD, AdamW, Optimizer, training_graph
from packtrain.engine.optim.adamw import opt_step_adamw
from packtrain.engine.optim.sgd import opt_step_sgd
from packtrain.engine.tensor import Tensor
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.kernels.rowwise.counter_rng import uniform_numpy
from packtrain.models import transformer
from tests import checks
from tests.faults import replace_kernel
from tests.faults_kernels import to_nearest
from tests.models import CONFIG, bind_graph, seeded_batch, seeded_weights

STEP = 2.0**-7  # between neighbours from 1 to 2

# ---- rounding ------------------------------------------------------------------------------------------------


def rounding_key(step: int) -> np.ndarray:
    return np.array([5, step], np.int64)


def sgd_update(w: np.ndarray, by: np.ndarray, step: int = 1, stream: int = 3) -> np.ndarray:
    """bf16 values less `by`, as a step of gradient descent leaves them."""
    leaf, g = pt.weight("w", w.shape, pt.bf16), pt.input("g", w.shape)
    hyper, gate = pt.constant("hyper", np.array([1.0, 0.0])), pt.constant("gate", np.ones(()))
    inputs = {"w": quantize(w, pt.bf16), "g": by, "key": rounding_key(step)}
    updates = opt_step_sgd(
        leaf, g, hyper, gate, pt.input("key", (2,), pt.i64), decay=True, stream=stream
    )
    return dequantize(checks.run_graph(pt.Graph({}, updates), inputs)["w"])


def test_what_a_bf16_can_be_is_left_as_it_is() -> None:
    all_values = np.arange(1 << 16, dtype=np.uint16).view(pt.bf16.numpy)
    w = dequantize(all_values)
    w = w[np.isfinite(w)]
    for step in range(3):
        np.testing.assert_array_equal(sgd_update(w, np.zeros(w.shape, np.float32), step), w)


@pytest.mark.parametrize("part", (0.01, 0.25, 0.5, 0.9))
def test_the_mean_of_many_draws_is_the_value(part: float) -> None:
    ones = np.ones(200_000, np.float32)
    drawn = (sgd_update(ones, -STEP * part * ones) - 1) / np.float32(STEP)
    assert set(np.unique(drawn)) == {0, 1}
    deviation = (part * (1 - part) / len(ones)) ** 0.5
    assert abs(drawn.mean() - part) < 4 * deviation


def test_steps_and_tensors_draw_anew() -> None:
    ones = np.ones(1000, np.float32)
    half = -STEP / 2 * ones
    drawn = [
        sgd_update(ones, half),
        sgd_update(ones, half, step=2),
        sgd_update(ones, half, stream=4),
    ]
    assert (drawn[0] == sgd_update(ones, half)).all()
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 400 < np.count_nonzero(drawn[a] != drawn[b]) < 600


def adamw(w: Tensor, g: Tensor, hyper: Tensor, gate: Tensor, *key: Tensor) -> tuple[Tensor, ...]:
    m, v = pt.state("m", w.shape), pt.state("v", w.shape)
    return opt_step_adamw(w, g, m, v, hyper, gate, *key, decay=True, stream=9)


def sgd(w: Tensor, g: Tensor, hyper: Tensor, gate: Tensor, *key: Tensor) -> tuple[Tensor, ...]:
    return opt_step_sgd(w, g, hyper, gate, *key, decay=True, stream=9)


@pytest.mark.parametrize("n", (1, 17, 1023, 1025, 8193, 30_000))
@pytest.mark.parametrize(
    ("rule", "hyper"), [(adamw, (1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975)), (sgd, (1e-2, 0.1))]
)
def test_a_step_is_that_of_f32_and_then_rounded(
    rule: Callable[..., tuple[Tensor, ...]], hyper: tuple[float, ...], n: int
) -> None:
    """Bit for bit: 16 bits are added to those that go, and what carries is kept."""
    rest = pt.input("g", (n,)), pt.constant("hyper", np.array(hyper)), pt.constant("gate", 1)
    f32_graph = pt.Graph({}, rule(pt.weight("w", (n,)), *rest))
    packed = pt.Graph({}, rule(pt.weight("w", (n,), pt.bf16), *rest, pt.input("key", (2,), pt.i64)))
    inputs = checks.random_values(f32_graph)
    inputs["w"] = dequantize(quantize(inputs["w"], pt.bf16))
    expected = checks.run_graph(f32_graph, inputs)
    got = checks.run_graph(
        packed, inputs | {"w": quantize(inputs["w"], pt.bf16), "key": rounding_key(7)}
    )
    random = (uniform_numpy(5, 7, 9, n) * 65536).astype(np.uint32)
    halves = (expected["w"].view(np.uint32) + random) >> 16
    np.testing.assert_array_equal(got["w"].view(np.uint16), halves)
    for name in expected.keys() - {"w"}:
        np.testing.assert_array_equal(got[name], expected[name])


# ---- gradients -----------------------------------------------------------------------------------------------

CONFIGS = {
    "tied": CONFIG,
    "a head of its own": replace(CONFIG, tied=False),
    "fused": replace(CONFIG, architecture="phi3"),
    "experts": replace(CONFIG, expert_count=4, expert_used_count=2),
}


def matrices(config: transformer.Config, dtype: Dtype) -> dict[str, Dtype]:
    return {n: dtype for n, leaf in transformer.weights(config).items() if len(leaf.shape) > 1}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gradients_are_those_of_f32_weights_of_the_same_values(config: transformer.Config) -> None:
    results = []
    packed = {n: quantize(v, pt.bf16) for n, v in seeded_weights(config).items() if v.ndim > 1}
    for matrix_values in (packed, {n: dequantize(v) for n, v in packed.items()}):
        leaves = transformer.weights(
            config, matrices(config, pt.bf16) if matrix_values is packed else {}
        )
        outputs = transformer.loss(config, leaves, 2, 16, chunk=16)
        gradients = pt.differentiate(outputs.loss, list(leaves.values()), outputs.block_outputs)
        graph = pt.Graph({"loss": outputs.loss, **{w.label: d for w, d in gradients.items()}})
        results.append(
            bind_graph(graph, seeded_weights(config) | matrix_values)(seeded_batch(config, 2, 16))
        )
    got, expected = results
    assert got.keys() == expected.keys() and len(expected) > 20 - 8 * (config is CONFIGS["fused"])
    for name in expected:
        assert got[name].dtype == np.float32
        off = np.linalg.norm(got[name] - expected[name]) / np.linalg.norm(expected[name])
        assert off < 1e-5, f"{name}: {off}"


# ---- training ------------------------------------------------------------------------------------------------


def loss_decrease(dtype: Dtype, optimizer: Optimizer, steps: int) -> float:
    """By how much steps on one batch lower its loss; all but matrices stay as they are."""
    leaves = transformer.weights(CONFIG, matrices(CONFIG, dtype))
    outputs = transformer.loss(CONFIG, leaves, 2, 16, chunk=16)
    graph = training_graph(
        {"loss": outputs.loss}, [w for w in leaves.values() if len(w.shape) > 1], optimizer
    )
    run = bind_graph(
        graph, {n: quantize(v, leaves[n].dtype) for n, v in seeded_weights(CONFIG).items()}
    )
    losses = []
    for step in range(1, steps + 1):
        inputs = seeded_batch(CONFIG, 2, 16) | optimizer.inputs(step)
        losses.append(
            float(run(inputs | ({ROUNDING: rounding_key(step)} if dtype != pt.f32 else {}))["loss"])
        )
    return losses[0] - losses[-1]


@pytest.mark.parametrize(
    "optimizer", [AdamW(lr=2e-5, weight_decay=0.0), SGD(lr=1e-4)], ids=["adamw", "sgd"]
)
def test_steps_smaller_than_bf16s_own_are_not_lost(optimizer: Optimizer, monkeypatch) -> None:
    """Rounded to the nearest, most weights would stay where they are: a step is a small part of the way to the next."""
    expected, got = loss_decrease(pt.f32, optimizer, 120), loss_decrease(pt.bf16, optimizer, 120)
    for name in ("opt_step_adamw", "opt_step_sgd"):
        replace_kernel(monkeypatch, name, to_nearest)
    lost = loss_decrease(pt.bf16, optimizer, 120)
    assert expected > 0.02
    assert abs(got - expected) < 0.1 * expected
    assert lost < 0.25 * expected
