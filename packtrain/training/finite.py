"""What training does about a step whose loss or gradients are not finite."""

from collections.abc import Callable, Mapping

import numpy as np

IN_A_ROW = 3


class NotFinite(ArithmeticError):
    """Several steps in a row had no finite loss or gradient; says which op made the first such value."""


class FiniteGuard:
    """Looks at each step's `loss` and `squares`; the graph's gate has already skipped the update of a bad one."""

    def __init__(self) -> None:
        self.bad = 0

    def check(
        self, got: Mapping[str, np.ndarray], diagnose: Callable[[], str | None]
    ) -> str | None:
        """None for a good step; else the op, tensor and line that made the bad value.

        `diagnose` runs the step again without updates (Executor.diagnose). A step that was clipped by global norm
        changed nothing and gives the same values again; one that was not may have changed tensors before the
        first bad gradient and can then look different. Raises NotFinite for the third bad step in a row.
        """
        if np.isfinite(got["loss"]) and np.isfinite(got["squares"]):
            self.bad = 0
            return None
        self.bad += 1
        what = diagnose() or "it is finite when run again"
        if self.bad == IN_A_ROW:
            raise NotFinite(f"{IN_A_ROW} steps in a row without a finite loss and gradient; {what}")
        return what
