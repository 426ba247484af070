"""Train a new model on text, in a planned amount of memory."""

from packtrain.design.budget import Say
from packtrain.events import Events
from packtrain.tasks.ready import Ready, ready
from packtrain.tasks.run import carry_out
from packtrain.tasks.trained import Trained
from packtrain.training.job import build_job
from packtrain.training.settings import TrainSettings


def train(settings: TrainSettings, events: Events) -> Trained:
    """Train until the last step or a stop. Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite."""
    return carry_out(settings, prepare, events)


def prepare(settings: TrainSettings, say: Say, runs: bool = True) -> Ready:
    """The run with its plan, see `ready`. Raises InputError."""
    return ready("train", settings, build_job, say, runs)
