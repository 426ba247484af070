"""A step on a device beside PyTorch: python -m benchmarks.gpu [--device cuda] [--preset 15m] [--rounds 20]

    python -m benchmarks.gpu --base MODEL.gguf     also a LoRA step on a llama, beside that step as PEFT computes it
    python -m benchmarks.gpu --device torch:cpu --preset 1m --rounds 3       a dry run where there is no GPU

All sides take the same steps of the same model on the same tokens, in this process, round by round: packtrain on the
device, PyTorch eager, and PyTorch compiled. Seconds are medians, of which the host waits for the device; memory is the
most that the allocator of the device had. On a machine without the device it says so and ends with exit code 1. It has
not yet been run on a GPU by its authors.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packtrain import kernels
from packtrain.backends import target
from packtrain.benching import training
from packtrain.benching.timing import paired
from packtrain.benching.torch_llama import Llama, Trained, Tuned, optimizer
from packtrain.errors import InputError
from packtrain.models import transformer
from packtrain.models.config import PRESETS
from packtrain.models.file import open_model
from packtrain.quant import dequantize

WARM = 3  # rounds that do not count: compiling, and tables made once
LIKE = 0.01  # by how much losses of the first step may differ, relatively
RANK, SCALE = 16, 2.0


@dataclass
class Side:
    """What takes steps: `step` returns a loss when the step is done."""

    name: str
    step: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    nbytes: int = 0

    def turn(self, peak: "Peak") -> None:
        peak.begin()
        begin = time.perf_counter()
        self.losses.append(self.step())
        self.seconds.append(time.perf_counter() - begin)
        self.nbytes = max(self.nbytes, peak.end())


class Peak:
    """The most bytes that the allocator of the device had; 0 where it has none."""

    def __init__(self, device: str) -> None:
        self.cuda = kernels.torch().cuda if device.startswith("cuda") else None

    def begin(self) -> None:
        if self.cuda:
            self.cuda.reset_peak_memory_stats()

    def end(self) -> int:
        if not self.cuda:
            return 0
        self.cuda.synchronize()
        return int(self.cuda.max_memory_reserved())


# ---- sides ---------------------------------------------------------------------------------------------------


def moved(device: str) -> str:
    """PyTorch's name of the device."""
    return "cpu" if device.startswith("torch:cpu") else device


def ours(made: training.Training) -> Side:
    return Side("packtrain", made.step)


def theirs(model: Any, made: training.Training, device: str, compiled: bool) -> Side:
    forward = torch_compile(model) if compiled else model
    trained = Trained(model, optimizer(model, training.LR), training.MAX_NORM, forward)
    name = "PyTorch, compiled" if compiled else "PyTorch, eager"
    return Side(name, lambda: trained.step(made.batches, training.LR))


def torch_compile(model: Any) -> Any:
    return kernels.torch().compile(model)


def training_sides(device: str, preset: str) -> Iterator[Side]:
    """A step of `packtrain train --preset`."""
    made = training.of_preset(preset, device=device)
    yield ours(made)
    values = transformer.initial(PRESETS[preset])
    for compiled in (False, True):
        model = Llama(PRESETS[preset], values, real=compiled).to(moved(device))
        yield theirs(model, made, device, compiled)


def tuning_sides(device: str, base: Path) -> Iterator[Side]:
    """A LoRA step; PyTorch has the weights unpacked, as transformers has those of a GGUF file. Raises InputError."""
    model = open_model(base)
    if model.config.architecture != "llama":
        raise InputError(
            f"--base: {base} is of {model.config.architecture}; the peer here is a llama"
        )
    made = training.of_base(base, device=device)
    yield ours(made)
    values = {name: unpacked(array) for name, array in model.stored().items()}
    for compiled in (False, True):
        peer = Tuned(model.config, values, RANK, SCALE, real=compiled).to(moved(device))
        yield theirs(peer, made, device, compiled)


def unpacked(array: np.ndarray) -> np.ndarray:
    return dequantize(array) if array.dtype.names else array.astype(np.float32)


# ---- a comparison --------------------------------------------------------------------------------------------


def compared(title: str, sides: Sequence[Side], rounds: int, device: str) -> bool:
    """Print the table; whether the losses of the first step agree."""
    peak = Peak(device)
    for number in range(WARM + rounds):
        for side in sides:
            side.turn(peak)
            if number < WARM:
                side.seconds.clear()
    first = sides[0]
    print(f"{title} on {device}")
    print("| | seconds a step | packtrain is so many times as fast | MiB | first loss |")
    print("|---|---|---|---|---|")
    for side in sides:
        took = statistics.median(side.seconds)
        times = "" if side is first else f"{paired(first.seconds, side.seconds):.2f}"
        mib = f"{side.nbytes / 2**20:,.0f}" if side.nbytes else "not counted"
        print(f"| {side.name} | {took:.4f} | {times} | {mib} | {side.losses[0]:.4f} |")
    return all(abs(s.losses[0] / first.losses[0] - 1) <= LIKE for s in sides)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="15m", choices=[*training.ROWS])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    try:
        if given.device.partition(":")[0] not in ("cuda", "mps", "torch"):
            raise InputError(f"--device {given.device}: it must be cuda, mps or torch:cpu")
        target(given.device)
        sides = [*training_sides(given.device, given.preset)]
        alike = compared(f"a step of {given.preset}", sides, given.rounds, given.device)
        if given.base is not None:
            sides = [*tuning_sides(given.device, given.base)]
            title = f"a LoRA step on {given.base.name}"
            alike &= compared(title, sides, given.rounds, given.device)
    except InputError as error:
        print(f"benchmarks.gpu: {error}; nothing was measured", file=sys.stderr)
        return 1
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
