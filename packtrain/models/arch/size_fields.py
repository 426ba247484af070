"""Sizes of a model, as in GGUF's metadata and the configs of checkpoints: plain data."""

from dataclasses import dataclass
from typing import NamedTuple


class Scan(NamedTuple):
    """Sizes of a Mamba-2 scan, or of a gated delta net.

    inner  values of all heads; `state` is the width of the state for each value
    taps   tokens, itself included, that a token sees in the convolution before the scan
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
        """Numbers of rows of the input matrix for (gate, the convolution's input, steps), in the order of SCAN_IN."""
        return self.inner, self.conv_channels, self.heads


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model's sizes; names follow the GGUF metadata keys."""

    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    key_length: int | None = None  # width of a head; None: embedding_length / head_count
    expert_count: int = 0
    expert_used_count: int = 0
    expert_feed_forward_length: int | None = None  # width of an expert; None: feed_forward_length
    expert_shared_feed_forward_length: int = 0  # width of the shared expert; 0: there is none
    leading_dense_block_count: int = 0  # number of first blocks without experts
    # for each block, whether it attends, else it has a convolution or scan; empty: all attend
    attending: tuple[bool, ...] = ()
    conv_width: int = 0  # tokens, itself included, that a token sees in a short convolution
    value_length: int | None = None  # width of a head's values; None: key_length
    rope_dims: int | None = None  # elements of a head that rope rotates; None: all
    q_lora_rank: int = 0  # width of the vector from which queries are made; 0: they read x
    kv_lora_rank: int = 0  # width of the vector from which keys and values are made; 0: they read x
    interleave_moe_layer_step: int = 1  # of the later blocks, only every N-th has experts
    scan: Scan | None = None  # sizes of scans; None: there are none

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
        """Whether a block has attention."""
        return self.attending[block] if self.attending else True

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts."""
        is_interleaved = (block + 1) % self.interleave_moe_layer_step == 0
        return self.expert_count > 0 and block >= self.leading_dense_block_count and is_interleaved
