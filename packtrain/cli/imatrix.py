"""packtrain imatrix: measure which inputs of a model's matrices matter, for quantizing."""

from packtrain.cli import DONE
from packtrain.cli.event_output import TerminalEvents
from packtrain.common.text import plural
from packtrain.workflows.imatrix_run import ImatrixSettings, imatrix


def run(settings: ImatrixSettings) -> int:
    """Write the file and say what was read. Raises InputError and leaves an existing file as it was."""
    done = imatrix(settings, TerminalEvents())
    print(
        f"{done.output}: {plural(done.matrices, 'matrix', 'matrices')}, {done.tokens:,} tokens, {done.seconds:.1f} s"
    )
    return DONE
