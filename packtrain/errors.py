"""What goes wrong for a user rather than for a programmer: one sentence, and the exit code that goes with it."""


def printable(text: str) -> str:
    """The text with control characters and line ends as escapes: it can do nothing to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class InputError(ValueError):
    """Something given cannot be used. The message names the file, the field and what would be right. Exit code 2.

    It may quote names and texts of a file nobody has checked: control characters and line ends become escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class DoesNotFit(RuntimeError):
    """The plan needs more memory than was allowed. Exit code 3."""


class Interrupted(RuntimeError):
    """Stopped by a signal, after saving what there was to save. Exit code 130."""
