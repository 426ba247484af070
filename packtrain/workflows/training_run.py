"""Train a new model on text, in a planned amount of memory."""

from packtrain.common.events import Events
from packtrain.planner.budget import ReportFunction
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_job import build_job
from packtrain.workflows.planned_run import PlannedRun, plan_run
from packtrain.workflows.run_training import execute_run
from packtrain.workflows.training_result import TrainingResult


def train(settings: TrainSettings, events: Events) -> TrainingResult:
    """Train a new model to the last step or a stop. Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite."""
    return execute_run(settings, prepare, events)


def prepare(settings: TrainSettings, report: ReportFunction, runs: bool = True) -> PlannedRun:
    """Return the run with its plan, see `plan_run`. Raises InputError."""
    return plan_run("train", settings, build_job, report, runs)
