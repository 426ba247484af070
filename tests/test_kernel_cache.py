"""Compiled kernels are kept by module: a change compiles the modules again whose code it is part of, and no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from packtrain.kernels import runtime


def test_a_module_needs_what_it_imports_however_far_away():
    assert {"attention", "visible", "tile", "simd"} <= runtime.needed("attention_back")
    assert runtime.needed("softmax") == {"softmax", "simd"}


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("gemm", {"gemm", "matmul", "loss"}),
        ("softmax", {"softmax"}),
        ("simd", set(runtime.modules())),
    ],
)
def test_a_change_reaches_all_that_contains_it(
    changed: str, again: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in runtime.modules():
        (tmp_path / f"{name}.py").write_text((runtime.FOLDER / f"{name}.py").read_text())
    monkeypatch.setattr(runtime, "FOLDER", tmp_path)
    before = {name: runtime.fingerprint(name) for name in runtime.modules()}
    with open(tmp_path / f"{changed}.py", "a") as file:
        file.write("# another version\n")
    after = {name: runtime.fingerprint(name) for name in runtime.modules()}
    assert {name for name in before if before[name] != after[name]} >= again
    if changed != "simd":
        assert "norm" not in {name for name in before if before[name] != after[name]}


def test_one_process_compiles_at_a_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    code = (
        "import sys, time; from pathlib import Path; from packtrain.kernels import runtime\n"
        "with runtime.alone(Path(sys.argv[1])): print('in', flush=True); time.sleep(0.3); print('out', flush=True)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    first, second = (subprocess.Popen(command) for _ in range(2))
    assert (first.wait(), second.wait()) == (0, 0)
    said = capfd.readouterr()
    assert said.out.split() == ["in", "out", "in", "out"]
    assert said.err.count("waiting for it") == 1
