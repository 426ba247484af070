"""A run before it starts: its settings become a job, and the job a plan, or a refusal with advice."""

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.common.errors import InputError, with_keywords
from packtrain.common.mapped_file import limited_pages
from packtrain.common.memory import parse_size, private_nbytes, release_memory
from packtrain.common.option_rules import check_rules, refuse_changed
from packtrain.common.options import WITH_OPTIMIZER, flag, resumable_names
from packtrain.common.text import clock, plural
from packtrain.data.tokenizer import Tokenizer
from packtrain.distributed import current_world
from packtrain.engine.backends import CPU, HOST, cpu
from packtrain.engine.memory_plan import size_text
from packtrain.engine.optim import OPTIMIZERS
from packtrain.planner import budget as budgets
from packtrain.planner.budget import ReportFunction, minimum_budget, plan_shape, plan_within_limits
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.device_spread import AUTO
from packtrain.planner.expected_pace import attended_share, num_trained_tokens
from packtrain.planner.kernel_memory import KernelMemory, measure_kernels, required_kernel_modules
from packtrain.planner.machine_speed import measure_rates_in_children
from packtrain.planner.plan_request import OFFLOAD_MODES, PlanRequest
from packtrain.planner.plan_table import memory_rows, plan_data, plan_text
from packtrain.planner.plan_view import chart_svg
from packtrain.planner.rank_exchange import ExchangeTimes, predict_exchange
from packtrain.planner.resident_limit import file_rate, plan_within_resident
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import TrainingPlans, packed_weight_types
from packtrain.training.checkpoints import TrainingCheckpoint, TrainingProgress, load_checkpoint
from packtrain.training.monitoring.notebook import html_table
from packtrain.training.replay_texts import writing_seconds
from packtrain.training.run_settings import RunSettings
from packtrain.training.training_job import TrainingJob
from packtrain.training.training_loop import CHECKPOINT, stop_reason
from packtrain.workflows.run_page_server import reserve_page_memory

MAX_RECTANGLES = 400  # rectangles of the plan's picture in a notebook, some 40 kB
PrepareRun = Callable[[Any, ReportFunction], "PlannedRun"]  # settings, and where messages go
BuildJob = Callable[[Any, ReportFunction], TrainingJob]  # likewise


@dataclass(frozen=True, slots=True, repr=False)
class PlannedRun:
    """A job with its plans, and the expected time of a step. `str()` is the printed table."""

    job: TrainingJob
    plans: TrainingPlans
    replay_seconds: Callable[[], float]  # seconds in which the base writes texts
    seconds: float
    learnt: int  # tokens that the first step trains on
    budget: int | None
    tokenizer: Tokenizer | None  # for samples; created before the baseline is measured
    found: TrainingCheckpoint | None  # checkpoint to resume from
    minimum: Callable[[], int]  # searches the smallest budget that fits
    command: str
    shared: Callable[[float], ExchangeTimes]  # times of a step over a link of bytes per second
    notes: tuple[str, ...] = ()  # more lines to print, such as the memory of the final merge
    files: tuple[tuple[Path, str, int], ...] = ()  # besides the job's: path, description, bytes

    def json(self, minimum: int | None = None) -> str:
        """Return the plan as JSON; `minimum`: the least budget in bytes that fits, null in JSON if not given."""
        return json.dumps(
            plan_data(self.plans, self.seconds, self.budget, minimum, self.seconds_before_step_1)
        )

    def about(self) -> str:
        """Return the run's figures that a page shows besides settings and curves, as JSON."""
        summary = {
            "title": self.job.title, "steps": self.job.steps, "planned_bytes": self.planned_nbytes,
        }  # fmt: skip
        return json.dumps(summary | {"budget_bytes": self.budget, "rows": self._memory_rows()})

    def _memory_rows(self) -> list[tuple[str, int, str]]:
        """Return rows (name, bytes, reason) of what the process's memory is for, the arena last."""
        arena = self.plans.largest_plan_in(HOST).arena(HOST)
        arena_row = ("arena", arena.nbytes, "activations, gradients, workspaces")
        return [*memory_rows(self.plans), arena_row]

    @property
    def ended(self) -> str:
        """A message for a resumed run that has no steps left; empty for all others."""
        settings = self.job.settings
        progress = self.found.progress if self.found else TrainingProgress()
        finishing_note = f"; finishing {settings.output}"
        if progress.step >= self.job.steps:
            return f"{plural(progress.step, 'step')} done, none left{finishing_note}"
        if stop_reason(settings, progress):
            return f"early stopping has ended training after step {progress.step:,}{finishing_note}"
        return ""

    @property
    def resume(self) -> str:
        """The command that continues the run."""
        return f"packtrain {self.command} -o {shlex.quote(str(self.job.settings.output))} --resume"

    @property
    def seconds_before_step_1(self) -> float:
        """Estimated seconds in which the base writes texts for replay, before step 1; 0 for a resumed run."""
        return 0.0 if self.found else self.replay_seconds()

    @property
    def refusal(self) -> str | None:
        """Why the plans, the smallest possible ones, do not fit, in the library's keywords; None if they fit."""
        return self.plans.refusal and with_keywords(self.plans.refusal)

    @property
    def planned_nbytes(self) -> int:
        """Planned peak of the process's private memory, in bytes."""
        return self.plans.total_nbytes

    def __repr__(self) -> str:
        budget_text = "" if self.budget is None else f" of {size_text(self.budget)}"
        total_seconds = self.seconds_before_step_1 + self.seconds * self.job.steps
        return (
            f"PlannedRun({self.job.title}: {plural(self.job.steps, 'step')}, about"
            f" {clock(total_seconds)}, in {size_text(self.planned_nbytes)}{budget_text}"
            f"{', which do not fit' if self.refusal else ''})"
        )

    def _repr_html_(self) -> str:
        """The table of bytes, and the picture of the plan's largest buffers."""
        rows = [*self._memory_rows(), ("total", self.planned_nbytes, "")]
        table = html_table((label, size_text(nbytes), reason) for label, nbytes, reason in rows)
        plan_picture = chart_svg(self.plans.largest_plan, **facts(self), rectangles=MAX_RECTANGLES)
        return f"<pre>{escape(repr(self))}</pre>{table}{plan_picture}"

    def __str__(self) -> str:
        return plan_text(
            self.plans, self.seconds, self.job.steps, self.learnt, self.seconds_before_step_1
        )


def plan_run(
    command: str, settings: RunSettings, build_job: BuildJob, report: ReportFunction, will_run: bool = True,
) -> PlannedRun:  # fmt: skip
    """Build and plan a job as rank 0 decides; `refusal` says why it does not fit. Loads kernels. Raises InputError.

    command  `train` or `finetune`, for the command that resumes the run
    """
    world = current_world()
    with reserve_page_memory(settings, will_run):
        if world.rank == 0:  # rank 0 fills the caches and searches the plan that all ranks use
            run_plan = _plan_on_rank(command, settings, build_job, report, None)
            world.from_first((run_plan.plans.shape, run_plan.job.offloaded))
            return run_plan
        shape, is_offloaded = world.from_first(None)
        if shape.moment_share is not None:
            shape = replace(shape, moment_share=(world.rank, world.world_size))
        return _plan_on_rank(command, settings, build_job, report, (shape, bool(is_offloaded)))


def _plan_on_rank(
    command: str, settings: RunSettings, build_job: BuildJob, report: ReportFunction,
    shared_decision: tuple[StepShape, bool] | None,
) -> PlannedRun:  # fmt: skip
    """Build and plan the job in this process; `shared_decision`: as in _plan_job."""
    limit = _private_limit(settings)
    job = _build_checked_job(settings, build_job, report)
    is_packed, optimizer_type = job.shape.base is not None, type(job.optimizer)
    is_aware = job.config.lora is not None and job.config.lora.aware
    kernel_modules = required_kernel_modules(
        job.shape.config, is_packed, optimizer_type, is_aware=is_aware
    )
    kernels.prepare(kernel_modules, limit, private_nbytes())
    free_nbytes = math.inf if limit is None else limit - private_nbytes()
    speed, tokens = _speed(job, report, free_nbytes)
    release_memory()
    path = settings.folder / CHECKPOINT
    checkpoint = load_checkpoint(path, report) if settings.resume else None
    job = job if checkpoint is None else _continue_job(job, checkpoint)
    tokenizer = job.model.tokenizer() if settings.sample_every > 0 else None
    module_memory = measure_kernels(kernel_modules, free_nbytes)
    request = _request(settings, job, speed, module_memory, limit, checkpoint is not None)
    target = settings.spread.place_leaves(job.shape, request)
    if settings.gpu_layers == AUTO:
        num_blocks = sum(name.startswith("cache.") for name in target.homes)
        all_blocks = plural(job.shape.config.block_count, "block")
        report(f"--gpu-layers auto: {num_blocks} of {all_blocks}")
    request = replace(request, target=target)
    job, plans, request = _plan_job(job, request, shared_decision, report)
    limit = _private_limit(settings, plans.window.nbytes if plans.window else 0)
    min_budget = partial(minimum_budget, job.shape, request, report)
    if plans.refusal:
        min_budget = partial(budgets.safe_budget, plans)
    job, seconds = replace(job, shape=plans.shape), plans.step_seconds(speed)
    # threads of all processes on a core
    threads_per_core = settings.nproc * kernels.threads() / kernels.MAX_THREADS
    time_over_link = partial(predict_exchange, plans, speed.slower(max(threads_per_core, 1.0)))
    replay_seconds = cache(partial(writing_seconds, job, speed))
    run_fields = job, plans, replay_seconds, seconds, tokens, limit, tokenizer, checkpoint
    return PlannedRun(*run_fields, min_budget, command, time_over_link)


def _request(
    settings: RunSettings, job: TrainingJob, machine_rates: BackendRates, module_memory: KernelMemory,
    limit: int | None, is_resumed: bool,
) -> PlanRequest:  # fmt: skip
    """Return the request for a plan of the job in `limit` private bytes, with this process's memory as it is now."""
    return PlanRequest(
        job.optimizer, machine_rates, private_nbytes() + module_memory.pending_nbytes + job.train.epoch_nbytes,
        job.config.context_length if settings.sample_every > 0 else 0, settings.target, settings.recompute,
        {**settings.target.limits, **({} if limit is None else {HOST: limit})}, is_resumed, module_memory,
    )  # fmt: skip


def _plan_job(
    job: TrainingJob, request: PlanRequest, shared_decision: tuple[StepShape, bool] | None, report: ReportFunction,
) -> tuple[TrainingJob, TrainingPlans, PlanRequest]:  # fmt: skip
    """Return job, plans and request, with the optimizer's moments on the device or in this process, as is faster.
    `shared_decision`: rank 0's (shape, whether moments are offloaded); None: decide here."""
    if (limit := job.settings.resident_nbytes) is not None:
        return replace(job, offloaded=False), _plan_in_pages(job, limit, request, report), request
    if shared_decision is not None:
        shape, moments_offloaded = shared_decision
        request = request.offloaded(shape) if moments_offloaded else request
        return replace(job, offloaded=moments_offloaded), plan_shape(shape, request), request
    offload_mode = job.settings.offload
    request = replace(request, offload_mode=OFFLOAD_MODES[offload_mode])
    offloaded_request = request.offloaded(job.shape)
    if offloaded_request.target == request.target:
        plans = plan_within_limits(job.shape, request, report)
        return replace(job, offloaded=False), plans, request
    requests = {False: request, True: offloaded_request}
    if job.offloaded is not None or offload_mode != "auto":
        chosen = offload_mode in ("moments", "all") if job.offloaded is None else job.offloaded
        plans = plan_within_limits(job.shape, requests[chosen], report)
        return replace(job, offloaded=chosen), plans, requests[chosen]
    candidates = {False: plan_within_limits(job.shape, request, report)}
    if candidates[False].refusal or candidates[False].shape != job.shape:
        candidates[True] = plan_within_limits(job.shape, offloaded_request, report)

    def plan_cost(is_offloaded: bool) -> tuple[bool, float]:
        plans = candidates[is_offloaded]
        is_refused = plans.refusal is not None
        space_nbytes = map(plans.nbytes_in, plans.device_spaces)
        return is_refused, sum(space_nbytes) if is_refused else plans.step_seconds(request.rates)

    best = min(candidates, key=plan_cost)
    if best:
        report("the optimizer's moments stay in this process's memory (--offload)")
    return replace(job, offloaded=best), candidates[best], requests[best]


def _private_limit(settings: RunSettings, page_nbytes: int = 0) -> int | None:
    """Return the limit on private bytes: --memory, or what --resident leaves beside `page_nbytes`; None: no limit."""
    limits = [] if settings.memory is None else [parse_size(settings.memory, "--memory")]
    if settings.resident_nbytes is not None:
        limits.append(settings.resident_nbytes - page_nbytes)
    return min(limits, default=None)


def _plan_in_pages(
    job: TrainingJob, limit: int, request: PlanRequest, report: ReportFunction
) -> TrainingPlans:
    """Return plans of the job with a `limit` in bytes on its private memory and its base's pages. Raises InputError."""
    if request.target != CPU or job.shape.world_size > 1:
        fact = "--resident and --strict need one process on the CPU"
        raise InputError(f"{fact}; leave them out")
    with limited_pages(limit):
        rate = file_rate(job.model.shared().values())
        return plan_within_resident(job.shape, request, limit, rate, report)


def _build_checked_job(
    settings: RunSettings, build_job: BuildJob, report: ReportFunction
) -> TrainingJob:
    """Set --threads and build a job; raise InputError for settings without effect on it. `report` gets notices."""
    check_effects(settings)
    _ = settings.spread  # raises InputError before data is read
    if settings.threads:
        try:
            kernels.set_threads(settings.threads)
        except ValueError:
            fact = f"--threads {settings.threads}: it must be from 1 to the number of cores"
            raise InputError(fact) from None
    job = build_job(settings, report)
    check_validation(settings, job.valid is not None)
    num_validations = -(-job.steps // (job.steps_per_eval or job.steps or 1))
    if job.valid is not None and num_validations <= settings.patience and job.steps:
        report(
            f"--patience {settings.patience} cannot act: this run validates {plural(num_validations, 'time')};"
            " --steps-per-eval N validates more often"
        )
    return job


def _speed(job: TrainingJob, report: ReportFunction, free: float) -> tuple[BackendRates, int]:
    """Return (this machine's speed for the job's data, trained tokens of step 1); measuring may take `free` bytes."""
    remeasure, target = job.settings.measure_speed, job.settings.target
    if not target.private and job.settings.offload != "none":  # moments may be updated on the cpu
        target = replace(target, homes={**target.homes, "moment": cpu})
    packed_types = packed_weight_types(job.shape)
    rates = measure_rates_in_children(remeasure, report, packed_types, free, target)
    data_glimpse = job.first_batches()
    num_positions = job.shape.num_positions
    tokens = num_trained_tokens(data_glimpse, num_positions)
    return rates.with_data_shares(attended_share(data_glimpse), tokens / num_positions), tokens


def _continue_job(job: TrainingJob, checkpoint: TrainingCheckpoint) -> TrainingJob:
    """Set the order of job.train to its checkpoint's; return the job with the checkpoint's micro-batches."""
    is_reshuffled, progress = job.settings.force_reshuffle, checkpoint.progress
    job.train.shuffle_key = progress.step if is_reshuffled else progress.shuffled
    if job.settings.shuffle_samples is None:  # its default was another when old runs began
        job.train.shuffle_samples = bool(checkpoint.about.get("shuffle_samples"))
    is_offloaded = bool(checkpoint.about.get("offloaded"))
    return replace(job, shape=resume_shape(job.shape, checkpoint.about), offloaded=is_offloaded)


def resume_shape(shape: StepShape, checkpoint_info: Mapping[str, Any]) -> StepShape:
    """Return the shape with a checkpoint's micro-batch, chunk and tiles, which fix the order of sums, if they fit."""
    rows = int(checkpoint_info.get("rows", shape.micro_batch_size))
    chunk = int(checkpoint_info.get("chunk", shape.chunk))
    if (shape.micro_batch_size * shape.num_micro_batches) % rows:
        return shape  # other settings: `check_compatible` reports it
    micros = shape.micro_batch_size * shape.num_micro_batches // rows
    layered = bool(checkpoint_info.get("layered", False))
    return replace(
        shape, micro_batch_size=rows, num_micro_batches=micros, chunk=chunk,
        layered=layered and not shape.has_separate_update, num_row_tiles=int(checkpoint_info.get("tiles", 1)),
    )  # fmt: skip


def facts(run_plan: PlannedRun, peak_nbytes: int | None = None) -> dict[str, Any]:
    """Return a plan picture's keywords (scene.SceneOptions); `peak_nbytes`: measured in a finished run, or None."""
    target = run_plan.plans.target
    return {
        "title": run_plan.job.title, "budget_nbytes": target.limit if target.is_separate else run_plan.budget,
        "rows": memory_rows(run_plan.plans, target.space), "measured": None if target.is_separate else peak_nbytes,
        "space": target.space,
    }  # fmt: skip


def optimizer_settings(settings_class: type[RunSettings]) -> set[str]:
    """Return the settings that only some optimizers have."""
    names = [{field.name for field in fields(optimizer)} for optimizer in OPTIMIZERS.values()]
    return {f.name for f in fields(settings_class)} & (
        set().union(*names) - names[0].intersection(*names)
    )


def check_effects(settings: RunSettings) -> None:
    """Raise InputError for a setting without effect, except in a resumed run, which keeps its original settings."""
    if settings.optimizer == "lbfgs" and getattr(settings, "masters", "f32") != "f32":
        raise InputError("--masters bf16 is too coarse for the line search of --optimizer lbfgs")
    if settings.resume and not settings.overwrite:
        return
    check_rules(settings)
    optimizer, settings_class = OPTIMIZERS[settings.optimizer], type(settings)
    option, names = f"--optimizer {optimizer.name}", {field.name for field in fields(optimizer)}
    refuse_changed(settings, sorted(optimizer_settings(settings_class) - names), f"with {option}")
    if optimizer.first_length is not None:
        idle_names = resumable_names(settings_class, WITH_OPTIMIZER) - {"lr", "optimizer"}
        reason = f"with {option}, which searches for the length of each step"
        refuse_changed(settings, sorted(idle_names), reason)
    if settings.learning_rate == 0:
        raise InputError("--lr 0 trains nothing; it must be more than 0")
    for name in ("save_name", "save_model"):
        pattern = getattr(settings, name)
        if pattern and (
            "ITERATION" not in pattern or "/" in pattern or not pattern.endswith(".gguf")
        ):
            fact = f"{flag(name)} {pattern}: it must be a file name with ITERATION in it"
            raise InputError(f"{fact}, such as model-ITERATION.gguf")


def check_validation(settings: RunSettings, validates: bool) -> None:
    """Raise InputError for validation settings of a new run without validation data (not `validates`)."""
    if not settings.resume:
        check_rules(settings, {"has_validation": validates})
