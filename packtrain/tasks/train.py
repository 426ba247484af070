"""Train a new model on text, in a planned amount of memory."""

from packtrain.events import Events
from packtrain.tasks.run import Kind, Trained, carry_out
from packtrain.training.job import build_job
from packtrain.training.settings import TrainSettings

KIND = Kind("train", build_job)


def train(settings: TrainSettings, events: Events) -> Trained:
    """Train until the last step or a stop. Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite."""
    return carry_out(settings, KIND, events)
