"""Rooms of element types: one file each, whose code is compiled where it is needed and nowhere else."""

import pickle
import shutil
from pathlib import Path

import pytest

from packtrain.common.child_process import run_in_child
from packtrain.dtypes import DTYPES, TYPE_MODULES
from packtrain.dtypes.element_type import DTYPES_BY_NAME
from packtrain.kernels.runtime import kernel_cache
from packtrain.models.quant_recipe import MIXES
from tests.copied import copy_package, own_cache, python_in

TOY = """
from packtrain.dtypes.intrinsics import absolute, chars_at, fma, half_at, largest, load, maximum, put_half
from packtrain.dtypes.intrinsics import put_rounded, put_word, reciprocal, splat, store, to_floats, total

# a type of a test: 32 bytes with a sign behind a scale of four bytes
toy = block_dtype("toy", 99, 32, 36, smaller=q8_0, layout=CodeLayout(32, 255, -127, (0,), 4))
toy.mix("TOY", 999)


@toy.unpack
def unpack_toy(y, x):
    d = half_at(x, 0)
    store(y, 0, to_floats(chars_at(x, 4)) * d)
    store(y, 16, to_floats(chars_at(x, 20)) * d)


@toy.dot
def dot_toy(x, w, n):
    a = splat(0.0)
    for i in range(0, n, 32):
        d = half_at(w, 0)
        a = fma(to_floats(chars_at(w, 4)) * d, load(x, i), a)
        a = fma(to_floats(chars_at(w, 20)) * d, load(x, i + 16), a)
        w += 36
    return total(a)


@toy.pack
def pack_toy(y, x):
    d = largest(maximum(absolute(load(x, 0)), absolute(load(x, 16)))) / f32(127)
    put_word(y, 0, 0)
    put_half(y, 0, d)
    put_rounded(y + 4, x, reciprocal(d))
    put_rounded(y + 20, x + 64, reciprocal(d))
"""
USE = """
import sys
import numpy as np
import packtrain as pt
from packtrain.dtypes import DTYPES
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.cli.main import main
from packtrain.conversion.calibration.rounding_grid import grid_of, put_codes
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize

random = np.random.default_rng(0)
x, toy, q8_0 = random.standard_normal((64, 256), np.float32), DTYPES["toy"], DTYPES["q8_0"]
packed = quantize(x, toy)
values = dequantize(packed)
np.testing.assert_array_equal(values, dequantize(quantize(x, q8_0)))
grid = grid_of(packed)
step, low = (np.repeat(part, 32, axis=1) for part in (grid.step, grid.low))
new_codes, changed = random.integers(0, grid.num_levels, x.shape, np.uint8), packed.copy()
put_codes(changed, new_codes)
np.testing.assert_array_equal(dequantize(changed), new_codes * step + low)
name = "blk.0.ffn_up.weight"
write_gguf("m.gguf", {"general.architecture": MetadataValue("string", "llama")}, {name: x})
assert main(["quantize", "m.gguf", "q.gguf", "toy"]) == 0
made = GGUF("q.gguf")
assert made.metadata["general.file_type"] == 999 and made.entries[name].dtype is toy
w, results = pt.weight("w", (64, 256), toy), []
for rows in (1, 9):
    graph = pt.Graph({"y": pt.matmul(pt.input("x", (rows, 256)), w)})
    placed = pt.place(graph)
    session = pt.Session()
    run = session.executor(placed, pt.make_plan(placed))
    session.set({"w": made.array(name)})
    np.testing.assert_allclose(run({"x": x[:rows]})["y"], x[:rows] @ values.T, rtol=1e-4, atol=1e-4)
"""


def test_a_type_is_one_file(tmp_path: Path):
    """A copy of the package with a type more in one room reads, packs, multiplies, writes and merges it."""
    with open(copy_package(tmp_path) / "dtypes/legacy.py", "a") as room:
        room.write(TOY)
    done = python_in(tmp_path, "-c", USE, **own_cache(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "recompiled"),
    [
        (
            "scale = sum_lx / sum_ll",
            "scale = sum_lx / (sum_ll * 1)",
            {"quantize", "rows", "grid_quantize", "weighted_quantize"},
        ),
        (
            "# of 32 values; q6_K",
            "# another comment: q6_K",
            {
                *(
                    "dequantize",
                    "dots",
                    "quantize",
                    "requantize",
                    "grid_quantize",
                    "weighted_quantize",
                ),
                *("rounding", "row_products", "panel_products", "rows"),
            },
        ),
        (
            "min_code = (low_bits >> 4)",
            "min_code = (low_bits // 16)",
            {"dequantize", "quantize", "requantize", "rows", "grid_quantize", "weighted_quantize"},
        ),
        ("-half_at(w, 41)", "-half_at(w, 40 + 1)", {"dots"}),
        (
            "upper_mins = ((upper_bits >> 4)",
            "upper_mins = ((upper_bits // 16)",
            {"row_products", "panel_products"},
        ),
        (
            "to_floats(q & 3) *",
            "to_floats(3 & q) *",
            {"dequantize", "quantize", "requantize", "rows", "grid_quantize", "weighted_quantize"},
        ),
    ],
)
def test_a_change_in_a_room_reaches_what_compiles_it(
    old: str, new: str, recompiled: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    before = {name: kernel_cache.fingerprint(name) for name in kernel_cache.MODULE_ROLES}
    shutil.copytree(kernel_cache.DTYPES_FOLDER, tmp_path / "dtypes")
    room = tmp_path / "dtypes/k.py"
    assert room.read_text().count(old) == 1
    room.write_text(room.read_text().replace(old, new))
    monkeypatch.setattr(kernel_cache, "DTYPES_FOLDER", tmp_path / "dtypes")
    after = {name: kernel_cache.fingerprint(name) for name in kernel_cache.MODULE_ROLES}
    assert {name for name in before if before[name] != after[name]} == recompiled


def test_numbers_and_names_are_those_of_one_type_each():
    numbers = [t.number for t in DTYPES.values() if t.number is not None]
    assert len(set(numbers)) == len(numbers) == len(DTYPES) - 1  # no file has u8
    mixes = [mix for t in DTYPES.values() for mix in t.mixes]
    assert len({mix.file_type for mix in mixes}) == len({mix.name for mix in mixes}) == len(mixes)
    assert all(MIXES[mix.name] is mix for mix in mixes if "pack" in mix.dtype.code)
    homes = [
        name
        for room in TYPE_MODULES
        for name, t in DTYPES_BY_NAME.items()
        if getattr(room, name, None) is t
    ]
    assert set(homes) == DTYPES_BY_NAME.keys() == DTYPES.keys()


def test_a_pickled_type_is_the_same_one_in_a_process_that_has_only_packtrain():
    for dtype in DTYPES.values():
        assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert run_in_child(lambda: None, str, DTYPES["q4_K"]) == "q4_K"
