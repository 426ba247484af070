"""Handling of steps whose loss or gradients are not finite."""

from collections.abc import Callable, Mapping

import numpy as np

IN_A_ROW = 3


class NotFinite(ArithmeticError):
    """Several steps in a row had no finite loss or gradient; names the op that produced the first such value."""


class FiniteGuard:
    """Checks each step's `loss` and `squares`; the gate in the graph has already skipped the update of a bad step."""

    def __init__(self) -> None:
        self.bad = 0

    def check(
        self, got: Mapping[str, np.ndarray], diagnose: Callable[[], str | None]
    ) -> str | None:
        """None for a good step; else the op, tensor and source line that produced the bad value.

        `diagnose` repeats the step without updates (Executor.diagnose). With clipping by global norm, the bad step
        changed nothing, and repeating it gives the same values; without, it may have changed tensors before the
        first bad gradient, and the repetition can differ. Raises NotFinite for the third bad step in a row.
        """
        if np.isfinite(got["loss"]) and np.isfinite(got["squares"]):
            self.bad = 0
            return None
        self.bad += 1
        what = diagnose() or "it is finite when run again"
        if self.bad == IN_A_ROW:
            raise NotFinite(f"{IN_A_ROW} steps in a row without a finite loss and gradient; {what}")
        return what
