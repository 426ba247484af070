"""`packtrain quantize`: the types llama-quantize chooses, values of kernels.quantized_arrays, the rest as it was."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli import quantize
from packtrain.common.errors import InputError
from packtrain.dtypes import DTYPES, f16, f32
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.kernels.quant import quantized_arrays
from packtrain.models import quant_recipe
from packtrain.models.quant_recipe import MIXES, tensor_dtypes
from packtrain.workflows.quantization import QuantizeSettings
from tests import mixes
from tests.mixes import SHAPES, write_shape

Capture = pytest.CaptureFixture[str]
MATRIX, NORM = "blk.0.ffn_down.weight", "blk.0.ffn_norm.weight"


def check_types(shape: str, folder: Path) -> None:
    write_shape(folder / "m.gguf", SHAPES[shape])
    gguf, recorded = GGUF(folder / "m.gguf"), mixes.load()
    for of, name, options in mixes.cases():
        if of == shape:
            tensor_types = tensor_dtypes(
                gguf, MIXES[name], **mixes.quantize_options(name, options)[1]
            )
            expected = recorded[f"{shape}: {name}{options}"].split()
            assert list(map(str, tensor_types.values())) == expected, f"{name}{options}"


@pytest.mark.parametrize("shape", SHAPES)
def test_types_are_those_llama_quantize_chooses(shape: str, tmp_path: Path):
    check_types(shape, tmp_path)


FAULTS = {
    "tied": (quant_recipe, "_gets_more_bits", lambda i, count: i < count // 8),
    "last block first": (quant_recipe, "_tensor_order", lambda name: 0),
    "two experts": (quant_recipe, "_block_index", lambda name: None),
    "rows of 96": (
        quant_recipe,
        "fit_block_width",
        lambda dtype, width: f16 if width % dtype.block else dtype,
    ),
    "eight experts": (quant_recipe, "NUM_RICH_EXPERTS", 4),
    "untied": (quant_recipe, "NUM_FIRST_VALUES", 3),
    "few values serve many": (quant_recipe._DtypeRules, "_is_70b", lambda rules: False),
}


@pytest.mark.parametrize("shape", FAULTS)
def test_a_rule_that_is_wrong_is_seen(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*FAULTS[shape])
    with pytest.raises(AssertionError):
        check_types(shape, tmp_path)


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> QuantizeSettings:
    write_shape(tmp_path / "m.gguf", SHAPES["untied"])
    return QuantizeSettings(tmp_path / "m.gguf", tmp_path / "q.gguf", "q4_k_m")


def with_value(source_path: Path, output_path: Path, name: str, value: float) -> Path:
    """A copy with one value changed."""
    gguf = GGUF(source_path)
    tensors = {name: gguf.array(name) for name in gguf.entries}
    tensors[name] = tensors[name].copy()
    tensors[name].flat[-1] = value
    write_gguf(output_path, gguf.values, tensors)
    return output_path


def test_weights_are_packed_and_the_rest_is_as_it_was(settings: QuantizeSettings, capsys: Capture):
    assert quantize.run(settings) == 0
    source, quantized = GGUF(settings.model), GGUF(settings.output)
    types = tensor_dtypes(source, MIXES["Q4_K_M"])
    assert list(quantized.entries) == list(source.entries)
    assert {str(dtype) for dtype in types.values()} == {"f32", "q4_K", "q6_K"}
    for name, dtype in types.items():
        expected = (
            source.array(name)
            if dtype is f32
            else quantized_arrays.quantize(source.array(name), dtype)
        )
        assert quantized.entries[name].dtype is dtype
        assert quantized.array(name).tobytes() == expected.tobytes(), name
    file_keys = {"general.file_type": 15, "general.quantization_version": 2}
    assert quantized.metadata == source.metadata | file_keys
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(types) + 1
    first = source.array("token_embd.weight")
    error_norm = np.linalg.norm(
        quantized_arrays.dequantize(quantized.array("token_embd.weight")) - first
    )
    expected = f"token_embd.weight [2, 512] f32 -> q4_K 0.00 -> 0.00 MiB error {error_norm / np.linalg.norm(first):.2%}"
    assert " ".join(lines[0].split()) == expected
    assert f"Q4_K_M, {len(types)} tensors" in lines[-1]


def test_rows_that_do_not_divide_are_said(tmp_path: Path, capsys: Capture):
    write_shape(tmp_path / "m.gguf", SHAPES["rows of 96"])
    quantize.run(QuantizeSettings(tmp_path / "m.gguf", tmp_path / "q.gguf", "Q4_K_M"))
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "f32 -> q5_0 " in said["blk.0.attn_q.weight"]
    assert said["blk.0.attn_q.weight"].endswith("  rows of 96 do not fill blocks of q4_K")
    assert "f32 -> q6_K " in said["blk.2.ffn_down.weight"]
    assert "rows of" not in said["blk.2.ffn_down.weight"]


def test_metadata_is_copied_and_what_no_longer_holds_is_not(settings: QuantizeSettings):
    source = GGUF(settings.model)
    extra_metadata = {
        "general.file_type": MetadataValue("u32", 0),
        "general.quantized_by": MetadataValue("string", "somebody"),
        "general.alignment": MetadataValue("u32", 64),
        "tokenizer.ggml.tokens": MetadataValue("string", [b"a", b"\xff"]),
        "tokenizer.ggml.scores": MetadataValue("f32", np.array([0.5, np.nan], np.float32)),
        "x.flag": MetadataValue("bool", True),
    }
    tensors = {name: source.array(name) for name in source.entries}
    write_gguf(settings.model, source.values | extra_metadata, tensors)
    quantize.run(replace(settings, type="Q8_0"))
    output_values = GGUF(settings.output).values
    expected = GGUF(settings.model).values
    assert output_values.keys() == expected.keys() - {"general.quantized_by"} | {
        "general.quantization_version"
    }
    for key in output_values.keys() & expected.keys() - {"general.file_type"}:
        np.testing.assert_equal(output_values[key].value, expected[key].value)
        assert output_values[key].kind == expected[key].kind
    assert output_values["general.file_type"].value == 7


def test_parts_of_tensors_give_the_same_file(
    settings: QuantizeSettings, monkeypatch: pytest.MonkeyPatch
):
    quantize.run(replace(settings, type="Q5_K_S"))
    full_content = settings.output.read_bytes()
    monkeypatch.setattr(
        "packtrain.workflows.quantization.VALUES_PER_CHUNK", 1
    )  # so that each part is one row
    quantize.run(replace(settings, type="Q5_K_S", overwrite=True))
    assert settings.output.read_bytes() == full_content


def test_a_split_file_becomes_one(tmp_path: Path):
    tensors = {
        "token_embd.weight": np.ones((2, 64), np.float32),
        "a.weight": np.ones(3, np.float32),
    }
    for i, (name, value) in enumerate(tensors.items()):
        split = {"split.no": MetadataValue("u16", i), "split.count": MetadataValue("u16", 2)}
        write_gguf(tmp_path / f"m-0000{i + 1}-of-00002.gguf", split, {name: value})
    quantize.run(QuantizeSettings(tmp_path / "m-00002-of-00002.gguf", tmp_path / "q.gguf", "Q8_0"))
    merged = GGUF(tmp_path / "q.gguf")
    assert [str(e.dtype) for e in merged.entries.values()] == ["q8_0", "f32"]
    assert merged.metadata.keys() == {"general.file_type", "general.quantization_version"}


def test_what_is_packed_already_stays_unless_it_is_allowed(settings: QuantizeSettings):
    quantize.run(replace(settings, type="Q8_0"))
    requantize = replace(
        settings, model=settings.output, output=settings.output.with_name("r.gguf")
    )
    with pytest.raises(InputError, match=r"token_embd.weight is already quantized, to q8_0; use"):
        quantize.run(requantize)
    assert not requantize.output.exists()
    quantize.run(replace(requantize, type="Q8_0"))  # nothing to convert
    assert requantize.output.read_bytes() == settings.output.read_bytes()
    quantize.run(replace(requantize, overwrite=True, allow_requantize=True))
    first, second = GGUF(settings.output), GGUF(requantize.output)
    expected = quantized_arrays.quantize(
        quantized_arrays.dequantize(first.array(MATRIX)), DTYPES["q6_K"]
    )
    assert second.array(MATRIX).tobytes() == expected.tobytes()


def test_packed_weights_can_be_unpacked(settings: QuantizeSettings):
    quantize.run(replace(settings, type="Q6_K"))
    unpack_settings = replace(
        settings, model=settings.output, output=settings.output.with_name("f.gguf")
    )
    with pytest.raises(InputError, match="is already quantized"):
        quantize.run(replace(unpack_settings, type="F16"))
    quantize.run(
        replace(unpack_settings, type="F32")
    )  # loses nothing, so nothing has to be allowed
    packed, unpacked = GGUF(settings.output), GGUF(unpack_settings.output)
    assert {e.dtype for e in unpacked.entries.values()} == {f32}
    np.testing.assert_array_equal(
        unpacked.array(MATRIX), quantized_arrays.dequantize(packed.array(MATRIX))
    )


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("name", (MATRIX, NORM))
def test_weights_that_are_no_numbers_are_refused(
    settings: QuantizeSettings, name: str, value: float
):
    settings.output.write_bytes(b"before")
    bad = with_value(settings.model, settings.model.with_name("bad.gguf"), name, value)
    with pytest.raises(InputError, match=rf"bad.gguf: {name} has values that are not finite"):
        quantize.run(replace(settings, model=bad, overwrite=True))
    assert settings.output.read_bytes() == b"before"


@pytest.mark.parametrize(("mix", "dtype"), (("F16", "f16"), ("Q4_0", "q4_0"), ("Q4_K_M", "q6_K")))
def test_weights_that_are_too_large_for_a_type_are_refused(
    settings: QuantizeSettings, mix: str, dtype: str
):
    large = with_value(settings.model, settings.model.with_name("large.gguf"), MATRIX, 1e9)
    with pytest.raises(InputError, match=rf"{MATRIX} has values too large for {dtype}; use"):
        quantize.run(replace(settings, model=large, type=mix))
    quantize.run(replace(settings, model=large, type="BF16"))


def test_the_smallest_types_need_an_importance_matrix(settings: QuantizeSettings, tmp_path: Path):
    small = replace(settings, type="IQ2_XXS")
    with pytest.raises(InputError, match=r"blk.0.attn_q.weight would be iq2_xxs, .* `packtrain im"):
        quantize.run(small)
    weights = tmp_path / "i.gguf"
    mixes.write_weights(weights, GGUF(settings.model))
    quantize.run(replace(small, imatrix=weights))
    source, quantized = GGUF(settings.model), GGUF(settings.output)
    for name, entry in quantized.entries.items():
        if entry.dtype is DTYPES["iq2_xxs"]:
            values = source.array(name)
            ones = np.ones(values.shape[-1], np.float32)
            assert (
                quantized.array(name).tobytes()
                == quantized_arrays.quantize(values, entry.dtype, ones).tobytes()
            )
    assert {str(e.dtype) for e in quantized.entries.values()} == {"f32", "q2_K", "q5_K", "iq2_xxs"}
    pure_settings = replace(small, imatrix=weights, pure=True, overwrite=True)
    # no importance matrix has weights for it
    with pytest.raises(
        InputError, match=r"d.weight would be iq2_xxs.*with --token-embedding-type$"
    ):
        quantize.run(pure_settings)
    quantize.run(replace(pure_settings, token_embedding_type="q2_k", output_tensor_type="q2_k"))
    assert str(GGUF(settings.output).entries["token_embd.weight"].dtype) == "q2_K"


@pytest.mark.skipif(os.name == "nt", reason="no such pipes on Windows")
def test_the_file_is_written_also_if_no_one_reads_the_table(settings: QuantizeSettings):
    reads, writes = os.pipe()
    os.close(reads)
    command = "-u", "-m", "packtrain", "quantize", str(settings.model), str(settings.output), "q8_0"
    process = subprocess.run([sys.executable, *command], stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (process.returncode, process.stderr) == (0, b"")
    assert GGUF(settings.output).entries.keys() == GGUF(settings.model).entries.keys()


def test_wrong_settings_are_said_before_any_work(settings: QuantizeSettings):
    wrong = {
        r"type: Q9 is unknown; it must be one of F32, F16, BF16, Q4_0": {"type": "Q9"},
        r"--output-tensor-type: iq2_xs is unknown; it must be one of": {
            "output_tensor_type": "iq2_xs"
        },
        r"--token-embedding-type: x is unknown": {"token_embedding_type": "x"},
        r"m.gguf is one of the files that are read; give another name": {
            "output": settings.model,
            "overwrite": True,
        },
        r"texts.txt is one of the files that are read; give another name": {
            "output": settings.model.with_name("texts.txt"),
            "calibrate": settings.model.with_name("texts.txt"),
            "overwrite": True,
        },
        r"output: .* is a folder": {"output": settings.output.parent},
    }
    settings.model.with_name("texts.txt").write_text("a text")
    for said, change in wrong.items():
        with pytest.raises(InputError, match=said):
            quantize.run(replace(settings, **change))
    settings.output.write_bytes(b"before")
    with pytest.raises(InputError, match=r"q.gguf exists; give another name, or --overwrite"):
        quantize.run(settings)
    assert settings.output.read_bytes() == b"before"


def test_a_type_must_fit_the_rows_it_is_asked_for(tmp_path: Path):
    write_shape(tmp_path / "m.gguf", SHAPES["rows of 40"])
    settings = QuantizeSettings(
        tmp_path / "m.gguf", tmp_path / "q.gguf", "Q8_0", token_embedding_type="Q8_0"
    )
    with pytest.raises(
        InputError, match=r"rows of token_embd.weight have 40 values; q8_0 packs 32"
    ):
        quantize.run(settings)
    quantize.run(replace(settings, token_embedding_type=None))
    assert GGUF(settings.output).entries["token_embd.weight"].dtype is f16


def test_types_that_cannot_be_read_are_copied_or_refused(tmp_path: Path):
    dtype = DTYPES["q1_0"]
    tensors = {
        "blk.0.x_norm.weight": np.zeros((2, 1), dtype.numpy),
        "ids": np.arange(5, dtype=np.int32),
        "scale": np.float32(1).reshape(()),
        "none.weight": np.zeros((0, 32), np.float32),
    }
    write_gguf(tmp_path / "m.gguf", {}, tensors)
    settings = QuantizeSettings(tmp_path / "m.gguf", tmp_path / "q.gguf", "Q8_0")
    quantize.run(settings)
    copied = GGUF(tmp_path / "q.gguf")
    assert {name: copied.array(name).tobytes() for name in copied.entries} == {
        name: value.tobytes() for name, value in tensors.items()
    }
    write_gguf(tmp_path / "m.gguf", {}, {"token_embd.weight": np.zeros((2, 1), dtype.numpy)})
    with pytest.raises(InputError, match=r"token_embd.weight is q1_0, which cannot be converted"):
        quantize.run(replace(settings, overwrite=True, allow_requantize=True))


def test_an_adapter_is_refused(settings: QuantizeSettings) -> None:
    write_gguf(settings.model, {"general.type": MetadataValue("string", "adapter")}, {})
    with pytest.raises(InputError, match=r"m.gguf is an adapter, which stays in f32; merge it"):
        quantize.run(settings)
