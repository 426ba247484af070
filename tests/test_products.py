"""Weights as they are stored: shared without a copy, read by products in the types of GGUF."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from benchmarks.watched import private_nbytes_of
from packtrain.dtypes import BLOCK_TYPES, DTYPES, READABLE, TRAINABLE, Dtype
from packtrain.engine import ops
from packtrain.engine.executor import RunError
from packtrain.gguf import GGUF, write_gguf
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.models import transformer
from packtrain.models.model_file import model_metadata
from tests import checks
from tests.models import initial_weights
from tests.test_model_file import TOKENS, vocabulary
from tests.test_quant import SCALES

# ---- shared arrays -------------------------------------------------------------------------------------------


def doubled_weight(name: str = "w") -> pt.Graph:
    return pt.Graph({"y": ops.scale(pt.weight(name, (3, 4)), by=2.0)})


def test_a_shared_array_is_the_leaf(tmp_path: Path) -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_gguf(tmp_path / "w.gguf", {}, {"w": w})
    mapped = GGUF(tmp_path / "w.gguf").array("w")
    session = pt.Session()
    session.share({"w": mapped})
    run = session.executor(pt.place(doubled_weight()))
    assert np.shares_memory(session.view("w"), mapped)
    np.testing.assert_array_equal(run()["y"], 2 * w)


def test_a_shared_array_cannot_be_changed() -> None:
    w = np.ones((3, 4), np.float32)
    session = pt.Session()
    session.share({"w": w})
    session.executor(pt.place(doubled_weight()))
    for change in (
        lambda: session.set({"w": 2 * w}),
        lambda: session.fill("w", lambda array: array.fill(2)),
        lambda: session.executor(pt.place(row_writer())),
    ):
        with pytest.raises(RunError, match="w is a shared array"):
            change()


def row_writer() -> pt.Graph:
    ids = pt.constant("ids", np.array([1]), pt.i32)
    (handle,) = ops.set_rows(pt.weight("w", (3, 4)), pt.input("x", (1, 4)), ids)
    return pt.Graph({}, [handle])


def test_only_arrays_of_the_leafs_own_kind_are_shared_and_in_time() -> None:
    session = pt.Session()
    session.share({"w": np.ones((3, 4)), "v": np.ones((4, 3), np.float32)})
    with pytest.raises(RunError, match=r"w is f32\[3, 4\]; a value of float64 does not fit"):
        session.executor(pt.place(doubled_weight()))
    with pytest.raises(RunError, match=r"v is f32\[3, 4\]; a value of shape \[4, 3\] does not fit"):
        session.executor(pt.place(doubled_weight("v")))
    session.executor(pt.place(doubled_weight("u")))
    with pytest.raises(RunError, match="u has its memory already"):
        session.share({"u": np.ones((3, 4), np.float32)})


def test_a_dirty_session_is_clean_when_all_of_its_own_leaves_are_set() -> None:
    session = pt.Session()
    session.share({"w": np.ones((3, 4), np.float32)})
    session.executor(pt.place(doubled_weight("v")))
    session.executor(pt.place(doubled_weight()))
    session.dirty = "an update failed"
    session.set({"v": np.ones((3, 4), np.float32)})
    assert session.dirty is None


# ---- arrays of blocks ----------------------------------------------------------------------------------------


def test_a_session_keeps_blocks_as_they_are() -> None:
    q8_0 = BLOCK_TYPES["q8_0"]
    w = np.random.default_rng(0).integers(0, 256, (3, 2 * 34), np.uint8).view(q8_0.numpy)
    leaf = pt.weight("w", (3, 64), q8_0)
    session = pt.Session()
    session.executor(pt.place(pt.Graph({"w": leaf})))
    session.set({"w": w})
    np.testing.assert_array_equal(session.get("w"), w)
    assert session.get("w").dtype == w.dtype
    with pytest.raises(RunError, match=r"w is q8_0\[3, 64\]; a value of shape \[3, 1\]"):
        session.set({"w": w[:, :1]})
    with pytest.raises(RunError, match=r"w is q8_0\[3, 64\]; a value of float32 does not fit"):
        session.set({"w": np.ones((3, 2), np.float32)})


# ---- products ------------------------------------------------------------------------------------------------

packed_type = pytest.mark.parametrize("dtype", [t for t in READABLE if t != pt.f32], ids=str)


def random_weights(dtype: Dtype, rows: int, width: int) -> np.ndarray:
    """Random bits of the type, with scales near 0.01; of the ternary ones 0.1, as their values are scales."""
    random = np.random.default_rng(3)
    if dtype in (pt.f16, pt.bf16):
        return quantize(random.standard_normal((rows, width), np.float32), dtype)
    shape = rows, width // dtype.block, dtype.block_nbytes
    bits = random.integers(0, 256, shape, np.uint8)
    unit = 0.1 if dtype.name.startswith("tq") else 0.01
    for i, at in enumerate(SCALES.get(dtype.name, ())):
        bits[..., at : at + 2] = np.float16([unit + 0.01 * i]).view(np.uint8)
    if dtype.name == "mxfp4":
        bits[..., 0] = random.integers(117, 124, shape[:2])  # 2**-11 to 2**-5
    if dtype.name == "iq1_m":  # four bits of the scale in front of each of four shorts
        for i, four in enumerate((0xF, 0x1, 0x1, 0x2)):  # 0.01 as f16 is 0x211F
            bits[..., 49 + 2 * i] = bits[..., 49 + 2 * i] & 0xF | four << 4
    return bits.view(dtype.numpy)[..., 0]


def test_the_weights_of_these_tests_are_ordinary_numbers() -> None:
    for dtype in READABLE[1:]:
        values = dequantize(random_weights(dtype, 9, 512))
        assert np.isfinite(values).all() and 0.01 < values.std() < 50, dtype


def product_graph(dtype: Dtype, m: int, n: int, k: int) -> pt.Graph:
    """Everything that reads a packed matrix, with a gradient where there is one."""
    w, x = pt.weight("w", (n, k), dtype), pt.input("x", (m, k))
    ids = pt.constant("ids", np.arange(m) * 7 % n, pt.i32)
    y = ops.matmul(x, w)
    loss, losses, _, dx, *_ = ops.linear_cross_entropy(
        x, w, ids, pt.input("weights", (m,)), chunk=300
    )
    outputs = {"y": y, "rows": ops.get_rows(w, ids), "loss": loss, "losses": losses, "dx": dx}
    backward_op = (
        ops.matmul_back if dtype != pt.f32 else lambda y, w: ops.matmul(y, ops.transpose(w))
    )
    return pt.Graph(outputs | {"back": backward_op(y, w), "added": ops.matmul(x, w, y)})


@packed_type
@pytest.mark.parametrize("m", (1, 3, 5, 530))
def test_packed_weights_give_what_their_values_give(dtype: Dtype, m: int) -> None:
    n, k = 150, {1: 99, 32: 352}.get(dtype.block, 512)
    packed = random_weights(dtype, n, k)
    inputs = {"x": np.random.default_rng(0).standard_normal((m, k)), "weights": np.full(m, 0.1)}
    actual = checks.run_graph(product_graph(dtype, m, n, k), inputs | {"w": packed})
    expected = checks.run_graph(product_graph(pt.f32, m, n, k), inputs | {"w": dequantize(packed)})
    checks.assert_all_close(actual, expected, f"{dtype} {m}")
    np.testing.assert_array_equal(actual["rows"], expected["rows"])


@pytest.mark.parametrize("dtype", [t for t in READABLE if t not in TRAINABLE], ids=str)
def test_packed_weights_have_no_gradient(dtype: Dtype) -> None:
    w = pt.weight("w", (4, 512), dtype)
    loss = ops.sum(ops.matmul(pt.input("x", (3, 512)), w))
    with pytest.raises(
        pt.GraphError, match="only f32 and bf16 tensors have gradients; w cannot be trained"
    ):
        pt.differentiate(loss, [w])


# ---- gradients through a packed base -------------------------------------------------------------------------

WIDTH, RANK, ROWS = 256, 4, 6


def adapter_graph(dtype: Dtype, packed: bool = True) -> tuple[pt.Graph, dict[str, np.ndarray]]:
    """Two layers with low-rank adapters and a head, packed or as f32; gradients of adapters and input; values."""
    stored = [random_weights(dtype, WIDTH, WIDTH), random_weights(dtype, WIDTH, WIDTH)[::-1].copy()]
    bases = [
        pt.constant(f"w{i}", array, dtype) if packed else pt.constant(f"w{i}", dequantize(array))
        for i, array in enumerate(stored)
    ]
    x = h = pt.input("x", (ROWS, WIDTH))
    adapters = []
    for i, base in enumerate(bases):
        a, b = pt.weight(f"a{i}", (RANK, WIDTH)), pt.weight(f"b{i}", (WIDTH, RANK))
        adapters += [a, b]
        h = ops.scale(h, by=0.05)
        y = ops.matmul(h, base)
        h = ops.silu(ops.matmul(ops.matmul(h, a), b, y))
    targets = pt.constant("targets", np.arange(ROWS), pt.i32)
    shares = pt.constant("shares", np.full(ROWS, 1 / ROWS))
    loss = ops.linear_cross_entropy(ops.scale(h, by=0.01), bases[0], targets, shares)[0]
    gradients = pt.differentiate(loss, [*adapters, x])
    random = np.random.default_rng(5)
    leaf_values = {t.label: random.standard_normal(t.shape, np.float32) for t in [*adapters, x]}
    graph = pt.Graph({"loss": loss} | {f"d/{t.label}": d for t, d in gradients.items()})
    return graph, leaf_values


@pytest.mark.parametrize("name", ("f16", "bf16", "q8_0", "q4_0", "q4_K", "q6_K"))
def test_gradients_through_a_packed_base(name: str) -> None:
    """They are what the specification says in float64 of a base that holds the same values in f32."""
    graph, leaf_values = adapter_graph(DTYPES[name])
    unpacked, _ = adapter_graph(DTYPES[name], packed=False)
    expected = pt.interpret(unpacked, leaf_values)
    actual = checks.run_graph(graph, leaf_values)
    for key, value in expected.items():
        top = float(np.abs(value).max())
        assert top > 1e-4, f"{key} says nothing"
        assert np.abs(actual[key] - value).max() < 1e-4 * top, key


def test_gradients_through_a_packed_base_are_the_slope() -> None:
    graph, leaf_values = adapter_graph(DTYPES["q4_K"])
    float64_values = {n: v.astype(np.float64) for n, v in leaf_values.items()}
    gradients = pt.interpret(graph, float64_values)
    random = np.random.default_rng(11)
    direction = {n: random.standard_normal(v.shape) for n, v in float64_values.items()}
    measured = checks.slope(pt.Graph({"loss": graph.outputs["loss"]}), float64_values, direction)
    checks.assert_slope(
        measured, {n: gradients[f"d/{n}"] * v for n, v in direction.items()}, "packed base"
    )


# ---- memory --------------------------------------------------------------------------------------------------

SHAPE = transformer.Config(len(TOKENS), 128, 256, 12, 1024, 4, 4)
READ = """
import sys
from packtrain import kernels
from packtrain.inference.generator import Generator
from packtrain.common.memory import private_nbytes
from packtrain.models.model_file import open_model

kernels.set_threads(1)  # the stack of another thread is in use or not, by chance
kernels.load_all()
Generator.from_model(open_model(sys.argv[1]), 40).feed([1, 2, 3] * 8)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_weights_of_a_file_take_no_private_memory(tmp_path: Path) -> None:
    """Looked at from outside: a model of so many MiB makes a process grow by its activations and no more."""
    private_sizes = []
    for blocks in (1, SHAPE.block_count):
        config = replace(SHAPE, block_count=blocks)
        packed = {
            n: quantize_matrix(v, BLOCK_TYPES["q8_0"]) for n, v in initial_weights(config).items()
        }
        path = tmp_path / f"{blocks}.gguf"
        write_gguf(path, model_metadata(config, "small") | vocabulary(), packed)
        with subprocess.Popen(
            [sys.executable, "-c", READ, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdin and child.stdout and child.stdout.readline() == b"ready\n"
            private_sizes.append(private_nbytes_of(child.pid))
            child.stdin.write(b"\n")
    weights = 11 * sum(v.nbytes for n, v in packed.items() if n.startswith("blk.0."))
    assert private_sizes[1] - private_sizes[0] < weights / 4, (
        f"{private_sizes[1] - private_sizes[0]:,} of {weights:,} bytes"
    )


def quantize_matrix(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    return quantize(values, dtype) if values.ndim > 1 else values


# ---- debugging -----------------------------------------------------------------------------------------------


def test_a_product_with_infinity_is_found_and_all_inputs_are_named() -> None:
    q8_0 = BLOCK_TYPES["q8_0"]
    packed = random_weights(q8_0, 3, 32)
    packed.view(np.uint8)[0, :2] = np.float16([np.inf]).view(np.uint8)
    y = ops.matmul(pt.input("x", (2, 32)), pt.constant("w", packed, q8_0))
    with pt.debug("nan"), pytest.raises(FloatingPointError, match=r"w: q8_0\[3, 32\]$"):
        checks.run_graph(pt.Graph({"y": y}), {"x": np.ones((2, 32))})
    with pt.debug("compare"):
        good = pt.constant("w", random_weights(q8_0, 3, 32), q8_0)
        checks.run_graph(
            pt.Graph({"y": ops.matmul(pt.input("x", (2, 32)), good)}), {"x": np.ones((2, 32))}
        )


# ---- positions without a target


@pytest.mark.parametrize("dtype", [pt.f32, BLOCK_TYPES["q8_0"]], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_head_leaves_out_positions_without_a_target(dtype: Dtype, share: float) -> None:
    """Losses and gradients are those of the rows with a target alone, in their places; chunks end between them."""
    rng, m, k, n = np.random.default_rng(0), 37, 64, 96
    x = rng.standard_normal((m, k), np.float32)
    w = quantize(rng.standard_normal((n, k), np.float32), dtype) if dtype != pt.f32 else None
    ids = np.where(rng.random(m) < share, rng.integers(0, n, m), -1).astype(np.int32)
    target_rows = np.flatnonzero(ids >= 0)

    def run(x: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
        operands = pt.input("x", x.shape), pt.weight("w", (n, k), dtype)
        targets, weights = pt.input("ids", ids.shape, pt.i32), pt.input("weights", ids.shape)
        results = ops.linear_cross_entropy(*operands, targets, weights, chunk=8)
        session = pt.Session()
        do = session.executor(pt.place(pt.Graph({str(i): t for i, t in enumerate(results)})))
        matrix = np.random.default_rng(1).standard_normal((n, k), np.float32) if w is None else w
        session.set({"w": matrix})
        outputs = do({"x": x, "ids": ids, "weights": np.full(ids.shape, 0.5, np.float32)})
        return list(outputs.values())

    loss, losses, num_correct, dx, *dw = run(x, ids)
    subset_outputs = run(x[target_rows], ids[target_rows]) if target_rows.size else None
    for full, part in zip(
        (losses, num_correct, dx),
        subset_outputs[1:4] if subset_outputs else (None,) * 3,
        strict=True,
    ):
        skipped_rows = np.delete(full, target_rows, axis=0)
        assert not skipped_rows.any()
        if part is not None:
            np.testing.assert_array_equal(full[target_rows], part)
    assert loss == (0.0 if subset_outputs is None else subset_outputs[0])
    if dw:
        np.testing.assert_array_equal(
            dw[0], np.zeros_like(dw[0]) if subset_outputs is None else subset_outputs[4]
        )
