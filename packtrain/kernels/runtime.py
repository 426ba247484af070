"""The policy of compiled code, set once, before the first kernel module loads.

Number of threads from affinity, cgroup quota and environment variables; one BLAS
thread; a cache folder for kernels, filled by a short-lived child. Importing this loads neither numba nor numpy.
"""

import contextlib
import gc
import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# values of PACKTRAIN_CPU: compile for a lesser CPU than this one, to try what its users get
CPUS = {
    "avx2": {
        "CPU_NAME": "haswell",
        "CPU_FEATURES": "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe",
    }
}


def allowed_cpus() -> int:
    """The number of cores that affinity and the cgroup quota (v2, v1) allow this process."""
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
def not_collecting() -> Iterator[None]:
    """Inside the block no garbage is looked for: modules that load leave little, and a tenth of their time is this."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@cache
def start_threads() -> None:
    """Choose the number of threads, and numba's own pool where ours is not available: OpenMP, else its workqueue."""
    with not_collecting():
        import numba

    try:
        importlib.import_module("numba.np.ufunc.omppool")
        layer = "omp"
    except ImportError:
        layer = "workqueue"
    for name, value in CPUS.get(os.environ.get("PACKTRAIN_CPU", ""), {}).items():
        setattr(numba.config, name, value)
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = layer
    if not {"NUMBA_NUM_THREADS", "OMP_NUM_THREADS"} & set(os.environ):
        with contextlib.suppress(RuntimeError):
            numba.config.NUMBA_NUM_THREADS = allowed_cpus()


@cache
def limit_blas() -> None:
    """Let NumPy's own products use one thread: more would compete with ours, and change results."""
    import numpy  # noqa: F401  loads the library
    import threadpoolctl

    threadpoolctl.threadpool_limits(1, "blas")


@cache
def platform_parts() -> tuple[str, ...]:
    """What all compiled code depends on in addition to its source."""
    import llvmlite
    import llvmlite.binding
    import numba

    start_threads()  # chooses the threading layer
    return (
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        *map(str, (numba.config.THREADING_LAYER, numba.config.CPU_NAME, numba.config.CPU_FEATURES)),
    )


def has(feature: str) -> bool:
    """Whether code is compiled for a CPU with this feature, as LLVM calls it: `avx512f`."""
    import llvmlite.binding
    import numba

    start_threads()  # chooses the CPU
    chosen = numba.config.CPU_FEATURES
    found = llvmlite.binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{feature}" in found.split(",")


def cache_root() -> Path:
    """The user's cache folder, by the platform's convention."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "packtrain"
    if platform.system() == "Windows" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "packtrain/cache"
    try:
        home = Path.home()
    except RuntimeError:  # a user unknown to the system, as in some containers
        return Path(tempfile.gettempdir()) / f"packtrain-{os.getuid()}"
    return home / ("Library/Caches" if platform.system() == "Darwin" else ".cache") / "packtrain"


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        print(f"packtrain: {text}", file=sys.stderr, flush=True)


def refusal(root: Path) -> str | None:
    """Why no files can be created in this folder (created if missing); None if they can."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return None
    except OSError as error:
        return error.strerror


def writable(root: Path) -> Path:
    """`root`, or with a message a temporary folder that is deleted at exit."""
    why = refusal(root)
    if why is None:
        return root
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="packtrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    say(f"cannot write {root} ({why}); using {folder} this time")
    return folder


def threads() -> int:
    """The number of threads that kernels use."""
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
