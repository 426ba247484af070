"""packtrain train: train a new model on text, in a planned amount of memory."""

import shlex

from packtrain.cli import DONE, INTERRUPTED
from packtrain.cli.event_output import run_events
from packtrain.distributed import rank
from packtrain.engine.memory_plan import size_text
from packtrain.training.train_settings import TrainSettings
from packtrain.workflows.training_run import train


def run(settings: TrainSettings) -> int:
    """Train; returns 0, or 130 if a signal stopped it after saving. Raises InputError, OSError, NotFinite."""
    events = run_events(settings)
    result = train(settings, events)
    if result.stopped or rank():
        return INTERRUPTED if result.stopped else DONE
    events.message(f"{result.output}: {size_text(result.output.stat().st_size)}")
    name = shlex.quote(str(result.output))
    events.message(f"  packtrain generate {name} -p 'Once'")
    events.message(f"  llama-cli -m {name} -no-cnv -p 'Once'")
    return DONE
