"""packtrain compile: compile all kernels ahead of time, for container images and shared machines."""

import math
import os
import time
from dataclasses import dataclass, replace
from itertools import product

from packtrain import kernels
from packtrain.common.memory import parse_size, private_nbytes
from packtrain.common.options import option
from packtrain.engine.optim import OPTIMIZERS
from packtrain.kernels.runtime import kernel_cache
from packtrain.kernels.runtime.environment import CPUS
from packtrain.models.config import PRESETS
from packtrain.planner.kernel_memory import measure_kernels, required_kernel_modules


@dataclass(frozen=True)
class CompileSettings:
    """Compile missing kernels into $XDG_CACHE_HOME/packtrain/kernels (default: ~/.cache/packtrain/kernels)."""

    memory: str | None = option(None, "memory limit for all processes together, such as 512MiB")
    cpu: str | None = option(
        None, "compile for each CPU of this level, not for this one; PACKTRAIN_CPU must name it in runs, too",
        choices=tuple(CPUS),
    )  # fmt: skip


def run(settings: CompileSettings) -> int:
    """Compile kernel modules that are not compiled, print the folder; returns 0. Raises DoesNotFit, InputError."""
    if settings.cpu is not None:
        os.environ["PACKTRAIN_CPU"] = settings.cpu  # children compile for it, too
    limit_nbytes = None if settings.memory is None else parse_size(settings.memory, "--memory")
    start_time = time.perf_counter()
    module_names = kernel_cache.kernel_modules()
    num_compiled = kernels.prepare(module_names, limit_nbytes, private_nbytes())
    free_nbytes = math.inf if limit_nbytes is None else limit_nbytes - private_nbytes()
    base_config = PRESETS["1m"]
    configs = base_config, replace(base_config, expert_count=1), replace(base_config, conv_width=2)
    variants = product(configs, (False, True), OPTIMIZERS.values())
    for modules in dict.fromkeys(required_kernel_modules(*variant) for variant in variants):
        measure_kernels(modules, free_nbytes)  # measured, so that a tight budget can be planned
    seconds = time.perf_counter() - start_time
    folders = sorted({str(kernel_cache.module_folder(name).parent) for name in module_names})
    print(
        f"{len(module_names)} kernel modules, {num_compiled} compiled now in {seconds:.0f} s, in {', '.join(folders)}"
    )
    return 0
