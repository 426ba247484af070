"""Names and shapes of a model's tensors, for every architecture. Names are those of GGUF files."""

from packtrain.models.arch import architecture as arch
from packtrain.models.config import Config

Shapes = dict[str, tuple[int, ...]]
KV_WEIGHTS = "attn_k", "attn_v", "attn_k_norm"
POSITIONS, HEAD_BIAS = "position_embd.weight", "output.bias"


def weight_shapes(config: Config) -> Shapes:
    """Return the shapes of all weights by full GGUF name, those of LoRA adapters last."""
    c, optional = config.embedding_length, config.optional
    shapes_by_name: Shapes = {"token_embd.weight": (config.vocab_size, c)}
    if config.traits.learned_positions:
        shapes_by_name[POSITIONS] = (config.context_length, c)
    shapes_by_name |= _layer_shapes(config) if config.embedding_length_per_layer else {}
    if num_extra := config.traits.num_streams and config.traits.num_streams - 1:
        names = f"{arch.STREAMS_IN}.weight", f"{arch.STREAMS_OUT}.weight"
        shapes_by_name |= dict.fromkeys(names, (num_extra, c, c))
    for i in range(config.block_count):
        shapes_by_name |= {f"blk.{i}.{n}": shape for n, shape in block_shapes(config, i).items()}
    shapes_by_name |= _with_biases(config, {config.traits.last_norm: (c,)})
    if not config.tied:
        shapes_by_name |= _with_biases(config, {"output": (config.vocab_size, c)})
    shapes_by_name |= {n: (config.rope_width // 2,) for n in optional if n.startswith("rope_")}
    if config.lora is not None:
        unread_names = {*unused_weights(config)}
        read = {name: shape for name, shape in shapes_by_name.items() if name not in unread_names}
        shapes_by_name |= dict(config.lora.adapter_shapes(read, config.block_count))
    return shapes_by_name


def block_shapes(config: Config, i: int) -> Shapes:
    """Return the shapes of block i's weights by name within the block, each followed by its bias if there is one."""
    mixer_shapes = _attention_shapes(config, i) if config.attends(i) else {}
    if config.conv_width and not config.attends(i):
        mixer_shapes = _conv_shapes(config)
    if config.has_scan(i):
        mixer_shapes |= _delta_shapes(config) if config.traits.delta else _scan_shapes(config)
    has_norm = config.traits.pre_norms and not config.is_parallel
    norm_shapes: Shapes = {config.traits.ffn_norm: (config.embedding_length,)} if has_norm else {}
    named_shapes = mixer_shapes | norm_shapes
    has_experts, has_dense = config.has_experts(i), config.traits.parallel_dense_ffn
    named_shapes |= _feed_forward_shapes(config, i) if has_dense or not has_experts else {}
    named_shapes |= _expert_shapes(config) if has_experts else {}
    if p := config.embedding_length_per_layer:
        width = config.embedding_length
        named_shapes |= {"inp_gate": (p, width), "proj": (width, p), "post_norm": (width,)}
    named_shapes |= _stream_shapes(config) if config.traits.num_streams else {}
    shapes_by_name = _with_biases(config, named_shapes)
    shapes_by_name |= {arch.LAYER_SCALE: (1,)} if arch.LAYER_SCALE in config.optional else {}
    if has_experts and has_dense:
        scale_shapes = (config.embedding_length,), (config.expert_count,)
        shapes_by_name |= dict(zip(arch.EXPERT_SCALES, scale_shapes, strict=True))
    if config.has_scan(i) and config.scan is not None:
        num_heads = config.scan.heads
        unsuffixed: Shapes = dict.fromkeys(arch.UNSUFFIXED_SCAN_WEIGHTS, (num_heads, 1))
        if config.traits.delta:
            unsuffixed = {arch.UNSUFFIXED_SCAN_WEIGHTS[0]: (num_heads,)}
        shapes_by_name |= {"ssm_dt.bias": (num_heads,), **unsuffixed}
    has_choice_bias = config.has_experts(i) and arch.CHOICE in config.optional
    return shapes_by_name | ({arch.CHOICE: (config.expert_count,)} if has_choice_bias else {})


def _layer_shapes(config: Config) -> Shapes:
    """Return the shapes of the embeddings that each block has for itself."""
    p, c = config.embedding_length_per_layer, config.embedding_length
    total_width = config.block_count * p
    parts: tuple[tuple[int, ...], ...] = ((config.vocab_size, total_width), (total_width, c), (p,))
    return {f"{name}.weight": shape for name, shape in zip(arch.LAYER_INPUTS, parts, strict=True)}


def _stream_shapes(config: Config) -> Shapes:
    """Return the shapes of a block's weights for several residual streams."""
    s, c = config.traits.num_streams, config.embedding_length
    rates: Shapes = {"altup_correct_coef": (s, s), "altup_predict_coef": (s * s, s)}
    return rates | {"altup_correct_scale": (c,), "altup_router": (s, c), "altup_router_norm": (c,)}


def unused_weights(config: Config) -> list[str]:
    """Return tensors that files may have and nothing reads: keys and values of blocks that use other blocks'. llama.cpp
    demands them if the number of blocks with their own is fixed: then they are weights, too."""
    sharing_blocks = (i for i in range(config.block_count) if config.source_of(i) != i)
    return [f"blk.{i}.{name}.weight" for i in sharing_blocks for name in KV_WEIGHTS]


def _with_biases(config: Config, named_shapes: Shapes) -> Shapes:
    """Add ".weight" to names within a block, and after each its bias (its first axis) if the model has one."""
    shapes_by_name, traits = Shapes(), config.traits
    for name, shape in named_shapes.items():
        is_bare = traits.unsuffixed_ffn_norm and name == traits.ffn_norm
        shapes_by_name[name if is_bare else f"{name}.weight"] = shape
        if f"{name}.bias" in config.optional:
            shapes_by_name[f"{name}.bias"] = shape[:-1] or shape
    return shapes_by_name


def _attention_shapes(config: Config, i: int) -> Shapes:
    if config.kv_lora_rank:
        return _latent_attention_shapes(config)
    c, d, traits = config.embedding_length, config.width_of(i), config.traits
    q, kv = config.head_count * d, config.kv_heads_of(i) * d
    q_rows = 2 * q if traits.gated_heads else q
    separate_shapes: Shapes = {"attn_q": (q_rows, c), "attn_k": (kv, c), "attn_v": (kv, c)}
    named_shapes: Shapes = {"attn_norm": (c,)} if traits.pre_norms else {}
    named_shapes |= {"attn_norm_2": (c,)} if config.has_weight("attn_norm_2") else {}
    named_shapes |= {"attn_qkv": (q + 2 * kv, c)} if config.has_fused_qkv else separate_shapes
    named_shapes |= {"attn_q_norm": (d,), "attn_k_norm": (d,)} if traits.head_norms else {}
    named_shapes |= {"attn_q_norm": (q,), "attn_k_norm": (kv,)} if traits.joint_qk_norms else {}
    if config.has_weight("attn_q_norm"):  # a layer norm of each head, or one for all
        per_head = {"attn_q_norm": (config.head_count, d), "attn_k_norm": (config.head_count_kv, d)}
        named_shapes |= per_head if traits.layer_norms else dict.fromkeys(per_head, (d,))
    named_shapes |= {"attn_sinks": (config.head_count,)} if traits.attention_sinks else {}
    gone = KV_WEIGHTS if config.source_of(i) != i and not traits.num_kv_blocks else ()
    gone = ("attn_v", *gone) if config.keys_are_values and not config.has_window(i) else gone
    named_shapes = {name: shape for name, shape in named_shapes.items() if name not in gone}
    if r := traits.laurel_rank:
        named_shapes |= {"laurel_l": (r, c), "laurel_r": (c, r), "laurel_post_norm": (c,)}
    named_shapes["attn_output"] = (c, q)
    return named_shapes | ({"post_attention_norm": (c,)} if traits.post_norms else {})


def _conv_shapes(config: Config) -> Shapes:
    c = config.embedding_length
    filter_shapes = {arch.FILTERS.removesuffix(".weight"): (c, config.conv_width)}
    return {"attn_norm": (c,), **filter_shapes, arch.CONV_INPUT: (3 * c, c), arch.CONV_OUT: (c, c)}


def _latent_attention_shapes(config: Config) -> Shapes:
    width, num_heads, rank, rope_width = (
        config.embedding_length, config.head_count, config.kv_lora_rank, config.rope_width,
    )  # fmt: skip
    nope_width, v, q_rank = config.head_width - rope_width, config.value_width, config.q_lora_rank
    num_q_rows = num_heads * config.head_width
    q_shapes: Shapes = {"attn_q": (num_q_rows, width)}
    if q_rank:
        q_shapes = {"attn_q_a": (q_rank, width), "attn_q_a_norm": (q_rank,)}
        q_shapes["attn_q_b"] = (num_q_rows, q_rank)
    named_shapes: Shapes = {"attn_norm": (width,), **q_shapes}
    named_shapes |= {"attn_kv_a_mqa": (rank + rope_width, width), "attn_kv_a_norm": (rank,)}
    kv_shapes: Shapes = {"attn_kv_b": (num_heads * (nope_width + v), rank)}
    if config.has_latent_cache:
        kv_shapes = {"attn_k_b": (num_heads, rank, nope_width), "attn_v_b": (num_heads, v, rank)}
    named_shapes |= kv_shapes
    return named_shapes | {"attn_output": (width, num_heads * v)}


def _scan_shapes(config: Config) -> Shapes:
    width, scan = config.embedding_length, config.scan
    assert scan is not None
    group_width = scan.inner // scan.groups
    norm: Shapes = {"ssm_norm": (scan.groups, group_width)} if config.has_weight("ssm_norm") else {}
    return {
        "attn_norm": (width,), arch.SCAN_INPUT: (sum(scan.input_rows), width),
        arch.SCAN_FILTERS.removesuffix(".weight"): (scan.conv_channels, scan.taps), **norm,
        arch.SCAN_OUT: (width, scan.inner),
    }  # fmt: skip


def _delta_shapes(config: Config) -> Shapes:
    width, scan = config.embedding_length, config.scan
    assert scan is not None
    head_shapes = {arch.DELTA_HEADS: (2 * scan.heads, width)}
    if config.traits.delta == "tiled":
        head_shapes = dict.fromkeys(arch.DELTA_EACH, (scan.heads, width))
    return {
        "attn_norm": (width,), "attn_qkv": (scan.conv_channels, width), "attn_gate": (scan.inner, width),
        arch.SCAN_FILTERS.removesuffix(".weight"): (scan.conv_channels, scan.taps), **head_shapes,
        "ssm_norm": (scan.inner // scan.heads,), arch.SCAN_OUT: (width, scan.inner),
    }  # fmt: skip


def _feed_forward_shapes(config: Config, i: int) -> Shapes:
    c, f, traits = config.embedding_length, config.feed_forward_of(i), config.traits
    parts: Shapes = {}
    if traits.fused_ffn:
        parts["ffn_up"] = (2 * f, c)
    else:
        parts |= {"ffn_gate": (f, c), "ffn_up": (f, c)} if traits.gated else {"ffn_up": (f, c)}
    parts["ffn_down"] = (c, f)
    return parts | ({"post_ffw_norm": (c,)} if traits.post_norms else {})


def _expert_shapes(config: Config) -> Shapes:
    c, f, e = config.embedding_length, config.expert_width, config.expert_count
    parts: Shapes = {"ffn_gate_inp": (e, c), "ffn_gate_exps": (e, f, c), "ffn_up_exps": (e, f, c)}
    parts["ffn_down_exps"] = (e, c, f)
    if config.has_weight("ffn_gate_up_exps"):
        parts["ffn_gate_up_exps"] = (e, 2 * f, c)
        parts = {n: s for n, s in parts.items() if n not in ("ffn_gate_exps", "ffn_up_exps")}
    if config.traits.parallel_dense_ffn:
        parts |= dict.fromkeys(("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"), (c,))
    if not (s := config.expert_shared_feed_forward_length):
        return parts
    parts |= {"ffn_gate_inp_shexp": (c,)} if config.traits.gated_shared_expert else {}
    return parts | {"ffn_gate_shexp": (s, c), "ffn_up_shexp": (s, c), "ffn_down_shexp": (c, s)}
