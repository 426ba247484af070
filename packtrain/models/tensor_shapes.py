"""Names and shapes of a model's tensors, for every architecture. Names are those of GGUF files."""

from packtrain.models.arch import architecture as arch
from packtrain.models.arch.architecture import BARE, CHOICE, LAYER_SCALE, SCAN_FILTERS, SCAN_OUT
from packtrain.models.config import Config

Shapes = dict[str, tuple[int, ...]]
OF_KEYS = "attn_k", "attn_v", "attn_k_norm"
POSITIONS, HEAD_BIAS = "position_embd.weight", "output.bias"


def shapes(config: Config) -> Shapes:
    """Shapes of all weights by name, those of LoRA adapters last."""
    c, optional = config.embedding_length, config.optional
    shapes_by_name: Shapes = {"token_embd.weight": (config.vocab_size, c)}
    if config.traits.learned_positions:
        shapes_by_name[POSITIONS] = (config.context_length, c)
    shapes_by_name |= _layer_shapes(config) if config.embedding_length_per_layer else {}
    if num_extra := config.traits.streams and config.traits.streams - 1:
        shapes_by_name |= {
            f"{name}.weight": (num_extra, c, c) for name in (arch.STREAMS_IN, arch.STREAMS_OUT)
        }
    for i in range(config.block_count):
        shapes_by_name |= {
            f"blk.{i}.{name}": shape for name, shape in block_shapes(config, i).items()
        }
    shapes_by_name |= _with_biases(config, {config.traits.last_norm: (c,)})
    if not config.tied:
        shapes_by_name |= _with_biases(config, {"output": (config.vocab_size, c)})
    shapes_by_name |= {
        name: (config.rope_width // 2,) for name in optional if name.startswith("rope_")
    }
    if config.lora is not None:
        unread_names = {*unread(config)}
        read = {name: shape for name, shape in shapes_by_name.items() if name not in unread_names}
        shapes_by_name |= dict(config.lora.shapes(read, config.block_count))
    return shapes_by_name


def block_shapes(config: Config, i: int) -> Shapes:
    """Shapes of the weights of block i by their names within it, each followed by its bias if there is one."""
    mixing = _attention_shapes(config, i) if config.attends(i) else {}
    if config.conv_width and not config.attends(i):
        mixing = _conv_shapes(config)
    if config.scans(i):
        mixing |= _delta_shapes(config) if config.traits.delta else _scan_shapes(config)
    parts = mixing | _feed_forward_norm(config)
    mixture, has_dense = config.mixture(i), config.traits.dense_beside
    parts |= _feed_forward_shapes(config, i) if has_dense or not mixture else {}
    parts |= _expert_shapes(config) if mixture else {}
    if p := config.embedding_length_per_layer:
        c = config.embedding_length
        parts |= {"inp_gate": (p, c), "proj": (c, p), "post_norm": (c,)}
    parts |= _stream_shapes(config) if config.traits.streams else {}
    shapes_by_name = _with_biases(config, parts)
    shapes_by_name |= {LAYER_SCALE: (1,)} if LAYER_SCALE in config.optional else {}
    if mixture and has_dense:
        scales = (config.embedding_length,), (config.expert_count,)
        shapes_by_name |= dict(zip(arch.EXPERT_SCALES, scales, strict=True))
    if config.scans(i) and config.scan is not None:
        heads = config.scan.heads
        unsuffixed = {BARE[0]: (heads,)} if config.traits.delta else dict.fromkeys(BARE, (heads, 1))
        shapes_by_name |= {"ssm_dt.bias": (heads,), **unsuffixed}
    chosen = config.mixture(i) and CHOICE in config.optional
    return shapes_by_name | ({CHOICE: (config.expert_count,)} if chosen else {})


def _layer_shapes(config: Config) -> Shapes:
    """Of embeddings that blocks have for themselves."""
    p, c = config.embedding_length_per_layer, config.embedding_length
    width = config.block_count * p
    parts: tuple[tuple[int, ...], ...] = ((config.vocab_size, width), (width, c), (p,))
    return {f"{name}.weight": shape for name, shape in zip(arch.LAYER_INPUTS, parts, strict=True)}


def _stream_shapes(config: Config) -> Shapes:
    """Of a block with several residual streams."""
    s, c = config.traits.streams, config.embedding_length
    rates: Shapes = {"altup_correct_coef": (s, s), "altup_predict_coef": (s * s, s)}
    return rates | {"altup_correct_scale": (c,), "altup_router": (s, c), "altup_router_norm": (c,)}


def unread(config: Config) -> list[str]:
    """Tensors that files may have and nothing reads: those of keys and values of blocks that share others'.

    llama.cpp demands them where the number of blocks that have their own is fixed: then they are weights, too.
    """
    sharing = (i for i in range(config.block_count) if config.source_of(i) != i)
    return [f"blk.{i}.{name}.weight" for i in sharing for name in OF_KEYS]


def _with_biases(config: Config, parts: Shapes) -> Shapes:
    shapes_by_name: Shapes = {}
    for name, shape in parts.items():
        is_bare = config.traits.bare_ffn_norm and name == config.traits.ffn_norm
        shapes_by_name[name if is_bare else f"{name}.weight"] = shape
        if f"{name}.bias" in config.optional:
            shapes_by_name[f"{name}.bias"] = shape[:-1] or shape
    return shapes_by_name


def _attention_shapes(config: Config, i: int) -> Shapes:
    if config.kv_lora_rank:
        return _latent_shapes(config)
    c, d, traits = config.embedding_length, config.width_of(i), config.traits
    q, kv = config.head_count * d, config.kv_heads_of(i) * d
    q_rows = 2 * q if traits.gated_heads else q
    separate: Shapes = {"attn_q": (q_rows, c), "attn_k": (kv, c), "attn_v": (kv, c)}
    parts: Shapes = {"attn_norm": (c,)} if traits.pre_norms else {}
    parts |= {"attn_norm_2": (c,)} if config.has("attn_norm_2") else {}
    parts |= {"attn_qkv": (q + 2 * kv, c)} if config.fused else separate
    parts |= {"attn_q_norm": (d,), "attn_k_norm": (d,)} if traits.head_norms else {}
    parts |= {"attn_q_norm": (q,), "attn_k_norm": (kv,)} if traits.whole_norms else {}
    if config.has("attn_q_norm"):  # a layer norm of each head, or one for all
        per_head = {"attn_q_norm": (config.head_count, d), "attn_k_norm": (config.head_count_kv, d)}
        parts |= per_head if traits.layer_norms else dict.fromkeys(per_head, (d,))
    parts |= {"attn_sinks": (config.head_count,)} if traits.sinks else {}
    gone = OF_KEYS if config.source_of(i) != i and not traits.owning_blocks else ()
    gone = ("attn_v", *gone) if config.keys_are_values and not config.near(i) else gone
    parts = {name: shape for name, shape in parts.items() if name not in gone}
    if r := traits.laurel:
        parts |= {"laurel_l": (r, c), "laurel_r": (c, r), "laurel_post_norm": (c,)}
    parts["attn_output"] = (c, q)
    return parts | ({"post_attention_norm": (c,)} if traits.post_norms else {})


def _conv_shapes(config: Config) -> Shapes:
    c = config.embedding_length
    filters = {arch.FILTERS.removesuffix(".weight"): (c, config.conv_width)}
    return {"attn_norm": (c,), **filters, arch.CONV_ROWS: (3 * c, c), arch.CONV_OUT: (c, c)}


def _latent_shapes(config: Config) -> Shapes:
    c, heads, rank, rope_width = (
        config.embedding_length, config.head_count, config.kv_lora_rank, config.rope_width,
    )  # fmt: skip
    nope_width, v, q_rank = config.head_width - rope_width, config.value_width, config.q_lora_rank
    q = heads * config.head_width
    parts: Shapes = {"attn_norm": (c,), "attn_q": (q, c)}
    if q_rank:
        parts = {
            "attn_norm": (c,),
            "attn_q_a": (q_rank, c),
            "attn_q_a_norm": (q_rank,),
            "attn_q_b": (q, q_rank),
        }
    parts |= {"attn_kv_a_mqa": (rank + rope_width, c), "attn_kv_a_norm": (rank,)}
    parts |= (
        {"attn_k_b": (heads, rank, nope_width), "attn_v_b": (heads, v, rank)}
        if config.latent
        else {"attn_kv_b": (heads * (nope_width + v), rank)}
    )
    return parts | {"attn_output": (c, heads * v)}


def _scan_shapes(config: Config) -> Shapes:
    c, scan = config.embedding_length, config.scan
    assert scan is not None
    each = scan.inner // scan.groups
    norm: Shapes = {"ssm_norm": (scan.groups, each)} if config.has("ssm_norm") else {}
    filters = {SCAN_FILTERS.removesuffix(".weight"): (scan.convolved, scan.taps)}
    return {
        "attn_norm": (c,),
        arch.SCAN_ROWS: (sum(scan.rows), c),
        **filters,
        **norm,
        SCAN_OUT: (c, scan.inner),
    }


def _delta_shapes(config: Config) -> Shapes:
    c, scan = config.embedding_length, config.scan
    assert scan is not None
    each = {arch.DELTA_HEADS: (2 * scan.heads, c)}
    if config.traits.delta == "tiled":
        each = dict.fromkeys(arch.DELTA_EACH, (scan.heads, c))
    return {
        "attn_norm": (c,),
        "attn_qkv": (scan.convolved, c),
        "attn_gate": (scan.inner, c),
        SCAN_FILTERS.removesuffix(".weight"): (scan.convolved, scan.taps),
        **each,
        "ssm_norm": (scan.inner // scan.heads,),
        SCAN_OUT: (c, scan.inner),
    }


def _feed_forward_norm(config: Config) -> Shapes:
    has_norm = config.traits.pre_norms and not config.parallel
    return {config.traits.ffn_norm: (config.embedding_length,)} if has_norm else {}


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
    if config.has("ffn_gate_up_exps"):
        parts["ffn_gate_up_exps"] = (e, 2 * f, c)
        parts = {n: s for n, s in parts.items() if n not in ("ffn_gate_exps", "ffn_up_exps")}
    if config.traits.dense_beside:
        parts |= dict.fromkeys(("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"), (c,))
    if not (s := config.expert_shared_feed_forward_length):
        return parts
    parts |= {"ffn_gate_inp_shexp": (c,)} if config.traits.shared_gate else {}
    return parts | {"ffn_gate_shexp": (s, c), "ffn_up_shexp": (s, c), "ffn_down_shexp": (c, s)}
