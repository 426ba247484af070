"""The promise of `--memory`: the fastest way to train that fits into so many bytes, or a refusal that helps.

In go a Shape as asked for, a limit, and what this machine can do; out come Plans. What was chosen changes no result
but for the order of additions, which is printed. The search runs in a child, so that its memory is gone afterwards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from packtrain.backends import HOST
from packtrain.child import ask
from packtrain.design.loaded import Loaded
from packtrain.design.parts import Setting
from packtrain.design.plans import Plans, Shape
from packtrain.design.search import as_asked, search, smallest
from packtrain.design.table import choices, rows
from packtrain.memory import private_nbytes, settle
from packtrain.planning import size_text

Say = Callable[[str], None]
OWNERS = 10
MIB = 1 << 20
MARGIN_NBYTES = 1 << 20  # how much kernels differ from what they took of another process
ASIDE_NBYTES = 3 << 19  # how much estimate and process differ: a second search is rare
SPARE_NBYTES = 3 << 20  # how much it differs from the next one
SEARCH_NBYTES = 48 << 20  # of a child that searches, measured
BLOCK_NBYTES = 900_000  # more for each block
NO_KERNELS = Loaded(0)
ROUNDS = 3  # searches, each for less than the one before, until what is found fits a process


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans, and the bytes of this process with them. With a `refusal` they are the smallest, and too large.

    searching  bytes of this process and of the child that searched, at their peak
    """

    plans: Plans
    baseline: int
    searching: int = 0
    refusal: str | None = None

    @classmethod
    def here(cls, plans: Plans, searching: int = 0, more: int = 0) -> "Planned":
        """Plans that this process has just made, which will hold so many bytes more before the run."""
        settle()
        return cls(plans, private_nbytes() + more, searching)

    @property
    def total(self) -> int:
        """Bytes that the run takes at the most."""
        return self.baseline + self.plans.nbytes

    @property
    def held(self) -> int:
        """Bytes of the space of the arena, with what kernels may take more of the process."""
        target = self.plans.target
        if target.apart:
            return self.plans.nbytes_in(target.space)
        return self.total + MARGIN_NBYTES

    @property
    def needed(self) -> int:
        """The same, or of the search before it."""
        return max(self.total, self.searching)

    @property
    def minimum(self) -> int:
        """Bytes that are enough, whatever the next process is like."""
        return self.needed + SPARE_NBYTES


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes of the process that may be taken, None for any number, and what will take some of them.

    fixed    nothing may be chosen that changes the order of additions: a run is resumed
    kernels  of the run; their bytes are part of the baseline of a setting
    runs     the kernels are loaded; otherwise what they take is taken on trust
    """

    nbytes: int | None
    fixed: bool = False
    kernels: Loaded = NO_KERNELS
    runs: bool = True


def planned(
    shape: Shape,
    recompute: str,
    setting: Setting,
    within: "Limit",
    say: Say = print,
) -> Planned:
    """Plans within the limit, or a refusal with all that helps. The search comes before the kernels are loaded."""
    target, taken = setting.target, within.kernels
    limit = target.limit if target.apart else within.nbytes
    most, change = within.nbytes, ""
    if limit is None:
        if within.runs:
            taken.load()
        made = planned_here(setting, as_asked(shape, recompute, setting), taken)
    else:
        made, change = searched(shape, recompute, setting, replace(within, nbytes=limit), say)
        fits = most is None or made.needed - taken.unsure <= most
        if fits and (within.runs or taken.unsure):
            taken.load()
            made = Planned.here(made.plans, made.searching)
    said = full(made, target.limits, change)
    if said is None and most is not None and made.needed > most:
        said = refusal(made, change or "a little more would do", most)
    return made if said is None else replace(made, refusal=said)


def searched(
    shape: Shape, recompute: str, setting: Setting, within: "Limit", say: Say
) -> tuple[Planned, str]:
    """Plans by a search within a number of bytes of the arena's space; and if none fit, a change that would."""
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
        made = planned_here(setting, answer.shape, taken, searching)
        over = made.held - limit
        if not answer.fits or over <= 0:
            return made, answer.change
        asked = replace(asked, baseline=asked.baseline + over)
    least = ask(late, smallest, shape, recompute, setting, fixed)
    return planned_here(setting, least, taken, searching), ""


def planned_here(setting: Setting, shape: Shape, taken: Loaded, searching: int = 0) -> Planned:
    """Plans that this process makes. Where packing them needs kernels, the others are loaded, too."""
    plans = setting.plans(shape)
    taken.load_rest()
    return Planned.here(plans, searching, taken.to_come)


def searching_nbytes(shape: Shape) -> int:
    """Of a child that searches."""
    return SEARCH_NBYTES + BLOCK_NBYTES * shape.config.block_count


def minimum(
    shape: Shape, recompute: str, setting: Setting, fixed: bool, taken: Loaded, say: Say
) -> int:
    """The smallest budget that would do."""

    def late() -> None:
        say("looking for the smallest way …")

    least = ask(late, smallest, shape, recompute, setting, fixed)
    return planned_here(setting, least, taken).minimum


# ---- refusal


def full(made: Planned, limits: Mapping[str, int], change: str) -> str | None:
    """A refusal where a memory that is not the process's own would have to hold more than it can."""
    plans = made.plans
    for space in plans.spaces:
        nbytes = plans.nbytes_in(space)
        if nbytes > limits.get(space, nbytes):
            has = size_text(limits[space])
            lines = [
                f"this does not fit into the memory of {space}: it has {has}, {size_text(nbytes)} are needed",
                f"  {_described(plans)}",
                *rows(plans, made.baseline),
                *_owners(plans, space),
            ]
            return "\n".join([*lines, f"  {change or 'a little more would do'}"])
    return None


def refusal(made: Planned, change: str, limit: int) -> str:
    """One screen: asked, the smallest that would do, who owns its peak, and the cheapest change that fits."""
    plans = made.plans
    lines = [
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is {mib(made.minimum)}",
        f"  {_described(plans)}",
        *rows(plans, made.baseline, -(-made.minimum // MIB) * MIB - made.baseline - plans.nbytes),
        *_owners(plans, HOST),
    ]
    return "\n".join([*lines, f"  {change}"])


def _owners(plans: Plans, space: str) -> list[str]:
    """Who has the most of an arena at its peak."""
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
    """A number of bytes as --memory takes it, rounded up."""
    return f"{-(-nbytes // MIB)}MiB"


def _described(plans: Plans) -> str:
    shape = plans.shape
    chosen = "".join(f"; {choice}" for choice in choices(plans))
    return f"that is with {shape.micros} × {shape.rows} × {shape.time} tokens a step{chosen}"
