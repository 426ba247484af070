"""Training in the blocks that a file will have: what is stored, its gradients, runs, merges, refusals."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.devtools.check.check_cases import run_graph
from packtrain.devtools.check.op_samples import store_values
from packtrain.dtypes import RECODABLE, Dtype
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.ops.stored_values import stored_rows
from packtrain.engine.optim import AdamW
from packtrain.gguf import GGUF
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models.lora import Lora
from packtrain.models.model_file import open_model
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training.monitoring import metrics_file
from tests.architectures import random_model
from tests.test_train import said

ROWS, RANK = 40, 4


def random_matrices(dtype: Dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix with ordinary values, and A and B whose product is a small part of them."""
    rng = np.random.default_rng(dtype.number)
    w = store_values(rng.standard_normal((ROWS, 512)).astype(np.float32), dtype)
    if dtype.name == "q2_K":  # random scales would differ too much
        raw = w.view(np.uint8).reshape(*w.shape, -1)
        raw[..., :16], raw[..., 80:] = 0x88, np.float16([0.1, 0.1]).view(np.uint8)
    a = rng.standard_normal((RANK, 512)).astype(np.float32)
    b = rng.standard_normal((ROWS, RANK)).astype(np.float32)
    return w, a, b


@pytest.mark.parametrize("dtype", RECODABLE, ids=str)
def test_without_an_addition_no_value_changes(dtype: Dtype) -> None:
    w, a, b = random_matrices(dtype)
    before = dequantize(w)
    after = dequantize(stored_rows(w, a, 0 * b, 1.0, 0))
    if dtype.name == "q8_0":  # its lowest code has no counterpart, and is not used
        before = np.where(before == before.min(), after, before)
    assert np.array_equal(after, before)


@pytest.mark.parametrize("dtype", RECODABLE, ids=str)
def test_small_additions_are_kept_on_average(dtype: Dtype) -> None:
    """Rounding to the nearest alone would lose all of an addition of less than half a step."""
    w, _, _ = random_matrices(dtype)
    before, ones = dequantize(w), np.ones((1, 512), np.float32)
    sizes = np.abs(before).mean(-1, keepdims=True)

    def moved(by: float) -> np.ndarray:
        """How far values move if the same is added to all of a row."""
        return dequantize(stored_rows(w, ones, (by * sizes).astype(np.float32), 1.0, 0)) - before

    inside = (moved(4.0) > 0) & (moved(-4.0) < 0)  # neither the least nor the largest of a group
    expected = np.broadcast_to(0.08 * sizes, before.shape)[inside].mean()
    assert inside.mean() > 0.3
    assert moved(0.08)[inside].mean() == pytest.approx(expected, rel=0.2)
    assert moved(-0.08)[inside].mean() == pytest.approx(-expected, rel=0.2)


@pytest.mark.parametrize("dtype", RECODABLE, ids=str)
def test_rows_are_the_same_alone_and_together(dtype: Dtype) -> None:
    w, a, b = random_matrices(dtype)
    all_rows = stored_rows(w, a, b, 0.01, 0)
    parts = [stored_rows(w[i : i + 7], a, b[i : i + 7], 0.01, i) for i in range(0, ROWS, 7)]
    assert np.array_equal(all_rows, np.concatenate(parts))
    assert not np.array_equal(all_rows[1:], stored_rows(w[1:], a, b[1:], 0.01, 0))


def test_gradients_are_those_of_the_exact_sum() -> None:
    rng, (w, a, b) = np.random.default_rng(1), random_matrices(RECODABLE[0])
    x = pt.weight("x", (2, 3, 512))
    leaves = [x, pt.weight("a", a.shape), pt.weight("b", b.shape)]
    packed = pt.constant("w", w, RECODABLE[0])
    values = {"x": rng.standard_normal((2, 3, 512)), "a": a.astype(float), "b": b.astype(float)}
    weighting = pt.constant("weighting", rng.standard_normal((2, 3, ROWS)).astype(np.float32))

    def gradients(y: pt.Tensor) -> dict[str, np.ndarray]:
        grads = differentiate(ops.sum(ops.mul(y, weighting)), leaves)
        return interpret(Graph({t.label: d for t, d in grads.items()}), values)

    both = ops.stored_sum(packed, leaves[1], leaves[2], by=0.5)
    got = gradients(ops.matmul_stored(x, both, leaves[1], leaves[2], by=0.5))
    low_rank = ops.scale(ops.matmul(x, leaves[1]), by=0.5)
    expected = gradients(ops.matmul(low_rank, leaves[2], ops.matmul(x, packed)))
    for name in ("a", "b"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-9)
    sum_of_both = interpret(Graph({"w": ops.cast(both)}), values)["w"]
    dx = weighting.value.astype(float) @ sum_of_both
    np.testing.assert_allclose(got["x"], dx, rtol=1e-6, atol=1e-6)


def test_the_sum_is_written_again_for_the_backward_pass() -> None:
    w, a, b = random_matrices(RECODABLE[0])
    x, packed = pt.weight("x", (2, 512)), pt.constant("w", w, RECODABLE[0])
    leaves = [pt.weight("a", a.shape), pt.weight("b", b.shape)]
    both = ops.stored_sum(packed, *leaves, by=1.0)
    y = ops.matmul_stored(x, both, *leaves, by=1.0)
    grads = differentiate(ops.sum(ops.sqr(y)), [x, *leaves])
    calls = Graph({t.label: d for t, d in grads.items()}).calls
    assert sum(call.op is ops.stored_sum for call in calls) == 2


# ---- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("aware")
    rng = random.Random(1)
    words = [rng.choice(("sun", "ice", "sea", "sky")) for _ in range(60)]
    lines = [{"prompt": f"say {w}", "completion": " ".join([w] * 3)} for w in words]
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("phi3", "llama tied"):
        random_model(directory / "f32.gguf", name)
        target = directory / f"{name}.gguf"
        assert main(["quantize", str(directory / "f32.gguf"), str(target), "Q4_K_M"]) == 0
    assert (
        main(["quantize", str(directory / "f32.gguf"), str(directory / "iq3.gguf"), "IQ3_S"]) == 0
    )
    random_model(directory / "experts.gguf", "llama experts")
    return directory


def run_finetune(folder: Path, base: str, output: Path, *extra_flags: str) -> int:
    common_flags = ["--batch-size", "2", "--lr", "0.003", "--val-split", "0.2", "--no-tensorboard"]
    io_flags = [
        str(folder / f"{base}.gguf"),
        "--data",
        str(folder / "data.jsonl"),
        "-o",
        str(output),
    ]
    return main(["finetune", *io_flags, *common_flags, "--iters", "12", "--aware", *extra_flags])


@pytest.mark.parametrize("base", ["phi3", "llama tied"])
def test_the_file_is_what_was_trained(base, folder, tmp_path, capsys):
    """Fused matrices, too: the loss of the file is the last one of validation, bit for bit."""
    output = tmp_path / "tuned.gguf"
    assert run_finetune(folder, base, output) == 0, said(capsys)
    (line,) = [line for line in said(capsys) if line.startswith("validation loss: base")]
    assert "(100% of the gain)" in line
    records = [*metrics_file.read(tmp_path / "tuned.run/metrics.jsonl")]
    last = next(r for r in reversed(records) if "val_loss" in r)["val_loss"]
    assert f"with the adapter {last:.4f}, merged {last:.4f}" in line
    before, after = GGUF(folder / f"{base}.gguf"), GGUF(output)
    assert {n: e.dtype for n, e in before.entries.items()} == {
        n: e.dtype for n, e in after.entries.items()
    }
    changed = [n for n in before.entries if not np.array_equal(before.array(n), after.array(n))]
    assert changed and all(n.startswith("blk.") for n in changed)
    # the adapter alone is merged in the same way
    merged_path, adapter = tmp_path / "again.gguf", tmp_path / "tuned.run/adapter.gguf"
    assert main(["merge", str(folder / f"{base}.gguf"), str(adapter), "-o", str(merged_path)]) == 0
    both = GGUF(merged_path)
    assert all(np.array_equal(both.array(n), after.array(n)) for n in after.entries)


def test_an_adapter_alone_is_named_to_be_merged(folder, tmp_path, capsys):
    """Beside the base it computes what was not trained."""
    output = tmp_path / "adapter.gguf"
    assert run_finetune(folder, "phi3", output, "--merge", "none", "--iters", "1") == 0, said(
        capsys
    )
    lines = said(capsys)
    (command,) = (line for line in lines if line.strip().startswith("packtrain merge"))
    assert not any("--lora" in line for line in lines)
    assert main(command.split()[1:]) == 0
    assert (tmp_path / "adapter-merged.gguf").exists()


def test_a_step_sees_what_is_stored(folder, tmp_path):
    """The forward pass with the adapter beside it gives the loss of the merged matrices."""
    base = open_model(folder / "phi3.gguf")
    name = "blk.0.attn_qkv.weight"
    w = base.gguf.array(name)
    rng = np.random.default_rng(2)
    a = 0.05 * rng.standard_normal((4, w.shape[-1] * 256)).astype(np.float32)
    b = 0.05 * rng.standard_normal((len(w), 4)).astype(np.float32)
    x, leaf = pt.input("x", (3, a.shape[1])), pt.constant("w", w, base.matrix_dtypes()[name])
    factors = [pt.constant("a", a), pt.constant("b", b)]
    both = ops.stored_sum(leaf, *factors, by=1.0)
    y = ops.matmul_stored(x, both, *factors, by=1.0)
    merged = pt.constant("m", stored_rows(w, a, b, 1.0, 0), base.matrix_dtypes()[name])
    got = run_graph(
        Graph({"y": y, "z": ops.matmul(x, merged)}), {"x": rng.standard_normal(x.shape)}
    )
    assert np.abs(got["y"] - got["z"]).max() <= 1e-4 * np.abs(got["z"]).max()
    base_output = run_graph(Graph({"y": ops.matmul(x, leaf)}), {"x": rng.standard_normal(x.shape)})
    assert np.abs(got["y"] - base_output["y"]).max() > 1e-2


def test_a_plan_holds_few_stored_matrices_at_a_time(folder):
    """No weight is unpacked, and each sum lives for one product."""
    model = open_model(folder / "phi3.gguf")
    lora = Lora((("blk.*", 4),), alpha=8.0)
    base = BaseModel(tuple(model.matrix_dtypes().items()))

    def arena(lora: Lora) -> int:
        config = replace(model.config, lora=lora)
        shape = StepShape(config, 1, 16, evaluate=False, base=base)
        return make_plans(shape, AdamW()).arena_nbytes

    largest = max(e.nbytes for n, e in model.gguf.entries.items() if n.startswith("blk."))
    assert arena(replace(lora, aware=True)) <= arena(lora) + 2 * largest


@pytest.mark.parametrize(
    ("base", "extra_flags", "message"),
    [
        ("phi3", ["--full"], "--aware has no effect with --full"),
        ("phi3", ["--type", "q8_0"], "--type has no effect with --aware"),
        ("phi3", ["--lora-dropout", "0.1"], "--lora-dropout has no effect with --aware"),
        ("phi3", ["--merge", "plain"], "--merge has no effect with --aware"),
        ("f32", [], "no matrix that is trained is quantized"),
        ("experts", [], "has experts"),
        ("iq3", [], "--aware: blk.0.attn_q.weight is iq3_s, and it is for matrices of q4_0"),
    ],
)
def test_what_it_is_not_for_is_refused(base, extra_flags, message, folder, tmp_path, capsys):
    assert run_finetune(folder, base, tmp_path / "tuned.gguf", *extra_flags) == 2
    assert message in said(capsys)[-1]
