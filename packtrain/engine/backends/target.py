"""Where a graph runs: backends in order of preference, homes of leaves, and what each memory may hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packtrain.engine.backends.host import BACKENDS, HOST, Backend
from packtrain.engine.tensor import GraphError, Tensor


@dataclass(frozen=True)
class Target:
    """The first backend is where leaves live that `homes` does not name, and with them the arena that counts.

    homes   name or role of a leaf, of a weight whose moments and sums go with it, or cache.N -> backend
    limits  space -> most bytes; the process's own memory is limited by `--memory` instead
    """

    backends: tuple[Backend, ...] = (BACKENDS["cpu"],)
    homes: Mapping[str, Backend] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.backends:
            raise GraphError("a target needs at least one backend")

    @classmethod
    def for_backend(cls, backend: Backend) -> "Target":
        """All on one backend, within what its space can hold."""
        limit = backend.capacity
        return cls((backend,), limits={} if limit is None else {backend.space: limit})

    @property
    def every(self) -> list[Backend]:
        """All its backends, in order."""
        backends = (*self.backends, *self.homes.values())
        return list({(b.name, b.space): b for b in backends}.values())

    @property
    def space(self) -> str:
        """The space of the arena that counts."""
        return self.backends[0].space

    @property
    def is_separate(self) -> bool:
        """Whether that is not the process's own memory."""
        return self.space != HOST

    @property
    def private(self) -> bool:
        """Whether everything is in the process's own memory."""
        return all(backend.space == HOST for backend in self.every)

    @property
    def aside(self) -> set[str]:
        """Spaces that are counted apart and yet are memory of this process, such as cpu:1's."""
        return {b.space for b in self.every if b.space != HOST and b.on_host}

    def extra_nbytes(self, space: str, buffers: Sequence[int]) -> int:
        """By how much more than these sizes buffers get there, see Backend.pool."""
        backend = next((b for b in self.every if b.space == space), None)
        return 0 if backend is None else backend.pool((), buffers)

    @property
    def limit(self) -> int | None:
        """Most bytes of that space, where it is not the process's own."""
        return self.limits.get(self.space) if self.is_separate else None

    @property
    def is_uniform(self) -> bool:
        """Whether all leaves live on the first backend."""
        return not self.homes

    def home(self, leaf: Tensor) -> Backend:
        """Where a leaf lives: by its name, that of its weight (m/NAME), its role, or its block's number of a cache."""
        _, _, block_number = leaf.label.rpartition(".")
        leaf_keys = (
            leaf.label,
            leaf.label.rpartition("/")[2],
            leaf.role or "",
            f"{leaf.role}.{block_number}",
        )
        leaf_backends = (self.homes[name] for name in leaf_keys if name in self.homes)
        return next(leaf_backends, self.backends[0])


CPU = Target()
