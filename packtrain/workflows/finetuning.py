"""Tune a GGUF model on conversations or text, in a planned amount of memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast

from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import check_not_read, check_writable, write_text
from packtrain.data.text.text_streams import data_files
from packtrain.distributed import here, rank
from packtrain.gguf import GGUF
from packtrain.models.model_file import ModelFile
from packtrain.planner.budget import Say
from packtrain.training.checkpoints import Progress
from packtrain.training.finetune_job import Tuned, build_job
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.gradient_probe import probe
from packtrain.training.monitoring.history import MODELFILE
from packtrain.training.training_job import Batch
from packtrain.training.training_loop import Fit
from packtrain.workflows.behaviour_check import check_answers
from packtrain.workflows.merge_after_training import End, note, space
from packtrain.workflows.planned_run import Ready, ready
from packtrain.workflows.run_training import carry_out
from packtrain.workflows.training_result import Trained


def finetune(settings: TuneSettings, events: Events) -> Trained:
    """Tune, merge and measure. Raises InputError, DoesNotFit, DiskFull, OSError, ArithmeticError."""
    if rank() == 0:
        _check(settings)
    return carry_out(settings, prepare, events, _before, _after)


def prepare(settings: TuneSettings, report: Say, runs: bool = True) -> Ready:
    """The run with its plan, see `ready`, and with what its merge needs. Raises InputError."""
    run_plan = ready("finetune", settings, build_job, report, runs)
    if run_plan.refusal is not None:
        return run_plan
    return replace(run_plan, notes=tuple(note(run_plan)), files=tuple(space(run_plan.job)))


def _check(settings: TuneSettings) -> None:
    """Raise InputError if an output would overwrite an input, or a file of something else."""
    base = None if settings.model is None else GGUF(settings.model)
    _check_trained(settings, base)
    outputs = {"--output": settings.output, "--adapter": settings.adapter}
    read = [*(base.paths if base else ()), *data_files(settings.data), settings.teacher]
    for flag, path in outputs.items():
        if path is not None:
            check_not_read(path, flag, read)
    if settings.adapter is None:
        return
    check_writable(settings.adapter, "--adapter")
    if settings.adapter.resolve() == settings.output.resolve():
        raise InputError(f"--adapter: {settings.adapter} is the --output, too; give another name")
    if settings.adapter.exists() and not (settings.overwrite or settings.resume):
        raise InputError(f"--adapter: {settings.adapter} exists; give another name, or --overwrite")


def _check_trained(settings: TuneSettings, base: GGUF | None) -> None:
    """Refuse settings that would train nothing."""
    if settings.num_layers == 0:
        raise InputError("--num-layers 0: it must be at least 1, or -1 for all")
    for pattern in settings.freeze:
        if base is not None and not any(fnmatchcase(name, pattern) for name in base.entries):
            raise InputError(f"--freeze {pattern}: {base.path} has no such tensor")


def _before(fit: Fit, events: Events, stopped: Callable[[], bool]) -> None:
    """Check that every trained tensor gets a gradient, and measure the validation loss of the base."""
    events.message("checking that every trained tensor gets a gradient …")
    probe(fit.job, fit.engine, events.message)
    if fit.job.valid is not None:
        with events.counting("validation of the base", "batch") as count:
            evaluation = fit.engine.evaluate(_until(stopped, fit.job.counted(count)))
        fit.progress = replace(fit.progress, base=evaluation.loss, batches=fit.job.validated)
        events.message(
            f"validation loss of the base: {evaluation.loss:.4f}, accuracy {100 * evaluation.accuracy:.1f} %"
        )


def _until(stopped: Callable[[], bool], batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if here().any(stopped()):
            raise Interrupted("stopped before step 1")
        yield batch


def _after(run_plan: Ready, progress: Progress, events: Events) -> None:
    """Merge the adapter, measure the result and check its answers. The memory of the run is already free."""
    End(run_plan.job, run_plan.plans.shape, progress, run_plan.budget, events).finish()
    settings, subject = cast(TuneSettings, run_plan.job.settings), cast(Tuned, run_plan.job.subject)
    _write_modelfile(settings, subject.model)
    check_answers(run_plan.job, run_plan.budget, events)


def _write_modelfile(settings: TuneSettings, base: ModelFile) -> None:
    """The Modelfile for `ollama create`. Ollama takes the chat template from the GGUF file, so none is written here."""
    tokenizer = base.tokenizer()
    eos_texts = [tokenizer.piece(id).decode(errors="replace") for id in sorted(tokenizer.ends)]
    stops = [f'PARAMETER stop "{end}"' for end in eos_texts if end and '"' not in end]
    lines = [f"FROM ../{settings.output.name}"]
    if settings.merge == "none":
        lines = [f"FROM {base.gguf.path.absolute()}", f"ADAPTER ../{settings.output.name}"]
    lines += [*stops, ""]
    write_text(settings.folder / MODELFILE, "\n".join(lines))
