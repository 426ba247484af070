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
    again: bool, say: Callable[[str], None], types: Collection[Dtype] = (), target: Target = CPU
) -> Rates:
    """The cached rates of this backend and number of threads; measured if missing, or if `again`.

    types  of quantized matrices that a run reads; each has its own rate
    """
    path = kept(kernels.threads(), target)
    before = None if again else read(path)
    if before is not None and before.serves(types):
        return before.expected
    known = {laying(t): t for t in READABLE}
    others = () if before is None else [known[k] for k in before.rates.kinds if k in known]
    found, quiet = measured({*types, *others} - {DTYPES["f32"]}, target=target)
    if before is not None and not quiet:
        found = faster(found, before.rates)
    how = "" if quiet else "; it is busy, and the next run measures it again"
    now = Kept(found, quiet, 1.0 if before is None else before.off)
    where = keep(path, now)
    what = target.backends[0].name if target.apart else "this machine"
    say(
        f"measured {what}: {found.flops / 1e9:.0f} GFLOP/s, {found.nbytes / 1e9:.1f} GB/s, {where}{how}"
    )
    return now.expected


def rates_apart(
    again: bool,
    say: Callable[[str], None],
    types: Collection[Dtype] = (),
    free: float = math.inf,
    target: Target = CPU,
) -> Rates:
    """The same of all backends of the target, measured by children, so that this process loads no kernels for it.

    free  bytes that a child may take; if too few, uses the rates known so far
    """
    threads = kernels.threads()
    found = dict[str, Rates]()
    for backend in {b.name: b for b in target.every}.values():
        one = Target.of(backend)
        before = None if again else read(kept(threads, one))
        if before is not None and (before.serves(types) or free < MEASURING_NBYTES):
            found[backend.name] = before.expected
        elif free < MEASURING_NBYTES:
            found[backend.name] = BEGIN
        else:
            names = [str(t) for t in types]
            found[backend.name], told = ask(lambda: None, _in_child, threads, again, names, one)
            for sentence in told:
                say(sentence)
    first, *others = found
    return replace(found[first], others={name: found[name] for name in others})


def _in_child(
    threads: int, again: bool, types: Collection[str], target: Target
) -> tuple[Rates, list[str]]:
    messages = list[str]()
    kernels.set_threads(threads)
    return rates(again, messages.append, [DTYPES[name] for name in types], target), messages


def faster(a: Rates, b: Rates) -> Rates:
    """The faster of each rate: other programs can only slow it down."""
    kinds = {k: max(a.kinds.get(k, 0.0), b.kinds.get(k, 0.0)) for k in {**a.kinds, **b.kinds}}
    most = {name: max(getattr(a, name), getattr(b, name)) for name in ("flops", "nbytes", "near")}
    least = {name: min(getattr(a, name), getattr(b, name)) for name in ("call", "region")}
    return replace(a, kinds=kinds, **most, **least)


def kept(threads: int, target: Target = CPU) -> Path:
    """The file of the rates."""
    name = target.backends[0].name
    parts = __version__, str(threads), *platform_parts(), *([] if name == "cpu" else [name])
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_root() / f"rates-{name}.json"


def read(path: Path) -> Kept | None:
    """The cached rates; None if missing or incomplete."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            return None
        return Kept(Rates(**found["rates"]), bool(found["quiet"]), float(found["off"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def correct(by: float, target: Target = CPU) -> None:
    """Correct the expected times of the next run by a factor."""
    for backend in target.every:
        path = kept(kernels.threads(), Target.of(backend))
        before = read(path)
        if before is not None:
            keep(path, replace(before, off=by * before.off))


def keep(path: Path, what: Kept) -> str:
    """Write the rates if possible; returns where, for a message."""
    if refusal(path.parent) is not None:
        return "not kept"
    plain = {"format": FORMAT, "quiet": what.quiet, "off": what.off, "rates": asdict(what.rates)}
    try:
        write_text(path, json.dumps(plain, indent=1))
    except OSError:  # a full disk
        return "not kept"
    return f"kept in {path}"
