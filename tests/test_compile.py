"""Compiling ahead: within its memory, only what a command needs, shared out to children, and counted as it is done."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.watched import private_nbytes_of
from packtrain import kernels
from packtrain.common.child_process import variables
from packtrain.common.errors import DoesNotFit
from packtrain.engine.optim import AdamW
from packtrain.kernels.runtime import kernel_cache, loader
from packtrain.kernels.runtime.loader import MIB, CompileMode
from tests.test_model_file import CONFIG, save

LASTING_MIB = loader._for_this_cpu(*loader.LASTING_MIB)


@pytest.mark.parametrize(
    ("limit", "cores", "expected"),
    [
        (None, 4, CompileMode(2, True)),
        (None, 1, CompileMode(1, True)),
        ((50 + 2 * LASTING_MIB) * MIB, 2, CompileMode(2, True)),
        ((50 + 2 * loader.SINGLE_MIB) * MIB, 2, CompileMode(2, False)),
        ((50 + LASTING_MIB) * MIB, 1, CompileMode(1, True)),
        ((50 + loader.SINGLE_MIB) * MIB, 2, CompileMode(1, False)),
    ],
)
def test_the_fastest_way_that_fits_is_taken(
    limit: int | None, cores: int, expected: CompileMode, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loader.environment, "allowed_cpus", lambda: cores)
    assert loader.choose_mode(limit, 50 * MIB, ["simd_f32"]) == expected


@pytest.mark.parametrize("name", ["simd_f32", *loader.LARGER])
def test_what_does_not_fit_is_refused_with_what_it_needs(name: str):
    required_mib = 50 + loader.peak_mib(name)
    printed_mib = required_mib + loader.SLACK_NBYTES // MIB
    with pytest.raises(
        DoesNotFit, match=f"needs {printed_mib} MiB.*packtrain compile.*{printed_mib}MiB"
    ):
        loader.choose_mode(required_mib * MIB - 1, 50 * MIB, ["jit", name])
    assert loader.choose_mode(required_mib * MIB, 50 * MIB, ["jit", name]).children == 1
    later_nbytes = 53 * MIB  # of the next start, which is never as large as this one to a page
    assert loader.choose_mode(printed_mib * MIB, later_nbytes, ["jit", name]).children == 1


def test_a_command_refuses_at_once_where_compiling_does_not_fit(tmp_path: Path):
    values = {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "packtrain", "compile", "--memory", "90MiB"]
    done = subprocess.run(command, env=variables() | values, capture_output=True, text=True)
    assert done.returncode == 3
    assert "compiling kernels needs" in done.stderr
    assert not (tmp_path / "packtrain/kernels").exists()


@pytest.mark.parametrize("name", kernel_cache.kernel_modules())
def test_a_child_for_one_module_takes_no_more_than_is_said(name: str, tmp_path: Path):
    dependencies = sorted(kernel_cache.needed(name) - {name})
    kernels.prepare(dependencies)
    for dependency in dependencies:
        shutil.copytree(
            kernel_cache.module_folder(dependency), tmp_path / kernel_cache.folder_name(dependency)
        )
    command = [sys.executable, "-m", "packtrain.kernels", str(tmp_path)]
    pipe = subprocess.PIPE
    peak = 0
    with subprocess.Popen(command, env=variables(), stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{name}\n")
        child.stdin.close()
        while child.poll() is None:
            peak = max(peak, private_nbytes_of(child.pid))
            time.sleep(0.01)
        assert child.stdout.read().split() == [name]
    assert (tmp_path / kernel_cache.folder_name(name) / kernel_cache.CHECKSUM_FILE).exists()
    assert peak <= loader.peak_mib(name) * MIB
    assert (
        name not in loader.LARGER
        or peak > max(0.7 * loader.peak_mib(name), loader.SINGLE_MIB) * MIB
    )


def test_modules_wait_for_those_they_need_and_are_counted(monkeypatch: pytest.MonkeyPatch):
    requested: list[str] = []
    monkeypatch.setattr(loader, "_ask", lambda child, name: requested.append(name))
    names = kernel_cache.kernel_modules()
    counted: list[int] = []
    work = loader.ModuleCompiler(list(names), lambda: counted.append(1))
    assert work.compile_all(CompileMode(2, True)) == ""
    assert sorted(requested) == sorted(names) and len(counted) == len(names)
    for place, name in enumerate(requested):
        assert kernel_cache.needed(name) - {name} <= set(requested[:place])


def test_a_child_that_fails_is_said_and_ends_the_others(monkeypatch: pytest.MonkeyPatch):
    def fail(child: object, name: str) -> None:
        raise ChildProcessError("exit 7")

    monkeypatch.setattr(loader, "_ask", fail)
    assert (
        loader.ModuleCompiler(["simd_f32", "jit"], lambda: None).compile_all(CompileMode(2, False))
        == "exit 7"
    )


LOADED = """
import json, sys
from packtrain.cli.main import main
code = main(sys.argv[1:])
from packtrain import kernels
assert "numba" not in sys.modules
print(json.dumps([name for name in kernels.kernel_cache.kernel_modules() if kernels.is_loaded(name)]))
sys.exit(code)
"""


def modules_after_run(*arguments: object) -> set[str]:
    """The kernel modules in a process that has run a command."""
    command = [sys.executable, "-c", LOADED, *map(str, arguments)]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def module_closure(names: tuple[str, ...]) -> set[str]:
    """These modules and all that they need."""
    return set().union(*(kernel_cache.needed(name) for name in names))


@pytest.mark.parametrize("experts", [0, 4])
def test_generate_loads_what_was_compiled_for_it_and_no_more(experts: int, tmp_path: Path):
    model = tmp_path / "m.gguf"
    save(model, replace(CONFIG, expert_count=experts, expert_used_count=experts // 2))
    allowed_modules = (*kernels.GENERATION_KERNELS, *(kernels.EXPERT_KERNELS if experts else ()))
    loaded_modules = modules_after_run("generate", model, "-n", 3, "-p", "a")
    assert (
        module_closure(("flash_attention", "norm"))
        <= loaded_modules
        <= module_closure(allowed_modules)
    )


def test_train_loads_no_modules_but_those_of_its_plan(tmp_path: Path):
    text, output = tmp_path / "text.txt", tmp_path / "m.gguf"
    text.write_text("one two three four five six seven eight nine ten\n" * 40)
    size_flags = ("--iters", 2, "--ctx", 16, "--batch-size", 2, "--preset", "1m")
    loaded_modules = modules_after_run("train", "--data", text, "-o", output, *size_flags)
    assert loaded_modules == module_closure((*kernels.TRAINING_KERNELS, *AdamW.kernels))
