"""LoRA: low-rank adapters of a model's matrices, y = W x + scale * B (A x). Hu et al. 2021, arXiv 2106.09685.

A Lora is plain data and part of a model's Config, so that every graph of the model includes the adapters; A and B are
leaves `<name>.lora_a` and `<name>.lora_b`, named as in an adapter file (see adapter_file)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from packtrain.models.arch.architecture import is_matrix

A, B = SUFFIXES = (".lora_a", ".lora_b")
# an embedding that is also the head has no adapter: PEFT means one of its two uses, llama.cpp stops, and the chunked
# head reads one matrix, so that adding to it would need a copy
EMBEDDING = "token_embd.weight"
KEY = "dropout"  # input that seeds dropout, of each part of the batch: seed, step, number of the micro-batch


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA adapters of a model: which matrices of the blocks have one, and whether the embedding has one."""

    # (pattern of tensor names, rank): the first match counts; a tensor without a match has no adapter
    ranks: tuple[tuple[str, int], ...]
    last: int = 0  # only the last N blocks have adapters; 0: all
    alpha: float = 0.0  # the scale is alpha / rank; 0 means a scale of 1
    dropout: float = 0.0  # dropout probability of A's input in training
    # by tensor name, the adapter of each row of A, where each token has its own scale for each adapter
    owners: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # quantized matrices compute as they will be stored after merging: see ops.stored_sum
    aware: bool = False

    def rank_of(self, name: str) -> int:
        """Return the rank of a tensor's adapter; 0 for none."""
        return next((rank for pattern, rank in self.ranks if fnmatchcase(name, pattern)), 0)

    def scale(self, rank: int) -> float:
        return lora_scale(self.alpha, rank)

    def scale_inputs(self) -> dict[tuple[int, ...], str]:
        """Return {owners, the adapter's number of each row of A: name of the graph input (T, rank) with each token's
        scales of these rows}; tensors whose rows have equal owners share an input."""
        distinct_owners = dict.fromkeys(owners for _, owners in self.owners)
        return {owners: f"lora_scales.{index}" for index, owners in enumerate(distinct_owners)}

    def input_of(self, name: str) -> str:
        """Return the graph input with each token's scales of tensor `name`; "" if all tokens have the same scale."""
        owners = dict(self.owners).get(name)
        return "" if owners is None else self.scale_inputs()[owners]

    def adapter_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], blocks: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, shape) of A and of B for each matrix with an adapter; `shapes`: the base's tensors by name."""
        first_block = blocks - self.last if self.last else 0
        for name, shape in shapes.items():
            in_block = name.startswith("blk.") and int(name.split(".")[1]) >= first_block
            in_reach = in_block or name == EMBEDDING
            rank = self.rank_of(name) if in_reach and is_matrix(name, shape) else 0
            if rank:
                yield from zip((name + A, name + B), fitting(shape, name, rank), strict=True)


def lora_scale(alpha: float, rank: int) -> float:
    """Return the factor of B A: alpha / rank, or 1 if alpha is 0, as in llama.cpp."""
    return alpha / rank if alpha else 1.0


def fitting(shape: tuple[int, ...], name: str, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of LoRA's A and B for a base tensor: (rank, in) and (out, rank) for (out, in); see Adapter."""
    *experts, num_rows, row_width = shape
    if name == EMBEDDING:
        return (num_rows, rank), (row_width, rank)
    return (*experts, rank, row_width), (*experts, num_rows, rank)
