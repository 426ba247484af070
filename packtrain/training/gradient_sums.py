"""Sums of gradients over ranks, exchanged while the backward pass goes on.

A hook between graph steps, not an op: an `all_reduce` op would have to know which micro-batch is the last, and would
need a kernel per backend for no computation."""

from collections.abc import Callable, Sequence

import numpy as np

from packtrain.distributed import current_world
from packtrain.engine.backends.host import done_by_later_call
from packtrain.engine.executor import Executor, Session
from packtrain.engine.tensor import Tensor
from packtrain.planner.rank_exchange import gradient_buckets
from packtrain.planner.training_plans import TrainingPlans


class GradientExchange:
    """Exchanges gradients of several ranks in buckets, while the last micro-batch's backward pass still runs."""

    def __init__(self, session: Session, plans: TrainingPlans, micro: Executor) -> None:
        self.session, self.micro_executor = session, micro
        self.trained_leaves = [plans.leaves[name] for name in plans.trained_names]
        self.is_sharded = plans.shape.moment_share is not None
        self.buckets = gradient_buckets(micro.placed)
        self.num_sent, self.start_seconds = 0, (0.0, 0.0)

    def begin_step(self) -> None:
        """Note the exchange times so far, from which `exchange_seconds` computes those of the step that begins."""
        self.start_seconds = current_world().exchange_seconds, current_world().waited

    def make_sender(self) -> Callable[[], bool]:
        """Return a callback, a stop condition that never stops, for the last micro-batch's backward pass: it starts the
        all-reduce of each bucket of gradients once complete."""
        self.num_sent, micro = 0, self.micro_executor

        def send() -> bool:
            if micro.calls[micro.at] is done_by_later_call:
                return False
            while self.num_sent < len(self.buckets) and self.buckets[self.num_sent][0] <= micro.at:
                current_world().start_all_reduce(self._leaf_arrays(self.buckets[self.num_sent][1]))
                self.num_sent += 1
            return False

        return send

    def finish_step(self, loss: np.ndarray) -> None:
        """Send the remaining buckets and the loss (), and wait until each is the sum over all ranks."""
        for _, sums in self.buckets[self.num_sent :]:
            current_world().start_all_reduce(self._leaf_arrays(sums))
        current_world().start_all_reduce([loss.reshape(1)])
        current_world().wait_for_transfers()

    def spread_weights(self) -> None:
        """If each rank updates only its part of the weights (ZeRO), all-gather the updated parts."""
        if self.is_sharded:
            current_world().start_all_gather(self._leaf_arrays(self.trained_leaves))
            current_world().wait_for_transfers()

    def _leaf_arrays(self, leaves: Sequence[Tensor]) -> list[np.ndarray]:
        return [self.session.array(leaf) for leaf in leaves]

    def exchange_seconds(self) -> dict[str, float]:
        """Return the seconds that the last step's exchange took, and those spent only waiting for it."""
        exchanged_before, waited_before = self.start_seconds
        return {
            "exchange_seconds": current_world().exchange_seconds - exchanged_before,
            "waited_seconds": current_world().waited - waited_before,
        }
