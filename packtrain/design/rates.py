"""What this machine does in a second: measured once, kept in the user's cache, so that two runs choose the same."""

import hashlib
import json
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain import kernels
from packtrain.backends import CPU, Target
from packtrain.child import ask
from packtrain.cost import Rates
from packtrain.dtypes import DTYPES, Dtype
from packtrain.files import write_text
from packtrain.kernels.runtime import cache_root, platform_parts, refusal
from packtrain.ops.costs import laying
from packtrain.speed import BEGIN, measured
from packtrain.version import __version__

MEASURING_NBYTES = 136 << 20  # of a child that measures
FORMAT = 2  # of the file; another is measured again


@dataclass(frozen=True, slots=True)
class Kept:
    """Rates in a file. Those of a busy machine (`quiet` is false) serve one run, and the next measures again.

    off  times as long as these rates say did steps of the last run take that was off
    """

    rates: Rates
    quiet: bool
    off: float = 1.0

    @property
    def expected(self) -> Rates:
        return self.rates.slower(self.off)

    def serves(self, types: Collection[Dtype]) -> bool:
        """Whether nothing has to be measured for a run that reads matrices of these types packed."""
        return self.quiet and all(laying(t) in self.rates.kinds for t in types)


def rates(
    again: bool,
    say: Callable[[str], None],
    types: Collection[Dtype] = (),
    target: Target = CPU,
) -> Rates:
    """The kept rates of this backend with so many threads; measured if they are missing, or if `again`.

    types  of the matrices that a run reads packed; each has a rate of its own
    """
    path = kept(kernels.threads(), target)
    before = None if again else read(path)
    if before is not None and before.serves(types):
        return before.expected
    known = {laying(t): t for t in DTYPES.values()}
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
    room: float = math.inf,
    target: Target = CPU,
) -> Rates:
    """The same, but measured by a child: this process loads no kernels for it.

    room  bytes that the child may take; where they are too few, what is known must do
    """
    threads = kernels.threads()
    before = None if again else read(kept(threads, target))
    if before is not None and before.serves(types):
        return before.expected
    if room < MEASURING_NBYTES:
        return BEGIN if before is None else before.expected
    found, said = ask(lambda: None, _in_child, threads, again, [str(t) for t in types], target)
    for sentence in said:
        say(sentence)
    return found


def _in_child(
    threads: int, again: bool, types: Collection[str], target: Target
) -> tuple[Rates, list[str]]:
    said = list[str]()
    kernels.set_threads(threads)
    return rates(again, said.append, [DTYPES[name] for name in types], target), said


def faster(a: Rates, b: Rates) -> Rates:
    """Of each rate the faster: what else runs only takes time."""
    kinds = {k: max(a.kinds.get(k, 0.0), b.kinds.get(k, 0.0)) for k in {**a.kinds, **b.kinds}}
    most = {name: max(getattr(a, name), getattr(b, name)) for name in ("flops", "nbytes", "near")}
    least = {name: min(getattr(a, name), getattr(b, name)) for name in ("call", "region")}
    return replace(a, kinds=kinds, **most, **least)


def kept(threads: int, target: Target = CPU) -> Path:
    """Where the rates are."""
    name = target.backends[0].name
    parts = __version__, str(threads), *platform_parts(), *([] if name == "cpu" else [name])
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_root() / f"rates-{name}.json"


def read(path: Path) -> Kept | None:
    """What was kept; None if nothing was, or nothing whole."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            return None
        return Kept(Rates(**found["rates"]), bool(found["quiet"]), float(found["off"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def correct(by: float, target: Target = CPU) -> None:
    """Let the next run expect that everything takes so many times as long: a run was off."""
    path = kept(kernels.threads(), target)
    before = read(path)
    if before is not None:
        keep(path, replace(before, off=by * before.off))


def keep(path: Path, what: Kept) -> str:
    """Write them where that is possible, and tell where."""
    if refusal(path.parent) is not None:
        return "not kept"
    plain = {"format": FORMAT, "quiet": what.quiet, "off": what.off, "rates": asdict(what.rates)}
    write_text(path, json.dumps(plain, indent=1))
    return f"kept in {path}"
