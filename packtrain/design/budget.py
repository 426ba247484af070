"""Keeps to `--memory`: finds the fastest plan that fits into the limit, or a refusal with advice.

Returns Plans for a requested StepShape, a limit and the rates of this machine. The choice changes results only by the
order of floating-point additions, which is printed. The search runs in a child, so that its memory is freed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from packtrain.backends import HOST
from packtrain.child import ask
from packtrain.design.loaded import Loaded
from packtrain.design.parts import Setting
from packtrain.design.plans import Plans, StepShape
from packtrain.design.search import as_asked, search, smallest
from packtrain.design.table import choices, rows
from packtrain.memory import private_nbytes, settle
from packtrain.planning import size_text

Say = Callable[[str], None]
OWNERS = 10
MIB = 1 << 20
MARGIN_NBYTES = 1 << 20  # by how much the memory of kernels differs between processes
ASIDE_NBYTES = 3 << 19  # by how much estimate and process differ, so that a second search is rare
SPARE_NBYTES = 3 << 20  # by how much a process differs from the next one
SEARCH_NBYTES = 48 << 20  # of a searching child, measured
BLOCK_NBYTES = 900_000  # in addition for each block
NO_KERNELS = Loaded(0)
ROUNDS = 3  # searches, each with a lower limit, until the result fits the process


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans, and the bytes of this process with them. With a `refusal` they are the smallest ones, and too large.

    searching  peak bytes of this process and the searching child together
    """

    plans: Plans
    baseline: int
    searching: int = 0
    refusal: str | None = None

    @classmethod
    def here(cls, plans: Plans, searching: int = 0, more: int = 0) -> "Planned":
        """Plans computed in this process, which will grow by `more` bytes before the run."""
        settle()
        return cls(plans, private_nbytes() + more, searching)

    @property
    def total(self) -> int:
        """The most bytes that the run takes."""
        return self.baseline + self.plans.nbytes

    @property
    def held(self) -> int:
        """Bytes of the arena's space, with a margin for kernels if that is the process."""
        target = self.plans.target
        if target.apart:
            return self.plans.nbytes_in(target.space)
        return self.total + MARGIN_NBYTES

    @property
    def needed(self) -> int:
        """The same, or the bytes of the search if that needed more."""
        return max(self.total, self.searching)

    @property
    def minimum(self) -> int:
        """A limit that is enough for any process."""
        return self.needed + SPARE_NBYTES


@dataclass(frozen=True, slots=True)
class Limit:
    """The byte limit of the process, None for no limit, and its conditions.

    fixed    the order of additions must not change: the run is resumed
    kernels  of the run; their bytes are part of the baseline of a setting
    runs     load the kernels; otherwise their expected memory is trusted
    """

    nbytes: int | None
    fixed: bool = False
    kernels: Loaded = NO_KERNELS
    runs: bool = True


def planned(
    shape: StepShape,
    recompute: str,
    setting: Setting,
    within: "Limit",
    say: Say = print,
) -> Planned:
    """Plans within the limit, or a refusal with advice. The search runs before the kernels are loaded."""
    target, taken = setting.target, within.kernels
    limit = target.limit if target.apart else within.nbytes
    most, change = within.nbytes, ""
    if limit is None:
        if within.runs:
            taken.load()
        result = planned_here(setting, as_asked(shape, recompute, setting), taken)
    else:
        result, change = searched(shape, recompute, setting, replace(within, nbytes=limit), say)
        fits = most is None or result.needed - taken.unsure <= most
        if fits and (within.runs or taken.unsure):
            taken.load()
            result = Planned.here(result.plans, result.searching)
    refused = full(result, target.limits, change)
    if refused is None and most is not None and result.needed > most:
        refused = refusal(result, change or "a little more would do", most)
    return result if refused is None else replace(result, refusal=refused)


def searched(
    shape: StepShape, recompute: str, setting: Setting, within: "Limit", say: Say
) -> tuple[Planned, str]:
    """Search plans within a number of bytes of the arena's space; if none fit, also returns a change that would."""
    limit, fixed, taken = within.nbytes, within.fixed, within.kernels
    assert limit is not None

    @cache
    def late() -> None:
        say(f"planning a run that fits into {size_text(limit)} …")

    aside, searching = 0 if setting.target.apart else ASIDE_NBYTES, 0
    asked = replace(setting, baseline=setting.baseline + aside)
    for _ in range(ROUNDS):
        searching = max(searching, private_nbytes() + searching_nbytes(shape))
        answer = ask(late, search, shape, recompute, asked, limit, fixed)
        result = planned_here(setting, answer.shape, taken, searching)
        over = result.held - limit
        if not answer.fits or over <= 0:
            return result, answer.change
        asked = replace(asked, baseline=asked.baseline + over)
    least = ask(late, smallest, shape, recompute, setting, fixed)
    return planned_here(setting, least, taken, searching), ""


def planned_here(setting: Setting, shape: StepShape, taken: Loaded, searching: int = 0) -> Planned:
    """Plans computed in this process. If packing loads kernels, loads the others, too."""
    plans = setting.plans(shape)
    taken.load_rest()
    return Planned.here(plans, searching, taken.to_come)


def searching_nbytes(shape: StepShape) -> int:
    """Bytes of a searching child."""
    return SEARCH_NBYTES + BLOCK_NBYTES * shape.config.block_count


def minimum(
    shape: StepShape, recompute: str, setting: Setting, fixed: bool, taken: Loaded, say: Say
) -> int:
    """The smallest budget that fits."""

    def late() -> None:
        say("searching the smallest plan …")

    least = ask(late, smallest, shape, recompute, setting, fixed)
    return planned_here(setting, least, taken).minimum


# ---- refusal


def full(result: Planned, limits: Mapping[str, int], change: str) -> str | None:
    """A refusal if a memory other than the process's own would exceed its capacity."""
    plans = result.plans
    for space in plans.spaces:
        nbytes = plans.nbytes_in(space)
        if nbytes > limits.get(space, nbytes):
            has = size_text(limits[space])
            lines = [
                f"this does not fit into the memory of {space}: it has {has}, {size_text(nbytes)} are needed",
                f"  {_described(plans)}",
                *rows(plans, result.baseline),
                *_owners(plans, space),
            ]
            return "\n".join([*lines, f"  {change or 'a little more would do'}"])
    return None


def refusal(result: Planned, change: str, limit: int) -> str:
    """The message: the limit, the smallest one that fits, the largest buffers at its peak, and the cheapest change."""
    plans = result.plans
    lines = [
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is {mib(result.minimum)}",
        f"  {_described(plans)}",
        *rows(
            plans, result.baseline, -(-result.minimum // MIB) * MIB - result.baseline - plans.nbytes
        ),
        *_owners(plans, HOST),
    ]
    return "\n".join([*lines, f"  {change}"])


def _owners(plans: Plans, space: str) -> list[str]:
    """The largest buffers at the peak of an arena."""
    plan = plans.largest_in(space)
    if not plan.arena(space).nbytes:
        return []
    return [
        f"  the peak of its arena, {size_text(plan.arena(space).nbytes)}, belongs to",
        *(
            f"    {size_text(b.nbytes):>10}  {b.name}  ({b.op}, {b.category})"
            for b in plan.peak(space)[:OWNERS]
        ),
    ]


def mib(nbytes: int) -> str:
    """A number of bytes in the format of --memory, rounded up."""
    return f"{-(-nbytes // MIB)}MiB"


def _described(plans: Plans) -> str:
    shape = plans.shape
    chosen = "".join(f"; {choice}" for choice in choices(plans))
    return f"that is with {shape.micros} × {shape.rows} × {shape.time} tokens a step{chosen}"
