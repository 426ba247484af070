"""packtrain imatrix: measure which inputs of a model's matrices matter, for quantizing."""

from packtrain.commands import DONE
from packtrain.commands.shown import Shown
from packtrain.tasks.imatrix import Imatrix, imatrix
from packtrain.words import plural


def run(settings: Imatrix) -> int:
    """Write the file and say what was read. Raises InputError and leaves an existing file as it was."""
    done = imatrix(settings, Shown())
    print(
        f"{done.output}: {plural(done.matrices, 'matrix', 'matrices')}, {done.tokens:,} tokens, {done.seconds:.1f} s"
    )
    return DONE
