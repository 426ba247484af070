"""packtrain check: what it prints and writes, and what it says of a wrong op; docs/ops.md lists the registry."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check as peer_check
from benchmarks import ops_page
from packtrain.cli.main import main
from packtrain.devtools.check import check_cases
from packtrain.devtools.check.op_samples import FUNCTIONS
from packtrain.engine import ops
from packtrain.engine.backends import cpu, numpy
from packtrain.engine.ops import __all__ as every
from packtrain.engine.tensor import OPS
from tests import checks
from tests.faults import replace_kernel

PAGE = Path(__file__).parent.parent / "docs" / "ops.md"
COLUMNS = 6  # that the registry says; the others are figures, and PyTorch's


def test_functions_are_checked_as_ops_are() -> None:
    left = {*every} - OPS.keys() - FUNCTIONS.keys()
    # numbers; whole blocks, which test_experts checks; a table without a gradient
    assert left == {"alibi_slopes", "experts", "grown"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients(name: str) -> None:
    checks.assert_passed(check_cases.check_values(name, (cpu, numpy)))
    checks.assert_passed(check_cases.check_slopes(name))


def test_every_type_that_an_op_takes_is_checked() -> None:
    dtypes = [value.dtype for value in check_cases.check_values("matmul", (cpu,))]
    assert {"f32", "f16", "bf16", "q8_0", "q4_K", "iq4_xs", "mxfp4"} <= {*dtypes}


def test_the_table_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["check", "neg", "pad", "--device", "cpu", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^neg +f32 +cpu +10 +0\.0e\+00", shown, re.MULTILINE)
    assert re.search(r"^pad +f32 +float64 ", shown, re.MULTILINE)
    report = json.loads(file.read_text())
    count = sum(row["cases"] for row in report["rows"])
    assert (
        f"{report['cases']} cases of 2 ops and functions in" in shown and count == report["cases"]
    )
    assert report["failed"] == []
    assert not report["pytorch"] and "PyTorch" not in shown


def test_without_pytorch_the_comparison_checks_ours_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_check, "find_spec", lambda name: None)
    assert peer_check.main(["neg", "--device", "cpu"]) == 0
    first_line, *table = capsys.readouterr().out.splitlines()
    assert first_line == "Nothing is compared with PyTorch, which is not installed."
    assert len(table) == 4 and table[1].startswith("neg ")
    for arguments, message in (
        (["matml"], "OPS: there is no op matml; did you mean matmul?"),
        (["neg", "--markdown", "p.md"], "--markdown writes a page about all ops; give no names"),
        (["--markdown", "no/p.md"], "--markdown: no/p.md cannot be written"),
    ):
        assert peer_check.main(arguments) == 2
        assert capsys.readouterr().err.startswith(f"benchmarks.check: error: {message}")


@pytest.mark.torch
def test_the_comparison_has_a_column_of_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "figures.json"
    assert peer_check.main(["neg", "rounded", "--device", "cpu", "--json", str(file)]) == 0
    heading, *_, last_line = capsys.readouterr().out.splitlines()
    assert heading.endswith(" PyTorch") and last_line == "no peer in PyTorch: rounded"
    report = json.loads(file.read_text())
    assert report["pytorch"]
    assert {row["op"] for row in report["rows"] if "PyTorch" in row["worst"]} == {"neg"}


def test_a_wrong_kernel_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_off(real: Callable[..., None]) -> Callable[..., None]:
        def run(y: Any, x: Any) -> None:
            real(y, x)
            y += 1e-3

        return run

    replace_kernel(monkeypatch, "neg", one_off)
    assert main(["check", "neg", "abs"]) == 1
    said = capsys.readouterr().err
    assert "beyond tolerance: neg sample 0 times 1, f32 on cpu: value off by 0.001" in said
    assert "abs sample" not in said and "on numpy" not in said


def test_a_wrong_gradient_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPS["sqr"], "vjp_rule", lambda dy, y, x: (ops.mul(dy, x),))
    assert main(["check", "sqr"]) == 1
    assert "sqr sample 0, result dense, f32 on float64: gradient off by" in capsys.readouterr().err


def test_a_kernel_that_fails_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise TypeError("no such array")

    real = OPS["neg"].kernels["cpu"]
    monkeypatch.setitem(OPS["neg"].kernels, "cpu", replace(real, run=broken))
    assert main(["check", "neg", "abs"]) == 1
    shown = capsys.readouterr()
    assert "beyond tolerance: neg" in shown.err and "TypeError: no such array" in shown.err
    assert re.search("^abs ", shown.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["matml"], "OPS: there is no op matml; did you mean matmul?"),
        (["conv2d"], "OPS: there is no op conv2d; did you mean conv_2d?"),
        (["neg", "--device", "gpu"], "--device is gpu; it must be one of cpu, numpy"),
    ],
)
def test_what_cannot_be_checked_is_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_the_page_lists_the_registry_as_it_is() -> None:
    listed = [line[2:].split(" | ") for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    assert PAGE.read_text().startswith(ops_page.PAGE)
    expected = [ops_page.op_columns(name) for name in check_cases.checkable_names()]
    assert [row[:COLUMNS] for row in listed] == expected, (
        "write it again: python -m benchmarks.check --markdown"
    )
