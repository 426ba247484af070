"""Merging with data: grids of packed rows, error feedback on one matrix, and whole models block by block."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from packtrain.cli.main import main
from packtrain.common.memory import MemoryPeak, release_memory
from packtrain.conversion.calibration.block_streams import StreamGraphs, StreamPair
from packtrain.conversion.calibration.calibration_inputs import ReadingPlan, best_reading
from packtrain.conversion.calibration.error_feedback import (
    BLOCK,
    DAMPING,
    cholesky,
    compute_feedback,
    invert_lower,
)
from packtrain.conversion.calibration.grid_points import UNIT_COLUMNS, PointRounder
from packtrain.conversion.calibration.merge_writer import AdapterMerge
from packtrain.conversion.calibration.rounding_grid import GridRounder, grid_of, put_codes
from packtrain.dtypes import PACKABLE, WRITABLE, Dtype, f32
from packtrain.gguf import GGUF
from packtrain.kernels import set_threads, threads
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import read_scaled
from packtrain.models.tensor_shapes import unused_weights
from tests.adapters import random_adapter
from tests.architectures import CONFIGS, random_model

RNG = np.random.default_rng(5)
TIME = 32
KINDS = [dtype for dtype in WRITABLE if dtype.layout]
POINTED = [dtype for dtype in PACKABLE if dtype.points]
every_kind = pytest.mark.parametrize("dtype", KINDS, ids=str)
every_pointed = pytest.mark.parametrize("dtype", POINTED, ids=str)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Each test draws the same numbers, whichever ran before."""
    RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state


def random_normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def inputs(n: int, tokens: int = 900) -> np.ndarray:
    """Tokens whose features go together and are of very different sizes, as those of trained models are."""
    rank = n // 8
    return random_normal(tokens, rank) @ random_normal(rank, n) + 0.05 * random_normal(tokens, n)


def damped_squares(z: np.ndarray) -> np.ndarray:
    squares = z.T.astype(np.float64) @ z
    return squares + DAMPING * squares.diagonal().mean() * np.eye(len(squares))


def squared_error(error: np.ndarray, squares: np.ndarray) -> float:
    return float(np.einsum("ij,jk,ik", error, squares, error))


# ---- one matrix ----------------------------------------------------------------------------------------------


def codes_of(rows: np.ndarray) -> np.ndarray:
    """The code of each value, found among all values of its grid."""
    grid, values = grid_of(rows), dequantize(rows)
    step, low = (np.repeat(part, grid.group_size, 1) for part in (grid.step, grid.low))
    code_values = grid.code_steps(np.arange(grid.num_levels, dtype=np.uint8))[:, None, None]
    matches = code_values * step + low == values
    assert matches.any(0).all()
    return matches.argmax(0).astype(np.uint8)


@every_kind
def test_codes_on_their_grid_are_the_values_and_come_back(dtype: Dtype):
    rows = quantize(random_normal(24, 512), dtype)
    grid, codes = grid_of(rows), codes_of(rows)
    step, low = (np.repeat(part, grid.group_size, 1) for part in (grid.step, grid.low))
    np.testing.assert_array_equal(grid.code_steps(codes) * step + low, dequantize(rows))
    new_codes = RNG.integers(0, grid.num_levels, codes.shape, np.uint8)
    changed = rows.copy()
    put_codes(changed, new_codes)
    np.testing.assert_array_equal(codes_of(changed), new_codes)
    np.testing.assert_array_equal(dequantize(changed), grid.code_steps(new_codes) * step + low)
    put_codes(changed, codes)
    assert changed.tobytes() == rows.tobytes()


@every_pointed
def test_points_of_targets_on_the_grid_are_those_targets(dtype: Dtype):
    rows = quantize(random_normal(24, 512), dtype, np.ones(512, np.float32))
    expected, changed = (
        dequantize(rows),
        quantize(random_normal(24, 512), dtype, np.ones(512, np.float32)),
    )
    assert dtype.points is not None
    blocks = (x.view(np.uint8).reshape(24, 2, -1) for x in (rows, changed))
    scales = [np.abs(dtype.points.read_scales(raw)) for raw in blocks]
    assert all(np.isfinite(s).all() and (s > 0).any() for s in scales)
    grid, none = PointRounder(rows), np.eye(UNIT_COLUMNS, dtype=np.float32)
    for at in range(0, 512, UNIT_COLUMNS):
        aim = np.ascontiguousarray(expected[:, at : at + UNIT_COLUMNS].T)
        np.testing.assert_array_equal(grid.choose(np.arange(at, at + UNIT_COLUMNS), aim, none), aim)
    changed_grid, original = PointRounder(changed), rows.copy()
    changed_grid.numbers[:], changed_grid.signs[:] = (
        RNG.integers(0, 256, changed_grid.numbers.shape),
        255,
    )
    changed_grid.write_rows(rows)
    assert (dequantize(rows) != expected).any()
    grid.write_rows(rows)
    np.testing.assert_array_equal(dequantize(rows), expected)
    assert rows.tobytes() == original.tobytes()


@every_pointed
def test_the_point_chosen_is_the_best_of_all(dtype: Dtype):
    rows = quantize(random_normal(6, 256), dtype, np.ones(256, np.float32))
    grid, half = PointRounder(rows), random_normal(UNIT_COLUMNS, 2 * UNIT_COLUMNS)
    factor = np.linalg.cholesky(half @ half.T / UNIT_COLUMNS).T.astype(np.float32)
    aim = np.ascontiguousarray(dequantize(rows)[:, 8:16].T) + 0.3 * random_normal(UNIT_COLUMNS, 6)
    got = grid.choose(np.arange(8, 16), aim, factor)
    width = grid.points.width
    shift = np.float32(0) if grid.row_shifts is None else grid.row_shifts[1] * grid.row_scales[0]
    signs = (
        np.where(got - shift < 0, -1, 1)[:width] if grid.row_shifts is None else np.ones((width, 6))
    )
    candidates = (
        signs[:, None] * grid.points.grid.T[..., None] * grid.row_scales[0]
        + shift
        - aim[:width, None]
    )
    errors = np.einsum("ikr,ij->jkr", candidates, np.linalg.inv(factor[:width, :width]))
    costs = np.square(errors).sum(0)
    best = candidates[:, costs.argmin(0), np.arange(6)] + aim[:width]
    np.testing.assert_allclose(got[:width], best, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [*KINDS, *POINTED], ids=str)
def test_feedback_makes_less_otherwise_than_the_nearest_codes(dtype: Dtype):
    importance = np.ones(512, np.float32) if dtype.column_weights_need else None
    stored = quantize(random_normal(40, 512), dtype, importance)
    target = dequantize(stored) + 0.02 * random_normal(40, 512)
    z = inputs(512)
    back = compute_feedback((z.T @ z).astype(np.float32), None, UNIT_COLUMNS if dtype.points else 1)
    grid = PointRounder(stored) if dtype.points else GridRounder(stored)
    wrong = back.round_targets(back.row_targets(target), grid)
    grid.write_rows(stored)
    squares = damped_squares(z)
    with_feedback = squared_error(dequantize(stored) - target, squares)
    assert with_feedback < 0.85 * squared_error(
        dequantize(quantize(target, dtype, importance)) - target, squares
    )
    assert wrong == pytest.approx(with_feedback, rel=1e-2)


def test_targets_make_of_the_merged_stream_what_the_matrix_makes_of_the_other():
    z, rows = inputs(64), random_normal(8, 64)
    x = z + 0.1 * z @ random_normal(64, 64)
    back = compute_feedback((z.T @ z).astype(np.float32), ((x - z).T @ z).astype(np.float32))
    moved = np.empty_like(rows)
    moved[:, back.order] = back.row_targets(rows).T
    old_error, new_error = (np.square(z @ t.T - x @ rows.T).sum() for t in (rows, moved))
    assert new_error < 0.02 * old_error
    best = rows + rows @ ((x - z).T @ z).astype(np.float64) @ np.linalg.inv(damped_squares(z))
    np.testing.assert_allclose(moved, best, atol=2e-3)


def test_columns_without_input_and_groups_without_a_step_are_no_trouble():
    values = random_normal(6, 256)
    values[:, 64:96] = 0
    stored = quantize(values, KINDS[0])
    z = inputs(256)
    z[:, 32:40] = 0
    back = compute_feedback(z.T @ z, None)
    grid = GridRounder(stored)
    wrong = back.round_targets(back.row_targets(values), grid)
    grid.write_rows(stored)
    assert np.isfinite(wrong) and np.isfinite(dequantize(stored)).all()
    nothing = compute_feedback(np.zeros((32, 32), np.float32), None)
    assert np.isfinite(nothing.factor).all()


@pytest.mark.parametrize("n", (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5))
def test_factor_and_inverse_in_place(n: int):
    half = RNG.standard_normal((n, 2 * n))
    a = half @ half.T
    expected = np.linalg.cholesky(a)
    cholesky(a)
    np.testing.assert_allclose(a, expected, rtol=1e-9, atol=1e-9)
    invert_lower(a)
    np.testing.assert_allclose(a @ expected, np.eye(n), atol=1e-9)


# ---- whole models --------------------------------------------------------------------------------------------


class RandomRows:
    """Batches of random tokens that are alike, with some padding."""

    def __init__(self, count: int = 24, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = rng.choice([3, 9, 30, 77, 120, 200, 260], (count, TIME)).astype(np.int32)
        self.tokens[::3, TIME - 5 :] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = self.tokens[index : index + 1]
        return {
            "tokens": tokens,
            "targets": tokens,
            "pos": np.arange(TIME, dtype=np.int32)[None],
            "seq": (tokens == 0).astype(np.int32),
            "weights": np.ones((1, TIME), np.float32),
        }


def prepare_merge(folder: Path, name: str, mix: str, scale: float = 0.1) -> AdapterMerge:
    """A random model in this mix, with a small random adapter in its blocks."""
    source, packed = folder / "f32.gguf", folder / "base.gguf"
    random_model(source, name)
    assert main(["quantize", str(source), str(packed), mix, "--pure"]) == 0
    base = open_model(packed)
    adapter = random_adapter(folder / "a.gguf", base)
    ((read, by),) = read_scaled([f"{adapter}:{scale}"], base.gguf)
    pairs = {name: pair for name, pair in read.lora_pairs.items() if name.startswith("blk.")}
    return AdapterMerge(base, [(replace(read, lora_pairs=pairs), by)])


def reading_of(merge: AdapterMerge, rows: int = 24, limit: int | None = None) -> ReadingPlan:
    result = best_reading(merge.adapted, merge.calibrated, TIME, rows, limit)
    assert result is not None
    return result


def last_activations(model: ModelFile, rows: RandomRows) -> np.ndarray:
    """What the last block leaves."""
    streams = StreamPair(model, {}, [rows[i] for i in range(len(rows))])
    for i in range(model.config.block_count):
        streams.advance_through(streams.block(i))
    return np.concatenate(streams.x)


@pytest.mark.parametrize(
    "name", ["llama tied", "llama biased", "phi3", "llama experts", "gemma3 linear"]
)
@pytest.mark.parametrize("mix", ["Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_a_merge_with_data_is_nearer_to_the_adapter_than_one_without(tmp_path, capsys, name, mix):
    merge = prepare_merge(tmp_path, name, mix)
    assert len(merge.calibrated) >= 4 * merge.base.config.block_count
    merge.write_file(tmp_path / "plain.gguf", "plain")
    merge.write_file(tmp_path / "with.gguf", "with", reading_of(merge), RandomRows())
    expected, held_out = (
        last_activations(merge.adapted, RandomRows(6, seed=1)),
        RandomRows(6, seed=1),
    )
    baseline, data = (
        np.square(
            last_activations(open_model(tmp_path / f"{label}.gguf"), held_out) - expected
        ).sum()
        for label in ("plain", "with")
    )
    assert data < 0.7 * baseline


@pytest.mark.parametrize("name", ["llama tied", "llama experts"])
def test_a_base_of_points_keeps_its_type_and_takes_up_the_adapter(tmp_path, capsys, name):
    plainly = prepare_merge(tmp_path, name, "IQ3_S", 0.3)
    merge = replace(plainly, use_data=True)
    merge.write_file(tmp_path / "with.gguf", "with", reading_of(merge), RandomRows())
    merge.write_file(tmp_path / "plain.gguf", "plain")
    types = [
        {e.dtype.name for n, e in GGUF(tmp_path / f"{label}.gguf").entries.items() if n in pairs}
        for label, pairs in (("with", merge.calibrated), ("plain", plainly.calibrated))
    ]
    assert types == [{"iq3_s"}, {"q4_K"}] and merge.extra_nbytes == 0 < plainly.extra_nbytes
    expected, held_out = (
        last_activations(merge.adapted, RandomRows(6, seed=1)),
        RandomRows(6, seed=1),
    )
    base, data = (
        np.square(last_activations(model, held_out) - expected).sum()
        for model in (merge.base, open_model(tmp_path / "with.gguf"))
    )
    assert data < 0.5 * base


def test_all_else_stays_byte_for_byte_and_the_file_as_large(tmp_path, capsys):
    merge = prepare_merge(tmp_path, "llama tied", "Q5_K")
    errors = merge.write_file(tmp_path / "m.gguf", "base", reading_of(merge), RandomRows())
    base, merged = merge.base.gguf, GGUF(tmp_path / "m.gguf")
    assert {n: e.dtype for n, e in merged.entries.items()} == {
        n: e.dtype for n, e in base.entries.items()
    }
    unchanged = {n for n in base.entries if merged.array(n).tobytes() == base.array(n).tobytes()}
    assert unchanged == base.entries.keys() - set(merge.calibrated)
    assert errors.keys() == set(merge.calibrated) and all(0 < e < 1 for e in errors.values())
    assert not list(tmp_path.glob(".*"))


def test_blocks_before_the_first_change_are_passed_by_once(tmp_path, capsys, monkeypatch):
    merge = prepare_merge(tmp_path, "llama tied", "Q5_0")
    ((adapter, by),) = merge.adapters
    last = merge.base.config.block_count - 1
    pairs = {n: pair for n, pair in adapter.lora_pairs.items() if n.startswith(f"blk.{last}.")}
    merge = replace(merge, adapters=[(replace(adapter, lora_pairs=pairs), by)])
    progress = list[tuple[int, int]]()
    skipped_path, advanced_path = tmp_path / "one.gguf", tmp_path / "both.gguf"
    merge.write_file(
        skipped_path,
        "m",
        reading_of(merge),
        RandomRows(),
        block=lambda *block: progress.append(block),
    )
    assert last > 0 and progress == [(1, 1)]

    def advance_both(streams: StreamPair, blocks: int) -> None:
        for i in range(blocks):
            streams.advance_through(streams.block(i))

    monkeypatch.setattr(StreamPair, "skip_blocks", advance_both)
    merge.write_file(advanced_path, "m", reading_of(merge), RandomRows())
    assert skipped_path.read_bytes() == advanced_path.read_bytes()
    assert skipped_path.read_bytes() != merge.base.gguf.path.read_bytes()


def test_threads_change_no_bit(tmp_path, capsys):
    merge, count, outputs = prepare_merge(tmp_path, "llama", "Q8_0"), threads(), []
    try:
        for number in (1, count):
            set_threads(number)
            merge.write_file(tmp_path / "m.gguf", "m", reading_of(merge), RandomRows())
            outputs.append((tmp_path / "m.gguf").read_bytes())
    finally:
        set_threads(count)
    assert outputs[0] == outputs[-1]


def test_less_memory_reads_fewer_tokens_then_fewer_columns_and_then_there_is_no_room(monkeypatch):
    monkeypatch.setattr("packtrain.conversion.calibration.calibration_inputs.MAX_TOKENS", 1 << 14)
    wide = replace(CONFIGS["llama"], embedding_length=1024, feed_forward_length=8192)
    model = cast(ModelFile, SimpleNamespace(config=wide, adapter_values={}, matrix_dtypes=dict))
    names, rooms = {"blk.0.ffn_down.weight": f32}, list[ReadingPlan]()
    limit: int | None = None
    while (result := best_reading(model, names, 512, 100, limit)) is not None:
        rooms.append(result)
        limit = result.nbytes - 1
    assert [r.tokens for r in rooms[:5]] == [16384, 8192, 4096, 2048, 1024]
    assert [r.max_columns for r in rooms] == [8192] * 5 + [4096, 2048, 1024, 512]
    assert all(a.nbytes > b.nbytes for a, b in pairwise(rooms))


def test_a_merge_stays_in_its_room(tmp_path, capsys, monkeypatch):
    if "ALONE" not in os.environ:
        # in a process of its own, as a user's merge is: what other tests have freed lies scattered here
        name = f"{__file__}::test_a_merge_stays_in_its_room"
        command = [sys.executable, "-m", "pytest", "-q", name]
        env = os.environ | {"ALONE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return
    monkeypatch.setitem(CONFIGS, "wide", replace(CONFIGS["llama"], feed_forward_length=2048))
    merge = prepare_merge(tmp_path, "wide", "Q4_K")
    widths, limit = [], None
    merge.write_file(
        tmp_path / "m.gguf", "m", reading_of(merge, limit=limit), RandomRows()
    )  # loads kernels
    while not widths or widths[-1] > 512:
        data_reading = reading_of(merge, limit=limit)
        release_memory()
        with MemoryPeak() as peak:
            merge.write_file(tmp_path / "m.gguf", "m", data_reading, RandomRows())
        assert peak.nbytes - peak.baseline < data_reading.nbytes
        widths.append(data_reading.max_columns)
        limit = data_reading.nbytes - 1
    assert widths == [2048, 1024, 512]


def test_experts_that_few_tokens_reach_are_rounded_as_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "packtrain.conversion.calibration.calibrated_rounding.MIN_EXPERT_TOKENS", 1 << 20
    )
    merge = prepare_merge(tmp_path, "llama experts", "Q5_0")
    merge.write_file(tmp_path / "plain.gguf", "m")
    merge.write_file(tmp_path / "with.gguf", "m", reading_of(merge), RandomRows())
    baseline, data = (GGUF(tmp_path / f"{label}.gguf") for label in ("plain", "with"))
    for name in merge.calibrated:
        is_unchanged = baseline.array(name).tobytes() == data.array(name).tobytes()
        assert is_unchanged == name.endswith("ffn_down_exps.weight")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_matrix_of_every_architecture_is_found_with_what_it_reads(tmp_path, name):
    config = random_model(tmp_path / "m.gguf", name)
    model = open_model(tmp_path / "m.gguf")
    types = model.matrix_dtypes().items()
    excluded = (
        "attn_k_b.weight",
        *unused_weights(config),
    )  # the first is multiplied from its other side
    inner = {name: dtype for name, dtype in types if name.startswith("blk.")}
    names = {
        name: dtype
        for name, dtype in inner.items()
        if is_matrix(name, model.gguf.entries[name].shape) and not name.endswith(excluded)
    }
    graphs = StreamGraphs.for_types(model, names, (1, TIME))
    site_names = []
    for i in range(config.block_count):
        for site in graphs.build_block(i).matrix_inputs:
            widths = {model.gguf.entries[n].shape[-1] for n in site.matrix_names}
            assert widths == {site.z.shape[-1]}
            assert (site.x is None) == (site.expert is not None)
            site_names += site.matrix_names
    assert sorted(site_names) == sorted(names)
