"""Architectures that packtrain does not have, by llama.cpp's names, and the feature that each would need."""

ARCHITECTURES_BY_NEED = {
    "multi-head latent attention": "deepseek2-ocr minicpm3 plm",
    "multi-head latent attention and an indexer": "deepseek32 glm-dsa dots3note hy_v4",
    "multi-head latent attention and a gated delta net": "kimi-linear kimi-k3 bailingmoe3 glm5-next",
    "state-space layers (scans)": "mamba mamba2 jamba plamo2 nemotron_h nemotron_h_moe",
    "a gated delta net": "qwen4exp", "the time mixing of RWKV": "rwkv6 rwkv6qwen2 rwkv7 arwkv7",
    "lightning attention": "minimax-01",
    "experts with shared ones, or with their kind of routing":
        "afmoe arctic bailingmoe bailingmoe2 cohere2moe dbrx deepseek dots1 exaone-moe"
        " grok grovemoe hunyuan-moe laguna maple minimax-m2 phimoe smallthinker step35 hy_v3",
    "experts and attention sinks": "granite_swa mimo2 dflash deepseek4", "positions by ALiBi": "bloom mpt refact jais",
    "attention in both directions":
        "bert modern-bert neo-bert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3 eurobert gemma-embedding"
        " llama-embed dream llada llada-moe rnd1",
    "an encoder with cross-attention": "t5 t5encoder",
    "images": "clip qwen2vl qwen3vl qwen3vlmoe cogvlm hunyuan_vl chameleon paddleocr",
    "sound": "wavtokenizer-dec qwen3tts pockettts", "ternary matrices with scales": "bitnet",
}  # fmt: skip
NEEDED = {name: need for need, names in ARCHITECTURES_BY_NEED.items() for name in names.split()}
