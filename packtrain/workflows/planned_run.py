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
from packtrain.planner.kernel_memory import Loaded, loaded, needed
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
    replay_seconds: Callable[[], float]  # in which the base writes texts
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
        return json.dumps(
            as_data(self.plans, self.seconds, self.budget, minimum, self.seconds_before_step_1)
        )

    def about(self) -> str:
        """What a page shows of the run besides its settings and curves, as JSON."""
        plans = self.plans
        arena = plans.largest_in(HOST).arena(HOST)
        rows = [*parts(plans), ("arena", arena.nbytes, "activations, gradients, workspaces")]
        summary = {
            "title": self.job.title,
            "steps": self.job.steps,
            "planned_bytes": self.planned_nbytes,
        }
        return json.dumps(summary | {"budget_bytes": self.budget, "rows": rows})

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
    def seconds_before_step_1(self) -> float:
        """Seconds in which the base writes texts for replay, before step 1."""
        return 0.0 if self.found else self.replay_seconds()

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
        total_seconds = self.seconds_before_step_1 + self.seconds * self.job.steps
        return (
            f"Ready({self.job.title}: {plural(self.job.steps, 'step')}, about"
            f" {clock(total_seconds)}, in {size_text(self.planned_nbytes)}{limit}"
            f"{', which do not fit' if self.refusal else ''})"
        )

    def _repr_html_(self) -> str:
        """The table of bytes, and the picture of the plan's largest buffers."""
        rows = [
            (label, size_text(nbytes), description)
            for label, nbytes, description in parts(self.plans)
        ]
        drawn = chart(self.plans.largest, **facts(self), rectangles=RECTANGLES)
        return f"<pre>{escape(repr(self))}</pre>{table(rows)}{drawn}"

    def __str__(self) -> str:
        return text(
            self.plans, self.seconds, self.job.steps, self.learnt, self.seconds_before_step_1
        )


def ready(
    command: str,
    settings: RunSettings,
    build_job: Callable[[Any, Say], Job],
    report: Say,
    runs: bool = True,
) -> Ready:
    """Build the job and plan it, or explain why it is refused; loads its kernels if it `runs`. Raises InputError.

    command  of the command line that does the same
    """
    world = here()
    with room(settings, runs):
        if world.rank == 0:  # it fills the caches and searches the plan, which all use
            run_plan = _ready(command, settings, build_job, report, runs, None)
            world.from_first((run_plan.plans.shape, run_plan.job.offloaded))
            return run_plan
        shape, moved = world.from_first(None)
        if shape.share is not None:
            shape = replace(shape, share=(world.rank, world.size))
        decided = shape, bool(moved)
        return _ready(command, settings, build_job, report, runs, decided)


def _ready(
    command: str,
    settings: RunSettings,
    build_job: Callable[[Any, Say], Job],
    report: Say,
    runs: bool,
    decided: tuple[StepShape, bool] | None,
) -> Ready:
    limit = None if settings.memory is None else parse_size(settings.memory, "--memory")
    job = _job(settings, build_job, report)
    packed, kind = job.shape.base is not None, type(job.optimizer)
    aware = job.config.lora is not None and job.config.lora.aware
    modules = needed(job.shape.config, packed, kind, aware=aware)
    kernels.prepare(modules, limit, private_nbytes())
    free = math.inf if limit is None else limit - private_nbytes()
    speed, tokens = _speed(job, report, free)
    settle()
    checkpoint, sampled = _found(settings, report), settings.sample_every > 0
    job = job if checkpoint is None else _continued(job, checkpoint)
    tokenizer = job.subject.tokenizer() if sampled else None
    module_memory = loaded(modules, free)
    request = _request(settings, job, speed, module_memory, limit, checkpoint is not None, runs)
    request = replace(request, target=_spread(settings, job.shape, request, report))
    job, plans, request = _planned(job, request, decided, report)
    min_budget = partial(_least, plans, job.shape, request, report)
    job, seconds = replace(job, shape=plans.shape), plans.seconds(speed)
    crowd = settings.nproc * kernels.threads() / kernels.COUNT  # threads of them all on a core
    time_over_link = partial(shared, plans, speed.slower(max(crowd, 1.0)))
    replay_seconds = partial(writing_seconds, job, speed)
    run = job, plans, replay_seconds, seconds, tokens, limit, tokenizer, checkpoint
    return Ready(*run, min_budget, command, time_over_link)


def _request(
    settings: RunSettings,
    job: Job,
    speed: Rates,
    module_memory: Loaded,
    limit: int | None,
    resumes: bool,
    runs: bool,
) -> Request:
    """What a plan of the job must keep to, in this process as it is now."""
    return Request(
        job.optimizer,
        speed,
        private_nbytes() + module_memory.to_come,
        job.config.context_length if settings.sample_every > 0 else 0,
        settings.target,
        settings.recompute,
        {**settings.target.limits, **({} if limit is None else {HOST: limit})},
        resumes,
        module_memory,
        runs,
    )


def _planned(
    job: Job, request: Request, decided: tuple[StepShape, bool] | None, report: Say
) -> tuple[Job, Plans, Request]:
    """The plans with moments beside their weights or in the process's memory: as asked, or what fits and is faster.

    decided  elsewhere: the shape, and whether they are in the process's memory
    """
    if decided is not None:
        shape, moved = decided
        request = request.offloaded(shape) if moved else request
        return replace(job, offloaded=moved), followed(shape, request), request
    offload_mode = job.settings.offload
    request = replace(request, offload=ACTIVATIONS[offload_mode])
    offloaded_request = request.offloaded(job.shape)
    if offloaded_request.target == request.target:
        return replace(job, offloaded=False), planned(job.shape, request, report), request
    requests = {False: request, True: offloaded_request}
    if job.offloaded is not None or offload_mode != "auto":
        chosen = offload_mode in ("moments", "all") if job.offloaded is None else job.offloaded
        return (
            replace(job, offloaded=chosen),
            planned(job.shape, requests[chosen], report),
            requests[chosen],
        )
    candidates = {False: planned(job.shape, request, report)}
    if candidates[False].refusal or candidates[False].shape != job.shape:
        candidates[True] = planned(job.shape, offloaded_request, report)

    def worth(is_offloaded: bool) -> tuple[bool, float]:
        plans = candidates[is_offloaded]
        refused, nbytes = plans.refusal is not None, map(plans.nbytes_in, plans.spaces)
        return refused, sum(nbytes) if refused else plans.seconds(request.rates)

    best = min(candidates, key=worth)
    if best:
        report("the optimizer's moments stay in this process's memory (--offload)")
    return replace(job, offloaded=best), candidates[best], requests[best]


def _spread(settings: RunSettings, shape: StepShape, request: Request, report: Say) -> Target:
    """Where the leaves of the model live. Raises InputError."""
    target = settings.spread.over(shape, request)
    if settings.gpu_layers == AUTO:
        num_blocks = sum(name.startswith("cache.") for name in target.homes)
        report(f"--gpu-layers auto: {num_blocks} of {plural(shape.config.block_count, 'block')}")
    return target


def _least(plans: Plans, shape: StepShape, request: Request, report: Say) -> int:
    return enough(plans) if plans.refusal else minimum(shape, request, report)


def _job(settings: RunSettings, build_job: Callable[[Any, Say], Job], report: Say) -> Job:
    """The checked job of the settings. Raises InputError."""
    check_effects(settings)
    _ = settings.spread  # raises InputError before data is read
    if settings.threads:
        _set_threads(settings.threads)
    job = build_job(settings, report)
    check_validation(settings, job.valid is not None)
    count = -(-job.steps // (job.steps_per_eval or job.steps or 1))
    if job.valid is not None and count <= settings.patience and job.steps:
        report(
            f"--patience {settings.patience} cannot act: this run validates {plural(count, 'time')};"
            " --steps-per-eval N validates more often"
        )
    return job


def _speed(job: Job, report: Say, free: float) -> tuple[Rates, int]:
    """The rates of this machine for the job's data, and the tokens that its first step trains on."""
    remeasure, target = job.settings.measure_speed, job.settings.target
    if not target.private and job.settings.offload != "none":  # moments may be updated on the cpu
        target = replace(target, homes={**target.homes, "moment": cpu})
    rates = rates_apart(remeasure, report, packed_types(job.shape), free, target)
    data = job.glimpse()
    positions = job.shape.positions
    tokens = learnt(data, positions)
    return rates.seeing(seen(data), tokens / positions), tokens


def _found(settings: RunSettings, report: Say) -> Checkpoint | None:
    """The checkpoint to resume from; None if there is none yet."""
    return load(settings.folder / CHECKPOINT, report) if settings.resume else None


def _continued(job: Job, checkpoint: Checkpoint) -> Job:
    """The job with the order of the data and the micro-batches of its checkpoint."""
    reshuffle, progress = job.settings.force_reshuffle, checkpoint.progress
    job.train.key = progress.step if reshuffle else progress.shuffled
    moved = bool(checkpoint.about.get("offloaded"))
    return replace(job, shape=resumed(job.shape, checkpoint.about), offloaded=moved)


def resumed(shape: StepShape, checkpoint_info: Mapping[str, Any]) -> StepShape:
    """The shape with the micro-batch and chunk of the checkpoint, which fix the order of floating-point additions."""
    rows = int(checkpoint_info.get("rows", shape.rows))
    chunk = int(checkpoint_info.get("chunk", shape.chunk))
    if (shape.rows * shape.micros) % rows:
        return shape  # other settings: `check_compatible` reports it
    micros, layered = shape.rows * shape.micros // rows, bool(checkpoint_info.get("layered", False))
    return replace(
        shape, rows=rows, micros=micros, chunk=chunk, layered=layered and not shape.apart
    )


def facts(run_plan: Ready, measured: int | None = None) -> dict[str, Any]:
    """Labels for pictures of the plan; `measured` is the peak of a finished run."""
    target = run_plan.plans.target
    return {
        "title": run_plan.job.title,
        "budget_nbytes": target.limit if target.apart else run_plan.budget,
        "rows": parts(run_plan.plans, target.space),
        "measured": None if target.apart else measured,
        "space": target.space,
    }


def _set_threads(count: int) -> None:
    try:
        kernels.set_threads(count)
    except ValueError:
        raise InputError(f"--threads {count}: it must be from 1 to the number of cores") from None
