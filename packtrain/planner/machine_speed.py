"""The rates of this machine: measured once and kept in the user's cache, so that runs make the same choices."""

import hashlib
import json
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain import kernels
from packtrain.common.child_process import ask
from packtrain.common.files import write_text
from packtrain.common.version import __version__
from packtrain.dtypes import DTYPES, READABLE, Dtype
from packtrain.engine.backends import CPU, Target
from packtrain.engine.ops.costs import laying
from packtrain.kernels.runtime import cache_root, platform_parts, refusal
from packtrain.planner.cost_model import Rates
from packtrain.planner.speed_probe import BEGIN, measured

MEASURING_NBYTES = 136 << 20  # of a measuring child
FORMAT = 3  # of the file; with another format, rates are measured again


@dataclass(frozen=True, slots=True)
class Kept:
    """Rates in a file. Rates of a busy machine (`quiet` is false) are used for one run, then measured again.

    off  correction factor of step times, from the last run whose steps took longer or shorter than expected
    """

    rates: Rates
    quiet: bool
    off: float = 1.0

    @property
    def expected(self) -> Rates:
        return self.rates.slower(self.off)

    def serves(self, types: Collection[Dtype]) -> bool:
        """Whether the rates are complete for a run with quantized matrices of these types."""
        return self.quiet and all(laying(t) in self.rates.kinds for t in types)


def rates(
    force: bool, report: Callable[[str], None], types: Collection[Dtype] = (), target: Target = CPU
) -> Rates:
    """The cached rates of this backend and number of threads; measured if missing, or if `force`.

    types  of quantized matrices that a run reads; each has its own rate
    """
    path = kept(kernels.threads(), target)
    cached = None if force else read(path)
    if cached is not None and cached.serves(types):
        return cached.expected
    dtypes_by_kind = {laying(t): t for t in READABLE}
    cached_types = (
        ()
        if cached is None
        else [dtypes_by_kind[k] for k in cached.rates.kinds if k in dtypes_by_kind]
    )
    new_rates, quiet = measured({*types, *cached_types} - {DTYPES["f32"]}, target=target)
    if cached is not None and not quiet:
        new_rates = faster(new_rates, cached.rates)
    remark = "" if quiet else "; it is busy, and the next run measures it again"
    updated = Kept(new_rates, quiet, 1.0 if cached is None else cached.off)
    location = keep(path, updated)
    device_name = target.backends[0].name if target.apart else "this machine"
    report(
        f"measured {device_name}: {new_rates.flops / 1e9:.0f} GFLOP/s,"
        f" {new_rates.nbytes / 1e9:.1f} GB/s, {location}{remark}"
    )
    return updated.expected


def rates_apart(
    force: bool,
    report: Callable[[str], None],
    types: Collection[Dtype] = (),
    free: float = math.inf,
    target: Target = CPU,
) -> Rates:
    """The same of all backends of the target, measured by children, so that this process loads no kernels for it.

    free  bytes that a child may take; if too few, uses the rates known so far
    """
    threads = kernels.threads()
    by_backend = dict[str, Rates]()
    for backend in {b.name: b for b in target.every}.values():
        single_target = Target.of(backend)
        cached = None if force else read(kept(threads, single_target))
        if cached is not None and (cached.serves(types) or free < MEASURING_NBYTES):
            by_backend[backend.name] = cached.expected
        elif free < MEASURING_NBYTES:
            by_backend[backend.name] = BEGIN
        else:
            names = [str(t) for t in types]
            by_backend[backend.name], messages = ask(
                lambda: None, _in_child, threads, force, names, single_target
            )
            for sentence in messages:
                report(sentence)
    first, *other_names = by_backend
    return replace(by_backend[first], others={name: by_backend[name] for name in other_names})


def _in_child(
    threads: int, force: bool, types: Collection[str], target: Target
) -> tuple[Rates, list[str]]:
    messages = list[str]()
    kernels.set_threads(threads)
    return rates(force, messages.append, [DTYPES[name] for name in types], target), messages


def faster(a: Rates, b: Rates) -> Rates:
    """The faster of each rate: other programs can only slow it down."""
    kinds = {k: max(a.kinds.get(k, 0.0), b.kinds.get(k, 0.0)) for k in {**a.kinds, **b.kinds}}
    best_throughput = {
        name: max(getattr(a, name), getattr(b, name)) for name in ("flops", "nbytes", "near")
    }
    best_latency = {name: min(getattr(a, name), getattr(b, name)) for name in ("call", "region")}
    return replace(a, kinds=kinds, **best_throughput, **best_latency)


def kept(threads: int, target: Target = CPU) -> Path:
    """The file of the rates."""
    name = target.backends[0].name
    parts = __version__, str(threads), *platform_parts(), *([] if name == "cpu" else [name])
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_root() / f"rates-{name}.json"


def read(path: Path) -> Kept | None:
    """The cached rates; None if missing or incomplete."""
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            return None
        return Kept(Rates(**record["rates"]), bool(record["quiet"]), float(record["off"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def correct(by: float, target: Target = CPU) -> None:
    """Correct the expected times of the next run by a factor."""
    for backend in target.every:
        path = kept(kernels.threads(), Target.of(backend))
        cached = read(path)
        if cached is not None:
            keep(path, replace(cached, off=by * cached.off))


def keep(path: Path, entry: Kept) -> str:
    """Write the rates if possible; returns where, for a message."""
    if refusal(path.parent) is not None:
        return "not kept"
    record = {
        "format": FORMAT,
        "quiet": entry.quiet,
        "off": entry.off,
        "rates": asdict(entry.rates),
    }
    try:
        write_text(path, json.dumps(record, indent=1))
    except OSError:  # a full disk
        return "not kept"
    return f"kept in {path}"
