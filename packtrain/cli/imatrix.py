"""packtrain imatrix: measure which inputs of a model's matrices matter, for quantizing."""

from packtrain.cli import DONE
from packtrain.cli.event_output import TerminalEvents
from packtrain.common.text import plural
from packtrain.workflows.imatrix_run import ImatrixSettings, imatrix


def run(settings: ImatrixSettings) -> int:
    """Write the importance matrix, say what was read; returns 0. Raises InputError; an old file then stays."""
    done = imatrix(settings, TerminalEvents())
    print(
        f"{done.output}: {plural(done.matrices, 'matrix', 'matrices')}, {done.tokens:,} tokens, {done.seconds:.1f} s"
    )
    return DONE
