"""The architectures, one module each; to add one, write it and list it here."""

from packtrain.models.arch import (
    cohere2,
    deepseek2,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm4,
    glm4moe,
    gpt2,
    gpt_oss,
    granite,
    granitehybrid,
    granitemoe,
    hunyuan_dense,
    internlm2,
    lfm2,
    lfm2moe,
    llama,
    llama4,
    mistral3,
    nemotron,
    olmo2,
    olmoe,
    phi2,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen35,
    qwen35moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from packtrain.models.arch.architecture import Architecture, Family

MODULES = (
    *(
        llama,
        llama4,
        mistral3,
        qwen2,
        qwen3,
        qwen2moe,
        qwen3moe,
        qwen3next,
        qwen35,
        qwen35moe,
        ernie4_5_moe,
        glm4moe,
        gpt_oss,
        olmoe,
        gemma,
        gemma2,
        gemma3,
        gemma3n,
        gemma4,
        phi3,
    ),
    granitemoe,
    deepseek2,
    *(granite, olmo2, seed_oss, ernie4_5, exaone4, glm4, hunyuan_dense, internlm2),
    *(lfm2, lfm2moe, granitehybrid, falcon_h1),
    *(phi2, gpt2, starcoder2, stablelm, falcon, nemotron, cohere2, smollm3),
)
ARCHITECTURES: dict[str, Architecture] = {m.ARCHITECTURE.name: m.ARCHITECTURE for m in MODULES}


def classes() -> dict[str, tuple[Architecture, Family]]:
    """Architecture and family of checkpoints by their model class."""
    return {
        name: (architecture, family)
        for architecture in ARCHITECTURES.values()
        for family in architecture.families
        for name in family.classes
    }
