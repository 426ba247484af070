"""Sizes of a model, as GGUF's metadata and the configs of checkpoints have them: plain data."""

from dataclasses import dataclass
from typing import NamedTuple


class Scan(NamedTuple):
    """Sizes of a Mamba-2 scan, or of a gated delta net: `inner` values of all heads, `state` of the state for each,
    groups of heads.

    taps  how many tokens, itself included, a token sees in the convolution before it
    """

    inner: int
    state: int
    heads: int
    groups: int
    taps: int

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def input_rows(self) -> tuple[int, int, int]:
        """Of the input matrix, by SCAN_IN."""
        return self.inner, self.conv_channels, self.heads


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model's sizes; names follow the GGUF metadata keys.

    key_length                  width of a head; None: embedding_length / head_count
    value_length                width of its values; None: the same
    rope_dims                   how much of it rope turns; None: all
    expert_feed_forward_length  width of an expert; None: feed_forward_length
    expert_shared_feed_forward_length  width of the expert that all tokens have; 0: there is none
    leading_dense_block_count   the first blocks that have no experts
    interleave_moe_layer_step   of the others, only every N-th block has them
    attending   whether each block has attention; the others have a short convolution or a scan; empty: all have
    conv_width  how many tokens, itself included, a token sees in a short convolution
    q_lora_rank, kv_lora_rank   width of the vector from which the queries are made, and keys and values; 0: of x
    scan        sizes of scans; None: there are none
    """

    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    key_length: int | None = None
    expert_count: int = 0
    expert_used_count: int = 0
    expert_feed_forward_length: int | None = None
    expert_shared_feed_forward_length: int = 0
    leading_dense_block_count: int = 0
    attending: tuple[bool, ...] = ()
    conv_width: int = 0
    value_length: int | None = None
    rope_dims: int | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    interleave_moe_layer_step: int = 1
    scan: Scan | None = None

    @property
    def head_width(self) -> int:
        return self.key_length or self.embedding_length // self.head_count

    @property
    def value_width(self) -> int:
        return self.value_length or self.head_width

    @property
    def expert_width(self) -> int:
        return self.expert_feed_forward_length or self.feed_forward_length

    def attends(self, block: int) -> bool:
        """Whether that block has attention."""
        return self.attending[block] if self.attending else True

    def has_experts(self, block: int) -> bool:
        """Whether that block has experts."""
        is_interleaved = (block + 1) % self.interleave_moe_layer_step == 0
        return self.expert_count > 0 and block >= self.leading_dense_block_count and is_interleaved
