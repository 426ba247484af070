"""Writes a model with merged adapters, calibrated on batches of tokens or rounded to the nearest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packtrain.common.files import atomic_path
from packtrain.conversion.calibration.calibrated_rounding import BlockProgress, calibrate
from packtrain.conversion.calibration.calibration_inputs import BatchSequence, ReadingPlan
from packtrain.dtypes import Dtype
from packtrain.gguf import MetadataValue, TensorInfo, tensor_nbytes
from packtrain.models import rewrite_model
from packtrain.models.adapter_file import Adapter
from packtrain.models.lora import SUFFIXES, Lora
from packtrain.models.model_file import ModelFile
from packtrain.models.model_with_adapters import Scaled, adapted
from packtrain.models.rewrite_model import ReadRows, is_recodable, merged_rows, stored_dtype


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """Adapters with scales to merge into a base, and the types to write."""

    base: ModelFile
    adapters: Sequence[Scaled]
    # type of changed matrices; None keeps the type of each, see stored_dtype
    dtype: Dtype | None = None
    types: Mapping[str, Dtype] = field(default_factory=dict)  # types of single matrices, by name
    extra_metadata: Mapping[str, MetadataValue] = field(default_factory=dict)  # additional metadata
    # whether data chooses the codes, if data can be read; grid points are then chosen by data, too
    use_data: bool = False

    @property
    def aware(self) -> Adapter | None:
        """The adapter, if it was trained in the quantization blocks of the base and is merged there; else None."""
        (adapter, scale), *other_adapters = self.adapters
        is_unmodified = scale == 1 and not other_adapters and self.dtype is None and not self.types
        return adapter if adapter.aware and is_unmodified else None

    def stored(self, name: str) -> Dtype:
        """Return the type in which tensor `name` is written if it changes: of `types`, `dtype` or the base."""
        entry, dtype = self.base.gguf.entries[name], self.types.get(name, self.dtype)
        keeps_points = self.use_data and name.startswith("blk.") and entry.dtype.points is not None
        if (keeps_points and dtype is None) or (self.aware and is_recodable(self.base.gguf, name)):
            return entry.dtype
        return stored_dtype(entry, dtype)

    @property
    def extra_nbytes(self) -> int:
        """Bytes by which the changed tensors are larger than those of the base."""
        entries = self.base.gguf.entries
        names = {name for adapter, _ in self.adapters for name in adapter.lora_pairs}
        changed = [(entries[name], self.stored(name)) for name in names]
        return sum(tensor_nbytes(entry.shape, dtype) - entry.nbytes for entry, dtype in changed)

    @property
    def calibrated(self) -> dict[str, Dtype]:
        """Types, by name, of the matrices that can be calibrated: those in blocks whose type has codes."""
        names = dict.fromkeys(name for adapter, _ in self.adapters for name in adapter.lora_pairs)
        if self.aware is not None:
            return {}
        types = {name: self.stored(name) for name in names if name.startswith("blk.")}
        return {name: dtype for name, dtype in types.items() if dtype.chosen}

    @property
    def adapted(self) -> ModelFile:
        """The base with the unmerged adapters of its blocks; adapters outside of blocks only work merged."""
        block_adapters = []
        for adapter, scale in self.adapters:
            pairs = {n: pair for n, pair in adapter.lora_pairs.items() if n.startswith("blk.")}
            block_adapters.append((replace(adapter, lora_pairs=pairs), scale))
        return adapted(self.base, block_adapters)

    @property
    def sizing_model(self) -> ModelFile:
        """A stand-in for `adapted` in memory planning; of several adapters of a matrix it has only the last."""
        pairs = {n: pair for adapter, _ in self.adapters for n, pair in adapter.lora_pairs.items()}
        block_pairs = {name: pair for name, pair in pairs.items() if name.startswith("blk.")}
        ranks = tuple((name, b.shape[-1]) for name, (_, b) in block_pairs.items())
        added = {n + s: h for n, p in block_pairs.items() for s, h in zip(SUFFIXES, p, strict=True)}
        config = replace(self.base.config, lora=Lora(ranks) if ranks else None)
        return replace(self.base, config=config, adapter_values=added)

    def write_file(
        self, path: Path, name: str, reading: ReadingPlan | None = None, data: BatchSequence | None = None,
        done: Callable[[TensorInfo, Dtype, float], None] = lambda entry, stored, error: None,
        block: BlockProgress = lambda block, blocks: None,
    ) -> Mapping[str, float]:  # fmt: skip
        """Write the file; without `reading`, `data` or matrices to calibrate, every value is rounded to the nearest.

        name   the model's name in the metadata
        data   batches of tokens, of which the first are read, as many as `reading` allows
        done   called for each matrix rounded to the nearest;  block  called for each finished block
        Returns the relative errors of the calibrated matrices, see `calibrate`.
        """
        if reading is None and self.use_data:
            return replace(self, use_data=False).write_file(path, name, done=done)
        changes = merged_rows(self.base.gguf, self.adapters)
        rounded = set(self.calibrated) if reading is not None else set[str]()
        # a matrix that keeps its type keeps the base's grid: only the addition is rounded there
        same_type = {n for n in rounded if self.stored(n) == self.base.gguf.entries[n].dtype}
        plain_changes: Mapping[str, ReadRows | rewrite_model.AwareMergedRows]
        plain_changes = {n: changes[n] for n in changes.keys() - same_type}
        if self.aware is not None:
            plain_changes = rewrite_model.aware_merged_rows(self.base.gguf, self.aware)

        def write_plainly(output_path: Path) -> None:
            rewrite_model.write_changed(
                *(output_path, self.base.gguf, plain_changes),
                name=name, dtype=self.dtype, types=self.types, extra_metadata=self.extra_metadata, on_tensor=done,
            )  # fmt: skip

        if reading is None or data is None or not rounded:
            write_plainly(path)
            return {}
        with atomic_path(path) as part_path:
            write_plainly(part_path)
            calibration_args = reading.read(data), reading.max_columns, block, reading.target
            searched = rounded - same_type
            return calibrate(part_path, self.adapted, changes, *calibration_args, searched=searched)
