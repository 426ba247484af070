"""Train a new model on text, in a planned amount of memory."""

from packtrain.common.events import Events
from packtrain.planner.budget import Say
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_job import build_job
from packtrain.workflows.planned_run import Ready, ready
from packtrain.workflows.run_training import carry_out
from packtrain.workflows.training_result import Trained


def train(settings: TrainSettings, events: Events) -> Trained:
    """Train until the last step or a stop. Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite."""
    return carry_out(settings, prepare, events)


def prepare(settings: TrainSettings, report: Say, runs: bool = True) -> Ready:
    """The run with its plan, see `ready`. Raises InputError."""
    return ready("train", settings, build_job, report, runs)
