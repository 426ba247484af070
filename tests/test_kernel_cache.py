"""Compiled kernels are kept by module and content: a change compiles again what it is part of, and nothing else."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packtrain import kernels
from packtrain.cli import compile
from packtrain.cli.main import main
from packtrain.common.child_process import variables
from packtrain.kernels.runtime import environment, kernel_cache, loader, machine_code
from tests.test_model_file import save

SMALL = ("softmax",)


@pytest.fixture
def clean() -> Iterator[None]:
    """What these functions remember is forgotten before and after."""
    remembering = (
        kernel_cache.cache_roots,
        kernel_cache.target_folder,
        kernel_cache.kernel_modules,
        kernel_cache.module_files,
        kernel_cache.module_imports,
        kernel_cache.needed,
        kernel_cache.folder_name,
        kernel_cache.saved_fingerprints,
    )
    for function in remembering:
        function.cache_clear()
    yield
    for function in remembering:
        function.cache_clear()


def test_what_each_module_imports_is_read_from_its_source():
    paths = sorted(kernel_cache.KERNELS_FOLDER.rglob("*.py"))
    modules = [file.stem for file in paths if not file.stem.startswith("__")]
    assert len(modules) == len({*modules}), "the cache names modules by their stems"
    files = {file.stem: ast.parse(file.read_text()) for file in paths}
    assert files.keys() - kernel_cache.HOST_MODULES == kernel_cache.module_imports().keys()
    for name, listed in kernel_cache.module_imports().items():
        nodes = [node for node in ast.walk(files[name]) if isinstance(node, ast.ImportFrom)]
        imports = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        paths = {
            kernel_cache.import_path(module): module for module in kernel_cache.module_imports()
        }
        parts = {paths.get(path) or paths.get(path.rpartition(".")[0]) for path in imports}
        assert parts - {None} == listed, name


def test_a_module_needs_what_it_imports_however_far_away():
    assert {"flash_attention", "masks", "register_tiles", "simd_f32"} <= kernel_cache.needed(
        "attention_back"
    )
    base = {"simd_f32", "lane_reduction", "jit", "work_stealing", "thread_pool", "kernel_types"}
    assert kernel_cache.needed("softmax") == {"softmax", *base}


@pytest.mark.parametrize(
    ("changed", "recompiled"),
    [
        ("gemm", {"gemm", "matmul_f32", "loss"}),
        ("softmax", {"softmax"}),
        ("simd_f32", {"simd_f32", "norm", "flash_attention", "packed"}),
    ],
)
def test_a_change_reaches_all_that_contains_it(
    changed: str,
    recompiled: set[str],
    clean: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    names = kernel_cache.kernel_modules()
    files = {
        name: file.relative_to(kernel_cache.KERNELS_FOLDER)
        for name, file in kernel_cache.module_files().items()
    }
    old_fingerprints = {name: kernel_cache.fingerprint(name) for name in names}
    for name in names:
        copy = tmp_path / files[name]
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((kernel_cache.KERNELS_FOLDER / files[name]).read_text())
    monkeypatch.setattr(kernel_cache, "KERNELS_FOLDER", tmp_path)
    kernel_cache.module_files.cache_clear()
    assert {
        name: kernel_cache.fingerprint(name) for name in names
    } == old_fingerprints  # a copy is the same
    with open(tmp_path / files[changed], "a") as file:
        file.write("# another version\n")
    new_fingerprints = {name: kernel_cache.fingerprint(name) for name in names}
    assert {
        name for name in old_fingerprints if old_fingerprints[name] != new_fingerprints[name]
    } >= recompiled
    if changed != "simd_f32":
        assert new_fingerprints["norm"] == old_fingerprints["norm"]


def test_one_process_compiles_at_a_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    code = (
        "import sys, time; from pathlib import Path; from packtrain.kernels.runtime import loader\n"
        "with loader.file_lock(Path(sys.argv[1])): print('in', flush=True); time.sleep(0.3); print('out', flush=True)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    first, second = (subprocess.Popen(command) for _ in range(2))
    assert (first.wait(), second.wait()) == (0, 0)
    said = capfd.readouterr()
    assert said.out.split() == ["in", "out", "in", "out"]
    assert said.err.count("waiting for it") == 1


USE = """
import numpy as np
from packtrain import kernels
x, none = np.ones((2, 3), np.float32), np.zeros((0, 0), np.float32)
kernels.softmax.soft_max(x, x, none, 1.0)
assert abs(x - 1 / 3).max() < 1e-6
from packtrain.kernels.runtime import kernel_cache
print(kernel_cache.module_folder("softmax").parent)
"""


def kernel_location(
    cache: Path, temporary: Path, tree: Path = kernel_cache.KERNELS_FOLDER.parents[1]
) -> tuple[str, str]:
    """Where a process found a kernel that it used, and what it said."""
    values = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary), "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", USE], env={**os.environ, **values}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with what `softmax` needs, compiled by a child."""
    cache = tmp_path_factory.mktemp("filled")
    location, said = kernel_location(cache, cache)
    assert location == str(cache / "packtrain/kernels")
    assert f"compiling {len(kernel_cache.needed('softmax'))} kernel modules" in said
    return cache


def modification_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_complete_cache_is_only_read(filled: Path, tmp_path: Path):
    snapshot = modification_times(filled)
    assert kernel_location(filled, tmp_path) == (str(filled / "packtrain/kernels"), "")
    assert modification_times(filled) == snapshot
    assert not any(tmp_path.iterdir())


LEAN = """
import sys
import numpy as np
from packtrain.dtypes import bf16
from packtrain.kernels.quant.quantized_arrays import quantize
assert (quantize(np.ones((4, 32), np.float32), bf16).view(np.uint16) == 0x3F80).all()
assert "numba" not in sys.modules
import numba

@numba.njit(parallel=True)
def own(x):
    for i in numba.prange(len(x)):
        x[i] += np.sqrt(x[i]) + len(str(i))
    return x.sum()

assert own(np.ones(4)) == 12
"""


def test_cached_kernels_load_without_what_compiles_them_and_other_code_still_compiles():
    loader.prepare(["quantize"])
    subprocess.run([sys.executable, "-c", LEAN], check=True)


NUMBA_CHECK_SOURCE = """
import sys
import numpy as np
from packtrain import kernels
from packtrain.kernels.quant.quantized_arrays import quantize
from packtrain.dtypes import WRITABLE
x = np.random.default_rng(0).standard_normal((3, 512), np.float32)
before = [quantize(x, dtype).tobytes() for dtype in WRITABLE]
sums = np.empty((2, 3))
light, packed = kernels.quantize, np.empty((3, 1024), np.uint8)
assert "numba" not in sys.modules
itself = kernels.loader.with_numba("quantize")
assert kernels.quantize is itself is not light and not hasattr(light.rows, "overloads")
assert [quantize(x, dtype).tobytes() for dtype in WRITABLE] == before
assert light.MAX_CHUNK == itself.MAX_CHUNK and light.sum_of_squares is not itself.sum_of_squares
assert light.pack is itself.pack  # what is no kernel and no constant
"""


def test_machine_code_from_the_cache_and_numba_beside_it_give_the_same_bits():
    loader.prepare(["quantize"])
    subprocess.run([sys.executable, "-c", NUMBA_CHECK_SOURCE], check=True)


ARGUMENT_CHECK_SOURCE = """
import numpy as np
from packtrain import kernels
kernels.set_threads(1)
x, none = np.ones((2, 4), np.float32), np.zeros((0, 0), np.float32)
fixed = x.copy()
fixed.flags.writeable = False
kernels.softmax.soft_max(x, fixed, none, 1.0)
for wrong in (x.astype(np.float64), x[0], x[:, ::2], fixed):
    try:
        kernels.softmax.soft_max(wrong, x, none, 1.0)
    except TypeError as error:
        assert "soft_max: argument 0" in str(error)
    else:
        raise AssertionError(wrong)
"""


def test_the_debug_flag_calls_refuses_arrays_of_other_types():
    loader.prepare(SMALL)
    env = os.environ | {"PACKTRAIN_DEBUG": "nan,calls"}
    subprocess.run([sys.executable, "-c", ARGUMENT_CHECK_SOURCE], check=True, env=env)


def test_a_variable_gives_the_number_of_threads():
    code = "from packtrain import kernels; kernels.softmax; print(kernels.threads())"
    for variable, count in (("NUMBA_NUM_THREADS", "3"), ("OMP_NUM_THREADS", "5")):
        env = {**os.environ, variable: count}
        assert (
            subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
            == f"{count}\n"
        )


LATER = """
import numba
import numpy as np
from packtrain import kernels
codes = kernels.loader.with_numba("codes")
assert not codes.reciprocal.overloads
reciprocal = codes.reciprocal

@numba.njit
def twice(d):
    return reciprocal(d) * np.float32(2)

assert twice(4) == 0.5
assert [str(given) for (given,) in codes.reciprocal.overloads] == ["float32"]
"""


def test_parts_of_cached_kernels_load_when_new_code_calls_them():
    loader.prepare(["quantize"])
    subprocess.run([sys.executable, "-c", LATER], check=True)


def test_kept_fingerprints_are_those_of_the_sources(
    filled: Path, clean: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(filled))
    assert kernel_cache.saved_fingerprints() == {
        name: kernel_cache.fingerprint(name) for name in kernel_cache.kernel_modules()
    }
    kernel_cache.saved_fingerprints.cache_clear()
    monkeypatch.setattr(kernel_cache, "platform_identity", lambda: ("another",))
    assert kernel_cache.saved_fingerprints() == {}


def test_code_for_a_chosen_cpu_serves_every_machine_that_has_it(monkeypatch: pytest.MonkeyPatch):
    features = environment.CPUS["avx2"]["CPU_FEATURES"]
    environment._override_config.cache_clear()

    def identity_on(cpu_name: str, cpu_features: str) -> tuple[str, ...]:
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: cpu_name)
        monkeypatch.setattr(environment, "host_cpu_features", lambda: cpu_features)
        return environment.platform_identity.__wrapped__()

    machines = ("znver4", f"{features},+avx512f"), ("alderlake", f"{features},+avxvnni")
    monkeypatch.setenv("PACKTRAIN_CPU", "x86-64-v3")
    assert len({identity_on(*machine) for machine in machines}) == 1
    monkeypatch.delenv("PACKTRAIN_CPU")
    assert len({identity_on(*machine) for machine in machines}) == 2


def truncate_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def corrupt_file(file: Path) -> None:
    code = bytearray(file.read_bytes())
    for at in range(len(code) // 3, len(code) // 3 + 40):
        code[at] ^= 16
    file.write_bytes(code)


@pytest.mark.parametrize("damage", [truncate_file, corrupt_file, Path.unlink])
def test_damaged_machine_code_is_compiled_again(
    damage: Callable[[Path], None], filled: Path, tmp_path: Path
):
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "packtrain/kernels"
    code = folder / kernel_cache.folder_name("softmax") / machine_code.CODE_FILE
    damage(code)
    location, said = kernel_location(tmp_path, tmp_path)
    assert location == str(folder) and said.count("compiling 1 kernel modules") == 1
    assert f"{code.parent} is damaged" in said
    assert kernel_location(tmp_path, tmp_path) == (str(folder), "")


@pytest.mark.parametrize(
    "error, is_damage",
    [
        (MemoryError(), False),
        (OSError("Could not find/load shared object file 'libllvmlite.so'"), False),
        (SystemError("error return without exception set"), False),
        (ImportError("libllvmlite.so: failed to map segment from shared object"), False),
        (EOFError("Ran out of input"), True),
    ],
)
def test_a_process_that_lacks_memory_leaves_the_cache_to_others(
    error: Exception, is_damage: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def fail(name: str) -> None:
        raise error

    folder = tmp_path / "norm"
    folder.mkdir()
    (folder / kernel_cache.CHECKSUM_FILE).write_text("checksum")
    monkeypatch.setattr(kernel_cache, "needed", lambda name: {name})
    monkeypatch.setattr(kernel_cache, "complete", lambda name: folder)
    monkeypatch.setattr(loader, "_imported", fail)
    with pytest.raises(type(error)):
        loader.with_numba.__wrapped__("norm")
    assert folder.exists() == (not is_damage)


def test_a_damaged_cache_of_numba_is_compiled_again(filled: Path, tmp_path: Path):
    """Such as after a power failure: softmax is missing, and what it needs cannot be read."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "packtrain/kernels"
    shutil.rmtree(folder / kernel_cache.folder_name("softmax"))
    for file in (folder / kernel_cache.folder_name("simd_f32")).glob("*.nb?"):
        truncate_file(file)
    location, said = kernel_location(tmp_path, tmp_path)
    assert location == str(folder) and "failed" not in said


@pytest.mark.parametrize("text", ["5", "{}", '{"simd_f32": "../../x"}', "\xff", "[" * 10**5])
def test_damaged_fingerprints_are_made_again(
    text: str, clean: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    name = kernel_cache.fingerprints_file()
    expected = {
        module: kernel_cache.fingerprint(module) for module in kernel_cache.module_imports()
    }
    monkeypatch.setattr(kernel_cache, "cache_roots", lambda: [tmp_path])
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    assert (
        kernel_cache.saved_fingerprints() == {}
        and kernel_cache.folder_name("simd_f32") == f"simd_f32-{expected['simd_f32']}"
    )
    kernel_cache.save_fingerprints()
    kernel_cache.saved_fingerprints.cache_clear()
    assert kernel_cache.saved_fingerprints() == expected


def test_a_copy_of_the_package_elsewhere_uses_the_same_kernels(filled: Path, tmp_path: Path):
    tree = tmp_path / "elsewhere"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(kernel_cache.KERNELS_FOLDER.parent, tree / "packtrain", ignore=ignored)
    for file in tree.rglob("*.py"):
        os.utime(file, (1, 1))
    snapshot = modification_times(filled)
    assert kernel_location(filled, tmp_path, tree) == (str(filled / "packtrain/kernels"), "")
    assert modification_times(filled) == snapshot


def test_what_is_missing_of_a_cache_that_cannot_be_written_goes_to_a_folder_of_the_user(
    clean: None, filled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(filled))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    default_folder = filled / "packtrain/kernels"
    monkeypatch.setattr(
        kernel_cache, "write_error", lambda root: "read-only" if root == default_folder else None
    )
    requests: list[list[str]] = []
    monkeypatch.setattr(loader, "_compile", lambda names, compiler: requests.append(names))
    (tmp_path / f"packtrain-{os.getuid()}/kernels").mkdir(parents=True, mode=0o700)
    (tmp_path / f"packtrain-{os.getuid()}").chmod(0o700)
    assert loader.prepare(SMALL) == 0 and requests == []
    assert loader.prepare(("reduce",)) == 1 and requests == [["reduce"]]
    assert kernel_cache.target_folder() == tmp_path / f"packtrain-{os.getuid()}/kernels"
    assert kernel_cache.module_folder("simd_f32").parent == default_folder
    assert kernel_cache.module_folder("reduce").parent == kernel_cache.target_folder()


def test_packtrain_compile_fills_a_cache(
    clean: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    """The command on the modules that `softmax` needs; on all of them it takes minutes."""
    names = sorted(kernel_cache.needed("softmax"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "kernel_modules", lambda: names)
    monkeypatch.setattr(
        compile, "required_kernel_modules", lambda experts, packed, optimizer: ("softmax",)
    )
    folder = tmp_path / "packtrain/kernels"
    for count in (len(names), 0):
        assert main(["compile"]) == 0
        said = capfd.readouterr()
        assert re.fullmatch(
            rf"{len(names)} kernel modules, {count} compiled now in \d+ s, in {folder}\n", said.out
        )
        assert said.err.count("kernels compiled in ") == (count > 0)
    assert {path.parent for path in folder.glob(f"*/{kernel_cache.CHECKSUM_FILE}")} == {
        folder / kernel_cache.folder_name(name) for name in names
    }
    assert len(list(folder.parent.glob("loaded-*.json"))) == 1  # what a budget reads
    assert kernel_location(tmp_path, tmp_path) == (str(folder), "")


def without_rights(*command: str) -> list[str]:
    """The command as someone for whom the bits of files count, as they do not for root."""
    if os.geteuid():
        return [*command]
    if not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and there is no setpriv to give that up")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]


def test_a_complete_cache_that_is_read_only_is_used_by_a_command(tmp_path: Path):
    cache, temporary, model = (tmp_path / name for name in ("cache", "temporary", "m.gguf"))
    save(model)
    temporary.mkdir()
    kernels.prepare(kernels.GENERATION_KERNELS)
    for name in set[str]().union(*map(kernel_cache.needed, kernels.GENERATION_KERNELS)):
        folder = kernel_cache.module_folder(name)
        shutil.copytree(folder, cache / "packtrain/kernels" / folder.name)
    snapshot = modification_times(cache)
    for path in (cache, *snapshot):
        path.chmod(path.stat().st_mode & ~0o222)
    values = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    try:
        if not subprocess.run(without_rights("test", "-w", str(cache / "packtrain"))).returncode:
            pytest.skip("here everything can be written")
        command = without_rights(sys.executable, "-m", "packtrain", "generate", str(model), "-n3")
        done = subprocess.run(command, env=variables() | values, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, done.stderr
        assert "compil" not in done.stderr and "cannot write" not in done.stderr
        assert modification_times(cache) == snapshot and not any(temporary.iterdir())
    finally:
        for path in (cache, *snapshot):
            path.chmod(path.stat().st_mode | 0o200)


def test_a_folder_that_others_can_write_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"packtrain-{os.getuid()}"
    assert kernel_cache.private_folder() == []
    assert kernel_cache.private_folder(create=True) == [folder / "kernels"]
    folder.chmod(0o777)
    assert kernel_cache.private_folder() == []
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert kernel_cache.private_folder() == []
