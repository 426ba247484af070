"""A file with adapters merged into it by means of batches of tokens: as large as a plain merge, and nearer to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packtrain.dtypes import Dtype
from packtrain.files import atomic_path
from packtrain.gguf import Entry, Value, tensor_nbytes
from packtrain.merging.calibrated import Done, additions, calibrate
from packtrain.merging.room import Batched, Room
from packtrain.models.adapted import Scaled
from packtrain.models.file import ModelFile
from packtrain.models.lora import SUFFIXES, Lora
from packtrain.models.merge import merged, stored_type, write_changed


@dataclass(frozen=True, slots=True)
class Merge:
    """Adapters to merge into a base.

    dtype  of changed matrices, see stored_type; None leaves each in its own
    types  of single ones, by name
    more   metadata beside that of the base
    """

    base: ModelFile
    adapters: Sequence[Scaled]
    dtype: Dtype | None = None
    types: Mapping[str, Dtype] = field(default_factory=dict)
    more: Mapping[str, Value] = field(default_factory=dict)

    def stored(self, name: str) -> Dtype:
        """What a changed tensor is stored in."""
        return stored_type(self.base.gguf.entries[name], self.types.get(name, self.dtype))

    @property
    def grown(self) -> int:
        """By how many bytes its tensors are larger than those of the base."""
        entries = self.base.gguf.entries
        names = {name for adapter, _ in self.adapters for name in adapter.pairs}
        return sum(
            tensor_nbytes(entries[n].shape, self.stored(n)) - entries[n].nbytes for n in names
        )

    @property
    def calibrated(self) -> dict[str, Dtype]:
        """Types of the matrices that are rounded with data. Others have no codes, or no block to be read in."""
        names = dict.fromkeys(name for adapter, _ in self.adapters for name in adapter.pairs)
        types = {name: self.stored(name) for name in names if name.startswith("blk.")}
        return {name: dtype for name, dtype in types.items() if dtype.layout}

    @property
    def adapted(self) -> ModelFile:
        """The base with what the adapters add to its blocks beside it."""
        return additions(self.base, self.adapters)

    @property
    def sized(self) -> ModelFile:
        """The same, for its sizes: values are those of the first adapter that has them."""
        pairs = {n: pair for adapter, _ in self.adapters for n, pair in adapter.pairs.items()}
        inside = {n: pair for n, pair in pairs.items() if n.startswith("blk.")}
        ranks = tuple((n, b.shape[-1]) for n, (_, b) in inside.items())
        added = {
            n + end: half
            for n, pair in inside.items()
            for end, half in zip(SUFFIXES, pair, strict=True)
        }
        config = replace(self.base.config, lora=Lora(ranks) if ranks else None)
        return replace(self.base, config=config, added=added)

    def write(
        self,
        path: Path,
        name: str,
        room: Room | None = None,
        data: Batched | None = None,
        done: Callable[[Entry, Dtype, float], None] = lambda entry, stored, error: None,
        block: Done = lambda block, blocks: None,
    ) -> Mapping[str, float]:
        """Write the file; without a room for it each matrix is rounded as it is.

        data   what is read, as the room says
        done   told of matrices that are rounded as they are, block of blocks that are done
        Gives what calibrate does of the others.
        """
        changes = merged(self.base.gguf, self.adapters)
        rounded = set(self.calibrated) if room is not None else set[str]()
        # on the base's own grid where that is the type: only the addition is to be rounded there
        kept = {n for n in rounded if self.stored(n) == self.base.gguf.entries[n].dtype}
        first = {n: rows for n, rows in changes.items() if n not in kept}

        def write(to: Path) -> None:
            write_changed(
                to,
                self.base.gguf,
                first,
                name=name,
                dtype=self.dtype,
                types=self.types,
                more=self.more,
                done=done,
            )

        if room is None or data is None or not rounded:
            write(path)
            return {}
        with atomic_path(path) as part:
            write(part)
            given = room.read(data), room.width, block, room.target
            return calibrate(part, self.adapted, changes, *given)
