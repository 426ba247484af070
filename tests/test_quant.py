"""Packed types against PyPI `gguf`, ggml's own Python: the same bits for whatever bytes a file can hold."""

import gguf
import numpy as np
import pytest

from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, Dtype, f16, f32
from packtrain.quant import READABLE, dequantize

# where a block's f16 scales are; the types without have none
SCALES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_K": (80, 82), "q3_K": (108,),
    "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip
BLOCKS = 512


def kind(dtype: Dtype) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(kernels.dequantize.KINDS[dtype.name])


def record(dtype: Dtype) -> np.dtype:
    if dtype in (f32, f16):
        return dtype.numpy
    return np.dtype([(dtype.name, f"V{dtype.block_nbytes}")])


def blocks(dtype: Dtype, scales: np.ndarray) -> np.ndarray:
    """Random bytes, u8 (blocks, bytes of one), every f16 scale one of `scales`."""
    rng = np.random.default_rng(0)
    made = rng.integers(0, 256, (BLOCKS, dtype.block_nbytes), np.uint8)
    for at in SCALES.get(dtype.name, ()):
        chosen = rng.choice(scales.astype(np.uint16), BLOCKS)
        made[:, at : at + 2] = chosen[:, None].view(np.uint8)
    return made


def read(dtype: Dtype, packed: np.ndarray, rows: int = 4) -> np.ndarray:
    return dequantize(packed.reshape(rows, -1).view(record(dtype)))


every_type = pytest.mark.parametrize("dtype", READABLE, ids=str)


@every_type
def test_values_are_those_of_ggml_bit_for_bit(dtype: Dtype):
    finite = np.arange(1 << 16)[np.arange(1 << 16) & 0x7C00 != 0x7C00]
    packed = blocks(dtype, finite)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = gguf.quants.dequantize(packed.reshape(4, -1), kind(dtype))
    found = read(dtype, packed)
    assert found.shape == wanted.shape == (4, BLOCKS // 4 * dtype.block)
    both_nan = np.isnan(found) & np.isnan(wanted)  # of f32, f16 and bf16: the payload may differ
    assert ((found.view(np.uint32) == wanted.view(np.uint32)) | both_nan).all()


@every_type
def test_scales_that_are_zero_tiny_infinite_or_no_number_do_no_harm(dtype: Dtype):
    odd = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x7C00, 0xFC00, 0x7E00, 0x7C01])
    packed = blocks(dtype, odd)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = gguf.quants.dequantize(packed.reshape(4, -1), kind(dtype))
    np.testing.assert_array_equal(read(dtype, packed), wanted)


@every_type
def test_any_shape_is_read(dtype: Dtype):
    packed = blocks(dtype, np.array([0x3C00]))[:24].view(record(dtype))
    flat = dequantize(packed.reshape(-1))
    for shape in ((24,), (3, 8), (2, 3, 4), (24, 1)):
        found = dequantize(packed.reshape(shape))
        assert found.shape == (*shape[:-1], shape[-1] * dtype.block)
        np.testing.assert_array_equal(found.reshape(-1), flat)
    assert dequantize(packed.reshape(-1)[:0]).shape == (0,)
    every_second = packed.reshape(4, 6)[::2]
    np.testing.assert_array_equal(dequantize(every_second), flat.reshape(4, -1)[::2])


@pytest.mark.parametrize("width", (1, 15, 16, 17, 40))
@pytest.mark.parametrize("name", ("f16", "bf16"))
def test_rows_of_any_width_end_where_they_should(name: str, width: int):
    dtype = next(d for d in READABLE if d.name == name)
    packed = np.random.default_rng(1).integers(0, 256, (3, width * 2), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = gguf.quants.dequantize(packed, kind(dtype))
    np.testing.assert_array_equal(dequantize(packed.view(record(dtype))), wanted)


def test_what_cannot_be_read_is_said():
    array = np.zeros((2, 1), record(BLOCK_TYPES["iq1_s"]))
    with pytest.raises(ValueError, match=r"iq1_s cannot be read; what can: f32, f16, bf16, q4_0"):
        dequantize(array)
