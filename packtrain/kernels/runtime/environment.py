"""Set the policy of compiled code once, before the first kernel module loads.

The number of threads comes from environment variables, affinity and cgroup quota; BLAS has one thread; a short-lived
child fills the cache folder of kernels. Importing this module loads neither numba nor numpy.
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
from packtrain.common.gc_control import gc_paused

# values of PACKTRAIN_CPU: compile for a lesser CPU than this one, for images, and to try what its users get
AVX2_FEATURES = "+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
AVX512_FEATURES = "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni,+avx512bf16"
CPUS = {
    "avx2": {"CPU_NAME": "haswell", "CPU_FEATURES": AVX2_FEATURES},
    "avx512": {"CPU_NAME": "cooperlake", "CPU_FEATURES": f"{AVX2_FEATURES},{AVX512_FEATURES}"},
}
CPUS["x86-64-v3"] = CPUS["avx2"]
ARCH_PRCTL, REQUEST, TILES = 158, 0x1023, 18  # Linux: a system call, its request, and AMX's tiles
AMX = "amx-bf16"
PRECISION_FEATURES = {"bf16": "avx512bf16", "bf16x3": AMX}  # CPU feature by precision of products
is_quiet = False  # with --quiet: print no messages
THREAD_VARIABLES = "NUMBA_NUM_THREADS", "OMP_NUM_THREADS"  # variables that give a number of threads


def max_threads() -> int:
    """Return the number of threads that the environment gives, else one for each core."""
    env_values = (os.environ.get(variable, "") for variable in THREAD_VARIABLES)
    return next(
        (int(text) for text in env_values if text.isdecimal() and int(text)), allowed_cpus()
    )


def allowed_cpus() -> int:
    """Return the number of cores that affinity and the cgroup quota (v2, v1) allow this process."""
    affinity_cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    num_cpus = len(affinity_cpus) or os.cpu_count() or 1
    cgroup_root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        cgroup_path = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        for folder in (cgroup_root / cgroup_path, *(cgroup_root / cgroup_path).parents):
            if (folder / "cpu.max").exists():
                quota_text, period_text = (folder / "cpu.max").read_text().split()[:2]
                if quota_text != "max":
                    num_cpus = min(num_cpus, max(1, -(-int(quota_text) // int(period_text))))
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((cgroup_root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((cgroup_root / "cpu/cpu.cfs_period_us").read_text())
        if quota_us > 0:
            num_cpus = min(num_cpus, max(1, -(-quota_us // period_us)))
    return num_cpus


@cache
def prepare_numba() -> None:
    """Let numba compile for the chosen CPU and use max_threads() threads, OpenMP's or else its workqueue's."""
    with gc_paused():
        import numba

    try:
        importlib.import_module("numba.np.ufunc.omppool")
        threading_layer = "omp"
    except ImportError:
        threading_layer = "workqueue"
    for option_name, option_value in chosen_cpu().items():
        setattr(numba.config, option_name, option_value)
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = threading_layer
    with contextlib.suppress(RuntimeError):
        numba.config.NUMBA_NUM_THREADS = max_threads()


@cache
def limit_blas() -> None:
    """Limit NumPy's BLAS to one thread: more would compete with kernels' threads, and change results."""
    import numpy  # noqa: F401  loads the library
    import threadpoolctl

    threadpoolctl.threadpool_limits(1, "blas")


def chosen_cpu() -> dict[str, str]:
    """Return numba's CPU options; none mean this CPU. Raises InputError for a wrong PACKTRAIN_CPU."""
    cpu_name = os.environ.get("PACKTRAIN_CPU", "")
    chosen = _override_config(cpu_name) if cpu_name else {}
    names = ("CPU_NAME", "CPU_FEATURES")
    env_values = {option_name: os.environ.get(f"NUMBA_{option_name}") for option_name in names}
    return {name: value for name, value in env_values.items() if value is not None} | chosen


@cache
def _override_config(cpu_name: str) -> dict[str, str]:
    """Return numba's CPU options for a PACKTRAIN_CPU; code for features that this CPU lacks would end the process."""
    if cpu_name not in CPUS:
        fact = f"PACKTRAIN_CPU: {cpu_name} is unknown"
        raise InputError(f"{fact}; it must be {' or '.join(CPUS)}, or unset for this CPU")
    host_features = host_cpu_features().split(",")
    missing_features = [
        name for name in CPUS[cpu_name]["CPU_FEATURES"].split(",") if name not in host_features
    ]
    if missing_features:
        missing_text = ", ".join(feature.removeprefix("+") for feature in missing_features)
        raise InputError(f"PACKTRAIN_CPU: {cpu_name}: this CPU has no {missing_text}; unset it")
    return CPUS[cpu_name]


@cache
def platform_identity() -> tuple[str, ...]:
    """Return all that compiled code depends on in addition to its source: of this machine only what was not chosen."""
    import llvmlite.binding

    cpu = chosen_cpu()
    return (
        "with entries",  # the format of saved code, see machine_code.py
        *map(package_version, ("numba", "llvmlite")), sys.version,
        cpu.get("CPU_NAME") or llvmlite.binding.get_host_cpu_name(), cpu.get("CPU_FEATURES") or host_cpu_features(),
        *("tiles" for _ in range(has_cpu_feature(AMX))), *("roomy" for _ in range(has_large_l2())),
    )  # fmt: skip


def package_version(package: str) -> str:
    """Return the text that defines a package's version, read without importing the package."""
    return (package_folder(package) / "_version.py").read_text(encoding="utf-8")


def package_folder(package: str) -> Path:
    module_spec = find_spec(package)
    assert module_spec is not None and module_spec.origin is not None
    return Path(module_spec.origin).parent


def has_cpu_feature(feature: str) -> bool:
    """Return whether code is compiled for a CPU with this feature, as LLVM names it: `avx512f`."""
    features = chosen_cpu().get("CPU_FEATURES", host_cpu_features())
    return f"+{feature}" in features.split(",") and (feature != AMX or has_tile_permission())


@cache
def host_cpu_features() -> str:
    import llvmlite.binding

    return str(llvmlite.binding.get_host_cpu_features().flatten())


def supports_precision(precision: str) -> bool:
    """Return whether products on this CPU can have this precision."""
    return precision not in PRECISION_FEATURES or has_cpu_feature(PRECISION_FEATURES[precision])


@cache
def has_large_l2() -> bool:
    """Return whether a core's L2 cache has 2 MiB, which products make use of; a chosen CPU has the usual 1 MiB."""
    if os.environ.get("PACKTRAIN_CPU"):
        return False
    with contextlib.suppress(OSError, ValueError):
        size_text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(size_text.removesuffix("K")) >= 2048
    return False


@cache
def has_tile_permission() -> bool:
    """Ask Linux whether this process may use AMX's tiles; if not, kernels are those of a CPU without AMX."""
    if sys.platform != "linux":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(ARCH_PRCTL, REQUEST, TILES) == 0)


def cache_root() -> Path:
    """Return the user's cache folder, by the platform's convention."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "packtrain"
    if platform.system() == "Windows" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "packtrain/cache"
    try:
        home = Path.home()
    except RuntimeError:  # a user unknown to the system, as in some containers
        return Path(tempfile.gettempdir()) / f"packtrain-{getattr(os, 'getuid', int)()}"
    return home / ("Library/Caches" if platform.system() == "Darwin" else ".cache") / "packtrain"


def print_message(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        if not is_quiet:
            print(f"packtrain: {text}", file=sys.stderr, flush=True)


def write_error(folder: Path) -> str | None:
    """Return why no files can be created in this folder (created if missing), or None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def writable(folder: Path) -> Path:
    """Return `folder`, or with a message a temporary folder that is deleted at exit."""
    error_text = write_error(folder)
    if error_text is None:
        return folder
    import atexit

    temporary_folder = Path(tempfile.mkdtemp(prefix="packtrain-"))
    atexit.register(shutil.rmtree, temporary_folder, ignore_errors=True)
    print_message(f"cannot write {folder} ({error_text}); using {temporary_folder} this time")
    return temporary_folder
