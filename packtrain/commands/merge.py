"""packtrain merge: merge LoRA adapters into a model; all other tensors are copied byte for byte."""

from packtrain.commands import DONE
from packtrain.commands.shown import Shown
from packtrain.tasks.merge import Merge, merge
from packtrain.tasks.quantize import MIB


def run(settings: Merge) -> int:
    """Write the file and print a line per merged tensor. Raises InputError and leaves an existing file as it was."""
    done = merge(settings, Shown())
    print(
        f"{done.output}: {done.changed} of {done.count} tensors changed, "
        f"{done.before_nbytes / MIB:.2f} -> {done.nbytes / MIB:.2f} MiB, {done.seconds:.1f} s"
    )
    return DONE
