"""packtrain train: train a new model on text, in a planned amount of memory."""

import shlex

from packtrain.cli import INTERRUPTED, say
from packtrain.cli.event_output import shown
from packtrain.distributed import rank
from packtrain.engine.memory_plan import size_text
from packtrain.training.train_settings import TrainSettings
from packtrain.workflows.training_run import train


def run(settings: TrainSettings) -> int:
    """Train; returns 130 if a signal stopped it after saving. Raises InputError, OSError, NotFinite."""
    done = train(settings, shown())
    if done.stopped:
        return INTERRUPTED
    if rank():
        return 0
    say(f"{done.output}: {size_text(done.output.stat().st_size)}")
    name = shlex.quote(str(done.output))
    say(f"  packtrain generate {name} -p 'Once'")
    say(f"  llama-cli -m {name} -no-cnv -p 'Once'")
    return 0
