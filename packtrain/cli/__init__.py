"""The commands, one module each: `run(settings)` runs a workflow, prints its result and returns the exit code."""

import os
import sys
from contextlib import suppress

DONE, FAILED, INTERRUPTED = 0, 1, 130


def print_message(text: str) -> None:
    """Print a message to standard error; a closed stderr does not end the command."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_row(text: str) -> None:
    """Print a row of results; if the reader has left, as `head` does, the task goes on: it is writing a file."""
    try:
        print(text)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Discard what is printed to standard output from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
