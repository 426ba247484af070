"""The machine: its processor, what runs on it, and how much it can do at most in a second."""

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
from packtrain.devtools.bench.bench_table import Table
from packtrain.devtools.bench.timing import CLOCK, Clock, took
from packtrain.kernels import runtime
from packtrain.planner.cost_model import CACHE

# names of LLVM, and ours; those of other processors are not there
FEATURES = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx512vnni": "VNNI", "avxvnni": "AVX-VNNI",
    "avx512bf16": "bf16", "amx-tile": "AMX", "amx-bf16": "AMX bf16", "amx-int8": "AMX int8",
    "neon": "NEON", "sve": "SVE",
}  # fmt: skip
PACKAGES = "numpy", "numba", "torch"
ROUNDS, TURNS = 30, 50_000  # the loop of multiply-adds is so short that others rarely interrupt it
TRIES = 150  # of it
NEAR, FAR = 1 << 18, 1 << 24  # f32: in a cache, and in memory
PRODUCT = 1024, 4096, 1024  # of our product: large, and no side awkward
LANES = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """Work per second.

    fma      floating-point operations of multiply-adds in registers: on one thread, and on all
    product  those of our own f32 product, all threads
    near     bytes read and written by copying what a cache holds; `far`: what it does not
    """

    fma_one: float
    fma: float
    product: float
    near: float
    far: float
    threads: int = 1

    def moving(self, nbytes: float) -> float:
        """Least seconds for reading and writing bytes."""
        return nbytes / (self.near if nbytes <= CACHE else max(self.far, 1.0))


def measured(clock: Clock = CLOCK, rounds: int = ROUNDS) -> Rates:
    """The rates by the fastest of several rounds: other programs can only slow them down."""
    threads, peak = kernels.threads(), _module("peak")

    def fastest(work: Callable[[], object], rounds: int = rounds) -> float:
        work()
        return min(took(work, clock) for _ in range(rounds))

    def multiplied(count: int) -> float:
        y = np.zeros(LANES * count, np.float32)
        flops = float(2 * TURNS * peak.CHAINS * y.size)
        return flops / fastest(lambda: peak.multiply_adds(y, 0.5, TURNS), TRIES)

    def copied(size: int) -> float:
        x, y = np.ones(size, np.float32), np.zeros(size, np.float32)
        copy_functions = (lambda: peak.copied(y, x, threads)), (lambda: np.copyto(y, x))
        return (x.nbytes + y.nbytes) / min(map(fastest, copy_functions))

    m, n, k = PRODUCT
    a, b, y = (np.ones(shape, np.float32) for shape in ((m, k), (n, k), (m, n)))
    product = fastest(lambda: _module("matmul").product(y, a, b.T, False, 0))
    return Rates(
        fma_one=multiplied(1),
        fma=multiplied(threads),
        product=2.0 * m * n * k / product,
        near=copied(NEAR),
        far=copied(FAR),
        threads=threads,
    )


def _module(name: str) -> Any:
    return getattr(kernels, name)


def processor() -> str:
    """Its name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def features() -> list[str]:
    """Of those that matter here, what kernels are compiled for."""
    return [ours for theirs, ours in FEATURES.items() if runtime.has(theirs)]


def versions() -> dict[str, str]:
    package_versions = {"packtrain": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            package_versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return package_versions


def about() -> dict[str, Any]:
    """What figures depend on."""
    forced = os.environ.get("PACKTRAIN_CPU", "")
    return {
        "cpu": processor(),
        "features": features(),
        "forced": forced,
        "cores": runtime.allowed_cpus(),
        "threads": kernels.threads(),
        "versions": versions(),
    }


def sentence(about: dict[str, Any]) -> str:
    """The same in words."""
    forced = f", compiled for {about['forced']}" if about["forced"] else ""
    version_text = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"{about['cpu']} ({', '.join(about['features']) or 'no vector features'}{forced}), "
        f"{about['threads']} threads on {about['cores']} cores; {version_text}"
    )


def table(rates: Rates) -> Table:
    rows = [
        ("multiply-adds in registers, one thread", rates.fma_one / 1e9, "GFLOP/s"),
        (f"multiply-adds in registers, {rates.threads} threads", rates.fma / 1e9, "GFLOP/s"),
        (f"our f32 product of {' × '.join(map(str, PRODUCT))}", rates.product / 1e9, "GFLOP/s"),
        ("copying within a cache, bytes read and written", rates.near / 1e9, "GB/s"),
        ("copying in memory, bytes read and written", rates.far / 1e9, "GB/s"),
    ]
    share = rates.product / rates.fma
    note = f"The product reaches {share:.0%} of what multiply-adds in registers do."
    return Table("machine", "The machine", {"what": "", "rate": ".1f", "unit": ""}, rows, (note,))
