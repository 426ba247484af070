"""Maps the tensors of a checkpoint to those of a GGUF file, with shapes and changes of values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import EllipsisType

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.checkpoint_folder import Checkpoint
from packtrain.conversion.hugging_face.safetensors import Stored
from packtrain.dtypes import BLOCK_TYPES
from packtrain.kernels import quantized_arrays
from packtrain.models.arch.architecture import BARE, LAYER_INPUTS, Changed, Experts, Family, Spans
from packtrain.models.config import Config
from packtrain.models.tensor_shapes import POSITIONS, block_shapes, shapes, unread

HEAD = "lm_head."
GATED = "ssm_norm"
FLAT = (*BARE, GATED)  # which have one axis in checkpoints
MXFP4 = BLOCK_TYPES["mxfp4"]
HALF = MXFP4.block // 2
Cut = tuple[EllipsisType | slice, ...]
PART = 1 << 20  # elements in memory at a time, unless a row or a head is longer


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: `sources` of the checkpoint, stacked if there are several.

    turned      number of heads whose rows are permuted from halves to pairs, 0 for none
    shift       added to every value
    transposed  the source has columns instead of rows
    spans       rows of the source in the order of the file, each (from, to); none: as they are; and ...
    columns     ... columns
    heads       the source's rows are those of so many heads, each of which becomes a matrix
    cut         of the source, the elements that are used
    changed     the values of rows, the first of which has this number
    padded      rows of zeros behind those of the source
    """

    name: str
    sources: tuple[Stored, ...]
    stacked: bool = False
    turned: int = 0
    shift: float = 0.0
    transposed: bool = False
    spans: Spans = ()
    columns: Spans = ()
    heads: int = 0
    cut: Cut = (...,)
    changed: Changed | None = None
    padded: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        part_shape = self._part(np.broadcast_to(np.float32(0), self.sources[0].shape)).shape
        rows = (sum(end - at for at, end in self.spans),) if self.spans else part_shape[:1]
        if self.stacked:
            return (len(self.sources), *part_shape)
        return (rows[0] + self.padded, *part_shape[1:])

    def _part(self, array: np.ndarray) -> np.ndarray:
        if self.heads:
            array = array.reshape(self.heads, -1, array.shape[-1])
        part: np.ndarray = array[self.cut]
        return part.swapaxes(-1, -2) if self.transposed else part

    def values(self) -> Iterator[np.ndarray]:
        """The values of the sources in order as f32, some rows at a time; heads are not split."""
        for source in self.sources:
            array = self._part(source.array())
            count = sum(end - at for at, end in self.spans) or len(array)
            head = count // self.turned if self.turned else 1
            step = max(PART * len(array) // (array.size * head), 1) * head
            for start, end in self._parts(len(array), step):
                rows = quantized_arrays.dequantize(np.ascontiguousarray(array[start:end]))
                if self.columns:
                    rows = rows[:, order(self.columns)]
                if self.turned:
                    rows = paired(rows, len(rows) // head)
                rows = rows + np.float32(self.shift) if self.shift else rows
                yield rows if self.changed is None else self.changed(rows, start)
        if self.padded:
            yield np.zeros((self.padded, *self.shape[1:]), np.float32)

    def _parts(self, count: int, step: int) -> Iterator[tuple[int, int]]:
        for first, last in self.spans or ((0, count),):
            yield from ((at, min(at + step, last)) for at in range(first, last, step))


@dataclass(frozen=True, slots=True)
class Idle(Tensor):
    """A tensor of this size that nothing reads and the checkpoint lacks: zeros; the source only says where."""

    size: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def values(self) -> Iterator[np.ndarray]:
        yield np.zeros(self.size, np.float32)


@dataclass(frozen=True, slots=True)
class Blocks(Tensor):
    """The experts' matrices; sources are blocks (E, rows, G, 16) of two values a byte, and scales (E, rows, G).

    A source's byte has the values 2 j and 2 j + 1 of its block, a
    file's j and j + 16, behind the scale: OCP Microscaling Formats; ggml's block_mxfp4.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        count, rows, groups = np.broadcast_to(np.uint8(0), self.sources[1].shape)[self.cut].shape
        return count, rows, groups * MXFP4.block

    def values(self) -> Iterator[np.ndarray]:
        """The blocks of an expert at a time, (rows, G)."""
        nibbles, scales = (source.raw()[self.cut] for source in self.sources)
        for pairs, scale in zip(nibbles, scales, strict=True):
            codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*scale.shape, MXFP4.block)
            packed_codes = codes[..., :HALF] | codes[..., HALF:] << 4
            block_bytes = np.concatenate((scale[..., None], packed_codes), -1).astype(np.uint8)
            yield np.ascontiguousarray(block_bytes).view(MXFP4.numpy)[..., 0]


def order(spans: Spans) -> np.ndarray:
    """The numbers in these spans."""
    return np.concatenate([np.arange(at, end) for at, end in spans])


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

    def __init__(self, checkpoint: Checkpoint, family: Family, blocks: int) -> None:
        self.folder, prefix = checkpoint.folder, family.names.prefix
        self.tensors, self.first = dict[str, Stored](), next(iter(checkpoint.tensors.values()))
        block_prefix = f"{prefix}{family.names.blocks}."
        for name, stored in checkpoint.tensors.items():
            at = name.removeprefix(block_prefix).split(".")[0] if family.more_blocks else ""
            if at.isdecimal() and int(at) >= blocks:
                continue
            for end, canonical in family.ends.items():
                name = name.removesuffix(end) + canonical if name.endswith(end) else name
            for alias, canonical in family.same.items():
                name = name.replace(f".{alias}.", f".{canonical}.")
            if not (family.unused and name.endswith(family.unused)):
                has_prefix = name.startswith((prefix, HEAD))
                self.tensors[name if has_prefix else prefix + name] = stored

    def take(self, name: str, shape: tuple[int, ...], *, flat: bool = False) -> Stored:
        """A tensor of this shape; with `flat` it has one axis there."""
        stored = self.tensors.pop(name, None)
        if stored is None:
            raise InputError(f"{self.folder}: tensor {name} is missing; its shape is {[*shape]}")
        wide = (*shape[:1], 1, *shape[1:])  # of a convolution: one channel for each filter
        wide = (math.prod(shape),) if flat else wide
        if stored.shape not in (shape, (1, *shape), wide):  # a matrix of one row is a vector
            raise InputError(
                f"{stored.path}: {name} has shape {[*stored.shape]}; by config.json it must be {[*shape]}"
            )
        return replace(stored, shape=shape) if stored.shape == wide else stored

    def check_empty(self) -> None:
        left = {n: stored for n, stored in self.tensors.items() if not _is_nothing(n, stored)}
        if left:
            stored = next(iter(left.values()))
            raise InputError(
                f"{stored.path}: tensor {stored.name} is not part of the model that config.json describes"
                f" ({len(left)} such tensors)"
            )


def _is_nothing(name: str, stored: Stored) -> bool:
    """Whether a tensor is a bias of zeros, as some checkpoints have where the model has none."""
    vector = name.endswith(".bias") and len(stored.shape) == 1
    return vector and not quantized_arrays.dequantize(stored.array()).any()


def tensors_of(checkpoint: Checkpoint, config: Config, family: Family) -> list[Tensor]:
    """Every tensor of the GGUF file, in order. Raises InputError for missing or unknown tensors and wrong shapes."""
    sources = _Found(checkpoint, family, config.block_count)
    width = config.embedding_length
    names = family.names
    embedding = sources.take(f"{names.prefix}{names.embedding}.weight", (config.vocab_size, width))
    tensors = [Tensor("token_embd.weight", (embedding,))]
    if names.positions:
        learned = f"{names.prefix}{names.positions}.weight", (config.context_length, width)
        tensors.append(Tensor(POSITIONS, (sources.take(*learned),)))
    all_shapes = shapes(config)
    for module, name in names.outside.items():
        if (weight := f"{name}.weight") in all_shapes:
            source = f"{names.prefix}{module}.weight"
            tensors.append(_outside(sources, source, weight, all_shapes[weight]))
    for i in range(config.block_count):
        tensors += _block(sources, i, config, family)
    norm = f"{names.prefix}{names.norm}"
    tensors += _both(sources, norm, config.traits.last_norm, (width,), config, family.norm_shift)
    tensors += _head(sources, embedding, config)
    sources.check_empty()
    changes = family.changes(checkpoint.config, config)
    return [replace(t, changed=changes.get(_part(t.name))) for t in tensors]


def _head(sources: _Found, embedding: Stored, config: Config) -> Iterator[Tensor]:
    """The output head. Some folders of tied models repeat the embedding; others have a head of their own: it counts."""
    name, traits = f"{HEAD}weight", config.traits
    head = sources.tensors.get(name)
    repeated = config.tied if head is None else head.same(embedding)
    if repeated and (config.tied or traits.always_tied) and not traits.always_apart:
        sources.tensors.pop(name, None)
    elif repeated and head is None:
        yield Tensor("output.weight", (embedding,))
    elif traits.always_tied:
        right = "files of its architecture have no head of their own"
        raise InputError(f"{sources.folder}: {name} is not the embedding; {right}")
    else:
        yield from _both(sources, HEAD[:-1], "output", embedding.shape, config)


def _outside(sources: _Found, source: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor outside blocks; the embeddings of blocks may lack the last tokens, those of images and sounds."""
    if "{}" in source:
        return _stacked(sources, source, name, shape)
    stored = sources.tensors.get(source)
    may_lack_tokens = stored and name == f"{LAYER_INPUTS[0]}.weight"
    rows = min(stored.shape[0], shape[0]) if stored and may_lack_tokens else shape[0]
    return Tensor(name, (sources.take(source, (rows, *shape[1:])),), padded=shape[0] - rows)


def _part(name: str) -> str:
    """A tensor's name within its block, without its ending."""
    inner = name.split(".", 2)[2] if name.startswith("blk.") else name
    return inner.removesuffix(".weight")


def _both(
    sources: _Found,
    module: str,
    name: str,
    shape: tuple[int, ...],
    config: Config,
    shift: float = 0.0,
) -> Iterator[Tensor]:
    """A weight, and its bias if the model has it."""
    yield Tensor(f"{name}.weight", (sources.take(f"{module}.weight", shape),), shift=shift)
    if f"{name}.bias" in config.optional:
        yield Tensor(f"{name}.bias", (sources.take(f"{module}.bias", shape[:1]),))


def _block(sources: _Found, i: int, config: Config, family: Family) -> Iterator[Tensor]:
    """The tensors of a block: weights and biases, then those of its experts."""
    shapes, permuted_heads = block_shapes(config, i), turned_heads(config, family)
    spans, columns = family.spans(config), family.columns(config)
    at = f"{family.names.prefix}{family.names.blocks}.{i}"
    for module, part in family.block.items():
        for kind in ("weight", "bias"):
            is_unsuffixed = kind == "weight" and part in shapes
            name = part if is_unsuffixed else f"{part}.{kind}"
            shape = shapes.get(name)
            is_unused = f"blk.{i}.{name}" in unread(config)
            if shape is None and is_unused:
                sources.tensors.pop(f"{at}.{module}.{kind}", None)
            if shape is None:
                continue
            if is_unused and f"{at}.{module}.{kind}" not in sources.tensors:
                yield Idle(f"blk.{i}.{name}", (sources.first,), size=shape)
                continue
            if "{}" in module:
                yield _stacked(sources, f"{at}.{module}.{kind}", f"blk.{i}.{name}", shape)
                continue
            is_transposed = family.transposed and len(shape) > 1
            flat = part in FLAT and kind == "weight"
            size = shape[:: -1 if is_transposed else 1]
            stored = sources.take(f"{at}.{module}.{kind}", size, flat=flat)
            yield Tensor(
                f"blk.{i}.{name}",
                (stored,),
                turned=permuted_heads.get(part, 0),
                shift=family.norm_shift if name.endswith("_norm.weight") and part != GATED else 0.0,
                transposed=is_transposed,
                spans=spans.get(part, ()),
                columns=columns.get(part, ()),
            )
    yield from _joined(sources, at, i, config, family)
    if family.latent and config.latent:
        yield from _by_heads(sources, f"{at}.{family.latent}.weight", i, config)
    if family.experts is not None:
        yield from _mixture(sources, at, i, config, family.experts)


def _joined(sources: _Found, at: str, i: int, config: Config, family: Family) -> Iterator[Tensor]:
    """The tensors that share out the rows of one."""
    shapes = block_shapes(config, i)
    for module, parts in family.joined.items():
        if f"{parts[0]}.weight" in shapes:
            spans, width = family.spans(config), config.embedding_length
            permuted_heads = turned_heads(config, family)
            rows = sum(end - start for part in parts for start, end in spans[part])
            source = sources.take(f"{at}.{module}.weight", (rows, width))
            for part in parts:
                heads = permuted_heads.get(part, 0)
                yield Tensor(f"blk.{i}.{part}.weight", (source,), turned=heads, spans=spans[part])


def _mixture(
    sources: _Found, at: str, i: int, config: Config, experts: Experts
) -> Iterator[Tensor]:
    """The tensors of experts: some checkpoints have those of each, some have stacked them."""
    matrices, shapes = experts.matrices, block_shapes(config, i)
    is_separate = any(f"{at}.{module.format(0)}.weight" in sources.tensors for module in matrices)
    if not is_separate:
        yield from _experts(sources, at, i, config, experts)
    if not config.mixture(i) or (experts.stacked and not is_separate):
        return
    for module, part in matrices.items():
        name = f"{part}.weight"
        yield _stacked(sources, f"{at}.{module}.weight", f"blk.{i}.{name}", shapes[name])


def _by_heads(sources: _Found, name: str, i: int, config: Config) -> Iterator[Tensor]:
    """The matrices that make keys and values from a narrow vector, out of one in which those of a head are together."""
    heads, nope_width = config.head_count, config.head_width - config.rope_width
    rows_per_head = nope_width + config.value_width
    source = sources.take(name, (heads * rows_per_head, config.kv_lora_rank))
    for part, rows in (
        ("attn_k_b", slice(0, nope_width)),
        ("attn_v_b", slice(nope_width, rows_per_head)),
    ):
        cut, is_transposed = (slice(None), rows), part == "attn_k_b"
        yield Tensor(
            f"blk.{i}.{part}.weight", (source,), transposed=is_transposed, heads=heads, cut=cut
        )


def _experts(
    sources: _Found, at: str, i: int, config: Config, experts: Experts
) -> Iterator[Tensor]:
    """The tensors of experts that the checkpoint has stacked, two of them maybe as one."""
    shapes, loaded = block_shapes(config, i), dict[str, Stored]()
    for part, (module, first, stride) in experts.stacked.items():
        for kind in ("weight", "bias"):
            shape, name = shapes.get(f"{part}.{kind}"), f"{at}.{module}.{kind}"
            if shape is None:
                continue
            count, inputs = (shape[:-2], shape[-1:]) if kind == "weight" else (shape[:-1], ())
            outputs = shape[len(count)]
            blocks, rows = f"{at}.{module}_blocks", (*count, outputs * stride)
            chosen = slice(first, None, stride)
            if experts.together:
                chosen = slice(first * outputs, (first + 1) * outputs)
            by_rows = experts.rows or not inputs
            cut: Cut = (
                (..., chosen, *(slice(None) for _ in inputs)) if experts.rows else (..., chosen)
            )
            if blocks in sources.tensors.keys() | loaded.keys() and inputs:
                groups, cut = (*rows, inputs[0] // MXFP4.block), (slice(None), chosen)
                shapes_of = {blocks: (*groups, HALF), f"{at}.{module}_scales": groups}
            else:
                shapes_of = {name: (*rows, *inputs) if by_rows else (*count, *inputs, rows[-1])}
            for source, required_shape in shapes_of.items():
                if source not in loaded:
                    loaded[source] = sources.take(source, required_shape)
            yield (Blocks if len(shapes_of) > 1 else Tensor)(
                f"blk.{i}.{part}.{kind}",
                tuple(loaded[source] for source in shapes_of),
                transposed=not by_rows,
                cut=cut,
            )


def _stacked(sources: _Found, source: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor from those of each expert or head, whose number is {} in their names."""
    count, *slice_shape = shape
    slices = tuple(sources.take(source.format(n), tuple(slice_shape)) for n in range(count))
    return Tensor(name, slices, stacked=True)


def turned_heads(config: Config, family: Family) -> dict[str, int]:
    """Tensors whose rows are permuted in GGUF files, and their heads: checkpoints pair halves."""
    head_counts = {"attn_q": config.head_count, "attn_k": config.head_count_kv}
    return {} if config.traits.halves or family.pairs else head_counts
