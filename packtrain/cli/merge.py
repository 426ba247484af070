"""packtrain merge: merge LoRA adapters into a model; all other tensors are copied byte for byte."""

from packtrain.cli import DONE
from packtrain.cli.event_output import TerminalEvents
from packtrain.workflows.adapter_merge import MergeSettings, merge
from packtrain.workflows.quantization import MIB


def run(settings: MergeSettings) -> int:
    """Write the file, print a line per merged tensor; returns 0. Raises InputError; an old file then stays."""
    result = merge(settings, TerminalEvents())
    print(
        f"{result.output}: {result.changed} of {result.count} tensors changed, "
        f"{result.before_nbytes / MIB:.2f} -> {result.nbytes / MIB:.2f} MiB, {result.seconds:.1f} s"
    )
    return DONE
