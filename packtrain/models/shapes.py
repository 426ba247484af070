"""Names and shapes of a model's tensors, for every architecture. Names are those of GGUF files."""

from packtrain.models.config import Config

Shapes = dict[str, tuple[int, ...]]
POSITIONS, HEAD_BIAS = "position_embd.weight", "output.bias"


def shapes(config: Config) -> Shapes:
    """Shapes of all weights by name, those of LoRA adapters last."""
    c, found = config.embedding_length, config.optional
    made: Shapes = {"token_embd.weight": (config.vocab_size, c)}
    if config.traits.learned_positions:
        made[POSITIONS] = (config.context_length, c)
    block = block_shapes(config)
    for i in range(config.block_count):
        made |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    made |= _with_biases(config, {"output_norm": (c,)})
    if not config.tied:
        made |= _with_biases(config, {"output": (config.vocab_size, c)})
    made |= {name: (config.rope_width // 2,) for name in found if name.startswith("rope_")}
    if config.lora is not None:
        made |= dict(config.lora.shapes(made, config.block_count))
    return made


def block_shapes(config: Config) -> Shapes:
    """Shapes of the weights of a block by their names within it, each followed by its bias if there is one."""
    return _with_biases(config, _attention_shapes(config) | _feed_forward_shapes(config))


def _with_biases(config: Config, parts: Shapes) -> Shapes:
    made: Shapes = {}
    for name, shape in parts.items():
        made[f"{name}.weight"] = shape
        if f"{name}.bias" in config.optional:
            made[f"{name}.bias"] = shape[:1]
    return made


def _attention_shapes(config: Config) -> Shapes:
    c, d, traits = config.embedding_length, config.head_width, config.traits
    q, kv = config.head_count * d, config.head_count_kv * d
    apart: Shapes = {"attn_q": (q, c), "attn_k": (kv, c), "attn_v": (kv, c)}
    made: Shapes = {"attn_norm": (c,)} if traits.pre_norms else {}
    made |= {"attn_norm_2": (c,)} if config.has("attn_norm_2") else {}
    made |= {"attn_qkv": (q + 2 * kv, c)} if config.fused else apart
    made |= {"attn_q_norm": (d,), "attn_k_norm": (d,)} if traits.head_norms else {}
    made |= {"attn_q_norm": (q,), "attn_k_norm": (kv,)} if traits.whole_norms else {}
    if config.has("attn_q_norm"):  # of each head its own
        made |= {"attn_q_norm": (config.head_count, d), "attn_k_norm": (config.head_count_kv, d)}
    made["attn_output"] = (c, q)
    return made | ({"post_attention_norm": (c,)} if traits.post_norms else {})


def _feed_forward_shapes(config: Config) -> Shapes:
    c, f, e, traits = (
        config.embedding_length, config.expert_width, config.expert_count, config.traits
    )  # fmt: skip
    made: Shapes = {traits.ffn_norm: (c,)} if traits.pre_norms and not config.parallel else {}
    if e:
        exps: Shapes = {"ffn_gate_exps": (e, f, c), "ffn_up_exps": (e, f, c)}
        exps["ffn_down_exps"] = (e, c, f)
        return made | {"ffn_gate_inp": (e, c)} | exps
    if traits.fused_ffn:
        made["ffn_up"] = (2 * f, c)
    else:
        made |= {"ffn_gate": (f, c), "ffn_up": (f, c)} if traits.gated else {"ffn_up": (f, c)}
    made["ffn_down"] = (c, f)
    return made | ({"post_ffw_norm": (c,)} if traits.post_norms else {})
