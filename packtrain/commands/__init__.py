"""The commands, one module each: `run(settings)` does a task, prints what comes of it, and gives the exit code."""

import sys
from contextlib import suppress

DONE, INTERRUPTED = 0, 130


def say(text: str) -> None:
    """A line for the person, beside what the command gives; that nobody reads it any more is no reason to end."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
