"""The memory of kernels, known before they are loaded: measured once by a child, kept in the user's cache.

So a run is planned while its process is still small, which leaves memory for the search.
"""

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
from packtrain.kernels import store
from packtrain.kernels.runtime import cache_root, write_error
from packtrain.models.config import Config

GUESSED_NBYTES = 17 << 20  # if there is no memory for the child; 11 to 16 MiB were measured
UNSURE_NBYTES = 7 << 20  # by how much the guess may be too high
MEASURED = 4  # times
CHILD_NBYTES = 44 << 20  # 34 to 36 MiB were measured


class KernelMemory(NamedTuple):
    """Bytes of the kernels, by how much that may be too high, and their modules."""

    nbytes: int
    uncertain_nbytes: int = 0
    names: tuple[str, ...] = ()

    @property
    def pending_nbytes(self) -> int:
        """Bytes by which this process will still grow."""
        return 0 if self.names and all(map(kernels.is_loaded, self.names)) else self.nbytes

    def load(self) -> None:
        kernels.load_all(self.names)

    def load_remaining(self) -> None:
        """Load all if some are loaded, because the memory of the rest alone is unknown."""
        if any(map(kernels.is_loaded, self.names)):
            self.load()


def model_kernel_modules(config: Config) -> tuple[str, ...]:
    """The kernel modules that a model calls beyond those of all."""
    return (
        *(kernels.EXPERT_KERNELS if config.expert_count else ()),
        *(kernels.CONV_KERNELS if config.conv_width else ()),
        *(kernels.SCAN_KERNELS if config.scan else ()),
        *(kernels.DELTA_KERNELS if config.traits.delta else ()),
        *(() if config.flash else kernels.SOFTMAX_KERNELS),
        *(kernels.AMX_LOSS_KERNELS if in_tiles(config.precision, config.embedding_length) else ()),
    )


def required_kernel_modules(
    config: Config, is_packed: bool, optimizer: type[Optimizer], *, is_aware: bool = False
) -> tuple[str, ...]:
    """The kernel modules that a run calls for such a model, which may be written with quantized matrices.

    is_aware  as in the config of LoRA adapters
    """
    return (
        *kernels.TRAINING_KERNELS,
        *optimizer.kernels,
        *model_kernel_modules(config),
        *(kernels.QUANTIZE_KERNELS if is_packed else ()),
        *(kernels.REQUANTIZE_KERNELS if is_aware else ()),
    )


def loaded(names: tuple[str, ...], free: float) -> KernelMemory:
    """Bytes by which a process grows when it loads these compiled kernel modules.

    free  bytes that a child may take; without any, the run is refused, but its minimum should be right
    """
    path = _cache_path(names)
    try:
        return KernelMemory(int(json.loads(path.read_text())), 0, names)
    except (OSError, ValueError, TypeError):  # missing or incomplete
        if 0 <= free < CHILD_NBYTES:
            return KernelMemory(GUESSED_NBYTES, UNSURE_NBYTES, names)
        # one child in five takes 1 MiB less, by chance, and what is found is kept
        measured_nbytes = max(
            run_in_child(lambda: None, _load_in_child, kernels.threads(), names)
            for _ in range(MEASURED)
        )
        if write_error(path.parent) is None:
            write_text(path, json.dumps(measured_nbytes))
        return KernelMemory(measured_nbytes, 0, names)


def _cache_path(names: Sequence[str]) -> Path:
    key_parts = "machine code alone", str(kernels.threads()), *map(store.folder_name, names)
    cache_key = hashlib.sha256("\0".join(key_parts).encode()).hexdigest()[:16]
    return cache_root() / f"loaded-{cache_key}.json"


def _load_in_child(num_threads: int, names: Sequence[str]) -> int:
    kernels.set_threads(num_threads)
    kernels.prepare(names)  # loads what the asking process has loaded, too
    release_memory()
    baseline = private_nbytes()
    kernels.load_all(names)
    release_memory()
    return private_nbytes() - baseline
