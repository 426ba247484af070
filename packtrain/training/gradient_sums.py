"""Sums of gradients over ranks, which travel while the backward pass goes on."""

from collections.abc import Callable, Sequence

import numpy as np

from packtrain.distributed import World, here
from packtrain.engine.backends.host import later
from packtrain.engine.executor import Executor, Session
from packtrain.engine.tensor import Tensor
from packtrain.planner.rank_exchange import buckets_of
from packtrain.planner.training_plans import Plans


class Exchanged:
    """Of a run of several ranks, for its graph of a micro-batch."""

    def __init__(self, session: Session, plans: Plans, micro: Executor) -> None:
        self.session, self.micro = session, micro
        self.trained = [plans.leaves[name] for name in plans.trained]
        self.shared = plans.shape.share is not None
        self.buckets = buckets_of(micro.placed)
        self.sent, self.before = 0, (0.0, 0.0)

    def begin(self) -> None:
        """A step begins, with one evaluation or several."""
        self.before = here().seconds, here().waited

    def leaving(self) -> Callable[[], bool]:
        """Called before each step of the last micro-batch: sends what is complete. It never stops a run."""
        self.sent, micro = 0, self.micro

        def send() -> bool:
            if micro.calls[micro.at] is later:
                return False
            while self.sent < len(self.buckets) and self.buckets[self.sent][0] <= micro.at:
                here().send(self._arrays(self.buckets[self.sent][1]))
                self.sent += 1
            return False

        return send

    def end(self, loss: np.ndarray) -> None:
        """After the last micro-batch; the loss () becomes the sum of all, too."""
        for _, sums in self.buckets[self.sent :]:
            here().send(self._arrays(sums))
        here().send([loss.reshape(1)])
        here().arrived()

    def spread(self) -> None:
        """After an update of parts of the weights: all ranks get all parts."""
        if self.shared:
            here().spread(self._arrays(self.trained))
            here().arrived()

    def _arrays(self, leaves: Sequence[Tensor]) -> list[np.ndarray]:
        return [self.session.array(leaf) for leaf in leaves]

    def seconds(self) -> dict[str, float]:
        """Of the last step: of exchanging, and of doing nothing but wait for it."""
        exchanging, waited = self.before
        return {
            "exchange_seconds": here().seconds - exchanging,
            "waited_seconds": here().waited - waited,
        }


def exchanged(session: Session, plans: Plans, micro: Executor | None) -> Exchanged | None:
    """None for a process alone."""
    world: World = here()
    return Exchanged(session, plans, micro) if world.size > 1 and micro is not None else None
