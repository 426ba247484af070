"""Spreads a model over memories: --device, --gpu-layers, --split and --device-memory.

Blocks go to the devices in order, in proportion to the shares; moments and gradients go with their weights."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from packtrain.common.errors import InputError
from packtrain.common.memory import parse_size
from packtrain.engine.backends import HOST, Backend, Target, backend, cpu
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import SLACK, PlanSearch
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import leaves

AUTO = "auto"
OUTPUT_PREFIXES = "output", "cls"  # beginnings of the names of tensors that follow the blocks


@dataclass(frozen=True, slots=True)
class DeviceSpread:
    """Which devices get the last blocks of a model, in which proportion, and the limits of their memories by space.

    gpu_layers    blocks on devices: a number, AUTO for as many as fit, or None for all blocks and all other tensors
    block_shares  share of the devices' blocks by device
    """

    devices: tuple[Backend, ...]
    gpu_layers: str | None
    block_shares: tuple[float, ...]
    limits: dict[str, int]

    @property
    def target(self) -> Target:
        """The backends and the limits of their memories, before any weight is assigned to one."""
        host_backends = (cpu,) if self.gpu_layers is not None else ()
        return Target((*host_backends, *self.devices), limits=self.limits)

    def place_leaves(self, shape: StepShape, request: PlanRequest) -> Target:
        """Return the target with a backend for each weight. Raises InputError for more devices than blocks."""
        if self.gpu_layers != AUTO:
            return self.spread_blocks(shape, self.num_device_blocks(shape))
        low, high = 0, shape.config.block_count + 1
        while low < high:  # the largest number of blocks that fits without recomputation
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(shape, request, middle) else (low, middle - 1)
        return self.spread_blocks(shape, low)

    def _fits(self, shape: StepShape, request: PlanRequest, num_device_blocks: int) -> bool:
        placed_request = replace(request, target=self.spread_blocks(shape, num_device_blocks))
        if not all(device in placed_request.target.every for device in self.devices):
            return False
        searches = ((PlanSearch(placed_request, s), limit) for s, limit in self.limits.items())
        return all(s.rough_draft(shape).nbytes * (1 + SLACK) <= limit for s, limit in searches)

    def num_device_blocks(self, shape: StepShape) -> int:
        """Return the number of blocks on devices, plus one if the tensors behind the blocks are there, too."""
        return shape.config.block_count + 1 if self.gpu_layers is None else int(self.gpu_layers)

    def spread_blocks(self, shape: StepShape, num_device_blocks: int) -> Target:
        """Return the target in which weights and KV caches of the last `num_device_blocks` blocks are on devices."""
        num_blocks = shape.config.block_count
        first = max(num_blocks - num_device_blocks, 0)
        assigned = [*zip(range(first, num_blocks), self._devices(num_blocks - first), strict=True)]
        at = dict[str, Backend]()
        for block, device in assigned:
            at |= {f"blk.{block}.": device, f"cache.{block}": device}
        if num_device_blocks > num_blocks:
            at |= dict.fromkeys(OUTPUT_PREFIXES, self.devices[-1])
        leaf_names = leaves(shape.config, shape.base)[0]
        leaf_homes = {n: d for n in leaf_names for prefix, d in at.items() if n.startswith(prefix)}
        leaf_homes |= {prefix: d for prefix, d in at.items() if prefix.startswith("cache.")}
        return replace(self.target, homes=leaf_homes) if len(self.target.every) > 1 else self.target

    def _devices(self, count: int) -> list[Backend]:
        """Return a device for each of `count` blocks, in order, so that each device has its share of them."""
        share_sum, running_shares = sum(self.block_shares), accumulate(self.block_shares)
        end_offsets = [round(count * share / share_sum) for share in running_shares]
        return [self.devices[bisect_right(end_offsets, at)] for at in range(count)]


def parse_spread(
    device: str, gpu_layers: str | None = None, split: str | None = None, memory: str | None = None
) -> DeviceSpread:
    """Parse the flags --device, --gpu-layers, --split and --device-memory. Raises InputError."""
    devices = tuple(backend(name.strip()) for name in device.split(","))
    spaces = [b.space for b in devices]
    if len({*spaces}) < len(spaces):
        raise InputError(f"--device {device}: each memory can be named once")
    if gpu_layers is not None:
        if gpu_layers != AUTO and not gpu_layers.isdecimal():
            raise InputError(f"--gpu-layers {gpu_layers}: it must be a number of blocks, or auto")
        if HOST in spaces:
            fact = "--gpu-layers needs a --device with a memory of its own"
            raise InputError(f"{fact}, such as cuda or cpu:1, not {device}")
    limits = {b.space: b.capacity for b in devices if b.capacity is not None}
    requested = _memory_limits(memory, device, spaces)
    limits |= {space: min(limit, limits.get(space, limit)) for space, limit in requested.items()}
    return DeviceSpread(devices, gpu_layers, _shares(split, spaces, limits), limits)


def _memory_limits(memory: str | None, device: str, spaces: Sequence[str]) -> dict[str, int]:
    """Parse --device-memory into bytes by memory space: one size for all, or one for each. Raises InputError."""
    if memory is None:
        return {}
    if "%" in memory:
        raise InputError(f"--device-memory {memory}: give a size such as 2GiB")
    limits = [parse_size(text.strip(), "--device-memory") for text in memory.split(",")]
    device_spaces = [space for space in spaces if space != HOST]
    if not device_spaces:
        fact = f"--device-memory: {device} works in the memory of this process"
        raise InputError(f"{fact}, whose limit is --memory")
    if len(limits) == 1:
        limits *= len(device_spaces)
    if len(limits) != len(device_spaces):
        raise InputError(
            f"--device-memory {memory} has {len(limits)} sizes for {len(device_spaces)}"
            " memories: give one, or one for each"
        )
    return dict(zip(device_spaces, limits, strict=True))


def _shares(split: str | None, spaces: Sequence[str], limits: dict[str, int]) -> tuple[float, ...]:
    """Parse --split into a share of blocks by device; by default, shares follow the devices' memory or are equal."""
    if split is None:
        has_limits = all(space in limits for space in spaces)
        return tuple(float(limits[space]) if has_limits else 1.0 for space in spaces)
    try:
        shares = tuple(float(text) for text in split.split(","))
    except ValueError:
        shares = ()
    if len(shares) != len(spaces) or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        fact = f"--split {split}: it must be {len(spaces)} numbers such as 3,5"
        raise InputError(f"{fact}, one for each of --device")
    return shares
