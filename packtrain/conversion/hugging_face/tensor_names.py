"""Maps the tensors of a checkpoint to those of a GGUF file, with shapes and changes of values."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import EllipsisType

import numpy as np

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.checkpoint_folder import CheckpointFolder
from packtrain.conversion.hugging_face.safetensors import SafetensorsTensor
from packtrain.dtypes import BLOCK_TYPES
from packtrain.engine.tensor import Shape
from packtrain.kernels.quant import quantized_arrays
from packtrain.models.arch import architecture as arch
from packtrain.models.config import Config
from packtrain.models.tensor_shapes import POSITIONS, block_shapes, unused_weights, weight_shapes

HEAD_PREFIX = "lm_head."
GATED = "ssm_norm"
ONE_AXIS_PARTS = (*arch.UNSUFFIXED_SCAN_WEIGHTS, GATED)  # tensors that have one axis in checkpoints
MXFP4 = BLOCK_TYPES["mxfp4"]
HALF_BLOCK = MXFP4.block // 2
ArrayIndex = tuple[EllipsisType | slice, ...]
Converted = Iterator["ConvertedTensor"]
PART = 1 << 20  # elements in memory at a time, unless a row or a head is longer


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A tensor to write, made of `sources` of the checkpoint; `is_stacked`: they become slices of one tensor."""

    name: str
    sources: tuple[SafetensorsTensor, ...]
    is_stacked: bool = False
    # number of heads whose rows are permuted from halves to pairs, 0 for none
    permuted_heads: int = 0
    shift: float = 0.0  # number added to every value
    is_transposed: bool = False  # the source has columns instead of rows
    # rows of the source in the order of the file, each (from, to); none: all, in their order
    row_spans: arch.RowSpans = ()
    column_spans: arch.RowSpans = ()  # columns of the source, likewise
    heads: int = 0  # number of heads into which the source's rows divide; each becomes a matrix
    cut: ArrayIndex = (...,)  # index of the elements of the source that are used
    # changes the values of rows; its second argument is the number of the first row
    change_rows: arch.Changed | None = None
    num_padding_rows: int = 0  # rows of zeros behind those of the source

    @property
    def shape(self) -> Shape:
        part_shape = self._source_part(np.broadcast_to(np.float32(0), self.sources[0].shape)).shape
        rows = (sum(end - at for at, end in self.row_spans),) if self.row_spans else part_shape[:1]
        if self.is_stacked:
            return (len(self.sources), *part_shape)
        return (rows[0] + self.num_padding_rows, *part_shape[1:])

    def _source_part(self, array: np.ndarray) -> np.ndarray:
        """Return the used part of a source: array[cut], divided into heads first, if any; transposed if needed."""
        if self.heads:
            array = array.reshape(self.heads, -1, array.shape[-1])
        source_part: np.ndarray = array[self.cut]
        return source_part.swapaxes(-1, -2) if self.is_transposed else source_part

    def value_parts(self) -> Iterator[np.ndarray]:
        """Yield the sources' values as they will be stored, f32, some rows at a time; heads are not split."""
        for source_tensor in self.sources:
            array = self._source_part(source_tensor.array())
            num_rows = sum(part_end - at for at, part_end in self.row_spans) or len(array)
            head_rows = num_rows // self.permuted_heads if self.permuted_heads else 1
            part_rows = max(PART * len(array) // (array.size * head_rows), 1) * head_rows
            for part_start, part_end in self._row_ranges(len(array), part_rows):
                rows = quantized_arrays.dequantize(np.ascontiguousarray(array[part_start:part_end]))
                if self.column_spans:
                    rows = rows[:, order(self.column_spans)]
                if self.permuted_heads:
                    rows = pair_halves(rows, len(rows) // head_rows)
                rows = rows + np.float32(self.shift) if self.shift else rows
                yield rows if self.change_rows is None else self.change_rows(rows, part_start)
        if self.num_padding_rows:
            yield np.zeros((self.num_padding_rows, *self.shape[1:]), np.float32)

    def _row_ranges(self, num_rows: int, step: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of at most `step` rows at a time of the rows that are used."""
        for span_start, span_end in self.row_spans or ((0, num_rows),):
            yield from ((at, min(at + step, span_end)) for at in range(span_start, span_end, step))


@dataclass(frozen=True, slots=True)
class ZeroTensor(ConvertedTensor):
    """A tensor of zeros that the checkpoint lacks; its source only names the checkpoint.

    llama.cpp demands key and value matrices of Gemma 3n's sharing blocks: nothing reads them, and no run trains them.
    """

    zero_shape: Shape = ()

    @property
    def shape(self) -> Shape:
        return self.zero_shape

    def value_parts(self) -> Iterator[np.ndarray]:
        yield np.zeros(self.zero_shape, np.float32)


@dataclass(frozen=True, slots=True)
class MXFP4Tensor(ConvertedTensor):
    """Matrices of experts; sources are blocks (E, rows, G, 16) of two values a byte, and scales (E, rows, G).

    A byte of the source has values 2 j and 2 j + 1 of its block, a byte of the file j and j + 16, behind the scale:
    OCP Microscaling Formats; ggml's block_mxfp4.
    """

    @property
    def shape(self) -> Shape:
        count, rows, groups = np.broadcast_to(np.uint8(0), self.sources[1].shape)[self.cut].shape
        return count, rows, groups * MXFP4.block

    def value_parts(self) -> Iterator[np.ndarray]:
        """Yield the quantization blocks of each expert, (rows, blocks of a row)."""
        nibbles, scales = (source.byte_array()[self.cut] for source in self.sources)
        for pairs, scale in zip(nibbles, scales, strict=True):
            codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*scale.shape, MXFP4.block)
            packed_codes = codes[..., :HALF_BLOCK] | codes[..., HALF_BLOCK:] << 4
            block_bytes = np.concatenate((scale[..., None], packed_codes), -1).astype(np.uint8)
            yield np.ascontiguousarray(block_bytes).view(MXFP4.numpy)[..., 0]


def order(spans: arch.RowSpans) -> np.ndarray:
    """Return all numbers in these spans (first, end), the end excluded, one span after the other."""
    return np.concatenate([np.arange(span_start, span_end) for span_start, span_end in spans])


def pair_halves(weight_rows: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows of q or k, (heads * D, …), so that the rope pairs (i, i + D / 2) of a head become (2i, 2i + 1)."""
    head_halves = weight_rows.reshape(heads, 2, -1, *weight_rows.shape[1:])
    return np.ascontiguousarray(head_halves.swapaxes(1, 2)).reshape(weight_rows.shape)


def halved(weight_rows: np.ndarray, heads: int) -> np.ndarray:
    """Invert `pair_halves`: the rope pairs (2i, 2i + 1) of a head become (i, i + D / 2)."""
    head_pairs = weight_rows.reshape(heads, -1, 2, *weight_rows.shape[1:])
    return np.ascontiguousarray(head_pairs.swapaxes(1, 2)).reshape(weight_rows.shape)


class _Sources:
    """The tensors of a checkpoint that no tensor of the file has taken yet."""

    def __init__(self, checkpoint: CheckpointFolder, family: arch.Family, blocks: int) -> None:
        self.folder, prefix = checkpoint.folder, family.names.prefix
        self.tensors = dict[str, SafetensorsTensor]()
        self.first_tensor = next(iter(checkpoint.tensors.values()))
        block_prefix = f"{prefix}{family.names.blocks}."
        for name, stored_tensor in checkpoint.tensors.items():
            block_text = name.removeprefix(block_prefix).split(".")[0] if family.more_blocks else ""
            if block_text.isdecimal() and int(block_text) >= blocks:
                continue
            for suffix, canonical in family.suffix_renames.items():
                name = name.removesuffix(suffix) + canonical if name.endswith(suffix) else name
            for alias, canonical in family.module_aliases.items():
                name = name.replace(f".{alias}.", f".{canonical}.")
            if not (family.computed_suffixes and name.endswith(family.computed_suffixes)):
                has_prefix = name.startswith((prefix, HEAD_PREFIX))
                self.tensors[name if has_prefix else prefix + name] = stored_tensor

    def take(self, name: str, shape: Shape, *, flat: bool = False) -> SafetensorsTensor:
        """Remove and return tensor `name`, in this shape (`flat`: stored with one axis). InputError if none fits."""
        stored_tensor = self.tensors.pop(name, None)
        if stored_tensor is None:
            raise InputError(f"{self.folder}: tensor {name} is missing; its shape is {[*shape]}")
        wide = (*shape[:1], 1, *shape[1:])  # a convolution has one channel for each filter
        wide = (math.prod(shape),) if flat else wide
        if stored_tensor.shape not in (shape, (1, *shape), wide):  # a matrix of one row is a vector
            fact = f"{stored_tensor.path}: {name} has shape {[*stored_tensor.shape]}"
            raise InputError(f"{fact}; by config.json it must be {[*shape]}")
        return replace(stored_tensor, shape=shape) if stored_tensor.shape == wide else stored_tensor

    def check_all_used(self) -> None:
        left = {n: stored for n, stored in self.tensors.items() if not _is_zero_bias(n, stored)}
        if left:
            stored_tensor = next(iter(left.values()))
            raise InputError(
                f"{stored_tensor.path}: tensor {stored_tensor.name} is not part of the model that config.json describes"
                f" ({len(left)} such tensors)"
            )


def _is_zero_bias(name: str, stored: SafetensorsTensor) -> bool:
    """Whether a tensor is a bias of zeros, as some checkpoints have where the model has none."""
    is_vector = name.endswith(".bias") and len(stored.shape) == 1
    return is_vector and not quantized_arrays.dequantize(stored.array()).any()


def convert_tensors(
    checkpoint: CheckpointFolder, config: Config, family: arch.Family
) -> list[ConvertedTensor]:
    """Return every tensor of the file, in order. Raises InputError for missing or unknown tensors and wrong shapes."""
    sources = _Sources(checkpoint, family, config.block_count)
    width, names = config.embedding_length, family.names
    embedding = sources.take(f"{names.prefix}{names.embedding}.weight", (config.vocab_size, width))
    tensors = [ConvertedTensor("token_embd.weight", (embedding,))]
    if names.positions:
        position_args = f"{names.prefix}{names.positions}.weight", (config.context_length, width)
        tensors.append(ConvertedTensor(POSITIONS, (sources.take(*position_args),)))
    all_shapes = weight_shapes(config)
    for module, name in names.outside.items():
        if (weight := f"{name}.weight") in all_shapes:
            source = f"{names.prefix}{module}.weight"
            tensors.append(_outer_tensor(sources, source, weight, all_shapes[weight]))
    for i in range(config.block_count):
        tensors += _block_tensors(sources, i, config, family)
    norm = f"{names.prefix}{names.norm}"
    tensors += _with_bias(
        sources, norm, config.traits.last_norm, (width,), config, family.norm_shift
    )
    tensors += _head_tensors(sources, embedding, config)
    sources.check_all_used()
    changes = family.changes(checkpoint.config, config)
    part_names = (t.name.removeprefix("blk.").lstrip("0123456789.") for t in tensors)
    row_changes = (changes.get(name.removesuffix(".weight")) for name in part_names)
    return [replace(t, change_rows=r) for t, r in zip(tensors, row_changes, strict=True)]


def _head_tensors(sources: _Sources, embedding: SafetensorsTensor, config: Config) -> Converted:
    """Yield the output head's tensors. Folders of tied models may repeat the embedding; a head that differs counts."""
    name, traits = f"{HEAD_PREFIX}weight", config.traits
    head_tensor = sources.tensors.get(name)
    is_repeated = config.tied if head_tensor is None else head_tensor.has_same_bytes(embedding)
    if is_repeated and (config.tied or traits.always_tied) and not traits.always_untied:
        sources.tensors.pop(name, None)
    elif is_repeated and head_tensor is None:
        yield ConvertedTensor("output.weight", (embedding,))
    elif traits.always_tied:
        reason = "files of its architecture have no head of their own"
        raise InputError(f"{sources.folder}: {name} is not the embedding; {reason}")
    else:
        yield from _with_bias(sources, HEAD_PREFIX[:-1], "output", embedding.shape, config)


def _outer_tensor(sources: _Sources, key: str, name: str, shape: Shape) -> ConvertedTensor:
    """Return tensor `name` outside blocks from the checkpoint's `key`; rows of per-block embeddings may be missing."""
    if "{}" in key:
        return _stack_tensors(sources, key, name, shape)
    stored = sources.tensors.get(key)
    may_lack_tokens = stored and name == f"{arch.LAYER_INPUTS[0]}.weight"
    num_rows = min(stored.shape[0], shape[0]) if stored and may_lack_tokens else shape[0]
    source = sources.take(key, (num_rows, *shape[1:]))
    return ConvertedTensor(name, (source,), num_padding_rows=shape[0] - num_rows)


def _with_bias(
    sources: _Sources, module: str, name: str, shape: Shape, config: Config, shift: float = 0.0
) -> Converted:
    """Yield the weight `name` from the checkpoint's `module`, `shift` added, and its bias if the model has one."""
    yield ConvertedTensor(f"{name}.weight", (sources.take(f"{module}.weight", shape),), shift=shift)
    if f"{name}.bias" in config.optional:
        yield ConvertedTensor(f"{name}.bias", (sources.take(f"{module}.bias", shape[:1]),))


def _block_tensors(sources: _Sources, i: int, config: Config, family: arch.Family) -> Converted:
    """Yield the tensors of a block: weights and biases, then those of its experts."""
    part_shapes, permuted_heads = block_shapes(config, i), turned_heads(config, family)
    row_spans, column_spans = family.row_spans(config), family.column_spans(config)
    at = f"{family.names.prefix}{family.names.blocks}.{i}"
    for module, part in family.block_modules.items():
        for suffix in ("weight", "bias"):
            name = part if suffix == "weight" and part in part_shapes else f"{part}.{suffix}"
            shape = part_shapes.get(name)
            is_unused = f"blk.{i}.{name}" in unused_weights(config)
            if shape is None and is_unused:
                sources.tensors.pop(f"{at}.{module}.{suffix}", None)
            if shape is None:
                continue
            if is_unused and f"{at}.{module}.{suffix}" not in sources.tensors:
                yield ZeroTensor(f"blk.{i}.{name}", (sources.first_tensor,), zero_shape=shape)
                continue
            if "{}" in module:
                yield _stack_tensors(sources, f"{at}.{module}.{suffix}", f"blk.{i}.{name}", shape)
                continue
            is_transposed = family.is_transposed and len(shape) > 1
            has_one_axis = part in ONE_AXIS_PARTS and suffix == "weight"
            source_shape = shape[:: -1 if is_transposed else 1]
            stored_tensor = sources.take(f"{at}.{module}.{suffix}", source_shape, flat=has_one_axis)
            yield ConvertedTensor(
                f"blk.{i}.{name}", (stored_tensor,), permuted_heads=permuted_heads.get(part, 0),
                shift=family.norm_shift if name.endswith("_norm.weight") and part != GATED else 0.0,
                is_transposed=is_transposed, row_spans=row_spans.get(part, ()), column_spans=column_spans.get(part, ()),
            )  # fmt: skip
    yield from _split_joined(sources, at, i, config, family)
    if family.latent_module and config.has_latent_cache:
        yield from _latent_kv_tensors(sources, f"{at}.{family.latent_module}.weight", i, config)
    if family.experts is not None:
        yield from _expert_tensors(sources, at, i, config, family.experts)


def _split_joined(
    sources: _Sources, at: str, i: int, config: Config, family: arch.Family
) -> Converted:
    """Yield the tensors of block i (`at` in the checkpoint) that share out the rows of one fused matrix."""
    part_shapes = block_shapes(config, i)
    for module, part_names in family.fused_modules.items():
        if f"{part_names[0]}.weight" in part_shapes:
            row_spans, width = family.row_spans(config), config.embedding_length
            permuted_heads = turned_heads(config, family)
            num_rows = sum(end - start for part in part_names for start, end in row_spans[part])
            source = sources.take(f"{at}.{module}.weight", (num_rows, width))
            for part in part_names:
                name, heads = f"blk.{i}.{part}.weight", permuted_heads.get(part, 0)
                spans = row_spans[part]
                yield ConvertedTensor(name, (source,), permuted_heads=heads, row_spans=spans)


def _expert_tensors(
    sources: _Sources, at: str, i: int, config: Config, experts: arch.ExpertLayout
) -> Converted:
    """Yield the tensors of block i's experts, stored one by one or stacked; `at`: the block's name prefix."""
    matrices, part_shapes = experts.matrix_modules, block_shapes(config, i)
    is_separate = any(f"{at}.{module.format(0)}.weight" in sources.tensors for module in matrices)
    if not is_separate:
        yield from _stacked_expert_tensors(sources, at, i, config, experts)
    if not config.has_experts(i) or (experts.stacked_matrices and not is_separate):
        return
    for module, part_name in matrices.items():
        name = f"{part_name}.weight"
        yield _stack_tensors(sources, f"{at}.{module}.weight", f"blk.{i}.{name}", part_shapes[name])


def _latent_kv_tensors(sources: _Sources, name: str, i: int, config: Config) -> Converted:
    """Yield block i's attn_k_b and attn_v_b, which make keys and values from a narrow vector, out of the checkpoint's
    tensor `name`, in which each head has rows of both."""
    heads, nope_width = config.head_count, config.head_width - config.rope_width
    rows_per_head = nope_width + config.value_width
    source = sources.take(name, (heads * rows_per_head, config.kv_lora_rank))
    row_slices = {"attn_k_b": slice(0, nope_width), "attn_v_b": slice(nope_width, rows_per_head)}
    for part, row_slice in row_slices.items():
        name, is_key, cut = f"blk.{i}.{part}.weight", part == "attn_k_b", (slice(None), row_slice)
        yield ConvertedTensor(name, (source,), is_transposed=is_key, heads=heads, cut=cut)


def _stacked_expert_tensors(
    sources: _Sources, at: str, i: int, config: Config, experts: arch.ExpertLayout
) -> Converted:
    """Yield the tensors of experts that the checkpoint has stacked, two of them maybe as one."""
    part_shapes, loaded_tensors = block_shapes(config, i), dict[str, SafetensorsTensor]()
    for part_name, (module, first_row, stride) in experts.stacked_matrices.items():
        for suffix in ("weight", "bias"):
            shape, name = part_shapes.get(f"{part_name}.{suffix}"), f"{at}.{module}.{suffix}"
            if shape is None:
                continue
            count, inputs = (shape[:-2], shape[-1:]) if suffix == "weight" else (shape[:-1], ())
            num_outputs = shape[len(count)]
            blocks_name, rows = f"{at}.{module}_blocks", (*count, num_outputs * stride)
            chosen = slice(first_row, None, stride)
            if experts.is_contiguous:
                chosen = slice(first_row * num_outputs, (first_row + 1) * num_outputs)
            by_rows = experts.rows or not inputs
            source_index: ArrayIndex = (..., chosen, *(slice(None) for _ in inputs if experts.rows))
            if blocks_name in sources.tensors.keys() | loaded_tensors.keys() and inputs:
                groups, source_index = (*rows, inputs[0] // MXFP4.block), (slice(None), chosen)
                shapes_of = {blocks_name: (*groups, HALF_BLOCK), f"{at}.{module}_scales": groups}
            else:
                shapes_of = {name: (*rows, *inputs) if by_rows else (*count, *inputs, rows[-1])}
            for source_name, required_shape in shapes_of.items():
                if source_name not in loaded_tensors:
                    loaded_tensors[source_name] = sources.take(source_name, required_shape)
            tensor_class = MXFP4Tensor if len(shapes_of) > 1 else ConvertedTensor
            parts = tuple(loaded_tensors[source_name] for source_name in shapes_of)
            name = f"blk.{i}.{part_name}.{suffix}"
            yield tensor_class(name, parts, is_transposed=not by_rows, cut=source_index)


def _stack_tensors(sources: _Sources, key: str, name: str, shape: Shape) -> ConvertedTensor:
    """Return tensor `name` (n, …), stacked from the checkpoint's n tensors called `key`, with numbers for its {}."""
    num_slices, *slice_shape = shape
    slices = tuple(sources.take(key.format(n), tuple(slice_shape)) for n in range(num_slices))
    return ConvertedTensor(name, slices, is_stacked=True)


def turned_heads(config: Config, family: arch.Family) -> dict[str, int]:
    """Return {matrix, such as attn_q: its heads} of matrices whose rows GGUF files permute by `pair_halves`."""
    head_counts = {"attn_q": config.head_count, "attn_k": config.head_count_kv}
    return {} if config.traits.halves or family.interleaved_rope else head_counts
