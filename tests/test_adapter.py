"""Adapters in GGUF files: what is written is read again, what does not fit is refused, and what merging changes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.dtypes import DTYPES
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.models.adapter_file import Adapter, check_fits, read_adapter, write_adapter
from packtrain.models.model_file import open_model
from packtrain.models.rewrite_model import merged_rows, write_changed

RNG = np.random.default_rng(5)
WIDTH, OUT, RANK = 64, 96, 4


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def base_file(path: Path, **tensors: np.ndarray) -> GGUF:
    metadata = {
        "general.architecture": MetadataValue("string", "llama"),
        "general.name": MetadataValue("string", "the base"),
        "tokenizer.ggml.tokens": MetadataValue("string", ["a", "b"]),
    }
    defaults = {"blk.0.attn_q.weight": normal(OUT, WIDTH), "token_embd.weight": normal(8, WIDTH)}
    extra_tensors = {name.replace("__", "."): array for name, array in tensors.items()}
    write_gguf(
        path,
        metadata,
        {**defaults, **extra_tensors, "output_norm.weight": np.ones(WIDTH, np.float32)},
    )
    return GGUF(path)


def an_adapter(**changes: tuple[np.ndarray, np.ndarray]) -> Adapter:
    pairs = {"blk.0.attn_q.weight": (normal(RANK, WIDTH), normal(OUT, RANK))}
    return Adapter("llama", 8.0, pairs | {k.replace("__", "."): v for k, v in changes.items()})


def test_an_adapter_is_read_as_it_was_written(tmp_path: Path):
    adapter = an_adapter()
    write_adapter(tmp_path / "a.gguf", adapter, "mine")
    loaded = read_adapter(tmp_path / "a.gguf")
    assert (loaded.architecture, loaded.alpha) == ("llama", 8.0)
    for name, pair in adapter.lora_pairs.items():
        for expected, actual in zip(pair, loaded.lora_pairs[name], strict=True):
            np.testing.assert_array_equal(expected, actual)
    metadata = GGUF(tmp_path / "a.gguf").metadata
    assert (metadata["general.type"], metadata["adapter.type"]) == ("adapter", "lora")


@pytest.mark.parametrize(
    ("name", "a", "b", "dense"),
    [
        ("m.weight", (RANK, WIDTH), (OUT, RANK), lambda a, b: b @ a),
        ("token_embd.weight", (8, RANK), (WIDTH, RANK), lambda a, b: a @ b.T),
        ("e.weight", (3, RANK, WIDTH), (3, 5, RANK), lambda a, b: (b @ a).reshape(15, WIDTH)),
    ],
)
def test_rows_are_rows_of_the_whole_addition(name, a, b, dense):
    pair = normal(*a), normal(*b)
    adapter = Adapter("llama", 6.0, {name: pair})
    full_delta = 6.0 / RANK * dense(*(half.astype(np.float64) for half in pair))
    for start, stop in (
        (0, len(full_delta)),
        (1, 3),
        (4, 7),
        (len(full_delta) - 1, len(full_delta)),
    ):
        got = adapter.delta_rows(name, start, stop)
        np.testing.assert_allclose(got, full_delta[start:stop], rtol=1e-5, atol=1e-5)


def test_without_alpha_the_scale_is_one():
    assert Adapter("llama", 0.0, an_adapter().lora_pairs).scale_of("blk.0.attn_q.weight") == 1.0


def test_merging_changes_what_it_names_and_nothing_else(tmp_path: Path):
    base = base_file(tmp_path / "base.gguf")
    adapter_a, adapter_b = an_adapter(), an_adapter()
    write_changed(
        tmp_path / "m.gguf",
        base,
        merged_rows(base, [(adapter_a, 1.0), (adapter_b, -0.5)]),
        name="tuned",
    )
    result, name = GGUF(tmp_path / "m.gguf"), "blk.0.attn_q.weight"
    expected = base.array(name).astype(np.float64)
    for adapter, by in ((adapter_a, 1.0), (adapter_b, -0.5)):
        a, b = adapter.lora_pairs[name]
        expected = expected + by * 2.0 * (b.astype(np.float64) @ a)
    np.testing.assert_allclose(result.array(name), expected, rtol=1e-5, atol=1e-5)
    for unchanged_name in ("token_embd.weight", "output_norm.weight"):
        assert result.array(unchanged_name).tobytes() == base.array(unchanged_name).tobytes()
    assert result.metadata["general.name"] == "tuned"
    assert result.metadata["general.base_model.0.name"] == "the base"
    assert result.metadata["tokenizer.ggml.tokens"] == base.metadata["tokenizer.ggml.tokens"]


@pytest.mark.parametrize("stored", ["q8_0", "f16", "bf16"])
def test_a_merged_matrix_keeps_its_type(tmp_path: Path, stored: str):
    values = normal(OUT, WIDTH)
    base = base_file(tmp_path / "b.gguf", blk__0__ffn_up__weight=quantize(values, DTYPES[stored]))
    adapter = an_adapter(blk__0__ffn_up__weight=(normal(RANK, WIDTH), normal(OUT, RANK)))
    write_changed(tmp_path / "m.gguf", base, merged_rows(base, [(adapter, 1.0)]), name="m")
    result, name = GGUF(tmp_path / "m.gguf"), "blk.0.ffn_up.weight"
    assert result.entries[name].dtype is DTYPES[stored]
    expected = dequantize(base.array(name)) + adapter.delta_rows(name, 0, OUT)
    requantized = dequantize(quantize(expected, DTYPES[stored]))
    np.testing.assert_array_equal(dequantize(result.array(name)), requantized)
    write_changed(
        tmp_path / "f.gguf",
        base,
        merged_rows(base, [(adapter, 1.0)]),
        name="m",
        dtype=DTYPES["f32"],
    )
    np.testing.assert_array_equal(GGUF(tmp_path / "f.gguf").array(name), expected)


def test_a_scale_of_zero_gives_the_base(tmp_path: Path):
    base = base_file(tmp_path / "base.gguf")
    write_changed(tmp_path / "m.gguf", base, merged_rows(base, [(an_adapter(), 0.0)]), name="m")
    result = GGUF(tmp_path / "m.gguf")
    for name in base.entries:
        assert result.array(name).tobytes() == base.array(name).tobytes()


def adapter_file(
    path: Path, metadata: Mapping[str, MetadataValue], tensors: Mapping[str, np.ndarray]
) -> Path:
    good = {
        "general.architecture": MetadataValue("string", "llama"),
        "general.type": MetadataValue("string", "adapter"),
        "adapter.type": MetadataValue("string", "lora"),
        "adapter.lora.alpha": MetadataValue("f32", 8.0),
    }
    write_gguf(path, {**good, **metadata}, tensors)
    return path


A, B = {"w.lora_a": normal(RANK, WIDTH)}, {"w.lora_b": normal(OUT, RANK)}


@pytest.mark.parametrize(
    ("said", "metadata", "tensors"),
    [
        (
            "general.type is 'model'; in an adapter",
            {"general.type": MetadataValue("string", "model")},
            A | B,
        ),
        (
            "adapter.type is 'dora'; in an adapter",
            {"adapter.type": MetadataValue("string", "dora")},
            A | B,
        ),
        (
            "lora.alpha is 'x'; it must be a number",
            {"adapter.lora.alpha": MetadataValue("string", "x")},
            A | B,
        ),
        (
            "lora.alpha is nan; it must be a number",
            {"adapter.lora.alpha": MetadataValue("f32", np.nan)},
            A | B,
        ),
        (
            "invocation_tokens is present",
            {"adapter.alora.invocation_tokens": MetadataValue("u32", [1])},
            A | B,
        ),
        ("tensor w.lora_b is missing; halves", {}, A),
        ("tensor w.weight is neither .lora_a nor .lora_b", {}, {"w.weight": normal(2, 2)}),
        ("their ranks must be equal", {}, A | {"w.lora_b": normal(OUT, 3)}),
        (r"w.lora_b is f32\[96\]; it must be a matrix", {}, A | {"w.lora_b": normal(OUT)}),
        ("there are no tensors; an adapter has pairs", {}, {}),
    ],
)
def test_files_that_are_no_adapters_get_one_line(tmp_path: Path, said, metadata, tensors):
    path = adapter_file(tmp_path / "a.gguf", metadata, tensors)
    with pytest.raises(InputError, match=said) as raised:
        read_adapter(path)
    assert "\n" not in str(raised.value) and "a.gguf" in str(raised.value)


@pytest.mark.parametrize(
    ("said", "adapter"),
    [
        ("the adapter is for 'qwen2' and .* is 'llama'", Adapter("qwen2", 1.0, an_adapter().lora_pairs)),
        ("has no tensor blk.9.attn_q.weight; the adapter is for another base",
         Adapter("llama", 1.0, {"blk.9.attn_q.weight": (normal(2, 2), normal(2, 2))})),
        (r"lora_a \[4, 32\] and lora_b \[96, 4\] do not fit \[96, 64\]",
         Adapter("llama", 1.0, {"blk.0.attn_q.weight": (normal(RANK, 32), normal(OUT, RANK))})),
    ],
)  # fmt: skip
def test_adapters_of_another_base_get_one_line(tmp_path: Path, said, adapter):
    base = base_file(tmp_path / "base.gguf")
    with pytest.raises(InputError, match=said) as raised:
        check_fits(adapter, "a.gguf", base)
    assert "\n" not in str(raised.value)
    check_fits(an_adapter(), "a.gguf", base)


def test_an_adapter_in_place_of_a_model_is_named(tmp_path: Path):
    path = tmp_path / "a.gguf"
    write_adapter(path, an_adapter(), "a")
    with pytest.raises(InputError, match="is an adapter, not a model; give its base, and --lora"):
        open_model(path)
