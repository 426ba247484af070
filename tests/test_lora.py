"""Low-rank additions in graphs: they compute what merged matrices compute, and their gradients follow from theirs."""

from dataclasses import replace

import numpy as np
import pytest

from packtrain import Graph, Session, differentiate, interpret, place
from packtrain.dtypes import BLOCK_TYPES
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.models import transformer
from packtrain.models.lora import KEY, A, B, Lora
from packtrain.training.finetune_job import TuneSettings, lora_of
from tests.architectures import CONFIGS
from tests.checks import assert_close
from tests.models import CONFIG, bind_graph, gradient_graph, same_bits, seeded_batch, seeded_weights

ROWS, TIME = 2, 16
LORA = Lora((("blk.1.attn_q.*", 3), ("*attn_*", 4), ("*ffn_down*", 2), ("*ffn_up*", 2)), alpha=8.0)
FUSED = replace(CONFIG, architecture="phi3")
EXPERTS = replace(CONFIG, expert_count=4, expert_used_count=2)


def of_additions(
    config: transformer.Config, types=transformer.NO_TYPES, rows: int = ROWS, num_parts: int = 1
) -> Graph:
    """`loss` and the gradient of every addition."""
    leaves = transformer.weights(config, types)
    loss_graph = transformer.loss(config, leaves, rows, TIME, chunk=16, num_parts=num_parts)
    trained = [leaf for name, leaf in leaves.items() if name.endswith((A, B))]
    gradients = differentiate(loss_graph.loss, trained, loss_graph.block_outputs)
    return Graph({"loss": loss_graph.loss, **{f"d/{w.name}": d for w, d in gradients.items()}})


def merged_weights(tensors: dict[str, np.ndarray], alpha: float) -> dict[str, np.ndarray]:
    def merge_matrix(name: str, value: np.ndarray) -> np.ndarray:
        if name + A not in tensors:
            return value
        a, b = tensors[name + A], tensors[name + B]
        return value + value.dtype.type(alpha / len(a)) * (b @ a)

    return {name: merge_matrix(name, v) for name, v in tensors.items() if not name.endswith((A, B))}


@pytest.mark.parametrize("base", [CONFIG, FUSED], ids=["llama", "phi3"])
def test_additions_are_as_good_as_merged_matrices(base):
    config = replace(base, lora=LORA)
    weights, inputs = seeded_weights(config), seeded_batch(base, ROWS, TIME)
    changed = merged_weights(weights, LORA.alpha)
    actual = bind_graph(of_additions(config), weights)(inputs)
    expected = bind_graph(gradient_graph(base, ROWS, TIME), changed)(inputs)
    assert_close(actual["loss"], expected["loss"], "loss")
    added = [name for name in changed if name + A in weights]
    assert len(added) == (8 if base is FUSED else 12)
    for name in added:
        a, b, d = weights[name + A], weights[name + B], expected[f"d/{name}"]
        scale = np.float32(LORA.alpha / len(a))
        assert len(a) == (3 if name == "blk.1.attn_q.weight" else 4 if "attn" in name else 2)
        assert_close(actual[f"d/{name}{A}"], scale * b.T @ d, f"{name}{A}")
        assert_close(actual[f"d/{name}{B}"], scale * d @ a.T, f"{name}{B}")


def test_only_the_last_blocks_have_additions_where_so_many_are_asked_for():
    lora = replace(LORA, last=1)
    names = [n for n in transformer.weights(replace(CONFIG, lora=lora)) if n.endswith(A)]
    assert names and all(name.startswith("blk.1.") for name in names)


@pytest.mark.parametrize("base", [CONFIG, EXPERTS], ids=["llama", "experts alone"])
def test_dropout_is_drawn_from_seed_and_step_alone(base):
    lora = replace(LORA, dropout=0.5, ranks=LORA.ranks if base is CONFIG else (("*_exps*", 2),))
    config = replace(base, lora=lora)
    run, inputs = (
        bind_graph(of_additions(config), seeded_weights(config)),
        seeded_batch(CONFIG, ROWS, TIME),
    )

    def run_step(seed: int, step: int):
        return run(inputs | {KEY: np.array([[seed, step, 0]])})

    reference = run_step(3, 1)
    assert same_bits(run_step(3, 1), reference)
    assert run_step(3, 2)["loss"] != reference["loss"] != run_step(4, 1)["loss"]


@pytest.mark.parametrize("base", [CONFIG, FUSED], ids=["llama", "phi3"])
def test_dropout_drops_the_same_however_a_step_is_split(base):
    """Into micro-batches one after the other, or into parts that go through each block in turn."""
    config, rows = replace(base, lora=replace(LORA, dropout=0.5)), 4
    weights, inputs = seeded_weights(config), seeded_batch(base, rows, TIME)
    split_keys = np.array([[3, 1, index] for index in range(rows)])

    def run_graph(batch: dict[str, np.ndarray], keys: np.ndarray) -> dict[str, np.ndarray]:
        graph = of_additions(config, rows=len(batch["tokens"]), num_parts=len(keys))
        return bind_graph(graph, weights)(batch | {KEY: keys})

    unsplit = run_graph(inputs, split_keys[:1])
    in_parts = run_graph(inputs, split_keys)
    one_by_one = [
        run_graph({name: value[i : i + 1] for name, value in inputs.items()}, split_keys[i : i + 1])
        for i in range(rows)
    ]
    for name, value in unsplit.items():
        assert_close(in_parts[name], value, name)
        assert_close(np.sum([result[name] for result in one_by_one], axis=0), value, name)
    alike = run_graph(inputs, split_keys[:1].repeat(rows, axis=0))
    assert abs(alike["loss"] - unsplit["loss"]) > 1e-4


@pytest.mark.parametrize("dtype", ["q8_0", "q4_K"])
def test_gradients_on_packed_matrices_are_those_of_what_they_hold(dtype):
    """Merged in float64, as the specification says, which tests/test_golden.py compares with PyTorch."""
    wide_config = replace(CONFIG, embedding_length=256, feed_forward_length=512)
    config, packed = replace(wide_config, lora=LORA), BLOCK_TYPES[dtype]
    weights = seeded_weights(config)
    base = {
        name: quantize(value, packed)
        for name, value in weights.items()
        if value.ndim == 2 and not name.endswith((A, B))
    }
    session, inputs = Session(), seeded_batch(wide_config, ROWS, TIME)
    session.share(base)
    run = session.executor(place(of_additions(config, dict.fromkeys(base, packed))))
    session.set({name: value for name, value in weights.items() if name not in base})
    actual = run(inputs)

    w = {name: v.astype(np.float64) for name, v in weights.items()}
    w |= {name: dequantize(array).astype(np.float64) for name, array in base.items()}
    expected = interpret(
        gradient_graph(wide_config, ROWS, TIME), merged_weights(w, LORA.alpha) | inputs
    )
    assert_close(actual["loss"], expected["loss"], "loss", 1e-5)
    added = [name.removesuffix(A) for name in w if name.endswith(A)]
    assert len(added) == 12
    for name in added:
        a, b, d = w[name + A], w[name + B], expected[f"d/{name}"]
        scale = LORA.alpha / len(a)
        for part, value in ((A, scale * b.T @ d), (B, scale * d @ a.T)):
            relative_error = np.linalg.norm(actual[f"d/{name}{part}"] - value) / np.linalg.norm(
                value
            )
            assert relative_error < 1e-4, f"{name}{part}: {relative_error}"


def test_experts_behind_blocks_without_any_have_adapters() -> None:
    config = CONFIGS["glm4moe"]
    leaves = transformer.weights(replace(config, lora=lora_of(TuneSettings(), config)))
    adapted = {name.removesuffix(A) for name in leaves if name.endswith(A)}
    for name in ("gate", "up", "down"):
        assert {f"blk.0.ffn_{name}.weight", f"blk.2.ffn_{name}_exps.weight"} <= adapted
        assert f"blk.1.ffn_{name}_shexp.weight" in adapted
    assert not any("norm" in name or "gate_inp" in name or "bias" in name for name in adapted)
