"""Rates (work per second) of this machine, measured once and cached, so that runs make the same choices."""

import hashlib
import json
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain import kernels
from packtrain.common.child_process import run_in_child
from packtrain.common.files import write_text
from packtrain.common.version import __version__
from packtrain.dtypes import DTYPES, READABLE, Dtype
from packtrain.engine.backends import CPU, Target
from packtrain.engine.ops.costs import pack_kind
from packtrain.kernels.runtime import environment
from packtrain.kernels.runtime.environment import cache_root, platform_identity, write_error
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.speed_probe import DEFAULT_RATES, measure_rates

PROBE_CHILD_NBYTES = 136 << 20  # bytes of a measuring child, without PyTorch
FILE_FORMAT = 3  # of the cache file; rates in another format are measured again


@dataclass(frozen=True, slots=True)
class CachedRates:
    """The rates of a backend as its cache file has them. Rates of a busy machine serve one run and are measured again.

    is_quiet     no other program used the processor during the measurement
    time_factor  factor on step times, from the last run whose steps took longer or shorter than expected
    """

    rates: BackendRates
    is_quiet: bool
    time_factor: float = 1.0

    @property
    def corrected_rates(self) -> BackendRates:
        return self.rates.slower(self.time_factor)

    def covers_types(self, types: Collection[Dtype]) -> bool:
        """Whether no measurement is needed for a run with quantized matrices of these types."""
        return self.is_quiet and all(pack_kind(t) in self.rates.kinds for t in types)


def load_rates(
    force: bool, report: Callable[[str], None], types: Collection[Dtype] = (), target: Target = CPU
) -> BackendRates:
    """Return the cached rates of the target's backend; measure and cache them if they are missing, or if `force`.

    types  types of quantized matrices that a run reads; each has a rate of its own
    """
    path = rates_path(kernels.threads(), target)
    cached = None if force else read_rates(path)
    if cached is not None and cached.covers_types(types):
        return cached.corrected_rates
    dtypes_by_kind = {pack_kind(t): t for t in READABLE}
    kinds = [] if cached is None else [*cached.rates.kinds]
    types_in_cache = [dtypes_by_kind[kind] for kind in kinds if kind in dtypes_by_kind]
    new_rates, quiet = measure_rates({*types, *types_in_cache} - {DTYPES["f32"]}, target=target)
    if cached is not None and not quiet:
        new_rates = fastest_rates(new_rates, cached.rates)
    remark = "" if quiet else "; it is busy, and the next run measures it again"
    updated = CachedRates(new_rates, quiet, 1.0 if cached is None else cached.time_factor)
    saved_text = write_rates(path, updated)
    device_name = target.backends[0].name if target.is_separate else "this machine"
    report(
        f"measured {device_name}: {new_rates.flops / 1e9:.0f} GFLOP/s,"
        f" {new_rates.nbytes / 1e9:.1f} GB/s, {saved_text}{remark}"
    )
    return updated.corrected_rates


def measure_rates_in_children(
    force: bool, report: Callable[[str], None], types: Collection[Dtype] = (), free: float = math.inf,
    target: Target = CPU,
) -> BackendRates:  # fmt: skip
    """Return the rates of all backends of the target, measured by children, so that this process loads no kernels.

    free  bytes that a child may take; if too few, cached or default rates are returned
    """
    num_threads = kernels.threads()
    by_backend = dict[str, BackendRates]()
    for backend in {b.name: b for b in target.every}.values():
        single_target = Target.for_backend(backend)
        cached = None if force else read_rates(rates_path(num_threads, single_target))
        has_room = free >= PROBE_CHILD_NBYTES + backend.import_nbytes
        if cached is not None and (cached.covers_types(types) or not has_room):
            by_backend[backend.name] = cached.corrected_rates
        elif not has_room:
            by_backend[backend.name] = DEFAULT_RATES
        else:
            type_names = [str(t) for t in types]
            by_backend[backend.name], messages = run_in_child(
                lambda: None, _load_rates_in_child, num_threads, force, type_names, single_target
            )
            for sentence in messages:
                report(sentence)
    first_name, *other_names = by_backend
    return replace(by_backend[first_name], backend_rates={n: by_backend[n] for n in other_names})


def _load_rates_in_child(
    num_threads: int, force: bool, types: Collection[str], target: Target
) -> tuple[BackendRates, list[str]]:
    messages = list[str]()
    kernels.set_threads(num_threads)
    return load_rates(force, messages.append, [DTYPES[name] for name in types], target), messages


def fastest_rates(a: BackendRates, b: BackendRates) -> BackendRates:
    """Return the faster of each rate of two measurements, as other programs can only slow a measurement down."""
    kind_rates = {k: max(a.kinds.get(k, 0.0), b.kinds.get(k, 0.0)) for k in {**a.kinds, **b.kinds}}
    speeds = {n: max(getattr(a, n), getattr(b, n)) for n in ("flops", "nbytes", "cache_nbytes")}
    overheads = {name: min(getattr(a, name), getattr(b, name)) for name in ("call", "region")}
    return replace(a, kinds=kind_rates, **speeds, **overheads)


def rates_path(num_threads: int, target: Target = CPU) -> Path:
    """Return the path of the file that caches rates of this version, machine, backend and number of threads."""
    name = target.backends[0].name
    machine = environment.host_cpu_features(), *platform_identity()
    parts = __version__, str(num_threads), *machine, *([] if name == "cpu" else [name])
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_root() / f"rates-{name}.json"


def read_rates(path: Path) -> CachedRates | None:
    """Return the rates in a cache file (work per second of this machine's backend); None if missing or incomplete."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FILE_FORMAT:
            return None
        return CachedRates(BackendRates(**data["rates"]), bool(data["quiet"]), float(data["off"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def correct_step_times(by: float, target: Target = CPU) -> None:
    """Multiply by `by` the step times that later runs expect, in each backend's cache file of rates, if it has one."""
    for backend in target.every:
        path = rates_path(kernels.threads(), Target.for_backend(backend))
        cached_rates = read_rates(path)
        if cached_rates is not None:
            write_rates(path, replace(cached_rates, time_factor=by * cached_rates.time_factor))


def write_rates(path: Path, cached_rates: CachedRates) -> str:
    """Write rates to the cache file if possible; return a text for the user: where they are, or "not kept"."""
    if write_error(path.parent) is not None:
        return "not kept"
    file_data = {
        "format": FILE_FORMAT, "quiet": cached_rates.is_quiet, "off": cached_rates.time_factor,
        "rates": asdict(cached_rates.rates),
    }  # fmt: skip
    try:
        write_text(path, json.dumps(file_data, indent=1))
    except OSError:  # a full disk
        return "not kept"
    return f"kept in {path}"
