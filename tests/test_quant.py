"""Packed types against PyPI `gguf`, ggml's own Python: the same bits, read and written; the K and IQ types, which it
does not write, against ggml itself: its bits, but q4_K to q6_K without weights the errors of llama-quantize."""

import gguf
import numpy as np
import pytest

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, DTYPES, READABLE, WRITABLE, Dtype
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from tests import ggml_packed
from tests.ggml_packed import odd_rows, rows_of

# where a block's f16 scales are; the types without have none
SCALES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_K": (80, 82), "q3_K": (108,),
    "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,), "iq3_s": (0,), "iq4_nl": (0,), "iq4_xs": (0,),
    "iq1_s": (0,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "tq1_0": (52,), "tq2_0": (64,),
}  # fmt: skip
BLOCKS = 512
# of llama-quantize: sum of squared errors over sum of squares, for `rows_of`
ERRORS = {
    ("normal", "q4_K"): 5.097724e-03,
    ("normal", "q5_K"): 1.309796e-03,
    ("normal", "q6_K"): 3.188758e-04,
    ("heavy", "q4_K"): 9.948208e-03,
    ("heavy", "q5_K"): 2.657770e-03,
    ("heavy", "q6_K"): 8.329631e-04,
    ("positive", "q4_K"): 1.234334e-03,
    ("positive", "q5_K"): 3.022596e-04,
    ("positive", "q6_K"): 2.225591e-04,
}
MAX_ERROR_RATIO = 1.02  # as much error of theirs is allowed


def ggml_type(dtype: Dtype) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(dtype.number)


def random_blocks(dtype: Dtype, scales: np.ndarray) -> np.ndarray:
    """Random bytes, u8 (blocks, bytes of one), every f16 scale one of `scales`."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (BLOCKS, dtype.block_nbytes), np.uint8)
    for offset in SCALES.get(dtype.name, ()):
        chosen = rng.choice(scales.astype(np.uint16), BLOCKS)
        packed[:, offset : offset + 2] = chosen[:, None].view(np.uint8)
    return packed


def decode_rows(dtype: Dtype, packed: np.ndarray, rows: int = 4) -> np.ndarray:
    return dequantize(packed.reshape(rows, -1).view(dtype.numpy))


every_type = pytest.mark.parametrize("dtype", READABLE, ids=str)


@every_type
def test_values_are_those_of_ggml_bit_for_bit(dtype: Dtype):
    finite = np.arange(1 << 16)[np.arange(1 << 16) & 0x7C00 != 0x7C00]
    packed = random_blocks(dtype, finite)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(packed.reshape(4, -1), ggml_type(dtype))
    actual = decode_rows(dtype, packed)
    assert actual.shape == expected.shape == (4, BLOCKS // 4 * dtype.block)
    both_nan = np.isnan(actual) & np.isnan(expected)  # of f32, f16 and bf16: the payload may differ
    assert ((actual.view(np.uint32) == expected.view(np.uint32)) | both_nan).all()


@every_type
def test_scales_that_are_zero_tiny_infinite_or_no_number_do_no_harm(dtype: Dtype):
    edge_scales = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x7C00, 0xFC00, 0x7E00, 0x7C01])
    packed = random_blocks(dtype, edge_scales)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(packed.reshape(4, -1), ggml_type(dtype))
    np.testing.assert_array_equal(decode_rows(dtype, packed), expected)


@every_type
def test_any_shape_is_read(dtype: Dtype):
    packed = random_blocks(dtype, np.array([0x3C00]))[:24].view(dtype.numpy)
    flat = dequantize(packed.reshape(-1))
    for shape in ((24,), (3, 8), (2, 3, 4), (24, 1)):
        actual = dequantize(packed.reshape(shape))
        assert actual.shape == (*shape[:-1], shape[-1] * dtype.block)
        np.testing.assert_array_equal(actual.reshape(-1), flat)
    assert dequantize(packed.reshape(-1)[:0]).shape == (0,)
    every_second = packed.reshape(4, 6)[::2]
    np.testing.assert_array_equal(dequantize(every_second), flat.reshape(4, -1)[::2])


@pytest.mark.parametrize("width", (1, 15, 16, 17, 40))
@pytest.mark.parametrize("name", ("f16", "bf16"))
def test_rows_of_any_width_end_where_they_should(name: str, width: int):
    dtype = DTYPES[name]
    packed = np.random.default_rng(1).integers(0, 256, (3, width * 2), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(packed, ggml_type(dtype))
    np.testing.assert_array_equal(dequantize(packed.view(dtype.numpy)), expected)


def test_what_cannot_be_read_is_said():
    array = np.zeros((2, 1), BLOCK_TYPES["q1_0"].numpy)
    with pytest.raises(
        ValueError, match=r"q1_0 cannot be read; supported are f32, f16, bf16, q4_0"
    ):
        dequantize(array)


# ---- writing ---------------------------------------------------------------------------------------------------


blockwise = pytest.mark.parametrize(
    "dtype",
    [
        d
        for d in WRITABLE
        if not d.name.endswith("_K") and d.name not in ggml_packed.UNWEIGHED_TYPES
    ],
    ids=str,
)


@blockwise
def test_values_are_packed_as_ggml_packs_them_bit_for_bit(dtype: Dtype):
    x = odd_rows()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf.quants.quantize(x, ggml_type(dtype))
    actual = quantize(x, dtype)
    assert actual.dtype == dtype.numpy
    assert actual.shape == dtype.array_shape(x.shape)
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("name", "rows", "weighed"), list(ggml_packed.cases()))
def test_blocks_are_packed_as_ggml_packs_them_bit_for_bit(name: str, rows: str, weighed: bool):
    x = rows_of(rows)
    weights = ggml_packed.weights_of(x.shape[1]) if weighed else None
    actual = ggml_packed.digest(quantize(x, DTYPES[name], weights))
    assert actual == ggml_packed.load()[f"{name} {rows} {weighed}"]


@pytest.mark.parametrize("dtype", WRITABLE, ids=str)
def test_shapes_and_threads_change_nothing(dtype: Dtype):
    x = odd_rows()
    all_packed = quantize(x, dtype)
    np.testing.assert_array_equal(quantize(x.reshape(3, 4, 512), dtype).reshape(12, -1), all_packed)
    np.testing.assert_array_equal(quantize(x[::2], dtype), all_packed[::2])
    np.testing.assert_array_equal(quantize(x[3], dtype), all_packed[3])
    assert quantize(x[:0], dtype).shape == dtype.array_shape((0, 512))
    kernels.set_threads(1)
    try:
        np.testing.assert_array_equal(quantize(x, dtype), all_packed)
    finally:
        kernels.set_threads(kernels.runtime.environment.allowed_cpus())


@pytest.mark.parametrize("width", (1, 15, 16, 17, 40))
@pytest.mark.parametrize("name", ("f32", "f16", "bf16"))
def test_scalars_of_any_width_are_written(name: str, width: int):
    x = odd_rows()[-3:, :width]
    expected = gguf.quants.quantize(np.ascontiguousarray(x), ggml_type(DTYPES[name]))
    np.testing.assert_array_equal(quantize(x, DTYPES[name]).view(np.uint8), expected.view(np.uint8))


def squared_error(x: np.ndarray, packed: np.ndarray) -> float:
    x_f64 = x.astype(np.float64)
    return float(np.square(dequantize(packed) - x_f64).sum() / np.square(x_f64).sum())


@pytest.mark.parametrize(("rows", "name"), ERRORS)
def test_blocks_with_parts_are_as_near_as_llama_quantize_makes_them(rows: str, name: str):
    x = rows_of(rows)
    assert squared_error(x, quantize(x, DTYPES[name])) <= MAX_ERROR_RATIO * ERRORS[rows, name]


@pytest.mark.parametrize(("name", "codes"), (("q4_K", 15), ("q5_K", 31), ("q6_K", 31)))
def test_odd_rows_of_blocks_with_parts_come_back(name: str, codes: int):
    x = odd_rows()
    restored = dequantize(quantize(x, DTYPES[name]))
    span = np.maximum(x.max(-1), 0) - np.minimum(x.min(-1), 0)
    assert (restored[0] == 0).all()
    assert (np.abs(restored - x).max(-1) <= np.maximum(span / codes, 2e-6)).all()


@pytest.mark.parametrize("dtype", [d for d in WRITABLE if d.quantized], ids=str)
def test_values_too_small_for_a_scale_become_zeros(dtype: Dtype):
    x = np.full((2, 256), 1e-40, np.float32)
    x[:, ::2] *= -1
    assert (dequantize(quantize(x, dtype)) == 0).all()


def test_groups_of_zeros_leave_those_behind_them_in_their_places():
    x = rows_of("normal").copy()
    x[:, 64:96] = 0
    assert squared_error(x, quantize(x, DTYPES["iq3_s"])) < 0.04  # of ggml 0.25 more than 0.3


def test_what_cannot_be_written_is_said():
    with pytest.raises(ValueError, match="q1_0 cannot be written; supported are f32"):
        quantize(np.zeros((1, 256), np.float32), DTYPES["q1_0"])
    with pytest.raises(ValueError, match="iq2_xs cannot be written without weights; supported"):
        quantize(np.zeros((1, 256), np.float32), DTYPES["iq2_xs"])
    with pytest.raises(ValueError, match="rows have 48 values; q8_0 packs 32 each"):
        quantize(np.zeros((1, 48), np.float32), DTYPES["q8_0"])


@pytest.mark.parametrize("name", ["q8_0", "q4_K", "iq4_nl"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(name: str, wrong: float) -> None:
    values = np.ones((2, 256), np.float32)
    values[1, 7] = wrong
    with pytest.raises(ValueError, match=f"values for {name} are not finite"):
        quantize(values, DTYPES[name])
