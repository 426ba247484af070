"""Where a graph runs: backends in order of preference, homes of leaves, and limits of memories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packtrain.engine.backends.host import BACKENDS, HOST, Backend
from packtrain.engine.tensor import GraphError, Tensor


@dataclass(frozen=True)
class Target:
    """Where a graph runs: backends in order of preference, and homes of leaves, by default in the first's memory.

    homes   backend by name or role of a leaf, by name of a weight (also for its moments and sums), or by cache.N
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
        """Return a Target with one backend, limited by the bytes that are free in its memory."""
        limit = backend.capacity
        return cls((backend,), limits={} if limit is None else {backend.space: limit})

    @property
    def every(self) -> list[Backend]:
        """All backends of the target, those of `homes` included, each once."""
        backends = (*self.backends, *self.homes.values())
        return list({(b.name, b.space): b for b in backends}.values())

    @property
    def space(self) -> str:
        """The memory space of the first backend, where leaves live by default."""
        return self.backends[0].space

    @property
    def is_separate(self) -> bool:
        """Whether `space` is not the process's own memory, but that of a device."""
        return self.space != HOST

    @property
    def private(self) -> bool:
        """Whether all backends use the process's own memory."""
        return all(backend.space == HOST for backend in self.every)

    @property
    def aside(self) -> set[str]:
        """Memory spaces that count as devices and yet are memory of this process, such as that of cpu:1."""
        return {b.space for b in self.every if b.space != HOST and b.on_host}

    @property
    def import_nbytes(self) -> int:
        """Bytes by which a process grows when it imports the backends and plans for them."""
        return max(backend.import_nbytes for backend in self.every)

    def extra_nbytes(self, space: str, buffers: Sequence[int]) -> int:
        """Return the bytes by which a space's allocator rounds up buffers of these sizes, by its backend's `pool`."""
        backend = next((b for b in self.every if b.space == space), None)
        return 0 if backend is None else backend.pool((), buffers)

    @property
    def limit(self) -> int | None:
        """Most bytes of `space`; None if it has no limit or is the process's own memory."""
        return self.limits.get(self.space) if self.is_separate else None

    @property
    def is_uniform(self) -> bool:
        """Whether all leaves live in the memory of the first backend."""
        return not self.homes

    def home(self, leaf: Tensor) -> Backend:
        """Return a leaf's backend: in `homes` by its name, its weight's, its role, ROLE.N (block N), else the first."""
        if not self.homes:
            return self.backends[0]
        label, role = leaf.label, leaf.role or ""
        names = label, label.rpartition("/")[2], role, f"{role}.{label.rpartition('.')[2]}"
        return next((self.homes[name] for name in names if name in self.homes), self.backends[0])


CPU = Target()
