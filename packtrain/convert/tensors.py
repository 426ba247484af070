"""Maps the tensors of a checkpoint to those of a GGUF file, with shapes and changes of values."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packtrain import quant
from packtrain.convert.checkpoint import Checkpoint
from packtrain.convert.safetensors import Stored
from packtrain.errors import InputError
from packtrain.models.arch.architecture import Family
from packtrain.models.config import Config
from packtrain.models.transformer import block_shapes

PART = 1 << 20  # elements in memory at a time, unless a row or a head is longer


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: `sources` of the checkpoint, stacked if there are several.

    turned  number of heads whose rows are permuted from halves to pairs, 0 for none
    shift   added to every value
    """

    name: str
    sources: tuple[Stored, ...]
    stacked: bool = False
    turned: int = 0
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        one = self.sources[0].shape
        return (len(self.sources), *one) if self.stacked else one

    def values(self) -> Iterator[np.ndarray]:
        """The values of the sources in order as f32, some rows at a time; heads are not split."""
        for source in self.sources:
            array = source.array()
            head = len(array) // self.turned if self.turned else 1
            step = max(PART * len(array) // (array.size * head), 1) * head
            for start in range(0, len(array), step):
                rows = quant.dequantize(array[start : start + step])
                if self.turned:
                    rows = paired(rows, len(rows) // head)
                yield rows + np.float32(self.shift) if self.shift else rows


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows of q or k so that the rope pairs (i, i + D / 2) of a head become (2i, 2i + 1)."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def halved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of paired."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


class _Found:
    """The tensors of a checkpoint that have not been used yet."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self.tensors = checkpoint.folder, dict(checkpoint.tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> Stored:
        stored = self.tensors.pop(name, None)
        if stored is None:
            raise InputError(f"{self.folder}: tensor {name} is missing; its shape is {[*shape]}")
        if stored.shape != shape:
            raise InputError(
                f"{stored.path}: {name} has shape {[*stored.shape]}; by config.json it must be {[*shape]}"
            )
        return stored

    def check_empty(self) -> None:
        if self.tensors:
            name, stored = next(iter(self.tensors.items()))
            raise InputError(
                f"{stored.path}: tensor {name} is not part of the model that config.json describes"
                f" ({len(self.tensors)} such tensors)"
            )


def tensors_of(checkpoint: Checkpoint, config: Config, family: Family) -> list[Tensor]:
    """Every tensor of the GGUF file, in order. Raises InputError for missing or unknown tensors and wrong shapes."""
    found, width = _Found(checkpoint), config.embedding_length
    embedding = found.take("model.embed_tokens.weight", (config.vocab_size, width))
    tensors = [Tensor("token_embd.weight", (embedding,))]
    for i in range(config.block_count):
        tensors += _block(found, i, config, family)
    norm = found.take("model.norm.weight", (width,))
    tensors.append(Tensor("output_norm.weight", (norm,), shift=family.norm_shift))
    if config.tied:
        found.tensors.pop("lm_head.weight", None)  # some folders repeat the embedding
    else:
        head = found.take("lm_head.weight", (config.vocab_size, width))
        tensors.append(Tensor("output.weight", (head,)))
    found.check_empty()
    return tensors


def _block(found: _Found, i: int, config: Config, family: Family) -> Iterator[Tensor]:
    """The tensors of a block: weights and biases, then those of its experts."""
    shapes, turned = block_shapes(config), {} if family.pairs else turned_heads(config)
    for module, part in family.block.items():
        for kind in ("weight", "bias"):
            shape = shapes.get(f"{part}.{kind}")
            if shape is not None:
                stored = found.take(f"model.layers.{i}.{module}.{kind}", shape)
                shift = family.norm_shift if kind == "weight" and len(shape) == 1 else 0.0
                name = f"blk.{i}.{part}.{kind}"
                yield Tensor(name, (stored,), turned=turned.get(part, 0), shift=shift)
    for module, part in family.experts.matrices.items() if family.experts else ():
        count, *matrix = shapes[f"{part}.weight"]
        names = (f"model.layers.{i}.{module.format(e)}.weight" for e in range(count))
        taken = tuple(found.take(name, tuple(matrix)) for name in names)
        yield Tensor(f"blk.{i}.{part}.weight", taken, stacked=True)


def turned_heads(config: Config) -> dict[str, int]:
    """Tensors whose rows are permuted in GGUF files, and their heads: checkpoints pair halves."""
    apart = {"attn_q": config.head_count, "attn_k": config.head_count_kv}
    return {} if config.traits.halves else apart
