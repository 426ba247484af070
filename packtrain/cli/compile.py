"""packtrain compile: compile all kernels ahead of time, for container images and shared machines."""

import math
import time
from dataclasses import dataclass, replace
from itertools import product

from packtrain import kernels
from packtrain.common.memory import parse_size, private_nbytes
from packtrain.common.options import option
from packtrain.engine.optim import OPTIMIZERS
from packtrain.kernels import store
from packtrain.models.config import PRESETS
from packtrain.planner.kernel_memory import loaded, needed


@dataclass(frozen=True)
class Compile:
    """Compile missing kernels into $XDG_CACHE_HOME/packtrain/kernels (default: ~/.cache/packtrain/kernels)."""

    memory: str | None = option(None, "memory limit for all processes together, such as 512MiB")


def run(settings: Compile) -> int:
    """Compile every kernel module that is not compiled, and print the folder. Raises DoesNotFit, InputError."""
    limit = None if settings.memory is None else parse_size(settings.memory, "--memory")
    start_time = time.perf_counter()
    names = store.modules()
    count = kernels.prepare(names, limit, private_nbytes())
    free = math.inf if limit is None else limit - private_nbytes()
    base_config = PRESETS["1m"]
    configs = base_config, replace(base_config, expert_count=1), replace(base_config, conv_width=2)
    variants = product(configs, (False, True), OPTIMIZERS.values())
    for modules in dict.fromkeys(needed(*variant) for variant in variants):
        loaded(modules, free)  # measured, so that a tight budget can be planned
    seconds = time.perf_counter() - start_time
    folders = sorted({str(store.folder_of(name).parent) for name in names})
    print(
        f"{len(names)} kernel modules, {count} compiled now in {seconds:.0f} s, in {', '.join(folders)}"
    )
    return 0
