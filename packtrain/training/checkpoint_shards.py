"""Checkpoints of runs whose ranks share out the moments: rank 0 writes whole tensors, each rank reads its part."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from packtrain.distributed import current_world, rank_slice
from packtrain.engine.backends import HOST
from packtrain.engine.executor import Session
from packtrain.engine.optim import PART_PREFIX, RankShare, unsplit_name
from packtrain.planner.training_plans import TrainingPlans
from packtrain.training.checkpoints import TrainingCheckpoint


def shard_offsets(plans: TrainingPlans) -> dict[str, tuple[str, int]]:
    """Return the parts of weights that this rank updates (ZeRO), {part's name: (weight's name, index of the part's
    first number in the flat weight)}; {} if each rank updates all weights."""
    rank_share = plans.shape.moment_share
    if rank_share is None:
        return {}
    weight_sizes = {name: plans.leaves[name].spec.size for name in plans.trained_names}
    return {
        PART_PREFIX + n: (n, rank_slice(size, *rank_share).start)
        for n, size in weight_sizes.items()
    }


def restore(
    session: Session, plans: TrainingPlans, checkpoint: TrainingCheckpoint, moments: bool = True
) -> None:
    """Set weights and optimizer moments, or this rank's parts, from a checkpoint; without `moments`: zero moments."""
    for name, leaf in plans.checkpoint_tensors.items():
        if leaf.role == "moment" and not moments:
            session.fill(name, lambda array: array.fill(0))
            continue
        value = checkpoint.array(unsplit_name(name))
        if plans.shape.moment_share is not None and PART_PREFIX in name:
            value = value.reshape(-1)[rank_slice(value.size, *plans.shape.moment_share)]
            value = value.reshape(leaf.shape)
        session.set({name: value})


class LazyArrays(Mapping[str, np.ndarray]):
    """Mapping from names to arrays, each read on access, such as leaves by Session.view."""

    def __init__(self, read: Callable[[str], np.ndarray], names: Iterable[str]) -> None:
        self._read, self._names = read, tuple(names)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class GatheredArrays(LazyArrays):
    """Weights and moments by name on rank 0, each moment joined from all ranks on access, while the other ranks run
    `serve_shards`. An array is valid until the next one is read."""

    def __init__(self, session: Session, plans: TrainingPlans, rank_share: RankShare) -> None:
        super().__init__(session.view, map(unsplit_name, plans.checkpoint_tensors))
        self.session, self.plans, self.rank_share = session, plans, rank_share
        self.moment_names = {
            unsplit_name(name): name for name in plans.checkpoint_tensors if PART_PREFIX in name
        }

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.moment_names:
            return super().__getitem__(name)
        current_world().from_first(name)
        return self._gather(name)

    def serve_shards(self) -> None:
        """On other ranks: send this rank's part of each moment that rank 0 reads, until rank 0 calls `finish`."""
        while (name := current_world().from_first(None)) is not None:
            self._gather(name)

    def finish(self) -> None:
        """On rank 0, once all arrays are read: end `serve_shards` on the other ranks."""
        current_world().from_first(None)

    def _gather(self, name: str) -> np.ndarray:
        """Return a whole moment, f32, joined from all ranks' parts; waits until every rank calls with this name."""
        state_kind, _, weight = name.partition("/")
        leaf = self.plans.leaves[weight]
        flat_array, run = self._buffer(leaf.spec.size), rank_slice(leaf.spec.size, *self.rank_share)
        if run.stop > run.start:
            flat_array[run] = self.session.view(f"{state_kind}/{PART_PREFIX}{weight}").reshape(-1)
        current_world().start_all_gather([flat_array])
        current_world().wait_for_transfers()
        return flat_array.reshape(leaf.shape)

    def _buffer(self, count: int) -> np.ndarray:
        """Return f32 memory for `count` numbers: that of activations, idle between steps, if large enough, else new."""
        if self.plans.largest_plan_in(HOST).arena(HOST).nbytes < 4 * count:
            return np.empty(count, np.float32)
        arena: np.ndarray = self.session.buffer(HOST)
        return arena.reshape(-1).view(np.uint8)[: 4 * count].view(np.float32)


def checkpoint_arrays(session: Session, plans: TrainingPlans) -> Mapping[str, np.ndarray]:
    """Return the weights and moments that a checkpoint saves, by name, read on access; moments of all ranks joined."""
    rank_share = plans.shape.moment_share
    if rank_share is None:
        return LazyArrays(session.view, plans.checkpoint_tensors)
    return GatheredArrays(session, plans, rank_share)
