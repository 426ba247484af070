"""A training run from its settings to its result: planned, run, stopped, resumed.

`workflows.training_run` and `workflows.finetuning` give what they do differently as functions. Progress is
reported to `Events`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.common.errors import DoesNotFit, InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import check_not_read, check_writable, locked, write_text
from packtrain.common.memory import settle, total_nbytes
from packtrain.common.options import to_yaml, yaml
from packtrain.common.text import clock, plural
from packtrain.data.text.text_streams import data_files
from packtrain.data.tokenizer import Tokenizer
from packtrain.distributed import here, joined
from packtrain.engine.memory_plan import size_text
from packtrain.inference.generator import Generator, Limits, Reply
from packtrain.inference.kv_cache import Cache, Context, Sizes
from packtrain.inference.sampling import Sampling
from packtrain.planner.expected_pace import pace
from packtrain.planner.machine_speed import correct
from packtrain.planner.plan_view import page
from packtrain.planner.training_plans import Plans
from packtrain.training.checkpoints import Progress, previous
from packtrain.training.disk_space import check_space, resumable
from packtrain.training.monitoring import Watch
from packtrain.training.monitoring.progress import memory_text
from packtrain.training.reference_logprobs import refer
from packtrain.training.replay_texts import write_texts
from packtrain.training.resume_check import check_compatible
from packtrain.training.teacher_logits import teach
from packtrain.training.train_settings import RunSettings
from packtrain.training.training_engine import Engine
from packtrain.training.training_job import Job
from packtrain.training.training_loop import CHECKPOINT, SAMPLE, Fit
from packtrain.workflows.behaviour_check import ANSWERS
from packtrain.workflows.check_ranks import check_alike
from packtrain.workflows.planned_run import Prepare, Ready, facts
from packtrain.workflows.run_page_server import Show, watched
from packtrain.workflows.training_result import Trained

SAMPLE_TOKENS = 64
MOST_END = 0.5  # share of answers that a model must end where they end, or it is reported


def carry_out(
    settings: RunSettings,
    prepare: Prepare,
    events: Events,
    before: Callable[[Fit, Events, Callable[[], bool]], None] = lambda fit, events, stopped: None,
    after: Callable[[Ready, Progress, Events], None] = lambda run_plan, progress, events: None,
) -> Trained:
    """A run from its settings to its end. Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite.

    before  called before step 1, when the weights have their values; takes a function that returns whether to stop
    after   called when the steps are done and their memory is free
    """
    with joined(_share_cores, settings.device):
        if here().rank:
            settings = replace(settings, watch=None)
        else:
            _check(settings)
        if settings.nproc > 1 and here().size == 1:
            raise InputError(
                "--nproc is for the command line; here, start the processes with torchrun"
            )
        return _joined(settings, prepare, events, before, after)


def _joined(
    settings: RunSettings,
    prepare: Prepare,
    events: Events,
    before: Callable[[Fit, Events, Callable[[], bool]], None],
    after: Callable[[Ready, Progress, Events], None],
) -> Trained:
    """The run, as one of its ranks."""
    yaml()  # which writes the settings: now, not inside the plan's memory
    with watched(settings, events) as (events, show, report_end):
        run_plan = prepare(settings, events.message)
        check_alike(run_plan)
        if settings.resume and run_plan.found is None:
            events.notice(f"{settings.folder} has no checkpoint yet: starting at step 1")
        _begin(run_plan, events)
        train = partial(_train, settings, run_plan, before, events, show)
        result = _carry_out(settings, run_plan, train, events, after)
        report_end(result.output, result.stopped)
        return result


def _carry_out(
    settings: RunSettings,
    run_plan: Ready,
    train: Callable[[], Trained],
    events: Events,
    after: Callable[[Ready, Progress, Events], None],
) -> Trained:
    """All that comes after planning; but for the steps, it is done by rank 0."""
    if here().rank:
        return train()
    folder, resume = settings.folder, run_plan.resume
    folder.mkdir(exist_ok=True)
    with locked(folder / "lock", f"--output: {folder}"), resumable(folder / CHECKPOINT, resume):
        result = train()
        if result.stopped:
            return result
        settle()
        drawn = facts(run_plan, result.peak_nbytes)
        write_text(folder / "plan.html", page(run_plan.plans.largest, **drawn))
        for line in _report(result):
            events.message(line)
        try:
            after(run_plan, result.progress, events)
        except (KeyboardInterrupt, Interrupted):
            events.notice(f"stopped after the last step, which is saved; finish with: {resume}")
            return replace(result, stopped=True)
    return result


def _begin(run_plan: Ready, events: Events) -> None:
    """Report the plan, or raise why the run cannot start."""
    if run_plan.refusal is not None:
        raise DoesNotFit(run_plan.refusal)
    events.plan(run_plan)
    total, available_nbytes = run_plan.planned_nbytes, total_nbytes()
    if total > available_nbytes:
        raise DoesNotFit(
            f"this needs {size_text(total)} and there are {size_text(available_nbytes)}; "
            "--memory SIZE finds ways to need less"
        )
    if run_plan.found is not None:
        check_compatible(run_plan.job, run_plan.found, events.message)
    check_space(run_plan.job, run_plan.plans, run_plan.files)


def _train(
    settings: RunSettings,
    run_plan: Ready,
    before: Callable[[Fit, Events, Callable[[], bool]], None],
    events: Events,
    show: Show,
) -> Trained:
    """All steps, up to the last or a stop."""
    folder, total, job = settings.folder, run_plan.planned_nbytes, run_plan.job
    writes = here().rank == 0
    if writes:
        _begin_folder(settings, run_plan)
    with (
        events.stopping() as stopped,
        Watch(folder, events, tensorboard=settings.tensorboard, writes=writes) as watch,
        events.training(job.steps, total, settings.steps_per_report, run_plan.budget),
    ):
        show(folder, lambda: watch.peak.nbytes)
        if not _taught(run_plan, folder, events, stopped):
            return Trained(settings.output, folder, run_plan, Progress(), watch.peak.nbytes, True)
        engine = Engine(run_plan.plans, job.optimizer, job.subject.shared(), settings.seed)
        fit = Fit(job, engine, folder, timed(run_plan), events=events)
        if run_plan.tokenizer is not None and writes:
            fit.sample = partial(_sample, job, engine, run_plan.tokenizer)
        try:
            refer(job, engine, folder, events, stopped)
            fit.begin(run_plan.found)
            watch.resume(fit.progress.step)
            if run_plan.found is None:
                before(fit, events, stopped)
            settle()  # filling the weights took megabytes
            fit.go(watch, stopped)
        except Interrupted as error:
            events.notice(f"{error}; continue with: {run_plan.resume}")
            return Trained(settings.output, folder, run_plan, fit.progress, watch.peak.nbytes, True)
        if writes:
            fit.finish()
            watch.end(_end(fit, run_plan, watch))
        peak = watch.peak.nbytes
        return Trained(settings.output, folder, run_plan, fit.progress, peak, False)


def _taught(run_plan: Ready, folder: Path, events: Events, stopped: Callable[[], bool]) -> bool:
    """What a teacher says, and texts of the base, are there before the memory of the run is taken; not if stopped."""
    if not run_plan.job.steps:
        return True
    try:
        teach(run_plan.job, folder, run_plan.budget, events, stopped)
        write_texts(run_plan.job, folder, run_plan.budget, events, stopped)
    except Interrupted as error:
        events.notice(f"{error}; continue with: {run_plan.resume}")
        return False
    return True


def timed(run_plan: Ready) -> Callable[[float, int], str | None]:
    """What each step's seconds are told: see `pace`. Those of several processes say nothing of this machine's rates."""
    if here().size > 1:
        return lambda seconds, left: None
    return pace(run_plan.seconds, partial(correct, target=run_plan.job.settings.target))


def _share_cores(ranks: int) -> None:
    """Each of the ranks of this machine gets its share of the cores; --threads may change that."""
    kernels.set_threads(max(kernels.threads() // ranks, 1))


def _check(settings: RunSettings) -> None:
    """Checks that need no work."""
    check_writable(settings.output, "--output")
    read = [*data_files(settings.data), getattr(settings, "vocab", None)]
    check_not_read(settings.output, "--output", read)
    folder, output = settings.folder, settings.output
    checkpoint = folder / CHECKPOINT
    if folder == output:
        raise InputError(
            f"--output: {output} would be the run folder itself; end its name in .gguf"
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"--output: {folder} is in the way of the run folder; move it or give another --output"
        )
    if settings.resume or settings.overwrite:
        return
    if checkpoint.exists() or previous(checkpoint).exists():
        raise InputError(
            f"--output: {folder} has a run already; continue it with --resume, start over with --overwrite, or"
            " give another name"
        )
    if output.exists():
        raise InputError(
            f"--output: {output} exists; give another name, or --overwrite to replace it at the end"
        )


def _begin_folder(settings: RunSettings, run_plan: Ready) -> None:
    """Create the run folder with settings and plan; removes files of an earlier run unless it is resumed."""
    folder = settings.folder
    for torn in (*folder.glob(".*.part"), *folder.parent.glob(f".{settings.output.name}.*.part")):
        torn.unlink(missing_ok=True)
    if not settings.resume:
        saved_patterns = (
            s.replace("ITERATION", "*") for s in (settings.save_name, settings.save_model) if s
        )
        run_patterns = (
            "checkpoint*.gguf", "best.gguf", "metrics.jsonl", ANSWERS, "samples.jsonl", "reference.npz",
            "events.*", "*.svg",
        )  # fmt: skip
        for pattern in (*run_patterns, *saved_patterns):
            for file in folder.glob(pattern):
                file.unlink()
    paths: dict[str, Any] = {
        name: value.absolute()
        for name, value in vars(run_plan.job.settings).items()
        if isinstance(value, Path) and name != "output"
    }
    shown = replace(
        run_plan.job.settings, resume=False, overwrite=False, force_reshuffle=False, **paths
    )
    write_text(folder / "run.yaml", to_yaml(shown))
    write_text(folder / "run.json", run_plan.about())
    write_text(folder / "plan.json", run_plan.json())
    write_text(folder / "plan.html", page(run_plan.plans.largest, **facts(run_plan)))
    settle()  # drawing a large plan took megabytes


def _sample(job: Job, engine: Engine, tokenizer: Tokenizer) -> str:
    """Text that the model generates after --sample-prompt."""
    cells = job.config.context_length
    sizes = Sizes(tuple(size for size in engine.run if isinstance(size, int)), 1)
    generator = Generator(Context.within(job.shape.config, Cache(cells), sizes, engine.run))
    prompt = tokenizer.encode(job.settings.sample_prompt)
    reply = Reply(
        generator, tokenizer, prompt, Sampling(), job.settings.seed, Limits(SAMPLE_TOKENS)
    )
    return f"{SAMPLE}{job.settings.sample_prompt}{''.join(reply)}"


def _end(fit: Fit, run_plan: Ready, watch: Watch) -> dict[str, Any]:
    device_peaks = devices(run_plan.plans)
    summary = {
        "step": fit.progress.step,
        "planned_bytes": run_plan.planned_nbytes,
        "peak_bytes": watch.peak.nbytes,
        "baseline_bytes": watch.peak.baseline,
    }
    return summary | ({"devices": device_peaks} if device_peaks else {})


def devices(plans: Plans) -> dict[str, dict[str, int]]:
    """The most bytes that were taken of memories which know it, beside what was planned."""
    peaks = {b.space: b.taken for b in plans.target.every}
    return {
        space: {"planned_bytes": plans.nbytes_in(space), "peak_bytes": peak_nbytes}
        for space, peak_nbytes in peaks.items()
        if peak_nbytes is not None
    }


def _report(done: Trained) -> Iterator[str]:
    progress, job = done.progress, done.plan.job
    yield (
        f"trained {plural(progress.step, 'step')}, {plural(progress.tokens, 'learnt token')} in"
        f" {clock(progress.seconds)}; {memory_text(done.peak_nbytes, done.plan.planned_nbytes, done.plan.budget)}"
    )
    for space, usage in devices(done.plan.plans).items():
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
    num_right, num_ends = done.ends
    if num_right < MOST_END * num_ends:
        yield (
            f"of {plural(num_ends, 'validation answer')} the model would end {num_right}"
            " where they end: it may not stop "
            "writing; train longer (--epochs, --iters) or with a larger --lr"
        )
    yield f"the run is in {done.folder}, its curve in {done.folder / 'loss.svg'}"


def outcome(progress: Progress, best: bool, several: bool = True) -> str:
    """Which step the result comes from, with validation losses.

    best     the result is the step with the lowest validation loss, not the last
    several  the run validated more than once
    """
    last, lowest = f"step {progress.step:,}", f"step {progress.best_step:,}"
    if not math.isfinite(progress.best):
        return f"the result is {last}, the last; no validation loss was finite"
    if not progress.best_step or not math.isfinite(progress.last):  # from an older checkpoint
        source = "the step with the lowest validation loss" if best else f"{last}, the last"
        return f"the result is {source}; lowest validation loss {progress.best:.4f}"
    if progress.best == progress.last:
        rank = "the last and best" if several else "the last"
        return f"the result is {last}, {rank}: validation loss {progress.best:.4f}"
    if best:
        return (
            f"the result is {lowest}, the best: validation loss {progress.best:.4f}"
            f" (the last, {last}: {progress.last:.4f})"
        )
    return (
        f"the result is {last}, the last: validation loss {progress.last:.4f}"
        f" (the lowest, {lowest}: {progress.best:.4f}; --patience would keep that one)"
    )
