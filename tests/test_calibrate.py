"""Quantizing with data: `quantize --calibrate`, importance matrices and `quantize --imatrix`."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli import imatrix, quantize
from packtrain.cli.main import main
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.events import Events
from packtrain.common.memory import MemoryPeak, private_nbytes, release_memory
from packtrain.conversion.calibration.block_streams import StreamPair
from packtrain.conversion.calibration.calibrated_rounding import PART, MatrixSlice
from packtrain.conversion.calibration.importance_matrix import load_importance
from packtrain.dtypes import DTYPES
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.kernels.quant.quantized_arrays import quantize as packed
from packtrain.models.model_file import open_model
from packtrain.workflows.calibration_data import calibration
from packtrain.workflows.imatrix_run import ImatrixSettings
from packtrain.workflows.quantization import QuantizeSettings
from tests.architectures import CONFIGS, random_model

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "by", "it"]
V, DOWN = "blk.0.attn_v.weight", "blk.1.ffn_down.weight"


def write_text(path: Path, words: int = 900, seed: int = 0) -> Path:
    """Sentences of few words, which are about four tokens each."""
    rng = np.random.default_rng(seed)
    lines = (" ".join(rng.choice(WORDS, 9)) + ".\n" for _ in range(words // 9))
    path.write_text("".join(lines))
    return path


@pytest.fixture
def settings(tmp_path: Path) -> QuantizeSettings:
    random_model(tmp_path / "m.gguf", "llama tied")
    data = write_text(tmp_path / "text.txt")
    return QuantizeSettings(
        tmp_path / "m.gguf", tmp_path / "q.gguf", "Q4_0", pure=True, calibrate=data
    )


def last_block_output(path: Path, data: Path) -> np.ndarray:
    """What the last block leaves for a text."""
    model = open_model(path)
    rows = calibration(ImatrixSettings(model.gguf.path, data, Path()), model, Events())
    streams = StreamPair(model, {}, [rows[i] for i in range(4)])
    for i in range(model.config.block_count):
        streams.advance_through(streams.block(i))
    return np.concatenate(streams.x)


@pytest.mark.parametrize("mix", ("Q4_0", "Q4_K", "Q3_K_M", "Q2_K"))
@pytest.mark.parametrize(
    "name", ("llama tied", "gemma3 linear", "gemma3n", "gemma4", "llama experts")
)
def test_with_data_a_file_computes_more_nearly_the_same(tmp_path, name, mix):
    random_model(tmp_path / "m.gguf", name)
    data, heldout_path = write_text(tmp_path / "a.txt"), write_text(tmp_path / "b.txt", seed=1)
    settings = QuantizeSettings(tmp_path / "m.gguf", tmp_path / "plain.gguf", mix, pure=True)
    quantize.run(settings)
    quantize.run(replace(settings, output=tmp_path / "with.gguf", calibrate=data))
    reference = last_block_output(settings.model, heldout_path)
    plain_error, calibrated_error = (
        np.square(last_block_output(tmp_path / f"{stem}.gguf", heldout_path) - reference).sum()
        for stem in ("plain", "with")
    )
    assert calibrated_error < 0.8 * plain_error
    plain_file, calibrated_file = GGUF(tmp_path / "plain.gguf"), GGUF(tmp_path / "with.gguf")
    assert plain_file.values.keys() == calibrated_file.values.keys()
    assert {n: e.dtype for n, e in plain_file.entries.items()} == {
        n: e.dtype for n, e in calibrated_file.entries.items()
    }


@pytest.mark.parametrize("mix", ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XXS", "IQ1_M"))
def test_points_chosen_with_data_do_better_than_an_importance_matrix_of_it(settings, capsys, mix):
    weights, heldout_path = settings.model.with_name("i.gguf"), settings.model.with_name("b.txt")
    imatrix.run(ImatrixSettings(settings.model, settings.calibrate, weights))
    request = replace(settings, type=mix, pure=False)
    imatrix_output = request.model.with_name("plain.gguf")
    quantize.run(replace(request, output=imatrix_output, calibrate=None, imatrix=weights))
    quantize.run(request)
    write_text(heldout_path, seed=1)
    reference = last_block_output(request.model, heldout_path)
    imatrix_error, calibrated_error = (
        np.square(last_block_output(p, heldout_path) - reference).sum()
        for p in (imatrix_output, request.output)
    )
    assert calibrated_error < 0.85 * imatrix_error
    types = [{e.dtype for e in GGUF(p).entries.values()} for p in (imatrix_output, request.output)]
    assert types[0] == types[1] and any(dtype.points for dtype in types[0])


def test_memory_makes_it_read_less_and_what_cannot_be_is_said(settings: QuantizeSettings, capsys):
    quantize.run(settings)
    (line,) = (s for s in capsys.readouterr().err.splitlines() if s.startswith("quantizing reads"))
    assert int(line.split()[2].replace(",", "")) > 1024
    quantized, rerun = GGUF(settings.output), replace(settings, overwrite=True)
    assert quantized.metadata["general.file_type"] == 2
    assert all(e.dtype.name == "q4_0" for e in quantized.entries.values() if len(e.shape) > 1)
    settings.output.rename(done := settings.output.with_name("done.gguf"))
    settings.output.write_bytes(b"before")
    for change, said in (
        ({"model": done}, "done.gguf has matrices in these types already"),
        ({"memory": "1MiB"}, "--memory: 1MiB is too small to quantize with --calibrate"),
        (
            {"type": "F16"},
            "--calibrate: no matrix of a block gets a type whose codes can be chosen",
        ),
        ({"calibrate": settings.model.with_name("none.txt")}, "none.txt"),
        ({"calibrate": write_text(settings.model.with_name("few.txt"), 90)}, TOO_FEW),
        ({"imatrix": settings.model}, "--calibrate: the data says more than --imatrix"),
    ):
        with pytest.raises((InputError, DoesNotFit), match=said):
            quantize.run(replace(rerun, **change))
        assert settings.output.read_bytes() == b"before"


@pytest.mark.parametrize("work", ["quantize", "imatrix"])
def test_a_refusal_names_the_least_memory_and_that_will_do(settings: QuantizeSettings, work: str):
    args: list[str | Path] = [settings.model, "--data", settings.calibrate, "-o", settings.output]
    if work == "quantize":
        args = [settings.model, settings.output, "Q4_0", "--calibrate", settings.calibrate]

    def tried(memory: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "packtrain", work, *map(str, args), "--memory", memory]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    refused = tried("1MiB")
    min_budget = re.search(r"the smallest that would do is (\w+)$", refused.stderr.splitlines()[-1])
    assert refused.returncode == 3 and min_budget, refused.stderr
    done = tried(min_budget[1])
    assert done.returncode == 0, done.stderr


def test_it_stays_in_its_memory(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(CONFIGS, "wide", replace(CONFIGS["llama"], feed_forward_length=2048))
    random_model(tmp_path / "m.gguf", "wide")
    data = write_text(tmp_path / "a.txt", 6000)
    settings = QuantizeSettings(tmp_path / "m.gguf", tmp_path / "q.gguf", "Q3_K_M", calibrate=data)
    quantize.run(settings)
    read = []
    for extra_mib in (240, 120):
        release_memory()
        limit = private_nbytes() + (extra_mib << 20)
        capsys.readouterr()
        with MemoryPeak() as peak:
            quantize.run(replace(settings, memory=f"{limit // 1024}KiB", overwrite=True))
        assert peak.nbytes <= limit, (limit - peak.baseline, peak.nbytes - peak.baseline)
        (line,) = (
            s for s in capsys.readouterr().err.splitlines() if s.startswith("quantizing reads")
        )
        read.append(int(line.split()[2].replace(",", "")))
    assert read[0] >= read[1] >= 1024


def test_as_many_values_of_whole_rows_are_read_at_a_time_however_few_columns_are_rounded():
    read_sizes, values = list[int](), np.zeros((64, 32 * PART // 256), np.float32)

    def read_rows(start: int, stop: int) -> np.ndarray:
        read_sizes.append(values[start:stop].size)
        return values[start:stop]

    array = packed(values, DTYPES["q4_0"])
    MatrixSlice.of(array, read_rows, slice(0, 32), None, 1).round_plainly()
    assert sum(read_sizes) == values.size and max(read_sizes) <= PART


TOO_FEW = r"few.txt has [\d,]+ tokens, too few to say what a model is for; 1,024 are needed"


# ---- importance matrices -----------------------------------------------------------------------------------------


@pytest.fixture
def measured(settings: QuantizeSettings, capsys) -> Path:
    imatrix_path = settings.model.with_name("i.gguf")
    assert settings.calibrate is not None
    imatrix.run(ImatrixSettings(settings.model, settings.calibrate, imatrix_path))
    assert f"{imatrix_path}: 14 matrices" in capsys.readouterr().out
    return imatrix_path


def test_sums_are_of_what_matrices_read(settings: QuantizeSettings, measured: Path):
    model, importance, file = open_model(settings.model), load_importance(measured), GGUF(measured)
    assert settings.calibrate is not None
    data = calibration(settings, model, Events())
    rows = [data[i] for i in range(len(data))]
    real = [(row["tokens"] != 0) | (row["targets"] != 0) for row in rows]
    x = np.concatenate(
        [model.weight("token_embd.weight")[r["tokens"]][k] for r, k in zip(rows, real, strict=True)]
    ).astype(np.float64)
    x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + model.config.rms_eps)
    expected = np.square(x * model.weight("blk.0.attn_norm.weight")).sum(0)
    np.testing.assert_allclose(importance.sums[V][0], expected, rtol=1e-5)
    assert importance.counts[V].tolist() == [len(x)] == importance.counts[DOWN].tolist()
    assert file.metadata["general.type"] == "imatrix"
    assert file.metadata["imatrix.datasets"] == [b"text.txt"]
    assert file.metadata["imatrix.chunk_count"] == len(rows)
    assert file.metadata["imatrix.chunk_size"] == data.time
    assert file.entries[f"{V}.in_sum2"].shape == (x.shape[1],)
    assert file.entries[f"{V}.counts"].shape == (1,)
    matrix_names = {
        n for n, e in model.gguf.entries.items() if n[:4] == "blk." and len(e.shape) > 1
    }
    assert importance.sums.keys() == matrix_names


def test_groups_of_rows_add_up(settings: QuantizeSettings, measured: Path, monkeypatch):
    monkeypatch.setattr("packtrain.workflows.imatrix_run.AT_ONCE", 1024)
    parts = measured.with_name("parts.gguf")
    assert settings.calibrate is not None
    imatrix.run(ImatrixSettings(settings.model, settings.calibrate, parts, memory="4GiB"))
    full_importance, grouped_importance = load_importance(measured), load_importance(parts)
    for name, sums in full_importance.sums.items():
        np.testing.assert_allclose(grouped_importance.sums[name], sums, rtol=1e-5)
        assert (grouped_importance.counts[name] == full_importance.counts[name]).all()


def test_errors_count_by_it(settings: QuantizeSettings, measured: Path):
    by = replace(settings, calibrate=None, imatrix=measured, type="Q4_K")
    quantize.run(by)
    source, quantized, importance = (
        GGUF(settings.model),
        GGUF(settings.output),
        load_importance(measured),
    )
    for name in (V, DOWN):
        weights = importance.sums[name][0] / importance.counts[name][0]
        expected = packed(source.array(name), quantized.entries[name].dtype, weights)
        assert quantized.array(name).tobytes() == expected.tobytes()
        assert (
            expected.tobytes()
            != packed(source.array(name), quantized.entries[name].dtype).tobytes()
        )
    said = {"file": str(measured), "dataset": "text.txt", "entries_count": 14}
    assert (
        said.items()
        <= {
            key.removeprefix("quantize.imatrix."): value
            for key, value in quantized.metadata.items()
        }.items()
    )


def test_blocks_that_share_keys_are_measured(tmp_path: Path):
    random_model(tmp_path / "m.gguf", "gemma4")
    data = write_text(tmp_path / "a.txt")
    imatrix.run(ImatrixSettings(tmp_path / "m.gguf", data, tmp_path / "i.gguf"))
    model, importance = open_model(tmp_path / "m.gguf"), load_importance(tmp_path / "i.gguf")
    rows = calibration(ImatrixSettings(model.gguf.path, data, Path()), model, Events())
    streams = StreamPair(model, {}, [rows[i] for i in range(len(rows))])
    for i in range(3):
        streams.advance_through(streams.block(i))
    x = np.concatenate([h[0][k[0]] for h, k in zip(streams.x, streams.real_masks, strict=True)])
    x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + model.config.rms_eps)
    expected = np.square(x * model.weight("blk.3.attn_norm.weight")).sum(0)
    np.testing.assert_allclose(importance.sums["blk.3.attn_q.weight"][0], expected, rtol=1e-4)


def test_no_more_tokens_are_read_than_asked_for(tmp_path: Path):
    """A row may have more: the context is longer."""
    random_model(tmp_path / "m.gguf", "llama tied")
    data = write_text(tmp_path / "a.txt")
    model = tmp_path / "m.gguf"
    full_code = imatrix.run(ImatrixSettings(model, data, tmp_path / "a.gguf", tokens=300))
    limited_code = imatrix.run(ImatrixSettings(model, data, tmp_path / "b.gguf", tokens=90))
    assert (full_code, limited_code) == (0, 0)
    counts = [
        load_importance(tmp_path / f"{name}.gguf").counts["blk.0.attn_q.weight"][0] for name in "ab"
    ]
    assert counts[1] <= 90 < open_model(model).config.context_length < counts[0] <= 300


def test_experts_have_a_row_each(tmp_path: Path, capsys):
    config = random_model(tmp_path / "m.gguf", "llama experts")
    data = write_text(tmp_path / "a.txt")
    assert (
        main(["imatrix", f"{tmp_path}/m.gguf", "--data", str(data), "-o", f"{tmp_path}/i.gguf"])
        == 0
    )
    importance, down = load_importance(tmp_path / "i.gguf"), "blk.0.ffn_down_exps.weight"
    assert len(importance.sums[down]) == config.expert_count
    tokens = importance.counts["blk.0.attn_q.weight"][0]
    assert importance.counts[down].sum() == tokens * config.expert_used_count
    request = QuantizeSettings(
        tmp_path / "m.gguf", tmp_path / "q.gguf", "Q5_0", pure=True, imatrix=tmp_path / "i.gguf"
    )
    quantize.run(request)
    model, quantized, weights = GGUF(request.model), GGUF(request.output), importance.weights(down)
    for i in range(config.expert_count):
        expected = packed(model.array(down)[i], quantized.entries[down].dtype, weights[i])
        assert quantized.array(down)[i].tobytes() == expected.tobytes()


def change_imatrix(path: Path, **tensors: np.ndarray | None) -> Path:
    """A copy of an importance matrix with some tensors others, or without them."""
    gguf = GGUF(path)
    arrays = {name: gguf.array(name) for name in gguf.entries} | tensors
    to = path.with_name("other.gguf")
    write_gguf(to, gguf.values, {n: t for n, t in arrays.items() if t is not None})
    return to


def test_an_importance_matrix_that_does_nothing_or_is_of_another_model_is_said(
    measured: Path, settings: QuantizeSettings, capsys: pytest.CaptureFixture[str]
):
    request = replace(settings, calibrate=None, imatrix=measured, overwrite=True)
    no_effect = "--imatrix has no effect: no matrix gets a type that can weigh errors"
    for type_name, is_said in (("F16", True), ("Q8_0", True), ("Q4_0", False)):
        quantize.run(replace(request, type=type_name))
        assert (no_effect in capsys.readouterr().err) == is_said
    tensors = {
        f"blk.9.attn_q.weight.{n}": np.ones(k, "f4") for n, k in (("in_sum2", 8), ("counts", 1))
    }
    other = change_imatrix(measured, **tensors)
    quantize.run(replace(request, type="Q4_0", imatrix=other))
    said = capsys.readouterr().err
    assert (
        "has weights for matrices that" in said
        and "the first: blk.9.attn_q.weight; it may be of another model" in said
    )


def test_a_model_with_damaged_weights_has_no_importance_matrix(
    settings: QuantizeSettings, tmp_path: Path
):
    arrays = {"blk.0.attn_norm.weight": np.full(256, np.nan, np.float32)}
    damaged_model = change_imatrix(settings.model, **arrays)
    with pytest.raises(InputError, match=r"the inputs of blk\.0\..* are not finite"):
        imatrix.run(ImatrixSettings(damaged_model, settings.calibrate, tmp_path / "i.gguf"))
    assert not (tmp_path / "i.gguf").exists()


def test_matrices_of_other_models_are_refused(
    settings: QuantizeSettings, measured: Path, tmp_path: Path
):
    by = replace(settings, calibrate=None, imatrix=measured)
    sums, counts, ones = f"{V}.in_sum2", f"{V}.counts", np.ones(1, np.float32)
    wrong = {
        f"{V} has 7 weights, in .*m.gguf 256 inputs; measure this model": {
            sums: np.ones(7, np.float32)
        },
        f"{counts} is missing": {counts: None},
        "must be F32, a row of sums for each count": {counts: np.ones(3, np.float32)},
        "must be F32, a row of sums for each": {counts: np.ones(0, np.float32)},
        "has values that are not finite, or below zero": {sums: np.full(256, np.nan, np.float32)},
    }
    for said, tensors in wrong.items():
        with pytest.raises(InputError, match=f"other.gguf: .*{said}"):
            quantize.run(replace(by, imatrix=change_imatrix(measured, **tensors)))
    with pytest.raises(InputError, match=r"m.gguf: this is not an importance matrix; `packtrain"):
        quantize.run(replace(by, imatrix=settings.model))
    kind = {"general.type": MetadataValue("string", "imatrix")}
    write_gguf(tmp_path / "none.gguf", kind, {"x": ones})
    with pytest.raises(InputError, match=r"none.gguf: there are no sums in it"):
        quantize.run(replace(by, imatrix=tmp_path / "none.gguf"))
    write_gguf(tmp_path / "far.gguf", kind, {"a.in_sum2": ones, "a.counts": ones})
    with pytest.raises(InputError, match=r"it has no weights for any matrix of .*m.gguf; measure"):
        quantize.run(replace(by, imatrix=tmp_path / "far.gguf"))
    assert not settings.output.exists()


def test_matrices_without_weights_are_said(settings: QuantizeSettings, measured: Path, capsys):
    names = {f"{V}.in_sum2": None, f"{V}.counts": None}
    quantize.run(replace(settings, calibrate=None, imatrix=change_imatrix(measured, **names)))
    captured = capsys.readouterr()
    assert f"other.gguf has no weights for 1 matrix, the first: {V}" in captured.out + captured.err


def test_data_must_be_enough_to_measure(settings: QuantizeSettings):
    short_text = write_text(settings.model.with_name("few.txt"), 90)
    with pytest.raises(InputError, match=TOO_FEW):
        imatrix.run(ImatrixSettings(settings.model, short_text, settings.output))
    assert not settings.output.exists()
