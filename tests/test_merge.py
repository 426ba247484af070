"""`packtrain merge`: what is added and how it is stored, what stays byte for byte, and what is refused in one line."""

import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli import merge
from packtrain.cli.main import main
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.dtypes import BLOCK_TYPES, DTYPES
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.models.adapter_file import Adapter, write_adapter
from packtrain.models.model_file import open_model
from packtrain.models.model_with_adapters import adapted, split_scale
from packtrain.models.rewrite_model import write_changed
from packtrain.planner.training_plans import LOOP_NBYTES
from packtrain.workflows.adapter_merge import MergeSettings
from tests.adapters import random_adapter
from tests.architectures import random_model
from tests.kill import sample_chats, sample_text

Capture = pytest.CaptureFixture[str]
RNG = np.random.default_rng(8)
Q, DOWN, EMBEDDING, NORM = (
    "blk.0.attn_q.weight", "blk.0.ffn_down.weight", "token_embd.weight", "output_norm.weight"
)  # fmt: skip
BASE = {
    "general.architecture": MetadataValue("string", "llama"),
    "general.name": MetadataValue("string", "base"),
    "general.base_model.0.name": MetadataValue("string", "an older one"),
    "general.base_model.0.repo_url": MetadataValue("string", "somewhere"),
    "own.key": MetadataValue("string", [b"x", b"y"]),
}


def random_normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def tensors() -> dict[str, np.ndarray]:
    return {
        EMBEDDING: random_normal(8, 256),
        Q: quantize(random_normal(64, 256), DTYPES["q8_0"]),
        DOWN: quantize(random_normal(256, 64), DTYPES["f16"]),
        NORM: random_normal(256),
    }


def random_pair(out: int, width: int, rank: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return random_normal(rank, width), random_normal(out, rank)


@pytest.fixture
def settings(tmp_path: Path) -> MergeSettings:
    write_gguf(tmp_path / "base.gguf", BASE, tensors())
    adapter(tmp_path / "a.gguf", {Q: random_pair(64, 256)})
    return MergeSettings(tmp_path / "base.gguf", (str(tmp_path / "a.gguf"),), tmp_path / "out.gguf")


def adapter(path: Path, pairs: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    write_adapter(path, Adapter("llama", 8.0, pairs), "a")
    return str(path)


def dense_addition(name: str, path: str) -> np.ndarray:
    """The addition that an adapter file makes, alpha 8 and rank 4."""
    a, b = (np.float64(GGUF(path).array(f"{name}.lora_{half}")) for half in "ab")
    return 2.0 * (b @ a)


def test_several_adapters_add_with_their_scales(
    settings: MergeSettings, tmp_path: Path, capsys: Capture
):
    first_adapter = settings.adapters[0]
    second_adapter = adapter(
        tmp_path / "b.gguf", {Q: random_pair(64, 256), DOWN: random_pair(256, 64)}
    )
    merge_settings = replace(
        settings, adapters=(first_adapter, f"{second_adapter}:-0.5"), type="F32"
    )
    assert merge.run(merge_settings) == 0
    base, merged = GGUF(settings.model), GGUF(settings.output)
    q = (
        dequantize(base.array(Q))
        + dense_addition(Q, first_adapter)
        - 0.5 * dense_addition(Q, second_adapter)
    )
    down = dequantize(base.array(DOWN)) - 0.5 * dense_addition(DOWN, second_adapter)
    np.testing.assert_allclose(merged.array(Q), q, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(merged.array(DOWN), down, rtol=1e-5, atol=1e-5)
    for name in (EMBEDDING, NORM):
        assert merged.array(name).tobytes() == base.array(name).tobytes()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and "q8_0 -> f32" in said[0] and "2 of 4 tensors changed" in said[2]


def test_metadata_stays_but_for_where_the_model_comes_from(settings: MergeSettings):
    merge.run(settings)
    values = GGUF(settings.output).values
    assert values == {
        **{key: value for key, value in BASE.items() if not key.startswith("general.base")},
        "general.name": MetadataValue("string", "out"),
        "general.base_model.count": MetadataValue("u32", 1),
        "general.base_model.0.name": MetadataValue("string", "base"),
    }


def test_split_bases_become_one_file(settings: MergeSettings, tmp_path: Path):
    all_tensors = tensors()
    for i, names in enumerate(((EMBEDDING, Q), (DOWN, NORM))):
        split = {"split.no": MetadataValue("u16", i), "split.count": MetadataValue("u16", 2)}
        part = {name: all_tensors[name] for name in names}
        path = tmp_path / f"m-0000{i + 1}-of-00002.gguf"
        write_gguf(
            path,
            (BASE if not i else {}) | split | {"split.tensors.count": MetadataValue("i32", 4)},
            part,
        )
    merge.run(replace(settings, model=tmp_path / "m-00002-of-00002.gguf"))
    merged = GGUF(settings.output)
    assert list(merged.entries) == list(all_tensors)
    assert not any(key.startswith("split.") for key in merged.values)
    assert merged.array(DOWN).tobytes() == all_tensors[DOWN].tobytes()
    assert merged.array(Q).tobytes() != all_tensors[Q].tobytes()


def test_a_type_that_is_only_read_gets_the_next_larger_one(
    settings: MergeSettings, capsys: Capture
):
    zeros = np.zeros((64, 1), BLOCK_TYPES["iq3_s"].numpy)
    write_gguf(settings.model, BASE, tensors() | {Q: zeros})
    merge.run(settings)
    assert GGUF(settings.output).entries[Q].dtype is BLOCK_TYPES["q4_K"]
    assert "iq3_s -> q4_K" in capsys.readouterr().out


def test_norms_beside_an_adapter_are_left_out_and_said(settings: MergeSettings, capsys: Capture):
    gguf = GGUF(settings.adapters[0])
    halves = {name: gguf.array(name).copy() for name in gguf.entries}
    write_gguf(settings.adapters[0], gguf.values, halves | {NORM: random_normal(256)})
    merge.run(settings)
    assert GGUF(settings.output).array(NORM).tobytes() == GGUF(settings.model).array(NORM).tobytes()
    assert f"1 vector in the adapters left out, which no merge uses; the first: {NORM}" in (
        capsys.readouterr().err
    )


def test_the_embedding_of_a_tied_model_changes_its_head_and_that_is_said(
    settings: MergeSettings, capsys: Capture
):
    path = adapter(
        settings.output.with_name("e.gguf"),
        {EMBEDDING: (random_normal(8, 4), random_normal(256, 4))},
    )
    merge.run(replace(settings, adapters=(path,)))
    a, b = (GGUF(path).array(f"{EMBEDDING}.lora_{half}") for half in "ab")
    expected = GGUF(settings.model).array(EMBEDDING) + 2.0 * (a @ b.T)
    np.testing.assert_allclose(
        GGUF(settings.output).array(EMBEDDING), expected, rtol=1e-5, atol=1e-5
    )
    assert "is also the output head: both are changed" in capsys.readouterr().err


def test_a_scale_stands_after_the_file(tmp_path: Path):
    assert split_scale("a.gguf:0.5") == (Path("a.gguf"), 0.5)
    assert split_scale("a.gguf") == (Path("a.gguf"), 1.0)
    (tmp_path / "b:2").touch()
    assert split_scale(f"{tmp_path}/b:2") == (tmp_path / "b:2", 1.0)
    assert split_scale(f"{tmp_path}/b:2:-1e-1") == (tmp_path / "b:2", -0.1)


@pytest.mark.parametrize("scale", ["nan", "inf", "-1e39", "2e6"])
def test_scales_beyond_reason_are_refused(scale: str):
    with pytest.raises(
        InputError, match=rf"a\.gguf:{scale}: the scale is {scale}; it must be from"
    ):
        split_scale(f"a.gguf:{scale}")


def test_rows_that_a_type_cannot_hold_are_said(
    settings: MergeSettings, tmp_path: Path, capsys: Capture
):
    both = adapter(tmp_path / "b.gguf", {Q: random_pair(64, 256), DOWN: random_pair(256, 64)})
    assert merge.run(replace(settings, adapters=(both,), type="q4_K")) == 0
    said = capsys.readouterr().out.splitlines()
    assert "q8_0 -> q4_K" in said[0] and "no blocks" not in said[0]
    assert "f16 -> f16" in said[1] and "rows of 64 do not fill blocks of q4_K" in said[1]


# ---- what is refused -----------------------------------------------------------------------------------------


def check_refusal(settings: MergeSettings, said: str) -> None:
    """One line, and nothing is written or left behind."""
    before = {path: path.read_bytes() for path in settings.model.parent.iterdir()}
    with pytest.raises(InputError, match=said) as raised:
        merge.run(settings)
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in settings.model.parent.iterdir()} == before


def test_files_that_would_be_lost_are_kept(settings: MergeSettings):
    check_refusal(replace(settings, output=settings.model), "is one of the files that are read")
    check_refusal(
        replace(settings, output=Path(settings.adapters[0])), "is one of the files that are read"
    )
    texts = settings.model.with_name("texts.txt")
    texts.write_text("a text")
    conflicting = replace(settings, output=texts, calibrate=texts, overwrite=True)
    check_refusal(conflicting, "is one of the files that are read")
    settings.output.write_bytes(b"earlier")
    check_refusal(settings, "exists; give another name, or --overwrite")
    merge.run(replace(settings, overwrite=True))
    assert GGUF(settings.output).entries


def test_another_base_is_refused(settings: MergeSettings, tmp_path: Path):
    wrong = adapter(tmp_path / "w.gguf", {Q: random_pair(64, 32)})
    check_refusal(
        replace(settings, adapters=(*settings.adapters, wrong)), "do not fit .* another base"
    )
    missing = adapter(tmp_path / "x.gguf", {"blk.7.attn_q.weight": random_pair(64, 32)})
    check_refusal(replace(settings, adapters=(missing,)), "no tensor blk.7.attn_q.weight")


def test_quantized_halves_are_refused(settings: MergeSettings, tmp_path: Path):
    values, (a, b) = GGUF(settings.adapters[0]).values, random_pair(64, 256)
    halves = {f"{Q}.lora_a": quantize(a, DTYPES["q8_0"]), f"{Q}.lora_b": b}
    write_gguf(tmp_path / "q.gguf", values, halves)
    merge_settings = replace(settings, adapters=(str(tmp_path / "q.gguf"),))
    check_refusal(merge_settings, "lora_a is q8_0.* it must be a matrix of f32, f16, bf16")


def test_a_base_whose_type_cannot_be_read_is_refused(settings: MergeSettings):
    write_gguf(settings.model, BASE, tensors() | {Q: np.zeros((64, 2), BLOCK_TYPES["q1_0"].numpy)})
    check_refusal(settings, "attn_q.weight is q1_0, which cannot be merged into")


def test_an_unknown_type_is_refused(settings: MergeSettings):
    check_refusal(replace(settings, type="iq3_s"), "--type: iq3_s is unknown")


def test_values_that_are_no_numbers_are_refused(settings: MergeSettings, tmp_path: Path):
    a, b = random_pair(64, 256)
    b[3, 1] = np.nan
    bad = adapter(tmp_path / "n.gguf", {Q: (a, b)})
    check_refusal(replace(settings, adapters=(bad,)), "lora_b has values that are not finite")
    settings.output.write_bytes(b"earlier")
    b[3, 1] = 3e38  # finite, but what is added is not
    overflow_settings = replace(
        settings, adapters=(adapter(tmp_path / "n.gguf", {Q: (a, b)}),), overwrite=True
    )
    check_refusal(overflow_settings, "attn_q.weight has values that are not finite")
    b[3, 1] = 1e6
    large_adapter = adapter(tmp_path / "n.gguf", {Q: (a, b)})
    check_refusal(
        replace(overflow_settings, adapters=(large_adapter,), type="f16"),
        "values too large for f16",
    )


def test_few_rows_are_in_memory_at_a_time(settings: MergeSettings, monkeypatch: pytest.MonkeyPatch):
    seen, rows = [], Adapter.delta_rows

    def counted(self: Adapter, name: str, start: int, stop: int) -> np.ndarray:
        seen.append((start, stop))
        return rows(self, name, start, stop)

    monkeypatch.setattr(Adapter, "delta_rows", counted)
    monkeypatch.setattr("packtrain.models.rewrite_model.CHUNK_ELEMENTS", 256 * 24)
    merge.run(settings)
    assert seen == [(0, 24), (24, 48), (48, 64)]


@pytest.mark.parametrize("dtype", ("f32", "q8_0"))
def test_a_tuned_matrix_is_written_in_the_room_of_the_loop(tmp_path: Path, dtype: str) -> None:
    """All memory of the run is still held then, and its plan has no other row for this."""
    values = random_normal(1024, 1024)
    write_gguf(tmp_path / "base.gguf", BASE, {Q: quantize(values, DTYPES[dtype])})
    base, changes = GGUF(tmp_path / "base.gguf"), {Q: lambda start, stop: values[start:stop]}
    write_changed(tmp_path / "first.gguf", base, changes, name="compiled")
    tracemalloc.start()
    write_changed(tmp_path / "tuned.gguf", base, changes, name="tuned")
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < LOOP_NBYTES


# ---- with data -----------------------------------------------------------------------------------------------


@pytest.fixture
def tunable(tmp_path: Path) -> MergeSettings:
    """A model with a template of its own making, an adapter of its blocks, and conversations."""
    random_model(tmp_path / "f32.gguf", "llama tied")
    assert (
        main(["quantize", str(tmp_path / "f32.gguf"), str(tmp_path / "base.gguf"), "Q4_K_M"]) == 0
    )
    adapter_path = random_adapter(tmp_path / "a.gguf", open_model(tmp_path / "base.gguf"))
    (tmp_path / "chats.jsonl").write_text(sample_chats())
    return MergeSettings(tmp_path / "base.gguf", (f"{adapter_path}:0.1",), tmp_path / "out.gguf")


def test_a_merge_with_data_prints_what_each_matrix_loses(tunable: MergeSettings, capsys: Capture):
    assert merge.run(tunable) == 0
    assert "--calibrate DATA" in capsys.readouterr().err
    uncalibrated = tunable.output.read_bytes()
    calibrated_settings = replace(
        tunable, calibrate=tunable.model.with_name("chats.jsonl"), overwrite=True
    )
    assert merge.run(calibrated_settings) == 0
    out, err = capsys.readouterr()
    assert re.search(r"merging reads [\d,]+ tokens of the data", err)
    assert "--calibrate" not in err
    base, merged = GGUF(tunable.model), GGUF(tunable.output)
    changed = [n for n in base.entries if merged.array(n).tobytes() != base.array(n).tobytes()]
    assert set(changed) == {line.split()[0] for line in out.splitlines() if "error" in line}
    assert (
        tunable.output.stat().st_size == len(uncalibrated)
        and tunable.output.read_bytes() != uncalibrated
    )


FREED = """
import sys
import numpy as np
from packtrain.cli.main import main
from packtrain.common.memory import private_nbytes, release_memory
assert main(sys.argv[1:]) == 0
release_memory()
before = private_nbytes()
for mib in (24, 16):  # malloc would get the first one from the system, and keep the second
    np.ones(mib << 20, np.uint8)
print(private_nbytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere malloc is another one")
def test_what_a_merge_with_data_frees_is_not_kept(tunable: MergeSettings) -> None:
    """--memory counts the matrices that are there at once: those that malloc kept took 30 MiB more."""
    merge_args = ["merge", tunable.model, *tunable.adapters, "-o", tunable.output]
    data = ["--calibrate", tunable.model.with_name("chats.jsonl")]
    command = [sys.executable, "-c", FREED, *map(str, merge_args + data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 4 << 20


def test_text_calibrates_and_so_do_matrices_of_another_type(
    tunable: MergeSettings, capsys: Capture
):
    data = tunable.model.with_name("text.txt")
    data.write_text(sample_text(2000))
    assert merge.run(replace(tunable, calibrate=data, type="q5_1")) == 0
    merged = GGUF(tunable.output)
    assert merged.entries["blk.1.ffn_down.weight"].dtype.name == "q5_1"
    assert tunable.model.with_name("text.txt").exists()


def test_too_little_memory_and_missing_data_are_refused(tunable: MergeSettings, capsys: Capture):
    data = tunable.model.with_name("chats.jsonl")
    assert merge.run(replace(tunable, calibrate=data)) == 0  # now its tokens are in the cache
    tunable.output.unlink()
    with pytest.raises(DoesNotFit, match="--memory: 2MiB is too small to merge with --calibrate"):
        merge.run(replace(tunable, calibrate=data, memory="2MiB"))
    with pytest.raises(InputError, match=r"--calibrate: .*none.jsonl does not exist"):
        merge.run(replace(tunable, calibrate=data.with_name("none.jsonl")))
    assert not tunable.output.exists()


@pytest.mark.filterwarnings("error")
def test_a_scale_that_overflows_is_an_error(tmp_path: Path):
    random_model(tmp_path / "m.gguf", "llama")
    model = open_model(tmp_path / "m.gguf")
    pairs = {Q: random_pair(*model.gguf.entries[Q].shape)}
    with pytest.raises(
        InputError, match=rf"{Q}: the adapter's values, or its scale, are too large"
    ):
        adapted(model, [(Adapter("llama", 1e38, pairs), 1e3)])


def test_what_a_killed_merge_left_is_removed(settings: MergeSettings, tmp_path: Path):
    with subprocess.Popen(["true"]) as process:
        process.wait()
    part_file = tmp_path / f".out.gguf.0.{process.pid}.part"
    part_file.write_bytes(b"half")
    merge.run(settings)
    assert settings.output.exists() and not part_file.exists()
