"""A training run from its settings to its result: planned, run, stopped, resumed, with progress reported to `Events`.
`workflows.training_run` and `workflows.finetuning` give what they do differently as functions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.common.errors import DoesNotFit, InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import check_not_read, check_writable, file_lock, write_text
from packtrain.common.mapped_file import limited_pages
from packtrain.common.memory import release_memory, total_nbytes
from packtrain.common.options import ON_ALL_RANKS, flag, resumable_names, to_yaml, yaml
from packtrain.common.text import clock, plural
from packtrain.common.version import __version__
from packtrain.data.text.text_streams import data_files
from packtrain.data.tokenizer import Tokenizer
from packtrain.distributed import current_world, join_world
from packtrain.engine.memory_plan import size_text
from packtrain.inference.generator import GenerationLimits, Generator, Reply
from packtrain.inference.kv_cache import CacheLayout, Context, RunSizes
from packtrain.inference.sampling import Sampling
from packtrain.planner.expected_pace import pace
from packtrain.planner.machine_speed import correct_step_times
from packtrain.planner.plan_view import page_html
from packtrain.planner.training_plans import TrainingPlans
from packtrain.training.checkpoints import TrainingProgress, previous_path
from packtrain.training.disk_space import check_space, resumable
from packtrain.training.monitoring import RUN_LOCK, RunMonitor
from packtrain.training.monitoring.progress import memory_text
from packtrain.training.reference_logprobs import compute_reference_logps
from packtrain.training.replay_texts import write_texts
from packtrain.training.resume_check import check_compatible
from packtrain.training.run_settings import RunSettings
from packtrain.training.teacher_logits import compute_teacher_logits
from packtrain.training.training_engine import TrainingEngine
from packtrain.training.training_job import TrainingJob
from packtrain.training.training_loop import CHECKPOINT, SAMPLE_PREFIX, TrainingLoop
from packtrain.workflows.behaviour_check import ANSWERS_FILE
from packtrain.workflows.planned_run import PlannedRun, PrepareRun, facts
from packtrain.workflows.run_page_server import ShowRun, watched
from packtrain.workflows.training_result import TrainingResult

SAMPLE_TOKENS = 64
BeforeSteps = Callable[[TrainingLoop, Events, Callable[[], bool]], None]
AfterSteps = Callable[[PlannedRun, TrainingProgress, Events], None]
MIN_END_SHARE = 0.5  # share of answers that a model must end where they end, or it is reported


def execute_run(
    settings: RunSettings, prepare_run: PrepareRun, events: Events, before_steps: BeforeSteps = lambda *_: None,
    after_steps: AfterSteps = lambda *_: None,
) -> TrainingResult:  # fmt: skip
    """Plan and execute a run, as one of its ranks. Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite.

    before_steps  called before step 1 with initialized weights, and with a function that returns whether to stop
    after_steps   called when the steps are done and their memory is free
    """
    # each rank of this machine has its share of the cores; --threads may change that
    with join_world(lambda n: kernels.set_threads(max(kernels.threads() // n, 1)), settings.device):
        if current_world().rank:
            settings = replace(settings, watch=None)
        else:
            _check_outputs(settings)
        if settings.nproc > 1 and current_world().world_size == 1:
            fact = "--nproc is for the command line; here, start the processes with torchrun"
            raise InputError(fact)
        yaml()  # load it now, not inside the plan's memory
        with watched(settings, events) as (events, show_run, report_end):
            run_plan = prepare_run(settings, events.message)
            check_ranks_agree(run_plan)
            if settings.resume and run_plan.found is None:
                events.notice(f"{settings.folder} has no checkpoint yet: starting at step 1")
            _start_run(run_plan, events)
            train_steps = partial(_train_steps, settings, run_plan, before_steps, events, show_run)
            result = _execute_plan(run_plan, train_steps, events, after_steps)
            report_end(result.output, result.stopped)
            return result


def _execute_plan(
    run_plan: PlannedRun, train: Callable[[], TrainingResult], events: Events, after_steps: AfterSteps,
) -> TrainingResult:  # fmt: skip
    """Run the steps, and return the result of train(); rank 0 then draws the plan, reports, and calls `after_steps`."""
    if current_world().rank:
        return train()
    folder, resume, window = run_plan.job.settings.folder, run_plan.resume, run_plan.plans.window
    folder.mkdir(exist_ok=True)
    with (
        file_lock(folder / RUN_LOCK, f"--output: {folder}"),
        resumable(folder / CHECKPOINT, resume),
    ):
        with limited_pages(window.nbytes if window else None):
            result = train()
        if result.stopped:
            return result
        release_memory()
        picture_labels = facts(run_plan, result.peak_nbytes)
        write_text(folder / "plan.html", page_html(run_plan.plans.largest_plan, **picture_labels))
        for report_line in _report_lines(result):
            events.message(report_line)
        try:
            with limited_pages(window.nbytes if window else None):
                after_steps(run_plan, result.progress, events)
        except (KeyboardInterrupt, Interrupted):
            events.notice(f"stopped after the last step, which is saved; finish with: {resume}")
            return replace(result, stopped=True)
    return result


def _start_run(run_plan: PlannedRun, events: Events) -> None:
    """Report the plan; raise what keeps a run from starting: DoesNotFit, DiskFull, InputError if it cannot resume."""
    if run_plan.plans.refusal is not None:
        raise DoesNotFit(run_plan.plans.refusal)
    events.plan(run_plan)
    planned_nbytes, available_nbytes = run_plan.planned_nbytes, total_nbytes()
    if planned_nbytes > available_nbytes:
        raise DoesNotFit(
            f"this needs {size_text(planned_nbytes)} and there are {size_text(available_nbytes)}; "
            "--memory SIZE finds ways to need less"
        )
    if run_plan.found is not None:
        check_compatible(run_plan.job, run_plan.found, events.message)
    check_space(run_plan.job, run_plan.plans, run_plan.files)


def _train_steps(
    settings: RunSettings, run_plan: PlannedRun, before_steps: BeforeSteps, events: Events, show_run: ShowRun,
) -> TrainingResult:  # fmt: skip
    """Train up to the last step or a stop, and write the model, on rank 0, after the last; return the result."""
    folder, planned_nbytes, job = settings.folder, run_plan.planned_nbytes, run_plan.job
    is_writer = current_world().rank == 0
    if is_writer:
        _prepare_folder(settings, run_plan)
    with (
        events.stopping() as stopped,
        RunMonitor(folder, events, tensorboard=settings.tensorboard, writes=is_writer) as watch,
        events.training(job.steps, planned_nbytes, settings.steps_per_report, run_plan.budget),
    ):
        show_run(folder, lambda: watch.peak.nbytes)
        paths = settings.output, folder
        if not _prepare_texts(run_plan, folder, events, stopped):
            return TrainingResult(*paths, run_plan, TrainingProgress(), watch.peak.nbytes, True)
        engine = TrainingEngine(run_plan.plans, job.optimizer, job.model.shared(), settings.seed)
        fit = TrainingLoop(job, engine, folder, step_timer(run_plan), events=events)
        if run_plan.tokenizer is not None and is_writer:
            fit.sample = partial(_sample_text, job, engine, run_plan.tokenizer)
        try:
            compute_reference_logps(job, engine, folder, events, stopped)
            fit.init_weights(run_plan.found)
            watch.resume(fit.progress.step)
            if run_plan.found is None:
                before_steps(fit, events, stopped)
            release_memory()  # filling the weights took megabytes
            fit.train(watch, stopped)
        except Interrupted as error:
            events.notice(f"{error}; continue with: {run_plan.resume}")
            return TrainingResult(*paths, run_plan, fit.progress, watch.peak.nbytes, True)
        if is_writer:
            fit.write_result()
            watch.record_end(_summary_record(fit, run_plan, watch))
        return TrainingResult(*paths, run_plan, fit.progress, watch.peak.nbytes, False)


def _prepare_texts(
    run_plan: PlannedRun, folder: Path, events: Events, stopped: Callable[[], bool]
) -> bool:
    """Compute teacher logits and replay texts before the run's memory is taken; returns False if stopped."""
    if not run_plan.job.steps:
        return True
    try:
        compute_teacher_logits(run_plan.job, folder, run_plan.budget, events, stopped)
        write_texts(run_plan.job, folder, run_plan.budget, events, stopped)
    except Interrupted as error:
        events.notice(f"{error}; continue with: {run_plan.resume}")
        return False
    return True


def step_timer(run_plan: PlannedRun) -> Callable[[float, int], str | None]:
    """Return a callback (a step's seconds, steps left) -> a remark on the estimate or None; always None with ranks."""
    if current_world().world_size > 1:
        return lambda seconds, num_steps_left: None
    return pace(run_plan.seconds, partial(correct_step_times, target=run_plan.job.settings.target))


def _check_outputs(settings: RunSettings) -> None:
    """Raise InputError if an output cannot be written or would replace another file, before any work."""
    check_writable(settings.output, "--output")
    model_paths = (getattr(settings, n, None) for n in ("vocab", "from_checkpoint"))
    check_not_read(settings.output, "--output", [*data_files(settings.data), *model_paths])
    folder, output = settings.folder, settings.output
    checkpoint = folder / CHECKPOINT
    if folder == output:
        fact = f"--output: {output} would be the run folder itself; end its name in .gguf"
        raise InputError(fact)
    if folder.exists() and not folder.is_dir():
        fact = f"--output: {folder} is in the way of the run folder"
        raise InputError(f"{fact}; move it or give another --output")
    if settings.resume or settings.overwrite:
        return
    if checkpoint.exists() or previous_path(checkpoint).exists():
        raise InputError(
            f"--output: {folder} has a run already; continue it with --resume, start over with --overwrite, or"
            " give another name"
        )
    if output.exists():
        fact = f"--output: {output} exists"
        raise InputError(f"{fact}; give another name, or --overwrite to replace it at the end")


def _prepare_folder(settings: RunSettings, run_plan: PlannedRun) -> None:
    """Create the run folder with settings and plan; removes files of an earlier run unless it is resumed."""
    folder = settings.folder
    for torn in (*folder.glob(".*.part"), *folder.parent.glob(f".{settings.output.name}.*.part")):
        torn.unlink(missing_ok=True)
    if not settings.resume:
        saved_patterns = (
            s.replace("ITERATION", "*") for s in (settings.save_name, settings.save_model) if s
        )
        run_patterns = (
            "checkpoint*.gguf", "best.gguf", "metrics.jsonl", ANSWERS_FILE, "samples.jsonl", "reference.npz",
            "events.*", "*.svg",
        )  # fmt: skip
        for file_pattern in (*run_patterns, *saved_patterns):
            for file in folder.glob(file_pattern):
                file.unlink()
    paths: dict[str, Any] = {
        name: value.absolute()
        for name, value in vars(run_plan.job.settings).items()
        if isinstance(value, Path) and name != "output"
    }
    shown_settings = replace(
        run_plan.job.settings, resume=False, overwrite=False, force_reshuffle=False, **paths
    )
    write_text(folder / "run.yaml", to_yaml(shown_settings))
    write_text(folder / "run.json", run_plan.about())
    write_text(folder / "plan.json", run_plan.json())
    write_text(folder / "plan.html", page_html(run_plan.plans.largest_plan, **facts(run_plan)))
    release_memory()  # drawing a large plan took megabytes


def _sample_text(job: TrainingJob, engine: TrainingEngine, tokenizer: Tokenizer) -> str:
    """Return text that the run's weights generate after --sample-prompt."""
    cells = job.config.context_length
    sizes = RunSizes(tuple(run_size for run_size in engine.run if isinstance(run_size, int)), 1)
    generator = Generator(Context.within(job.shape.config, CacheLayout(cells), sizes, engine.run))
    prompt = tokenizer.encode(job.settings.sample_prompt)
    reply = Reply(
        generator, tokenizer, prompt, Sampling(), job.settings.seed, GenerationLimits(SAMPLE_TOKENS)
    )
    return f"{SAMPLE_PREFIX}{job.settings.sample_prompt}{''.join(reply)}"


def _summary_record(fit: TrainingLoop, run_plan: PlannedRun, watch: RunMonitor) -> dict[str, Any]:
    peaks_by_device = device_peaks(run_plan.plans)
    summary = {
        "step": fit.progress.step, "planned_bytes": run_plan.planned_nbytes, "peak_bytes": watch.peak.nbytes,
        "baseline_bytes": watch.peak.baseline,
    }  # fmt: skip
    return summary | ({"devices": peaks_by_device} if peaks_by_device else {})


def device_peaks(plans: TrainingPlans) -> dict[str, dict[str, int]]:
    """Return {memory space: {"planned_bytes": …, "peak_bytes": …}} of each space that knows its peak."""
    peaks = {b.space: n for b in plans.target.every if (n := b.peak_reserved_nbytes) is not None}
    return {s: {"planned_bytes": plans.nbytes_in(s), "peak_bytes": n} for s, n in peaks.items()}


def _report_lines(result: TrainingResult) -> Iterator[str]:
    progress, job = result.progress, result.plan.job
    yield (
        f"trained {plural(progress.step, 'step')}, {plural(progress.tokens, 'learnt token')} in"
        f" {clock(progress.seconds)}; {memory_text(result.peak_nbytes, result.plan.planned_nbytes, result.plan.budget)}"
    )
    for space, usage in device_peaks(result.plan.plans).items():
        planned, peak = usage["planned_bytes"], usage["peak_bytes"]
        yield f"the memory of {space}: peak {size_text(peak)}, planned {size_text(planned)}" + (
            ": PyTorch took more there than was planned; give a smaller --device-memory where it must not"
            if peak > planned
            else ""
        )
    if not progress.step:
        yield "the result is untouched: --iters 0 takes no step"
    elif job.valid is not None:
        multiple_evals = 0 < job.steps_per_eval < progress.step
        yield outcome(progress, bool(job.settings.patience), multiple_evals)
    num_right, num_ends = result.ends
    if num_right < MIN_END_SHARE * num_ends:
        yield (
            f"of {plural(num_ends, 'validation answer')} the model would end {num_right} where they end: it may not"
            " stop writing; train longer (--epochs, --iters) or with a larger --lr"
        )
    yield f"the run is in {result.folder}, its curve in {result.folder / 'loss.svg'}"


def outcome(progress: TrainingProgress, is_best: bool, has_several_evals: bool = True) -> str:
    """Return a sentence on which step the result comes from, with validation losses; `is_best`: the step with the
    lowest loss, not the last; `has_several_evals`: the run validated more than once."""
    last, lowest_label = f"step {progress.step:,}", f"step {progress.best_step:,}"
    if not math.isfinite(progress.best):
        return f"the result is {last}, the last; no validation loss was finite"
    if not progress.best_step or not math.isfinite(progress.last):  # from an older checkpoint
        source = "the step with the lowest validation loss" if is_best else f"{last}, the last"
        return f"the result is {source}; lowest validation loss {progress.best:.4f}"
    if progress.best == progress.last:
        step_rank = "the last and best" if has_several_evals else "the last"
        return f"the result is {last}, {step_rank}: validation loss {progress.best:.4f}"
    if is_best:
        return (
            f"the result is {lowest_label}, the best: validation loss {progress.best:.4f}"
            f" (the last, {last}: {progress.last:.4f})"
        )
    return (
        f"the result is {last}, the last: validation loss {progress.last:.4f}"
        f" (the lowest, {lowest_label}: {progress.best:.4f}; --patience would keep that one)"
    )


def check_ranks_agree(run_plan: PlannedRun) -> None:
    """On every rank: InputError if settings, data or checkpoint differ from rank 0's; DoesNotFit if a plan does not."""
    facts_by_rank = current_world().gather((run_plan.plans.refusal, _rank_facts(run_plan)))
    if run_plan.plans.refusal is None:  # otherwise it is reported later, as in one process
        for rank, (refusal, _) in enumerate(facts_by_rank):
            if refusal is not None:
                raise DoesNotFit(f"on rank {rank} {refusal}")
    _, first = facts_by_rank[0]
    for rank, (_, rank_facts) in enumerate(facts_by_rank):
        for fact_name in first:
            if rank_facts[fact_name] != first[fact_name]:
                is_setting = hasattr(run_plan.job.settings, fact_name) and fact_name != "data"
                label = flag(fact_name) if is_setting else f"the {fact_name}"
                raise InputError(
                    f"rank {rank} has {label} {rank_facts[fact_name]}, rank 0 has {first[fact_name]};"
                    " all must be given the same"
                )


def _rank_facts(run_plan: PlannedRun) -> dict[str, Any]:
    """Return by name what must be equal on all ranks: version, settings, data, the checkpoint to resume from."""
    job_facts = {name: value for name, value in run_plan.job.about().items() if name != "sources"}
    checkpoint = run_plan.found
    checkpoint_hash = (
        None if checkpoint is None else checkpoint.gguf.metadata["packtrain.checkpoint.sha256"]
    )
    settings = run_plan.job.settings
    names = sorted(resumable_names(type(settings), ON_ALL_RANKS))
    setting_values = {name: getattr(settings, name) for name in names}
    teacher_mark = getattr(run_plan.job.train, "mark", None)
    run_facts = {"version": __version__, "teacher": teacher_mark, "checkpoint": checkpoint_hash}
    return {**job_facts, **setting_values, **run_facts}
