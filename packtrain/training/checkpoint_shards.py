"""Checkpoints of moments that are shared out over ranks: written whole by rank 0, read part by part."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from packtrain.distributed import here, part_of
from packtrain.engine.backends import HOST
from packtrain.engine.executor import Session
from packtrain.engine.optim import PART, Share, whole_name
from packtrain.planner.training_plans import Plans
from packtrain.training.checkpoints import Checkpoint


def overlays(plans: Plans) -> dict[str, tuple[str, int]]:
    """For Session.overlay: the weight that each part is of, and where it begins."""
    share = plans.shape.share
    if share is None:
        return {}
    sizes = {name: plans.leaves[name].spec.size for name in plans.trained}
    return {PART + name: (name, part_of(size, *share).start) for name, size in sizes.items()}


def restored(session: Session, plans: Plans, checkpoint: Checkpoint, moments: bool = True) -> None:
    """Give the saved leaves of a session the values of a checkpoint; without `moments`, these begin at zero."""
    for name, leaf in plans.saved.items():
        if leaf.role == "moment" and not moments:
            session.fill(name, lambda array: array.fill(0))
            continue
        value = checkpoint.array(whole_name(name))
        if plans.shape.share is not None and PART in name:
            value = value.reshape(-1)[part_of(value.size, *plans.shape.share)]
            value = value.reshape(leaf.shape)
        session.set({name: value})


class Values(Mapping[str, np.ndarray]):
    """Leaves by name, each read on access, see Session.view."""

    def __init__(self, session: "Session", names: Iterable[str]) -> None:
        self._session, self._names = session, tuple(names)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._session.view(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Whole(Mapping[str, np.ndarray]):
    """The saved leaves of all ranks by name, on rank 0; the others `serve`. An array lives until the next is read."""

    def __init__(self, session: Session, plans: Plans, share: Share) -> None:
        self.session, self.plans, self.share = session, plans, share
        self.moments = {whole_name(name): name for name in plans.saved if PART in name}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.moments:
            return self.session.view(name)
        here().from_first(name)
        return self._gathered(name)

    def __iter__(self) -> Iterator[str]:
        return (whole_name(name) for name in self.plans.saved)

    def __len__(self) -> int:
        return len(self.plans.saved)

    def serve(self) -> None:
        """Give rank 0 what it asks for, until it has all."""
        while (name := here().from_first(None)) is not None:
            self._gathered(name)

    def end(self) -> None:
        """Rank 0 has all."""
        here().from_first(None)

    def _gathered(self, name: str) -> np.ndarray:
        kind, _, weight = name.partition("/")
        leaf = self.plans.leaves[weight]
        flat, run = self._room(leaf.spec.size), part_of(leaf.spec.size, *self.share)
        if run.stop > run.start:
            flat[run] = self.session.view(f"{kind}/{PART}{weight}").reshape(-1)
        here().spread([flat])
        here().arrived()
        return flat.reshape(leaf.shape)

    def _room(self, count: int) -> np.ndarray:
        """Room for so many numbers: the arena, which nothing uses between two steps, if that is large enough."""
        if self.plans.largest_in(HOST).arena(HOST).nbytes < 4 * count:
            return np.empty(count, np.float32)
        arena: np.ndarray = self.session.buffer(HOST)
        return arena.reshape(-1).view(np.uint8)[: 4 * count].view(np.float32)


def saved(session: Session, plans: Plans) -> Mapping[str, np.ndarray]:
    """All leaves that a checkpoint holds, by the names that one process has for them."""
    share = plans.shape.share
    return Values(session, plans.saved) if share is None else Whole(session, plans, share)
