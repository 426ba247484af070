"""packtrain train: train a new model on text, in a planned amount of memory."""

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.errors import DoesNotFit, InputError, Interrupted
from packtrain.files import check_writable, locked, write_text
from packtrain.generate import Generator, Limits, Reply
from packtrain.memory import Peak, parse_size, private_nbytes, settle, total_nbytes
from packtrain.picture import page
from packtrain.plan import size_text
from packtrain.sample import Sampling
from packtrain.settings import to_yaml
from packtrain.stop import stop_on_signals
from packtrain.tokenizer import Tokenizer
from packtrain.train.budget import Limit, Planned, minimum, planned
from packtrain.train.compatible import check_compatible
from packtrain.train.effects import check_effects, check_validation
from packtrain.train.engine import Engine
from packtrain.train.fit import CHECKPOINT, Fit
from packtrain.train.job import Job, decide
from packtrain.train.loaded import loaded, needed
from packtrain.train.pace import Pace, learnt, seen
from packtrain.train.parts import Setting
from packtrain.train.plans import Plans, Shape, packed_types
from packtrain.train.rates import correct, rates_apart
from packtrain.train.search import as_asked
from packtrain.train.settings import RunSettings, TrainSettings
from packtrain.train.space import check_space, resumable
from packtrain.train.state import Checkpoint, Progress, load, previous
from packtrain.watch import Watch
from packtrain.watch.progress import clock
from packtrain.words import plural

SAMPLE_TOKENS = 64
INTERRUPTED = 130


def say(text: str) -> None:
    """A line for the person; that nobody reads it any more is no reason to end."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Work:
    """What a command that trains does in its own way.

    decide  settings to a job; it is given `say`
    before  what is done on the engine before step 1, once its values are there; it is given what says of a signal
    after   what is done and said when the run has ended and its memory is free
    notes   what is said with the plan
    space   what is written beside the files that the subject names: where, what, and bytes
    """

    command: str
    decide: Callable[[Any, Callable[[str], None]], Job]
    before: Callable[[Fit, Callable[[], bool]], None]
    after: Callable[["Ready", Progress], None]
    notes: Callable[["Ready"], Iterable[str]] = lambda made: ()
    space: Callable[[Job], Iterable[tuple[Path, str, int]]] = lambda job: ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A job with its plans, the memory of the process before any of it is reserved, and the expected time."""

    job: Job
    plans: Plans
    baseline: int
    seconds: float
    learnt: int  # tokens that the first step learns from
    budget: int | None
    tokenizer: Tokenizer | None  # for samples; made before the baseline is measured
    found: Checkpoint | None  # to go on from
    refusal: str | None  # why the plans, the smallest there are, do not fit
    minimum: Callable[[], int]  # looks for the smallest budget that would do

    def json(self, minimum: int | None = None) -> str:
        """The plan as plain data."""
        return json.dumps(self.plans.to_dict(self.baseline, self.seconds, self.budget, minimum))

    @property
    def ended(self) -> str:
        """What is left of a resumed run that has no steps to make; nothing of all others."""
        settings, progress = self.job.settings, self.found.progress if self.found else Progress()
        rest = f"; finishing {settings.output}"
        if progress.step >= self.job.steps:
            return f"{plural(progress.step, 'step')} done, none left{rest}"
        early = settings.patience and progress.stale >= settings.patience
        return f"training has stopped early, after step {progress.step:,}{rest}" if early else ""

    @property
    def text(self) -> str:
        return self.plans.text(self.baseline, self.seconds, self.job.steps, self.learnt)


def ready(settings: RunSettings, decide: Callable[[Any, Callable[[str], None]], Job]) -> Ready:
    """Decide and plan a run, or say why it is refused; nothing of it is reserved yet. Raises InputError."""
    limit = None if settings.memory is None else parse_size(settings.memory, "--memory")
    check_effects(settings)
    if settings.threads:
        _set_threads(settings.threads)
    job = decide(settings, say)
    check_validation(settings, job.valid is not None)
    modules = needed(job.shape.config.expert_count > 0, job.shape.base is not None)
    kernels.prepare(modules, limit, private_nbytes())
    room = math.inf if limit is None else limit - private_nbytes()
    speed = rates_apart(settings.measure_speed, say, packed_types(job.shape), room)
    data, positions = job.glimpse(), job.shape.rows * job.shape.time * job.shape.micros
    speed, learning = replace(speed, seen=seen(data)), learnt(data, positions)
    settle()
    found = _found(settings)
    job = replace(job, shape=resumed(job.shape, found.about)) if found else job
    tokenizer = job.subject.tokenizer() if settings.sample_every else None
    cells = job.config.context_length if settings.sample_every else 0
    taken = loaded(modules, room)
    setting = Setting(job.optimizer, speed, private_nbytes() + taken.nbytes, cells)
    asked, fixed = (job.shape, settings.recompute, setting), found is not None
    load = partial(kernels.load_all, modules)
    if limit is None:
        load()
        made = Planned.here(as_asked(*asked))
    else:
        made = planned(*asked, Limit(limit, fixed, taken, load), say)
    return Ready(
        replace(job, shape=made.plans.shape),
        made.plans,
        made.baseline,
        made.plans.seconds(speed),
        learning,
        limit,
        tokenizer,
        found,
        made.refusal,
        lambda: made.minimum if made.refusal else minimum(*asked, fixed, say),
    )


def _found(settings: RunSettings) -> Checkpoint | None:
    """The checkpoint that a resumed run goes on from; None if there is none yet, which is said."""
    if not settings.resume:
        return None
    found = load(settings.folder / CHECKPOINT, say)
    if found is None:
        say(f"{settings.folder} has no checkpoint yet: starting at step 1")
    return found


def resumed(shape: Shape, begun: Mapping[str, Any]) -> Shape:
    """The shape with what decided about the order of additions when the run began."""
    rows, chunk = int(begun.get("rows", shape.rows)), int(begun.get("chunk", shape.chunk))
    if (shape.rows * shape.micros) % rows:
        return shape  # other settings: `check_compatible` says so
    micros, layered = shape.rows * shape.micros // rows, bool(begun.get("layered", False))
    return replace(shape, rows=rows, micros=micros, chunk=chunk, layered=layered)


def facts(made: Ready, measured: int | None = None) -> dict[str, Any]:
    """What pictures of the plan tell beside the arena; `measured` is the peak of a run that has been."""
    return {
        "title": made.job.title,
        "budget_nbytes": made.budget,
        "rows": made.plans.parts(made.baseline),
        "measured": measured,
    }


def _set_threads(count: int) -> None:
    try:
        kernels.set_threads(count)
    except ValueError:
        raise InputError(f"--threads {count}: it must be from 1 to the number of cores") from None


def run(settings: TrainSettings) -> int:
    """Train; 130 if a signal ended it, after saving. Raises InputError, OSError, NotFinite."""
    return carry_out(settings, Work("train", decide, lambda fit, stopped: None, _after))


def carry_out(settings: RunSettings, work: Work) -> int:
    """A run of any command that trains, from its settings to its end."""
    _check(settings)
    made = ready(settings, work.decide)
    if made.refusal is not None:
        raise DoesNotFit(made.refusal)
    say(made.ended or "\n".join([made.text, *work.notes(made)]))
    total, there = made.baseline + made.plans.nbytes, total_nbytes()
    if total > there:
        raise DoesNotFit(
            f"this needs {size_text(total)} and there are {size_text(there)}; "
            "--memory SIZE finds ways to need less"
        )
    folder = settings.folder
    if made.found is not None:
        check_compatible(made.job, made.found, say)
    check_space(made.job, made.plans, work.space(made.job))
    folder.mkdir(exist_ok=True)
    going_on = resumable(folder / CHECKPOINT, _resume(work, settings))
    with locked(folder / "lock", f"--output: {folder}"), going_on:
        ended = _train(settings, made, work)
        if ended is None:
            return INTERRUPTED
        settle()
        progress, peak = ended
        write_text(folder / "plan.html", page(made.plans.largest, **facts(made, peak)))
        _report(made.job, progress, peak, total)
        try:
            work.after(made, progress)
        except KeyboardInterrupt:
            say(
                f"stopped after the last step, which is saved; finish with: {_resume(work, settings)}"
            )
            return INTERRUPTED
    return 0


def _resume(work: Work, settings: RunSettings) -> str:
    return f"packtrain {work.command} -o {shlex.quote(str(settings.output))} --resume"


def _train(settings: RunSettings, made: Ready, work: Work) -> tuple[Progress, int] | None:
    """How far it came and the most bytes it took; None if a signal ended it."""
    folder, total = settings.folder, made.baseline + made.plans.nbytes
    _begin_folder(settings, made)
    watching = partial(Watch, folder, steps=made.job.steps, planned_nbytes=total)
    with (
        stop_on_signals() as stopped,
        Peak() as peak,
        watching(report_every=settings.steps_per_report, tensorboard=settings.tensorboard) as watch,
    ):
        shared = made.job.subject.shared()
        engine = Engine(made.plans, made.job.optimizer, shared, settings.seed)
        fit = Fit(made.job, engine, folder, Pace(made.seconds, correct))
        fit.begin(made.found)
        watch.resume(fit.progress.step)
        if made.tokenizer is not None:
            fit.sample = partial(_sample, made.job, engine, made.tokenizer)
        try:
            if made.found is None:
                work.before(fit, stopped)
            fit.go(watch, stopped, lambda: peak.nbytes)
        except Interrupted as error:
            watch.say(f"{error}; continue with: {_resume(work, settings)}")
            return None
        fit.finish()
        watch.end(_end(fit, total, peak))
        return fit.progress, peak.nbytes


def _check(settings: RunSettings) -> None:
    """What can be known to be wrong before any work."""
    check_writable(settings.output, "--output")
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


def _begin_folder(settings: RunSettings, made: Ready) -> None:
    """The run folder with settings and plan; what a run before left goes if it is not resumed."""
    folder = settings.folder
    for torn in (*folder.glob(".*.part"), *folder.parent.glob(f".{settings.output.name}.*.part")):
        torn.unlink(missing_ok=True)
    if not settings.resume:
        for pattern in ("checkpoint*.gguf", "best.gguf", "metrics.jsonl", "events.*", "*.svg"):
            for file in folder.glob(pattern):
                file.unlink()
    paths: dict[str, Any] = {
        name: value.absolute()
        for name, value in vars(settings).items()
        if isinstance(value, Path) and name != "output"
    }
    kept = replace(settings, resume=False, overwrite=False, **paths)
    write_text(folder / "run.yaml", to_yaml(kept))
    write_text(folder / "plan.json", made.json())
    write_text(folder / "plan.html", page(made.plans.largest, **facts(made)))


def _sample(job: Job, engine: Engine, tokenizer: Tokenizer) -> str:
    """What the model writes now after the prompt of the settings."""
    runs = {
        int(name.split()[1]): run for name, run in engine.run.items() if name.startswith("generate")
    }
    generator = Generator(job.config.context_length, runs)
    prompt = tokenizer.encode(job.settings.sample_prompt)
    reply = Reply(
        generator, tokenizer, prompt, Sampling(), job.settings.seed, Limits(SAMPLE_TOKENS)
    )
    return f"sample: {job.settings.sample_prompt}{''.join(reply)}"


def _end(fit: Fit, planned: int, peak: Peak) -> dict[str, float]:
    return {
        "step": fit.progress.step,
        "planned_bytes": planned,
        "peak_bytes": peak.nbytes,
        "baseline_bytes": peak.baseline,
    }


def _report(job: Job, progress: Progress, peak: int, planned: int) -> None:
    say(
        f"trained {plural(progress.step, 'step')}, {plural(progress.tokens, 'token')} in {clock(progress.seconds)}; "
        f"memory: peak {size_text(peak)}, planned {size_text(planned)}"
    )
    if job.valid is not None:
        say(outcome(progress, bool(job.settings.patience)))
    folder = job.settings.folder
    say(f"the run is in {folder}, its curve in {folder / 'loss.svg'}")


def outcome(progress: Progress, best: bool) -> str:
    """Which step the result is of, with validation losses; `best` if it is the best step, not the last."""
    last, lowest = f"step {progress.step:,}", f"step {progress.best_step:,}"
    if not math.isfinite(progress.best):
        return f"the result is {last}, the last; no validation loss was finite"
    if not progress.best_step or not math.isfinite(progress.last):  # from an older checkpoint
        of = "the step with the lowest validation loss" if best else f"{last}, the last"
        return f"the result is {of}; lowest validation loss {progress.best:.4f}"
    if progress.best == progress.last:
        return f"the result is {last}, the last and best: validation loss {progress.best:.4f}"
    if best:
        return (
            f"the result is {lowest}, the best: validation loss {progress.best:.4f}"
            f" (the last, {last}: {progress.last:.4f})"
        )
    return (
        f"the result is {last}, the last: validation loss {progress.last:.4f}"
        f" (the best, {lowest}: {progress.best:.4f}; --patience keeps the best)"
    )


def _after(made: Ready, progress: Progress) -> None:
    """Where the model is, and what to do with it."""
    output = made.job.settings.output
    say(f"{output}: {size_text(output.stat().st_size)}")
    name = shlex.quote(str(output))
    say(f"  packtrain generate {name} -p 'Once'")
    say(f"  llama-cli -m {name} -no-cnv -p 'Once'")
