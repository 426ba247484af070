"""Describes the machine: its processor, versions of packages, and its peak rates of arithmetic and copying."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.common.version import __version__
from packtrain.devtools.bench.bench_table import BenchTable
from packtrain.devtools.bench.timing import CLOCK, Clock, time_call
from packtrain.kernels.runtime import environment
from packtrain.planner.cost_model import CACHE_NBYTES

# LLVM's names of CPU features, and ours
FEATURES = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx512vnni": "VNNI", "avxvnni": "AVX-VNNI",
    "avx512bf16": "bf16", "amx-tile": "AMX", "amx-bf16": "AMX bf16", "amx-int8": "AMX int8",
    "neon": "NEON", "sve": "SVE",
}  # fmt: skip
PACKAGES = "numpy", "numba", "torch"
ROUNDS, FMA_LOOPS = 30, 50_000  # a short loop, which other programs rarely interrupt
FMA_ROUNDS = 150  # rounds of that loop
CACHE_VALUES, MEMORY_VALUES = 1 << 18, 1 << 24  # f32: in a cache, and in memory
PRODUCT_SHAPE = 1024, 4096, 1024  # M, N, K of our product
LANES = 16


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Peak rates of the machine: work per second.

    fma_one          floating-point operations of multiply-adds in registers, one thread; `fma`: all threads
    product          floating-point operations of our f32 product, all threads
    cache_bandwidth  bytes read and written by copying within a cache; `far`: in memory
    """

    fma_one: float
    fma: float
    product: float
    cache_bandwidth: float
    far: float
    threads: int = 1

    def copy_seconds(self, nbytes: float) -> float:
        """Return the least seconds for reading and writing so many bytes."""
        return nbytes / (self.cache_bandwidth if nbytes <= CACHE_NBYTES else max(self.far, 1.0))


def measure_rates(clock: Clock = CLOCK, rounds: int = ROUNDS) -> MachineRates:
    """Measure the machine's rates, each as the fastest of several rounds: other programs only slow rounds down."""
    kernel_modules: Any = kernels
    threads, peak = kernels.threads(), kernel_modules.peak

    def fastest(task: Callable[[], object], rounds: int = rounds) -> float:
        task()
        return min(time_call(task, clock) for _ in range(rounds))

    def fma_rate(count: int) -> float:
        y = np.zeros(LANES * count, np.float32)
        flops = float(2 * FMA_LOOPS * peak.CHAINS * y.size)
        return flops / fastest(lambda: peak.multiply_adds(y, 0.5, FMA_LOOPS), FMA_ROUNDS)

    def copy_rate(num_values: int) -> float:
        x, y = np.ones(num_values, np.float32), np.zeros(num_values, np.float32)
        copy_functions = (lambda: peak.copy_on_threads(y, x, threads)), (lambda: np.copyto(y, x))
        return (x.nbytes + y.nbytes) / min(map(fastest, copy_functions))

    m, n, k = PRODUCT_SHAPE
    a, b, y = (np.ones(shape, np.float32) for shape in ((m, k), (n, k), (m, n)))
    product_seconds = fastest(lambda: kernel_modules.matmul_f32.product(y, a, b.T, False, 0))
    return MachineRates(
        fma_one=fma_rate(1), fma=fma_rate(threads), product=2.0 * m * n * k / product_seconds,
        cache_bandwidth=copy_rate(CACHE_VALUES), far=copy_rate(MEMORY_VALUES), threads=threads,
    )  # fmt: skip


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_machine() -> dict[str, Any]:
    """Return the facts on which figures depend: CPU, features, cores, threads and versions of packages."""
    forced = os.environ.get("PACKTRAIN_CPU", "")
    # those for which kernels are compiled
    features = [ours for theirs, ours in FEATURES.items() if environment.has_cpu_feature(theirs)]
    versions = {"packtrain": __version__, "python": platform.python_version()}
    versions |= {name: text for name in PACKAGES if (text := package_version(name))}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor_name = names[0] if names else platform.processor() or platform.machine()
    return {
        "cpu": processor_name, "features": features, "forced": forced, "cores": environment.allowed_cpus(),
        "threads": kernels.threads(), "versions": versions,
    }  # fmt: skip


def sentence(machine: dict[str, Any]) -> str:
    """Describe the machine in one sentence, from the facts of `describe_machine`."""
    forced = f", compiled for {machine['forced']}" if machine["forced"] else ""
    version_text = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['cpu']} ({', '.join(machine['features']) or 'no vector features'}{forced}), "
        f"{machine['threads']} threads on {machine['cores']} cores; {version_text}"
    )


def rates_table(rates: MachineRates) -> BenchTable:
    shape = " × ".join(map(str, PRODUCT_SHAPE))
    rows = [
        ("multiply-adds in registers, one thread", rates.fma_one / 1e9, "GFLOP/s"),
        (f"multiply-adds in registers, {rates.threads} threads", rates.fma / 1e9, "GFLOP/s"),
        (f"our f32 product of {shape}", rates.product / 1e9, "GFLOP/s"),
        ("copying within a cache, bytes read and written", rates.cache_bandwidth / 1e9, "GB/s"),
        ("copying in memory, bytes read and written", rates.far / 1e9, "GB/s"),
    ]
    efficiency = rates.product / rates.fma
    note = f"The product reaches {efficiency:.0%} of what multiply-adds in registers do."
    columns = {"what": "", "rate": ".1f", "unit": ""}
    return BenchTable("machine", "The machine", columns, rows, (note,))
