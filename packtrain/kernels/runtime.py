"""The policy of compiled code, set once, before the first kernel module loads.

Number of threads from environment variables, affinity and cgroup quota; one BLAS
thread; a cache folder for kernels, filled by a short-lived child. Importing this loads neither numba nor numpy.
"""

import contextlib
import ctypes
import importlib
import os
import platform
import shutil
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.gc_control import not_collecting

# values of PACKTRAIN_CPU: compile for a lesser CPU than this one, to try what its users get
CPUS = {
    "avx2": {
        "CPU_NAME": "haswell",
        "CPU_FEATURES": "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe",
    },
    "avx512": {
        "CPU_NAME": "cooperlake",
        "CPU_FEATURES": "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+avx512f,+avx512bw"
        ",+avx512cd,+avx512dq,+avx512vl,+avx512vnni,+avx512bf16",
    },
}
ARCH_PRCTL, REQUEST, TILES = 158, 0x1023, 18  # Linux: a system call, what it is asked, and for what


AMX = "amx-bf16"
NEEDED = {"bf16": "avx512bf16", "bf16x3": AMX}  # by products of these precisions
NUMBERS = "NUMBA_NUM_THREADS", "OMP_NUM_THREADS"  # variables that give a number of threads


def most_threads() -> int:
    """The number of threads that the environment gives, else a thread for each core."""
    env_values = (os.environ.get(name, "") for name in NUMBERS)
    return next(
        (int(text) for text in env_values if text.isdecimal() and int(text)), allowed_cpus()
    )


def allowed_cpus() -> int:
    """The number of cores that affinity and the cgroup quota (v2, v1) allow this process."""
    bound = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    count = len(bound) or os.cpu_count() or 1
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        cgroup_path = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        for folder in (root / cgroup_path, *(root / cgroup_path).parents):
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


@cache
def prepare_numba() -> None:
    """Let numba compile for the chosen CPU, with our number of threads: OpenMP's, else those of its workqueue."""
    with not_collecting():
        import numba

    try:
        importlib.import_module("numba.np.ufunc.omppool")
        layer = "omp"
    except ImportError:
        layer = "workqueue"
    for name, value in chosen_cpu().items():
        setattr(numba.config, name, value)
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = layer
    with contextlib.suppress(RuntimeError):
        numba.config.NUMBA_NUM_THREADS = most_threads()


@cache
def limit_blas() -> None:
    """Let NumPy's own products use one thread: more would compete with ours, and change results."""
    import numpy  # noqa: F401  loads the library
    import threadpoolctl

    threadpoolctl.threadpool_limits(1, "blas")


def chosen_cpu() -> dict[str, str]:
    """What numba is told of the CPU: nothing to compile for this one. Raises InputError for a wrong PACKTRAIN_CPU."""
    cpu_name = os.environ.get("PACKTRAIN_CPU", "")
    chosen = _lesser(cpu_name) if cpu_name else {}
    names = ("CPU_NAME", "CPU_FEATURES")
    env_values = {name: os.environ.get(f"NUMBA_{name}") for name in names}
    return {name: value for name, value in env_values.items() if value is not None} | chosen


@cache
def _lesser(cpu_name: str) -> dict[str, str]:
    """What numba is told for a value of PACKTRAIN_CPU; code for features that are not here would end the process."""
    import llvmlite.binding

    if cpu_name not in CPUS:
        raise InputError(
            f"PACKTRAIN_CPU: {cpu_name} is unknown; it must be {' or '.join(CPUS)}, or unset for this CPU"
        )
    host_features = llvmlite.binding.get_host_cpu_features().flatten().split(",")
    missing = [
        name for name in CPUS[cpu_name]["CPU_FEATURES"].split(",") if name not in host_features
    ]
    if missing:
        lacks = ", ".join(name.removeprefix("+") for name in missing)
        raise InputError(f"PACKTRAIN_CPU: {cpu_name}: this CPU has no {lacks}; unset it")
    return CPUS[cpu_name]


@cache
def platform_parts() -> tuple[str, ...]:
    """What all compiled code depends on in addition to its source."""
    import llvmlite.binding

    return (
        "with entries",  # of what is kept, see machine.py
        *map(version_of, ("numba", "llvmlite")),
        sys.version,
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        *("tiles" for _ in range(has(AMX))),
        *("roomy" for _ in range(roomy())),
        *(part for item in sorted(chosen_cpu().items()) for part in item),
    )


def version_of(package: str) -> str:
    """What says a package's version, read without importing it."""
    return (folder_of(package) / "_version.py").read_text(encoding="utf-8")


def folder_of(package: str) -> Path:
    module_spec = find_spec(package)
    assert module_spec is not None and module_spec.origin is not None
    return Path(module_spec.origin).parent


def has(feature: str) -> bool:
    """Whether code is compiled for a CPU with this feature, as LLVM calls it: `avx512f`."""
    import llvmlite.binding

    chosen = chosen_cpu().get("CPU_FEATURES")
    features = llvmlite.binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{feature}" in features.split(",") and (feature != AMX or tiles_allowed())


def multiplies(precision: str) -> bool:
    """Whether our products on this CPU have this precision."""
    return precision not in NEEDED or has(NEEDED[precision])


@cache
def roomy() -> bool:
    """Whether the L2 cache of a core has 2 MiB, which products make use of."""
    with contextlib.suppress(OSError, ValueError):
        size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(size.removesuffix("K")) >= 2048
    return False


@cache
def tiles_allowed() -> bool:
    """Whether Linux lets this process use AMX's tiles, which it wants to be asked."""
    if sys.platform != "linux":
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(ARCH_PRCTL, REQUEST, TILES) == 0)


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
    reason = refusal(root)
    if reason is None:
        return root
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="packtrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    say(f"cannot write {root} ({reason}); using {folder} this time")
    return folder
