"""A run before it starts: its settings become a job, and the job a plan, or a refusal with advice."""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.memory import parse_size, private_nbytes, settle
from packtrain.common.text import clock, plural
from packtrain.data.tokenizer import Tokenizer
from packtrain.distributed import here
from packtrain.engine.backends import HOST, Target, cpu
from packtrain.engine.memory_plan import size_text
from packtrain.planner.budget import Say, enough, followed, minimum, planned
from packtrain.planner.cost_model import Rates
from packtrain.planner.device_spread import AUTO
from packtrain.planner.expected_pace import learnt, seen
from packtrain.planner.kernel_memory import loaded, needed
from packtrain.planner.machine_speed import rates_apart
from packtrain.planner.plan_request import ACTIVATIONS, Request
from packtrain.planner.plan_table import as_data, parts, text
from packtrain.planner.plan_view import chart
from packtrain.planner.rank_exchange import Shared, shared
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import Plans, packed_types
from packtrain.training.checkpoints import Checkpoint, Progress, load
from packtrain.training.ineffective_settings import check_effects, check_validation
from packtrain.training.monitoring.notebook import table
from packtrain.training.replay_texts import writing_seconds
from packtrain.training.stop_criteria import why_ended
from packtrain.training.train_settings import RunSettings
from packtrain.training.training_job import Job
from packtrain.training.training_loop import CHECKPOINT
from packtrain.workflows.run_page_server import room

RECTANGLES = 400  # of the plan's picture in a notebook, some 40 kB
Prepare = Callable[[Any, Say], "Ready"]  # settings, and where messages go


@dataclass(frozen=True, slots=True, repr=False)
class Ready:
    """A job with its plans, and the expected time of a step. `str()` is the printed table."""

    job: Job
    plans: Plans
    rates: Rates
    seconds: float
    learnt: int  # tokens that the first step trains on
    budget: int | None
    tokenizer: Tokenizer | None  # for samples; created before the baseline is measured
    found: Checkpoint | None  # to resume from
    minimum: Callable[[], int]  # searches the smallest budget that fits
    command: str
    shared: Callable[[float], Shared]  # the time of a step over a link of so many bytes per second
    notes: tuple[str, ...] = ()  # more lines to print, such as the memory of the final merge
    files: tuple[tuple[Path, str, int], ...] = ()  # written beside the job's: path, what, bytes

    def json(self, minimum: int | None = None) -> str:
        """The plan as plain data."""
        return json.dumps(as_data(self.plans, self.seconds, self.budget, minimum, self.before))

    def about(self) -> str:
        """What a page shows of the run besides its settings and curves, as JSON."""
        plans = self.plans
        arena = plans.largest_in(HOST).arena(HOST)
        rows = [*parts(plans), ("arena", arena.nbytes, "activations, gradients, workspaces")]
        found = {
            "title": self.job.title,
            "steps": self.job.steps,
            "planned_bytes": self.planned_nbytes,
        }
        return json.dumps(found | {"budget_bytes": self.budget, "rows": rows})

    @property
    def ended(self) -> str:
        """A message for a resumed run that has no steps left; empty for all others."""
        settings, progress = self.job.settings, self.found.progress if self.found else Progress()
        rest = f"; finishing {settings.output}"
        if progress.step >= self.job.steps:
            return f"{plural(progress.step, 'step')} done, none left{rest}"
        if why_ended(settings, progress):
            return f"early stopping has ended training after step {progress.step:,}{rest}"
        return ""

    @property
    def resume(self) -> str:
        """The command that continues the run."""
        return f"packtrain {self.command} -o {shlex.quote(str(self.job.settings.output))} --resume"

    @property
    def before(self) -> float:
        """Seconds in which the base writes texts for replay, before step 1."""
        return 0.0 if self.found else writing_seconds(self.job, self.rates)

    @property
    def refusal(self) -> str | None:
        """Why the plans, the smallest possible, do not fit."""
        return self.plans.refusal

    @property
    def planned_nbytes(self) -> int:
        """Private memory of the process at its peak."""
        return self.plans.total_nbytes

    def __repr__(self) -> str:
        limit = "" if self.budget is None else f" of {size_text(self.budget)}"
        return (
            f"Ready({self.job.title}: {plural(self.job.steps, 'step')}, about"
            f" {clock(self.before + self.seconds * self.job.steps)}, in {size_text(self.planned_nbytes)}{limit}"
            f"{', which do not fit' if self.refusal else ''})"
        )

    def _repr_html_(self) -> str:
        """The table of bytes, and the picture of the plan's largest buffers."""
        rows = [(what, size_text(nbytes), why) for what, nbytes, why in parts(self.plans)]
        drawn = chart(self.plans.largest, **facts(self), rectangles=RECTANGLES)
        return f"<pre>{escape(repr(self))}</pre>{table(rows)}{drawn}"

    def __str__(self) -> str:
        return text(self.plans, self.seconds, self.job.steps, self.learnt, self.before)


def ready(
    command: str,
    settings: RunSettings,
    build_job: Callable[[Any, Say], Job],
    say: Say,
    runs: bool = True,
) -> Ready:
    """Build the job and plan it, or explain why it is refused; loads its kernels if it `runs`. Raises InputError.

    command  of the command line that does the same
    """
    world = here()
    with room(settings, runs):
        if world.rank == 0:  # it fills the caches and searches the plan, which all use
            found = _ready(command, settings, build_job, say, runs, None)
            world.from_first((found.plans.shape, found.job.offloaded))
            return found
        shape, moved = world.from_first(None)
        if shape.share is not None:
            shape = replace(shape, share=(world.rank, world.size))
        decided = shape, bool(moved)
        return _ready(command, settings, build_job, say, runs, decided)


def _ready(
    command: str,
    settings: RunSettings,
    build_job: Callable[[Any, Say], Job],
    say: Say,
    runs: bool,
    decided: tuple[StepShape, bool] | None,
) -> Ready:
    limit = None if settings.memory is None else parse_size(settings.memory, "--memory")
    job = _job(settings, build_job, say)
    packed, kind = job.shape.base is not None, type(job.optimizer)
    aware = job.config.lora is not None and job.config.lora.aware
    modules = needed(job.shape.config, packed, kind, aware=aware)
    kernels.prepare(modules, limit, private_nbytes())
    free = math.inf if limit is None else limit - private_nbytes()
    speed, tokens = _speed(job, say, free)
    settle()
    found, sampled = _found(settings, say), settings.sample_every > 0
    job = job if found is None else _continued(job, found)
    tokenizer = job.subject.tokenizer() if sampled else None
    taken = loaded(modules, free)
    request = Request(
        job.optimizer,
        speed,
        private_nbytes() + taken.to_come,
        job.config.context_length if sampled else 0,
        settings.target,
        settings.recompute,
        {**settings.target.limits, **({} if limit is None else {HOST: limit})},
        found is not None,
        taken,
        runs,
    )
    request = replace(request, target=_spread(settings, job.shape, request, say))
    job, plans, request = _planned(job, request, decided, say)
    least = partial(_least, plans, job.shape, request, say)
    job, seconds = replace(job, shape=plans.shape), plans.seconds(speed)
    crowd = settings.nproc * kernels.threads() / kernels.COUNT  # threads of them all on a core
    over = partial(shared, plans, speed.slower(max(crowd, 1.0)))
    return Ready(job, plans, speed, seconds, tokens, limit, tokenizer, found, least, command, over)


def _planned(
    job: Job, request: Request, decided: tuple[StepShape, bool] | None, say: Say
) -> tuple[Job, Plans, Request]:
    """The plans with moments beside their weights or in the process's memory: as asked, or what fits and is faster.

    decided  elsewhere: the shape, and whether they are in the process's memory
    """
    if decided is not None:
        shape, moved = decided
        request = request.offloaded(shape) if moved else request
        return replace(job, offloaded=moved), followed(shape, request), request
    asked = job.settings.offload
    request = replace(request, offload=ACTIVATIONS[asked])
    away = request.offloaded(job.shape)
    if away.target == request.target:
        return replace(job, offloaded=False), planned(job.shape, request, say), request
    ways = {False: request, True: away}
    if job.offloaded is not None or asked != "auto":
        chosen = asked in ("moments", "all") if job.offloaded is None else job.offloaded
        return replace(job, offloaded=chosen), planned(job.shape, ways[chosen], say), ways[chosen]
    found = {False: planned(job.shape, request, say)}
    if found[False].refusal or found[False].shape != job.shape:
        found[True] = planned(job.shape, away, say)

    def worth(way: bool) -> tuple[bool, float]:
        plans = found[way]
        refused, taken = plans.refusal is not None, map(plans.nbytes_in, plans.spaces)
        return refused, sum(taken) if refused else plans.seconds(request.rates)

    best = min(found, key=worth)
    if best:
        say("the optimizer's moments stay in this process's memory (--offload)")
    return replace(job, offloaded=best), found[best], ways[best]


def _spread(settings: RunSettings, shape: StepShape, request: Request, say: Say) -> Target:
    """Where the leaves of the model live. Raises InputError."""
    found = settings.spread.over(shape, request)
    if settings.gpu_layers == AUTO:
        there = sum(name.startswith("cache.") for name in found.homes)
        say(f"--gpu-layers auto: {there} of {plural(shape.config.block_count, 'block')}")
    return found


def _least(plans: Plans, shape: StepShape, request: Request, say: Say) -> int:
    return enough(plans) if plans.refusal else minimum(shape, request, say)


def _job(settings: RunSettings, build_job: Callable[[Any, Say], Job], say: Say) -> Job:
    """The checked job of the settings. Raises InputError."""
    check_effects(settings)
    _ = settings.spread  # raises InputError before data is read
    if settings.threads:
        _set_threads(settings.threads)
    job = build_job(settings, say)
    check_validation(settings, job.valid is not None)
    count = -(-job.steps // (job.steps_per_eval or job.steps or 1))
    if job.valid is not None and count <= settings.patience and job.steps:
        say(
            f"--patience {settings.patience} cannot act: this run validates {plural(count, 'time')};"
            " --steps-per-eval N validates more often"
        )
    return job


def _speed(job: Job, say: Say, free: float) -> tuple[Rates, int]:
    """The rates of this machine for the job's data, and the tokens that its first step trains on."""
    again, target = job.settings.measure_speed, job.settings.target
    if not target.private and job.settings.offload != "none":  # moments may be updated on the cpu
        target = replace(target, homes={**target.homes, "moment": cpu})
    rates = rates_apart(again, say, packed_types(job.shape), free, target)
    data = job.glimpse()
    positions = job.shape.positions
    tokens = learnt(data, positions)
    return rates.seeing(seen(data), tokens / positions), tokens


def _found(settings: RunSettings, say: Say) -> Checkpoint | None:
    """The checkpoint to resume from; None if there is none yet."""
    return load(settings.folder / CHECKPOINT, say) if settings.resume else None


def _continued(job: Job, found: Checkpoint) -> Job:
    """The job with the order of the data and the micro-batches of its checkpoint."""
    again, progress = job.settings.force_reshuffle, found.progress
    job.train.key = progress.step if again else progress.shuffled
    moved = bool(found.about.get("offloaded"))
    return replace(job, shape=resumed(job.shape, found.about), offloaded=moved)


def resumed(shape: StepShape, begun: Mapping[str, Any]) -> StepShape:
    """The shape with the micro-batch and chunk of the checkpoint, which fix the order of floating-point additions."""
    rows, chunk = int(begun.get("rows", shape.rows)), int(begun.get("chunk", shape.chunk))
    if (shape.rows * shape.micros) % rows:
        return shape  # other settings: `check_compatible` reports it
    micros, layered = shape.rows * shape.micros // rows, bool(begun.get("layered", False))
    return replace(
        shape, rows=rows, micros=micros, chunk=chunk, layered=layered and not shape.apart
    )


def facts(ready: Ready, measured: int | None = None) -> dict[str, Any]:
    """Labels for pictures of the plan; `measured` is the peak of a finished run."""
    target = ready.plans.target
    return {
        "title": ready.job.title,
        "budget_nbytes": target.limit if target.apart else ready.budget,
        "rows": parts(ready.plans, target.space),
        "measured": None if target.apart else measured,
        "space": target.space,
    }


def _set_threads(count: int) -> None:
    try:
        kernels.set_threads(count)
    except ValueError:
        raise InputError(f"--threads {count}: it must be from 1 to the number of cores") from None
