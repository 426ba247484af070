"""packtrain train: train a new model on text, in a planned amount of memory."""

import shlex

from packtrain.cli import DONE, INTERRUPTED, print_message
from packtrain.cli.event_output import run_events
from packtrain.distributed import rank
from packtrain.engine.memory_plan import size_text
from packtrain.training.train_settings import TrainSettings
from packtrain.workflows.training_run import train


def run(settings: TrainSettings) -> int:
    """Train; returns 130 if a signal stopped it after saving. Raises InputError, OSError, NotFinite."""
    result = train(settings, run_events())
    if result.stopped or rank():
        return INTERRUPTED if result.stopped else DONE
    print_message(f"{result.output}: {size_text(result.output.stat().st_size)}")
    name = shlex.quote(str(result.output))
    print_message(f"  packtrain generate {name} -p 'Once'")
    print_message(f"  llama-cli -m {name} -no-cnv -p 'Once'")
    return DONE
