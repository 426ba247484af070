"""Memory for a run in the process of the tests, which holds what others have left there."""

from packtrain.common.memory import private_nbytes


def memory_limit(mib: int) -> str:
    """A value of --memory that leaves so many MiB to the run."""
    return f"{(private_nbytes() >> 20) + mib}MiB"
