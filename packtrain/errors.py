"""What goes wrong for a user rather than for a programmer: one sentence, and the exit code that goes with it."""

LONGEST = 1200  # characters of a message


def printable(text: str) -> str:
    """The text with control characters and line ends as escapes: it can do nothing to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class InputError(ValueError):
    """Something given cannot be used. The message names the file, the field and what would be right. Exit code 2.

    It may quote names and texts of a file nobody has checked: control characters and line ends become escapes, and
    what is very long loses its middle.
    """

    def __init__(self, message: str) -> None:
        said = printable(message)
        super().__init__(
            said if len(said) <= LONGEST else f"{said[: LONGEST // 2]} … {said[-200:]}"
        )


class DoesNotFit(RuntimeError):
    """The plan needs more memory than was allowed. Exit code 3."""


class DiskFull(RuntimeError):
    """A disk has too little room. Exit code 1."""


class Interrupted(RuntimeError):
    """Stopped by a signal, after saving what there was to save. Exit code 130."""
