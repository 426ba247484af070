"""Predicts the memory of kernels before they are loaded: a child measures it once, and the user's cache saves it.

A run is thus planned while its process is still small, which leaves memory for the search."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packtrain import kernels
from packtrain.common.child_process import run_in_child
from packtrain.common.files import write_text
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.engine.ops.costs import in_tiles
from packtrain.engine.optim import Optimizer
from packtrain.kernels.runtime import kernel_cache
from packtrain.kernels.runtime.environment import cache_root, write_error
from packtrain.models.config import Config

GUESSED_NBYTES = 17 << 20  # bytes of kernels if the child has no memory; 11 to 16 MiB were measured
MEASURED = 4  # children that measure
CHILD_NBYTES = 44 << 20  # bytes of a child; 34 to 36 MiB were measured


class KernelMemory(NamedTuple):
    """Bytes by which a process grows when it loads the kernel modules `names`."""

    nbytes: int
    names: tuple[str, ...] = ()

    @property
    def pending_nbytes(self) -> int:
        """Bytes by which this process will still grow: 0 once all modules are loaded."""
        return 0 if self.names and all(map(kernels.is_loaded, self.names)) else self.nbytes

    def load(self) -> None:
        kernels.load_all(self.names)


def model_kernel_modules(config: Config) -> tuple[str, ...]:
    """Return the kernel modules that a model needs beyond those that every model needs, such as for experts."""
    return (
        *(kernels.EXPERT_KERNELS if config.expert_count else ()), *(kernels.CONV_KERNELS if config.conv_width else ()),
        *(kernels.SCAN_KERNELS if config.scan else ()), *(kernels.DELTA_KERNELS if config.traits.delta else ()),
        *(() if config.flash else kernels.SOFTMAX_KERNELS),
        *(kernels.AMX_LOSS_KERNELS if in_tiles(config.precision, config.embedding_length) else ()),
    )  # fmt: skip


def required_kernel_modules(
    config: Config, is_packed: bool, optimizer: type[Optimizer], *, is_aware: bool = False
) -> tuple[str, ...]:
    """Return the kernel modules that a run calls to train a model.

    is_packed  the run may write quantized matrices;  is_aware  adapters are trained for quantization blocks of the base
    """
    return (
        *kernels.TRAINING_KERNELS, *optimizer.kernels, *model_kernel_modules(config),
        *(kernels.QUANTIZE_KERNELS if is_packed else ()), *(kernels.REQUANTIZE_KERNELS if is_aware else ()),
    )  # fmt: skip


def measure_kernels(names: tuple[str, ...], free: float) -> KernelMemory:
    """Return the memory that these kernel modules take when loaded, from the cache or measured by children.

    free  bytes that a child may take; if too few, a guess is returned
    """
    path = _cache_path(names)
    try:
        return KernelMemory(int(json.loads(path.read_text())), names)
    except (OSError, ValueError, TypeError):  # missing or incomplete
        if 0 <= free < CHILD_NBYTES:
            return KernelMemory(GUESSED_NBYTES, names)
        # one child in five takes 1 MiB less by chance, and the result is cached
        measured_nbytes = max(
            run_in_child(lambda: None, _load_in_child, kernels.threads(), names)
            for _ in range(MEASURED)
        )
        if write_error(path.parent) is None:
            write_text(path, json.dumps(measured_nbytes))
        return KernelMemory(measured_nbytes, names)


def _cache_path(names: Sequence[str]) -> Path:
    key_parts = "machine code alone", str(kernels.threads()), *map(kernel_cache.folder_name, names)
    cache_key = hashlib.sha256("\0".join(key_parts).encode()).hexdigest()[:16]
    return cache_root() / f"loaded-{cache_key}.json"


def _load_in_child(num_threads: int, names: Sequence[str]) -> int:
    """Load the machine code of these kernel modules in this child process; return the bytes by which it grows."""
    kernels.set_threads(num_threads)
    kernels.prepare(names)  # loads everything that the parent process has loaded, too
    release_memory()
    baseline = private_nbytes()
    kernels.load_all(names)
    release_memory()
    return private_nbytes() - baseline
