"""One block of a transformer as graph functions: what mixes tokens, and a feed-forward, for every architecture.

Activations have the names of GGUF tensors; a Mixer is what mixes the values of a block's tokens.
"""

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor
from packtrain.models import altup, latent_attention, mamba
from packtrain.models.arch.architecture import CHOICE, CONV_IN, CONV_OUT, LAYER_SCALE, SCAN_OUT
from packtrain.models.block_weights import Block, Mixer, Tables, Weights
from packtrain.models.config import Config

DEVIATIONS = 1.6448533535003662  # 19 of 20 normal values are below; as gemma3n.cpp has it


def block(
    config: Config, w: Weights, i: int, h: Tensor, tables: Tables, mixer: Mixer,
    embeddings: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One transformer block: h (..., C) -> (..., C); embeddings (..., L, P), if blocks have some of their own.

    Of several streams (..., S, C) it computes with one.
    """
    part = Block(config, w, i)
    if config.traits.streams:
        guess = altup.predicted(part, h)
        h = altup.corrected(part, guess, computed(part, altup.one(guess), tables, mixer))
        first = ops.mul(altup.one(h), part.weight("altup_correct_scale"))
        return h if embeddings is None else altup.added(h, embedded(part, first, embeddings))
    h = computed(part, h, tables, mixer)
    h = h if embeddings is None else ops.add(embedded(part, h, embeddings), h)
    return ops.mul(h, part.weight("layer_output_scale")) if LAYER_SCALE in config.optional else h


def computed(part: Block, h: Tensor, tables: Tables, mixer: Mixer) -> Tensor:
    """h (..., C) plus what mixes tokens, and plus the feed-forward."""
    config, i, traits = part.config, part.number, part.config.traits
    x = read = part.saved(part.norm("attn_norm", h)) if traits.pre_norms else h
    if config.has("attn_norm_2"):
        read = part.saved(part.norm("attn_norm_2", h))
    if config.attends(i):
        mixed = latent_attention.attention if config.kv_lora_rank else attention
        y = mixed(part, read, tables, mixer)
        h = part.join("attn_output", y, "post_attention_norm", h)
    elif config.conv_width:
        h = part.join(CONV_OUT, short_conv(part, read, mixer), "", h)
    if config.scans(i):
        scanned = mamba.ruled if traits.delta else mamba.mixed
        h = part.join(SCAN_OUT, scanned(part, read, mixer), "", h)
    if traits.laurel:
        h = ops.scale(ops.add(h, low_rank(part, read)), by=0.5**0.5)
    if not config.parallel:
        x = part.saved(part.norm(traits.ffn_norm, h)) if traits.pre_norms else h
    return feed_forward(part, x, h)


def low_rank(part: Block, x: Tensor) -> Tensor:
    """x (..., C) plus its product with two narrow matrices, normalized: LAuReL, arXiv 2411.07501."""
    y = part.linear("laurel_r", part.saved(part.linear("laurel_l", x)))
    return ops.add(part.norm("laurel_post_norm", part.saved(y)), x)


def embedded(part: Block, h: Tensor, embeddings: Tensor) -> Tensor:
    """What the block makes of its own embeddings of the tokens, gated by h (..., C). Google, Gemma 3n."""
    axis = len(embeddings.shape) - 2
    block_embedding = ops.cont(ops.narrow(embeddings, axis=axis, start=part.number, length=1))
    gate = part.saved(part.linear("inp_gate", part.saved(h)))
    block_embedding = ops.reshape(block_embedding, shape=gate.shape)
    y = part.saved(part.named("inp_gated", ops.geglu(gate, block_embedding)))
    return part.norm("post_norm", part.saved(part.linear("proj", y)))


def attention(part: Block, x: Tensor, tables: Tables, mixer: Mixer) -> Tensor:
    """The heads' mixed values, side by side: x (..., C) -> (..., H D)."""
    config, i = part.config, part.number
    traits = config.traits
    q, gate = part.heads("attn_q", x, config.head_count), None
    if traits.gated_heads:
        q, gate = (
            ops.narrow(q, axis=len(q.shape) - 1, start=at, length=config.head_width)
            for at in (0, config.head_width)
        )
    qk, v = [q], None
    if config.source_of(i) == i:
        qk.append(part.heads("attn_k", x, config.kv_heads_of(i)))
        v = values(part, x, qk[1])
    by_heads = traits.head_norms or config.has("attn_q_norm")
    if by_heads and not traits.late_norms:
        qk = part.norm_heads(qk)
    rope = config.rope_of(i)
    if rope is not None:
        rope_inputs = zip("qk", qk, tables[rope], strict=False)
        qk = [
            part.named(f"{n}_rope", ops.rope(x, t, neox=traits.halves)) for n, x, t in rope_inputs
        ]
        if config.plain_norms:
            qk = [ops.rms_norm(part.saved(x), eps=config.rms_eps) for x in qk]
    elif traits.warmth:
        qk[0] = ops.mul(qk[0], tables[None][0])
    if traits.late_norms:
        qk = part.norm_heads(qk)
    sinks = part.weight("attn_sinks") if traits.sinks else None
    q, *k = map(part.saved, qk)
    new_kv = (k[0], part.saved(v)) if k and v is not None else (None, None)
    y = mixer.attend(i, q, new_kv[0], new_kv[1], sinks)
    if gate is not None:
        share = ops.sigmoid(part.saved(ops.cont(gate)))
        y = ops.mul(part.saved(y), part.named("attn_gated", share))
    return ops.reshape(y, shape=(*x.shape[:-1], config.head_count * config.width_of(i)))


def values(part: Block, x: Tensor, k: Tensor) -> Tensor:
    """The values of heads, (..., K, D); k are the keys as they come from their matrix."""
    config, i = part.config, part.number
    like_keys = config.keys_are_values and not config.near(i)
    v = k if like_keys else part.heads("attn_v", x, config.kv_heads_of(i))
    if not config.traits.value_norms:
        return v
    return part.named("attn_v_norm", ops.rms_norm(part.saved(v), eps=config.rms_eps))


def short_conv(part: Block, x: Tensor, mixer: Mixer) -> Tensor:
    """A short convolution between two gates: x (..., C) -> (..., C). Liquid AI, LFM2: arXiv 2511.23404."""
    before, after, x = (part.saved(part.linear(name, x)) for name in CONV_IN)
    x = part.saved(part.named("shortconv.gated", ops.mul(before, x)))
    y = mixer.convolve(part.number, x, part.weight("shortconv.conv"))
    return part.saved(ops.mul(after, part.saved(part.named("shortconv.conv", y))))


def feed_forward(part: Block, x: Tensor, h: Tensor) -> Tensor:
    """h plus the feed-forward of x, or of the experts for x: both (..., C) -> (..., C)."""
    by = part.config.residual_scale
    if part.config.mixture(part.number) and part.config.traits.dense_beside:
        return beside(part, x, h)
    if part.config.mixture(part.number):
        y = part.named("ffn_experts", mixture(part, x, None if by else h))
        y = shared(part, x, y) if part.config.expert_shared_feed_forward_length else y
        return ops.add(ops.scale(y, by=by), h) if by else y
    y = gated(part, x) if part.config.traits.gated else activated(part, x)
    return part.join("ffn_down", part.saved(y), "post_ffw_norm", h)


def beside(part: Block, x: Tensor, h: Tensor) -> Tensor:
    """h plus a feed-forward of x and the output of experts that read h, each normalized, and their sum. gemma4.cpp."""
    eps, by = part.config.rms_eps, part.config.embedding_length**-0.5
    y = part.linear("ffn_down", part.saved(gated(part, x)))
    y = part.norm("post_ffw_norm_1", part.saved(y))
    router_input = ops.mul(
        ops.rms_norm(part.saved(h), eps=eps), part.weight("ffn_gate_inp", "scale")
    )
    expert_input = part.saved(part.norm("pre_ffw_norm_2", h))
    z = part.named(
        "ffn_experts", mixture(part, expert_input, None, part.saved(ops.scale(router_input, by=by)))
    )
    y = ops.add(y, part.norm("post_ffw_norm_2", part.saved(z)))
    return ops.add(part.norm("post_ffw_norm", part.saved(y)), h)


def gated(part: Block, x: Tensor, end: str = "") -> Tensor:
    gate, up = (part.saved(part.linear(f"{name}{end}", x)) for name in ("ffn_gate", "ffn_up"))
    if part.number < part.config.traits.sparse_blocks:
        gate = part.saved(part.named("ffn_gate_sparse", sparse(gate)))
    if part.config.traits.gelu:
        return part.named(f"ffn_geglu{end}", ops.geglu(gate, up))
    return part.named(f"ffn_swiglu{end}", ops.swiglu(gate, up))


def sparse(gate: Tensor) -> Tensor:
    """By how much gates (..., F) exceed their mean and so many deviations that one of 20 normal values does, or 0."""
    off = ops.sub(gate, ops.mean_rows(gate))
    squares = ops.sum_rows(ops.sqr(off))
    deviation = ops.sqrt(ops.scale(squares, by=1 / (gate.shape[-1] - 1), bias=altup.TINY))
    return ops.relu(ops.sub(off, ops.scale(deviation, by=DEVIATIONS)))


def shared(part: Block, x: Tensor, h: Tensor) -> Tensor:
    """h plus the output of the expert that all tokens have, which a gate may weigh."""
    y = part.saved(gated(part, x, "_shexp"))
    if not part.config.traits.shared_gate:
        return part.linear("ffn_down_shexp", y, h)
    row = ops.reshape(part.weight("ffn_gate_inp_shexp"), shape=(1, x.shape[-1]))
    share = part.named("ffn_gate_inp_shexp", ops.sigmoid(ops.matmul(x, row)))
    return ops.add(ops.mul(part.linear("ffn_down_shexp", y), share), h)


def activated(part: Block, x: Tensor) -> Tensor:
    """Without a gate: gelu, or the square of relu."""
    up = part.saved(part.linear("ffn_up", x))
    if part.config.traits.gelu:
        return part.named("ffn_gelu", ops.gelu(up))
    return part.named("ffn_relu_sqr", ops.sqr(ops.relu(up)))


def mixture(part: Block, x: Tensor, h: Tensor | None, read: Tensor | None = None) -> Tensor:
    """h, if it is there, plus the output of the experts for x, with their LoRA adapters; they are chosen by `read`."""
    config, traits = part.config, part.config.traits
    names = {"gate_inp": "ffn_gate_inp", **{n: f"ffn_{n}_exps" for n in ("gate", "up", "down")}}
    if config.has("ffn_gate_up_exps"):
        names = {**names, "gate": "ffn_gate_up_exps"}
        del names["up"]
    w = {short: part.weight(name) for short, name in names.items()}
    adapters = {short: part.low(name) for short, name in names.items()}
    low = {short: addition for short, addition in adapters.items() if addition is not None}
    biases = {
        short: part.weight(name, "bias")
        for short, name in names.items()
        if f"{name}.bias" in config.optional
    }
    offsets = part.weight(*CHOICE.split(".")) if CHOICE in config.optional else None
    matrices = w["gate_inp"], w["gate"], w.get("up"), w["down"]
    return ops.experts(
        x, *matrices, h, offsets, used=config.expert_used_count, norm=config.chosen_sum,
        sigmoids=config.sigmoids, groups=config.expert_groups, by=config.expert_weights_scale or 1.0,
        first=traits.weighed_first, clamped=traits.clamped, biases=biases, low=low, read=read,
        gelu=traits.gelu, scales=part.weight("ffn_down_exps", "scale") if traits.dense_beside else None,
    )  # fmt: skip
