"""The policy of compiled code, set once, before the first kernel module loads.

Threads from affinity, cgroup quota and the user's own variables; OpenMP bound to cores; one BLAS
thread; kernels in a cache directory of their own, filled by a short-lived child. Importing this
loads neither numba nor numpy.
"""

import contextlib
import ctypes
import hashlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packtrain.child import variables

FOLDER = Path(__file__).parent
NOT_KERNELS = {"__init__", "__main__", "runtime", "counter"}
COMPLETE = "complete"
compiling: Path | None = None  # in the compiling child: kernel_root() of its parent


@dataclass(frozen=True, slots=True)
class Blas:
    """A single-threaded cblas_sgemm; its integers have 64 bits if `wide`."""

    symbol: str
    address: int
    wide: bool


def modules() -> list[str]:
    """The kernel modules, the largest source first."""
    files = [f for f in FOLDER.glob("*.py") if f.stem not in NOT_KERNELS]
    return [f.stem for f in sorted(files, key=lambda f: (-f.stat().st_size, f.stem))]


def allowed_cpus() -> int:
    """The cores that affinity and the cgroup quota (v2, v1) leave to this process."""
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    count = len(bound) or os.cpu_count() or 1
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        for folder in (root / own, *(root / own).parents):
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()[:2]
                if quota != "max":
                    count = min(count, max(1, -(-int(quota) // int(period))))
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
        if quota_us > 0:
            count = min(count, max(1, -(-quota_us // period_us)))
    return count


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables the user has not set, and take them back afterwards."""
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


@contextlib.contextmanager
def affinity_kept() -> Iterator[None]:
    """Give the calling thread the cores back that it had."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@cache
def start_threads() -> None:
    """Choose the thread pool: OpenMP bound to cores, else numba's workqueue.

    Unbound, the first parallel region after 20 ms of idling cost 7 ms. Threads that wait spin for a
    microsecond only: as fast alone, and twice as fast where another process has one of two cores.
    Variables and binding of this thread are taken back once libgomp has loaded: else children
    inherit one core.
    """
    count = allowed_cpus()
    with environment(OMP_PROC_BIND="true", GOMP_SPINCOUNT="1000"), affinity_kept():
        import numba

        try:
            importlib.import_module("numba.np.ufunc.omppool")
            layer = "omp"
        except ImportError:
            layer = "workqueue"
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = layer
    if not {"NUMBA_NUM_THREADS", "OMP_NUM_THREADS"} & set(os.environ):
        with contextlib.suppress(RuntimeError):
            numba.config.NUMBA_NUM_THREADS = count


@cache
def blas() -> Blas | None:
    """NumPy's own sgemm, which compiled code calls `packtrain_sgemm`; None if not found."""
    import llvmlite.binding
    import numpy  # noqa: F401  loads the library
    import threadpoolctl

    names = ("scipy_cblas_sgemm64_", "cblas_sgemm64_", "scipy_cblas_sgemm", "cblas_sgemm")
    found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    for library in sorted(found, key=lambda item: "numpy" not in item.filepath):
        handle = ctypes.CDLL(library.filepath)
        for name in names:
            function = getattr(handle, name, None)
            if function is not None:
                library.set_num_threads(1)
                address = ctypes.cast(function, ctypes.c_void_p).value or 0
                llvmlite.binding.add_symbol("packtrain_sgemm", address)
                return Blas(name, address, name.endswith("64_"))
    return None


@cache
def needed(name: str) -> frozenset[str]:
    """The kernel modules whose code is compiled into this one: itself and all that it imports."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    others = set(re.findall(rf"^from {re.escape(__package__)}\.(\w+) import", source, re.MULTILINE))
    for line in re.findall(rf"^from {re.escape(__package__)} import (.+)", source, re.MULTILINE):
        others |= set(line.split(", "))
    return frozenset([name]).union(*(needed(other) for other in others - NOT_KERNELS))


@cache
def platform_parts() -> tuple[str, ...]:
    """What all compiled code depends on beside its source."""
    import llvmlite
    import llvmlite.binding
    import numba

    found = blas()
    return (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        found.symbol if found else "own sgemm",
        *map(str, (numba.config.THREADING_LAYER, numba.config.CPU_NAME, numba.config.CPU_FEATURES)),
    )


def fingerprint(name: str) -> str:
    """Everything a module's code depends on; numba checks modification times, so they count too."""
    parts = list(platform_parts())
    for file in (FOLDER / f"{one}.py" for one in sorted(needed(name))):
        parts += [str(file), str(file.stat().st_mtime_ns), file.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cache_root() -> Path:
    """The user's cache folder by the rule of the platform."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "packtrain"
    if platform.system() == "Windows" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "packtrain/cache"
    try:
        home = Path.home()
    except RuntimeError:  # a user that the system does not know, as in some containers
        return Path(tempfile.gettempdir()) / f"packtrain-{os.getuid()}"
    return home / ("Library/Caches" if platform.system() == "Darwin" else ".cache") / "packtrain"


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be reading any more
        print(f"packtrain: {text}", file=sys.stderr, flush=True)


def writable(root: Path) -> Path:
    """`root`, or a temporary folder that goes with the process, said in one line."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        import atexit

        folder = Path(tempfile.mkdtemp(prefix="packtrain-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        say(f"cannot write {root} ({error.strerror}); it goes to {folder} this time")
        return folder


def sweep(root: Path) -> None:
    """Remove kernels of other versions that were compiled more than a month ago."""
    current = {f"{name}-{fingerprint(name)}" for name in modules()}
    for folder in root.iterdir():
        if folder.name not in current and time.time() - folder.stat().st_mtime > 30 * 24 * 3600:
            shutil.rmtree(folder, ignore_errors=True)


@cache
def kernel_root() -> Path:
    return compiling or writable(cache_root() / "kernels")


@cache
def folder_of(name: str) -> Path:
    """Where a module's compiled code is kept; all of it is there once the file COMPLETE is."""
    return kernel_root() / f"{name}-{fingerprint(name)}"


@cache
def fill_cache() -> None:
    """Let children compile what is missing. What is done before they are ended need not be done again."""

    def missing() -> list[str]:
        return [name for name in modules() if not (folder_of(name) / COMPLETE).exists()]

    if not missing():
        return
    with alone(kernel_root() / "lock"):
        names = missing()
        error = compiled(names, len(modules())) if names else ""
    if error:
        say(f"the compiling child failed ({error}); compiling in this process")


def compiled(names: list[str], count: int) -> str:
    """Compile these modules of `count` in children, and say so; what went wrong, or nothing."""
    sweep(kernel_root())
    say(
        f"compiling kernels, {len(names)} of {count} modules (once for this machine, a minute or two) …"
    )
    start = time.perf_counter()
    error = compile_in_children(names)
    if not error:
        say(f"kernels compiled in {time.perf_counter() - start:.0f} s")
    return error


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process after the other, so that those that start at once compile nothing twice."""
    try:
        import fcntl
    except ImportError:  # Windows: they do compile it twice
        yield
        return
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another process is compiling kernels; waiting for it …")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_in_children(names: list[str]) -> str:
    """Compile these modules, two processes at most; what went wrong, or nothing."""
    shares = [names] if allowed_cpus() == 1 or len(names) == 1 else [names[0::2], names[1::2]]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", __package__, str(kernel_root()), *share],
            env=variables(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    try:
        errors = [child.communicate()[1].strip() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    failed = [i for i, child in enumerate(children) if child.returncode]
    lines = [(errors[i] or f"exit {children[i].returncode}").splitlines()[-1] for i in failed]
    return "; ".join(lines)


def compile_into(root: str, names: list[str]) -> None:
    """What the child does; it must never start children of its own."""
    global compiling
    compiling = Path(root)
    for name in names:
        load(name)
        (folder_of(name) / COMPLETE).touch()


@contextlib.contextmanager
def numba_cache(folder: Path) -> Iterator[None]:
    """Let numba cache in `folder` meanwhile; the user's own numba code keeps its place."""
    import numba

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


@cache
def load(name: str) -> object:
    """Import one kernel module, and before it what it needs, under the policy."""
    start_threads()
    blas()
    for other in sorted(needed(name) - {name}):
        load(other)
    if not compiling:
        fill_cache()
    folder_of(name).mkdir(exist_ok=True)
    with numba_cache(folder_of(name)):
        return importlib.import_module(f"{__package__}.{name}")


def load_all(but: Collection[str] = ()) -> None:
    """Load every kernel module `but` these, so that what they take is there before memory is measured."""
    for name in modules():
        if name not in but:
            load(name)


def threads() -> int:
    """How many threads kernels use."""
    start_threads()
    import numba

    return int(numba.get_num_threads())


def set_threads(count: int) -> None:
    """Use `count` threads, at most as many as the pool has; results do not depend on it."""
    start_threads()
    import numba

    limit = int(numba.config.NUMBA_NUM_THREADS)
    if not 1 <= count <= limit:
        raise ValueError(f"set_threads: count ({count}) must lie between 1 and {limit}")
    numba.set_num_threads(count)
