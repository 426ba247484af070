"""Tune a GGUF model on conversations or text, in a planned amount of memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast

from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import check_not_read, check_writable, write_text
from packtrain.data.text.text_streams import data_files
from packtrain.distributed import current_world, rank
from packtrain.gguf import GGUF
from packtrain.models.model_file import ModelFile
from packtrain.planner.budget import ReportFunction
from packtrain.training.checkpoints import TrainingProgress
from packtrain.training.finetune_job import TunedModel, build_job
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.gradient_probe import check_gradients
from packtrain.training.indexed_batches import Batch
from packtrain.training.monitoring.history import MODELFILE
from packtrain.training.training_loop import TrainingLoop
from packtrain.workflows.behaviour_check import check_answers
from packtrain.workflows.merge_after_training import FinishedFinetune, merge_files, note
from packtrain.workflows.planned_run import PlannedRun, plan_run
from packtrain.workflows.run_training import execute_run
from packtrain.workflows.training_result import TrainingResult


def finetune(settings: TuneSettings, events: Events) -> TrainingResult:
    """Tune a model, merge and measure. Raises InputError, DoesNotFit, DiskFull, OSError, ArithmeticError."""
    if rank() == 0:
        _check_outputs(settings)
    return execute_run(settings, prepare, events, _before_steps, _after_steps)


def prepare(settings: TuneSettings, report: ReportFunction, runs: bool = True) -> PlannedRun:
    """Plan a run, see `plan_run`, and its merge; `runs`: whether the run will be executed. Raises InputError."""
    run_plan = plan_run("finetune", settings, build_job, report, runs)
    if run_plan.plans.refusal is not None:
        return run_plan
    return replace(run_plan, notes=tuple(note(run_plan)), files=tuple(merge_files(run_plan.job)))


def _check_outputs(settings: TuneSettings) -> None:
    """Raise InputError if an output would overwrite an input or another file, or if nothing would be trained."""
    base_gguf = None if settings.model is None else GGUF(settings.model)
    if settings.num_layers == 0:
        raise InputError("--num-layers 0: it must be at least 1, or -1 for all")
    for pattern in settings.freeze:
        if base_gguf and not any(fnmatchcase(name, pattern) for name in base_gguf.entries):
            raise InputError(f"--freeze {pattern}: {base_gguf.path} has no such tensor")
    outputs = {"--output": settings.output, "--adapter": settings.adapter}
    read = [*(base_gguf.paths if base_gguf else ()), *data_files(settings.data), settings.teacher]
    for flag_name, output_path in outputs.items():
        if output_path is not None:
            check_not_read(output_path, flag_name, read)
    if settings.adapter is None:
        return
    check_writable(settings.adapter, "--adapter")
    if settings.adapter.resolve() == settings.output.resolve():
        raise InputError(f"--adapter: {settings.adapter} is the --output, too; give another name")
    if settings.adapter.exists() and not (settings.overwrite or settings.resume):
        raise InputError(f"--adapter: {settings.adapter} exists; give another name, or --overwrite")


def _before_steps(fit: TrainingLoop, events: Events, stopped: Callable[[], bool]) -> None:
    """Check that every trained tensor gets a gradient; store the base's validation loss in fit. Raises Interrupted."""
    events.message("checking that every trained tensor gets a gradient …")
    check_gradients(fit.job, fit.engine, events.message)
    if fit.job.valid is not None:
        with events.counting("validation of the base", "batch") as count:
            evaluation = fit.engine.evaluate(_interruptible(stopped, fit.job.counted(count)))
        fit.progress = replace(fit.progress, base=evaluation.loss, batches=fit.job.num_eval_batches)
        events.message(
            f"validation loss of the base: {evaluation.loss:.4f}, accuracy {100 * evaluation.accuracy:.1f} %"
        )


def _interruptible(stopped: Callable[[], bool], batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if current_world().any_rank(stopped()):
            raise Interrupted("stopped before step 1")
        yield batch


def _after_steps(run_plan: PlannedRun, progress: TrainingProgress, events: Events) -> None:
    """Merge the adapter, measure the result and check its answers. The memory of the run is already free."""
    job, shape = run_plan.job, run_plan.plans.shape
    FinishedFinetune(job, shape, progress, run_plan.budget, events).merge_and_measure()
    settings, subject = cast(TuneSettings, job.settings), cast(TunedModel, job.model)
    _write_modelfile(settings, subject.model)
    if run_plan.plans.window is not None and run_plan.plans.window.read_nbytes:
        reason = "each token would read the base from its file"
        events.message(f"no held-out questions are answered: {reason}")
        return
    check_answers(run_plan.job, run_plan.budget, events)


def _write_modelfile(settings: TuneSettings, base_model: ModelFile) -> None:
    """Write the Modelfile for `ollama create`, without a chat template: Ollama takes it from the GGUF file."""
    tokenizer = base_model.tokenizer()
    eos_texts = [tokenizer.piece(id).decode(errors="replace") for id in sorted(tokenizer.eog_ids)]
    stop_lines = [f'PARAMETER stop "{end}"' for end in eos_texts if end and '"' not in end]
    lines = [f"FROM ../{settings.output.name}"]
    if settings.merge == "none":
        lines = [f"FROM {base_model.gguf.path.absolute()}", f"ADAPTER ../{settings.output.name}"]
    lines += [*stop_lines, ""]
    write_text(settings.folder / MODELFILE, "\n".join(lines))
