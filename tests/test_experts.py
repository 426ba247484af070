"""A mixture of experts as a whole, against PyTorch; what its routing promises; what is refused."""

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.engine import ops
from packtrain.kernels.quant import quantized_arrays
from tests import checks

T, C, E, F = 40, 48, 6, 65  # tokens, width, experts, feed-forward width
SHAPES = {
    "x": (2, T // 2, C), "gate_inp": (E, C), "gate": (E, F, C), "up": (E, F, C), "down": (E, C, F),
    "acc": (2, T // 2, C),
}  # fmt: skip


def block(used: int, norm: bool) -> pt.Graph:
    """The sum of the squares of a mixture, and its gradients."""
    leaves = [pt.input(name, shape) for name, shape in SHAPES.items()]
    y = ops.experts(*leaves, used=used, norm=norm)
    loss = ops.sum(ops.sqr(y))
    grads = pt.differentiate(loss, leaves)
    return pt.Graph({"y": y, "loss": loss} | {f"d/{t.label}": g for t, g in grads.items()})


def random_values(seed: int = 0) -> dict[str, np.ndarray]:
    """Values in which expert 2 is chosen by nobody."""
    rng = np.random.default_rng(seed)
    values = {name: rng.standard_normal(shape) * 0.3 for name, shape in SHAPES.items()}
    values["x"][..., 0] = 3
    values["gate_inp"][2, 0] = -9
    return values


def one_by_one(values: dict[str, np.ndarray], used: int, norm: bool) -> np.ndarray:
    """The mixture token by token and expert by expert."""
    rows = []
    for x, acc in zip(values["x"].reshape(T, C), values["acc"].reshape(T, C), strict=True):
        p = np.exp(values["gate_inp"] @ x)
        p /= p.sum()
        top = np.argsort(-p)[:used]
        share = p[top] / p[top].sum() if norm else p[top]
        for weight, e in zip(share, top, strict=True):
            gate, up = values["gate"][e] @ x, values["up"][e] @ x
            acc = acc + weight * (values["down"][e] @ (gate / (1 + np.exp(-gate)) * up))
        rows.append(acc)
    return np.stack(rows).reshape(SHAPES["x"])


def in_torch(values: dict[str, np.ndarray], used: int, norm: bool) -> dict[str, np.ndarray]:
    """The same and its gradients by PyTorch in float64."""
    import torch

    t = {
        name: torch.tensor(v, dtype=torch.float64, requires_grad=True) for name, v in values.items()
    }
    rows = []
    for x, acc in zip(t["x"].reshape(T, C), t["acc"].reshape(T, C), strict=True):
        p = torch.softmax(t["gate_inp"] @ x, 0)
        top = torch.topk(p, used)
        share = top.values / top.values.sum() if norm else top.values
        for weight, e in zip(share, top.indices, strict=True):
            hidden = torch.nn.functional.silu(t["gate"][e] @ x) * (t["up"][e] @ x)
            acc = acc + weight * (t["down"][e] @ hidden)
        rows.append(acc)
    y = torch.stack(rows).reshape(SHAPES["x"])
    loss = y.square().sum()
    loss.backward()
    outputs = {"y": y, "loss": loss} | {f"d/{name}": leaf.grad for name, leaf in t.items()}
    return {name: value.detach().numpy() for name, value in outputs.items()}


each_routing = pytest.mark.parametrize(
    ("used", "norm"), [(2, True), (3, False), (1, True), (E, True)]
)


@pytest.mark.torch
@each_routing
def test_a_mixture_and_its_gradients_equal_pytorch(used: int, norm: bool) -> None:
    values, graph = random_values(), block(used, norm)
    expected = in_torch(values, used, norm)
    checks.assert_all_close(pt.interpret(graph, values), expected, "float64", 1e-9)
    small = {name: value.astype(np.float32) for name, value in values.items()}
    checks.assert_all_close(checks.run_graph(graph, small), expected, "float32", 1e-4)


def test_an_expert_that_nobody_chose_has_gradient_zero() -> None:
    values = {name: value.astype(np.float32) for name, value in random_values().items()}
    got = checks.run_graph(block(2, True), values)
    for name in ("gate", "up", "down"):
        assert not got[f"d/{name}"][2].any()
        assert all(got[f"d/{name}"][e].any() for e in range(E) if e != 2)


@each_routing
def test_a_mixture_is_that_of_its_tokens_and_experts(used: int, norm: bool) -> None:
    """And its gradients in f32 are those of the specification, which are its slope; without PyTorch, too."""
    values, graph = random_values(), block(used, norm)
    reference = pt.interpret(graph, values)
    checks.assert_all_close(
        {"y": reference["y"]}, {"y": one_by_one(values, used, norm)}, "float64", 1e-9
    )
    rng = np.random.default_rng(1)
    direction = {name: rng.standard_normal(value.shape) * 1e-2 for name, value in values.items()}
    measured = checks.slope(pt.Graph({"loss": graph.outputs["loss"]}), values, direction)
    checks.assert_slope(
        measured, {n: reference[f"d/{n}"] * step for n, step in direction.items()}, "mixture"
    )
    small = {name: value.astype(np.float32) for name, value in values.items()}
    checks.assert_all_close(checks.run_graph(graph, small), reference, "float32", 1e-4)


def test_threads_change_no_bit() -> None:
    values = {name: value.astype(np.float32) for name, value in random_values().items()}
    parallel = checks.run_graph(block(2, True), values)
    count = kernels.threads()
    kernels.set_threads(1)
    serial = checks.run_graph(block(2, True), values)
    kernels.set_threads(count)
    checks.assert_same_bits(serial, parallel, "threads")


@pytest.mark.parametrize("dtype", [pt.dtypes.DTYPES["q8_0"], pt.f16], ids=str)
def test_packed_experts_compute_what_their_values_do(dtype: pt.dtypes.Dtype) -> None:
    """The gradient for x through packed matrices, for which there is none themselves."""
    rng, shapes = (
        np.random.default_rng(2),
        {"gate": (E, 96, 64), "up": (E, 96, 64), "down": (E, 64, 96)},
    )
    values = {
        name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()
    }
    inputs = {"x": rng.standard_normal((T, 64)), "gate_inp": rng.standard_normal((E, 64))}
    inputs = {name: value.astype(np.float32) for name, value in inputs.items()}
    results = []
    for packed in (True, False):
        x, router = (pt.input(name, value.shape) for name, value in inputs.items())
        stored = [quantized_arrays.quantize(value, dtype) for value in values.values()]
        matrices = [
            pt.constant("w", s, dtype)
            if packed
            else pt.constant("w", quantized_arrays.dequantize(s))
            for s in stored
        ]
        loss = ops.sum(ops.sqr(ops.experts(x, router, *matrices, used=2)))
        slopes = pt.differentiate(loss, [x, router])
        outputs = {"loss": loss} | {f"d/{t.label}": d for t, d in slopes.items()}
        results.append(checks.run_graph(pt.Graph(outputs), inputs))
    checks.assert_all_close(*results, f"{dtype} against f32", 2e-5)


def test_equal_logits_go_to_the_lower_experts() -> None:
    x = np.zeros((3, 5), np.float32)
    x[1, 2:] = 1
    graph = pt.Graph({"ids": ops.top_k(pt.input("x", x.shape), k=2)})
    expected = [[0, 1], [2, 3], [0, 1]]
    np.testing.assert_array_equal(checks.run_graph(graph, {"x": x})["ids"], expected)


def test_not_a_number_routes_somewhere_and_shows_in_the_result() -> None:
    values = {name: value.astype(np.float32) for name, value in random_values().items()}
    values["x"][0, 0] = np.nan
    y = checks.run_graph(block(2, True), values)["y"]
    assert np.isnan(y[0, 0]).all()
    assert np.isfinite(y.reshape(T, C)[1:]).all()


def test_what_cannot_be_routed_is_refused() -> None:
    with pytest.raises(pt.GraphError, match="k is 9; it must be 1 to 8"):
        ops.top_k(pt.input("x", (3, 8)), k=9)
    descending = pt.constant("ids", np.array([1, 0]), pt.i32)
    y = ops.matmul_id(pt.input("x", (2, 3)), pt.input("w", (2, 4, 3)), descending)
    with pytest.raises(IndexError, match="matmul_id: ids must ascend"):
        checks.run_graph(pt.Graph([y]), {"x": np.ones((2, 3)), "w": np.ones((2, 4, 3))})
    out_of_range = pt.constant("ids", np.array([0, 2]), pt.i32)
    y = ops.matmul_id(pt.input("x", (2, 3)), pt.input("w", (2, 4, 3)), out_of_range)
    with pytest.raises(IndexError, match="matmul_id: index 2 at position 1 is outside 0 to 1"):
        checks.run_graph(pt.Graph([y]), {"x": np.ones((2, 3)), "w": np.ones((2, 4, 3))})
