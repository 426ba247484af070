"""packtrain merge: merge LoRA adapters into a model; all other tensors are copied byte for byte."""

from packtrain.cli import DONE
from packtrain.cli.event_output import Shown
from packtrain.workflows.adapter_merge import Merge, merge
from packtrain.workflows.quantization import MIB


def run(settings: Merge) -> int:
    """Write the file and print a line per merged tensor. Raises InputError and leaves an existing file as it was."""
    done = merge(settings, Shown())
    print(
        f"{done.output}: {done.changed} of {done.count} tensors changed, "
        f"{done.before_nbytes / MIB:.2f} -> {done.nbytes / MIB:.2f} MiB, {done.seconds:.1f} s"
    )
    return DONE
