"""What goes wrong for a user rather than for a programmer: one sentence, and the exit code that goes with it."""


class InputError(ValueError):
    """Something given cannot be used. The message names the file, the field and what would be right. Exit code 2.

    It may quote names and texts of a file nobody has checked: control characters and line ends become escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else _escaped(c) for c in message))


class DoesNotFit(RuntimeError):
    """The plan needs more memory than was allowed. Exit code 3."""


class Interrupted(RuntimeError):
    """Stopped by a signal, after saving what there was to save. Exit code 130."""


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
