"""What goes wrong for a user rather than for a programmer: one sentence, and the exit code that goes with it."""


class InputError(ValueError):
    """Something given cannot be used. The message names the file, the field and what would be right. Exit code 2."""


class DoesNotFit(RuntimeError):
    """The plan needs more memory than was allowed. Exit code 3."""


class Interrupted(RuntimeError):
    """Stopped by a signal, after saving what there was to save. Exit code 130."""
