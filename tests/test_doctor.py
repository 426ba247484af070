"""What `packtrain doctor` reports, and when it says that packtrain cannot work."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import packtrain.kernels
from packtrain.cli import doctor
from packtrain.cli.main import main
from packtrain.devtools.bench import machine_rates
from packtrain.kernels.runtime import environment, kernel_cache


def test_a_report_names_what_a_run_depends_on(capsys, tmp_path, monkeypatch):
    (tmp_path / "packtrain/tokens/a").mkdir(parents=True)
    (tmp_path / "packtrain/tokens/a/b").write_bytes(bytes(3 << 20))
    (tmp_path / "packtrain/rates.json").write_bytes(bytes(9))
    monkeypatch.setattr(doctor, "cache_root", lambda: tmp_path / "packtrain")
    packtrain.kernels.set_threads(
        environment.max_threads()
    )  # a run before this test may have had fewer
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["caches"] == {"tokens": 3 << 20, "other files": 9}
    memory, kernels = report["memory"], report["kernels"]
    assert 0 < memory["available"] <= memory["total"] and memory["limit"] <= memory["total"]
    assert kernels["modules"] == len(kernel_cache.kernel_modules())
    assert kernels["missing"] == len(kernel_cache.missing_modules(kernel_cache.kernel_modules()))
    assert report["threads"] == environment.max_threads() and report["problems"] == []
    assert report["packages"]["numpy"] == importlib.metadata.version("numpy")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "tokens 3.0 MiB" in text and "problem: none" in text
    assert re.search(rf"^kernels +for {report['kernel_level']}, \d+ threads", text, re.MULTILINE)


def test_a_missing_part_is_named_with_what_it_brings(capsys, monkeypatch):
    def version(name: str) -> str:
        if name in ("pyarrow", "numba"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(machine_rates, "version", version)
    assert main(["doctor"]) == 0, "metadata alone stop nothing"
    text = capsys.readouterr().out
    assert "pip install 'packtrain[data]' brings Parquet, Arrow and Feather files" in text
    assert "not installed, but required" in text


def test_a_required_package_that_cannot_be_imported_is_a_problem(capsys, monkeypatch):
    def import_module(name: str) -> object:
        if name == "yaml":
            raise ImportError("no libyaml")
        return object()

    monkeypatch.setattr(doctor, "import_module", import_module)
    assert main(["doctor"]) == 1
    assert "problem: pyyaml cannot be imported: no libyaml; pip" in capsys.readouterr().out


def test_the_packages_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split("[>=<]", requirement)[0] for requirement in requirements}

    assert set(doctor.REQUIRED) == names(project["dependencies"])
    extras = project["optional-dependencies"]
    for extra in ("torch", "server", "grammar", "data"):
        packages = {name for name, (e, _) in doctor.OPTIONAL.items() if e == extra} - {"triton"}
        assert packages == names(extras[extra]), extra
