"""The commands, one module each: a dataclass of settings, and `run(settings)` which gives the exit code."""

import sys


def say(line: str) -> None:
    """A line for the person, beside what the command gives."""
    print(line, file=sys.stderr)
