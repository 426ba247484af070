"""One block of a transformer as graph functions: attention, convolution or scan, and a feed-forward.

Activations have the names of GGUF tensors; a Mixer lets the tokens of a block see each other."""

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor
from packtrain.models import altup, latent_attention, mamba
from packtrain.models.arch.architecture import CHOICE, CONV_INPUTS, CONV_OUT, LAYER_SCALE, SCAN_OUT
from packtrain.models.block_weights import BlockBuilder, Mixer, RopeTables
from packtrain.models.config import Config
from packtrain.models.lora_weights import Weights

UNNORMED_EXPERT_COUNT = 128  # experts of the llama4 whose queries and keys are not normalized
SPARSITY_DEVIATIONS = 1.6448533535003662  # 19 of 20 normal values are below; from gemma3n.cpp


def transformer_block(
    config: Config, w: Weights, i: int, h: Tensor, rope_tables: RopeTables, mixer: Mixer,
    embeddings: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute block i of the residual stream h (..., C), or of several streams (..., S, C), of which the block reads
    the first; returns h's shape. `embeddings` (..., L, P): each token's embedding for each block, or None."""
    block = BlockBuilder(config, w, i, config.fused_slices)
    compute = mixer.compute or compute_block
    if config.traits.num_streams:
        guess = altup.predict_streams(block, h)
        h = altup.correct(block, guess, compute(block, altup.stream_at(guess), rope_tables, mixer))
        first = ops.mul(altup.stream_at(h), block.weight("altup_correct_scale"))
        return (
            h if embeddings is None else altup.add_to_others(h, embedded(block, first, embeddings))
        )
    h = compute(block, h, rope_tables, mixer)
    h = h if embeddings is None else ops.add(embedded(block, h, embeddings), h)
    return ops.mul(h, block.weight("layer_output_scale")) if LAYER_SCALE in config.optional else h


def compute_block(block: BlockBuilder, h: Tensor, rope_tables: RopeTables, mixer: Mixer) -> Tensor:
    """Compute one block's residual stream h (..., C): add attention, convolution or scan, then the feed-forward."""
    return feed_forward(block, *mix_tokens(block, h, rope_tables, mixer))


def mix_tokens(
    block: BlockBuilder, h: Tensor, rope_tables: RopeTables, mixer: Mixer
) -> tuple[Tensor, Tensor]:
    """Return (x, h): the feed-forward's input, and h (..., C) plus the block's attention, convolution or scan of h."""
    config, i, traits = block.config, block.block_index, block.config.traits
    x = mixer_input = block.saved(block.norm("attn_norm", h)) if traits.pre_norms else h
    if config.has_weight("attn_norm_2"):
        mixer_input = block.saved(block.norm("attn_norm_2", h))
    if config.attends(i):
        attend = latent_attention.attention if config.kv_lora_rank else attention
        y = attend(block, mixer_input, rope_tables, mixer)
        h = block.add_to_residual("attn_output", y, "post_attention_norm", h)
    elif config.conv_width:
        h = block.add_to_residual(CONV_OUT, short_conv(block, mixer_input, mixer), "", h)
    if config.has_scan(i):
        scan = mamba.mix_delta_rule if traits.delta else mamba.mix_scan
        h = block.add_to_residual(SCAN_OUT, scan(block, mixer_input, mixer), "", h)
    if traits.laurel_rank:
        h = ops.scale(ops.add(h, laurel(block, mixer_input)), by=0.5**0.5)
    if not config.is_parallel:
        x = block.saved(block.norm(traits.ffn_norm, h)) if traits.pre_norms else h
    return x, h


def laurel(block: BlockBuilder, x: Tensor) -> Tensor:
    """Return x (..., C) plus its normalized product with two narrow matrices: LAuReL, arXiv 2411.07501."""
    y = block.linear("laurel_r", block.saved(block.linear("laurel_l", x)))
    return ops.add(block.norm("laurel_post_norm", block.saved(y)), x)


def embedded(block: BlockBuilder, h: Tensor, embeddings: Tensor) -> Tensor:
    """Return (..., C), what the block's own embeddings of the tokens (..., L, P) add, gated by h. Google, Gemma 3n."""
    axis = len(embeddings.shape) - 2
    block_embedding = ops.cont(ops.narrow(embeddings, axis=axis, start=block.block_index, length=1))
    gate = block.saved(block.linear("inp_gate", block.saved(h)))
    block_embedding = ops.reshape(block_embedding, shape=gate.shape)
    y = block.saved(block.named("inp_gated", ops.geglu(gate, block_embedding)))
    return block.norm("post_norm", block.saved(block.linear("proj", y)))


def attention(block: BlockBuilder, x: Tensor, rope_tables: RopeTables, mixer: Mixer) -> Tensor:
    """Compute attention: x (..., C) -> the heads' outputs side by side, (..., H D)."""
    config, i = block.config, block.block_index
    traits = config.traits
    # one product over [Wq Wk Wv] would pack x once, but took 0.95 to 1.02 of the time of three products
    q, gate = block.project_heads("attn_q", x, config.head_count), None
    if traits.gated_heads:
        q, gate = (
            ops.narrow(q, axis=len(q.shape) - 1, start=gate_start, length=config.head_width)
            for gate_start in (0, config.head_width)
        )
    qk, v = [q], None
    if config.source_of(i) == i:
        qk.append(block.project_heads("attn_k", x, config.kv_heads_of(i)))
        v = head_values(block, x, qk[1])
    norms_each_head = traits.head_norms or config.has_weight("attn_q_norm")
    if norms_each_head and not traits.qk_norms_after_rope:
        qk = block.norm_heads(qk)
    rope = config.rope_of(i)
    if rope is not None:
        inputs = zip("qk", qk, rope_tables[rope], strict=False)
        qk = [block.named(f"{n}_rope", ops.rope(x, t, neox=traits.halves)) for n, x, t in inputs]
        if traits.unweighted_qk_norms and config.expert_count != UNNORMED_EXPERT_COUNT:
            qk = [ops.rms_norm(block.saved(x), eps=config.rms_eps) for x in qk]
    elif traits.chunk_temperature:
        qk[0] = ops.mul(qk[0], rope_tables[None][0])
    if traits.qk_norms_after_rope:
        qk = block.norm_heads(qk)
    sinks = block.weight("attn_sinks") if traits.attention_sinks else None
    q, *k = map(block.saved, qk)
    new_kv = (k[0], block.saved(v)) if k and v is not None else (None, None)
    y = mixer.attend(i, q, new_kv[0], new_kv[1], sinks)
    if gate is not None:
        gate_share = ops.sigmoid(block.saved(ops.cont(gate)))
        y = ops.mul(block.saved(y), block.named("attn_gated", gate_share))
    return ops.reshape(y, shape=(*x.shape[:-1], config.head_count * config.width_of(i)))


def head_values(block: BlockBuilder, x: Tensor, k: Tensor) -> Tensor:
    """Return the heads' values (..., K, D): W_v x, or in some blocks without W_v `k`, the keys before norm and rope."""
    config, i = block.config, block.block_index
    like_keys = config.keys_are_values and not config.has_window(i)
    v = k if like_keys else block.project_heads("attn_v", x, config.kv_heads_of(i))
    if not config.traits.value_norms:
        return v
    return block.named("attn_v_norm", ops.rms_norm(block.saved(v), eps=config.rms_eps))


def short_conv(block: BlockBuilder, x: Tensor, mixer: Mixer) -> Tensor:
    """Compute a short convolution between two gates: x (..., C) -> (..., C). Liquid AI, LFM2: arXiv 2511.23404."""
    input_gate, output_gate, x = (block.saved(block.linear(name, x)) for name in CONV_INPUTS)
    x = block.saved(block.named("shortconv.gated", ops.mul(input_gate, x)))
    y = mixer.convolve(block.block_index, x, block.weight("shortconv.conv"))
    return block.saved(ops.mul(output_gate, block.saved(block.named("shortconv.conv", y))))


def feed_forward(block: BlockBuilder, x: Tensor, h: Tensor) -> Tensor:
    """Add to h (..., C) the feed-forward of x (..., C), or the output of the experts for x."""
    residual_scale = block.config.residual_scale
    if block.config.has_experts(block.block_index) and block.config.traits.parallel_dense_ffn:
        return dense_and_experts(block, x, h)
    if block.config.has_experts(block.block_index):
        y = block.named("ffn_experts", mixture(block, x, None if residual_scale else h))
        y = add_shared_expert(block, x, y) if block.config.expert_shared_feed_forward_length else y
        return ops.add(ops.scale(y, by=residual_scale), h) if residual_scale else y
    y = gated(block, x) if block.config.traits.gated else ungated_feed_forward(block, x)
    return block.add_to_residual("ffn_down", block.saved(y), "post_ffw_norm", h)


def dense_and_experts(block: BlockBuilder, x: Tensor, h: Tensor) -> Tensor:
    """Add to h the norm of a sum: a dense feed-forward of x, and experts that read h, each normalized. All (..., C)."""
    eps, router_scale = block.config.rms_eps, block.config.embedding_length**-0.5
    y = block.linear("ffn_down", block.saved(gated(block, x)))
    y = block.norm("post_ffw_norm_1", block.saved(y))
    normalized = ops.rms_norm(block.saved(h), eps=eps)
    router_input = ops.mul(normalized, block.weight("ffn_gate_inp", "scale"))
    expert_input = block.saved(block.norm("pre_ffw_norm_2", h))
    experts_output = block.named(
        "ffn_experts", mixture(block, expert_input, None, block.saved(ops.scale(router_input, by=router_scale))),
    )  # fmt: skip
    y = ops.add(y, block.norm("post_ffw_norm_2", block.saved(experts_output)))
    return ops.add(block.norm("post_ffw_norm", block.saved(y)), h)


def gated(block: BlockBuilder, x: Tensor, suffix: str = "") -> Tensor:
    """Compute activation(W_gate x) * (W_up x): x (..., C) -> (..., F), the input of ffn_down; `suffix` ends names."""
    gate, up = (block.saved(block.linear(f"{name}{suffix}", x)) for name in ("ffn_gate", "ffn_up"))
    if block.block_index < block.config.traits.num_sparse_blocks:
        gate = block.saved(block.named("ffn_gate_sparse", sparsify_gate(gate)))
    if block.config.traits.use_gelu:
        return block.named(f"ffn_geglu{suffix}", ops.geglu(gate, up))
    return block.named(f"ffn_swiglu{suffix}", ops.swiglu(gate, up))


def sparsify_gate(gate: Tensor) -> Tensor:
    """Compute relu(gates (..., F) - their mean - 1.64 deviations): one of 20 normal values stays above 0."""
    centered = ops.sub(gate, ops.mean_rows(gate))
    squares = ops.sum_rows(ops.sqr(centered))  # llama.cpp divides by F - 1, transformers by F
    deviation = ops.sqrt(ops.scale(squares, by=1 / (gate.shape[-1] - 1), bias=altup.NORM_EPS))
    return ops.relu(ops.sub(centered, ops.scale(deviation, by=SPARSITY_DEVIATIONS)))


def add_shared_expert(block: BlockBuilder, x: Tensor, h: Tensor) -> Tensor:
    """Add to h (..., C) the shared expert's output for x (..., C), times a sigmoid gate if the model has one."""
    y = block.saved(gated(block, x, "_shexp"))
    if not block.config.traits.gated_shared_expert:
        return block.linear("ffn_down_shexp", y, h)
    gate_row = ops.reshape(block.weight("ffn_gate_inp_shexp"), shape=(1, x.shape[-1]))
    expert_share = block.named("ffn_gate_inp_shexp", ops.sigmoid(ops.matmul(x, gate_row)))
    return ops.add(ops.mul(block.linear("ffn_down_shexp", y), expert_share), h)


def ungated_feed_forward(block: BlockBuilder, x: Tensor) -> Tensor:
    """Compute gelu, or relu squared, of ffn_up x: (..., C) -> (..., F)."""
    up = block.saved(block.linear("ffn_up", x))
    if block.config.traits.use_gelu:
        return block.named("ffn_gelu", ops.gelu(up))
    return block.named("ffn_relu_sqr", ops.sqr(ops.relu(up)))


def mixture(block: BlockBuilder, x: Tensor, h: Tensor | None, read: Tensor | None = None) -> Tensor:
    """Return (..., C): h (None: 0) plus the mixture of experts' outputs for x; the router reads `read` (None: x)."""
    config, traits = block.config, block.config.traits
    names = {"gate_inp": "ffn_gate_inp", **{n: f"ffn_{n}_exps" for n in ("gate", "up", "down")}}
    if config.has_weight("ffn_gate_up_exps"):
        names = {**names, "gate": "ffn_gate_up_exps"}
        del names["up"]
    weights = {key: block.weight(name) for key, name in names.items()}
    adapters_or_none = {key: block.lora_of(name) for key, name in names.items()}
    low = {key: adapter for key, adapter in adapters_or_none.items() if adapter is not None}
    biased = {key: name for key, name in names.items() if f"{name}.bias" in config.optional}
    biases = {key: block.weight(name, "bias") for key, name in biased.items()}
    offsets = block.weight(*CHOICE.split(".")) if CHOICE in config.optional else None
    matrices = weights["gate_inp"], weights["gate"], weights.get("up"), weights["down"]
    return ops.experts(
        x, *matrices, h, offsets, used=config.expert_used_count, norm=config.chosen_sum,
        sigmoids=config.uses_sigmoid_routing, groups=(config.expert_group_count or 1, config.expert_group_used_count),
        by=config.expert_weights_scale or 1.0,
        first=traits.weigh_expert_inputs, clamped=traits.clamped, biases=biases, low=low, read=read,
        gelu=traits.use_gelu, scales=block.weight("ffn_down_exps", "scale") if traits.parallel_dense_ffn else None,
    )  # fmt: skip
