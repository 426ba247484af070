"""The commands, one module each: `run(settings)` runs a task, prints its result and returns the exit code."""

import sys
from contextlib import suppress

DONE, FAILED, INTERRUPTED = 0, 1, 130


def say(text: str) -> None:
    """Print a message to standard error; a closed stderr does not end the command."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
