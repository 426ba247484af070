"""Writes a model with merged adapters, calibrated on batches of tokens or by plain rounding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packtrain.common.files import atomic_path
from packtrain.conversion.calibration.calibrated_rounding import Done, additions, calibrate
from packtrain.conversion.calibration.calibration_inputs import Batched, Reading
from packtrain.dtypes import Dtype
from packtrain.gguf import Entry, Value, tensor_nbytes
from packtrain.models import rewrite_model
from packtrain.models.adapter_file import Adapter
from packtrain.models.lora import SUFFIXES, Lora
from packtrain.models.model_file import ModelFile
from packtrain.models.model_with_adapters import Scaled
from packtrain.models.rewrite_model import (
    InBlocks,
    Rows,
    merged,
    recodable,
    stored_type,
    stored_with,
)


@dataclass(frozen=True, slots=True)
class Merge:
    """Adapters to merge into a base.

    dtype  of changed matrices, see stored_type; None keeps the type of each
    types  of single matrices, by name
    more   additional metadata
    data   whether codes are chosen with data, if it can be read: then points of grids are, too
    """

    base: ModelFile
    adapters: Sequence[Scaled]
    dtype: Dtype | None = None
    types: Mapping[str, Dtype] = field(default_factory=dict)
    more: Mapping[str, Value] = field(default_factory=dict)
    data: bool = False

    @property
    def aware(self) -> Adapter | None:
        """The adapter, if it was trained in the blocks of the base and is merged there."""
        (adapter, by), *other_adapters = self.adapters
        is_unmodified = by == 1 and not other_adapters and self.dtype is None and not self.types
        return adapter if adapter.aware and is_unmodified else None

    def stored(self, name: str) -> Dtype:
        """The stored type of a changed tensor."""
        entry, dtype = self.base.gguf.entries[name], self.types.get(name, self.dtype)
        pointed = self.data and name.startswith("blk.") and entry.dtype.points is not None
        if (pointed and dtype is None) or (self.aware and recodable(self.base.gguf, name)):
            return entry.dtype
        return stored_type(entry, dtype)

    @property
    def grown(self) -> int:
        """How many bytes larger its tensors are than those of the base."""
        entries = self.base.gguf.entries
        names = {name for adapter, _ in self.adapters for name in adapter.pairs}
        return sum(
            tensor_nbytes(entries[n].shape, self.stored(n)) - entries[n].nbytes for n in names
        )

    @property
    def calibrated(self) -> dict[str, Dtype]:
        """Types of the matrices that can be calibrated: those in blocks, with a type that has codes."""
        names = dict.fromkeys(name for adapter, _ in self.adapters for name in adapter.pairs)
        if self.aware is not None:
            return {}
        types = {name: self.stored(name) for name in names if name.startswith("blk.")}
        return {name: dtype for name, dtype in types.items() if dtype.chosen}

    @property
    def adapted(self) -> ModelFile:
        """The base with the unmerged adapters of its blocks."""
        return additions(self.base, self.adapters)

    @property
    def sized(self) -> ModelFile:
        """The same, only for its sizes: the values are those of the first adapter that has them."""
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
        reading: Reading | None = None,
        data: Batched | None = None,
        done: Callable[[Entry, Dtype, float], None] = lambda entry, stored, error: None,
        block: Done = lambda block, blocks: None,
    ) -> Mapping[str, float]:
        """Write the file; without a `reading`, by plain rounding.

        data   batches to read, as many as the reading allows
        done   called for matrices rounded plainly, block for each finished block
        Returns the result of `calibrate` for the others.
        """
        if reading is None and self.data:
            return replace(self, data=False).write(path, name, done=done)
        changes = merged(self.base.gguf, self.adapters)
        rounded = set(self.calibrated) if reading is not None else set[str]()
        # on the base's own grid if the type is the same: only the addition is rounded there
        same_type = {n for n in rounded if self.stored(n) == self.base.gguf.entries[n].dtype}
        first: Mapping[str, Rows | InBlocks] = {n: changes[n] for n in changes.keys() - same_type}
        if self.aware is not None:
            first = stored_with(self.base.gguf, self.aware)

        def write(to: Path) -> None:
            rewrite_model.write_changed(
                *(to, self.base.gguf, first),
                name=name, dtype=self.dtype, types=self.types, more=self.more, done=done,
            )  # fmt: skip

        if reading is None or data is None or not rounded:
            write(path)
            return {}
        with atomic_path(path) as part:
            write(part)
            calibration_args = reading.read(data), reading.width, block, reading.target
            return calibrate(
                part, self.adapted, changes, *calibration_args, searched=rounded - same_type
            )
