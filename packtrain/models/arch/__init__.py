"""The architectures, one module each; to add one, write it and list it here."""

from importlib import import_module

from packtrain.models.arch.architecture import Architecture, Family

MODULE_NAMES = (
    "llama", "llama4", "mistral3", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "qwen3next", "qwen35",
    "qwen35moe", "ernie4_5_moe", "glm4moe", "gpt_oss", "olmoe", "gemma", "gemma2", "gemma3",
    "gemma3n", "gemma4", "phi3", "granitemoe", "deepseek2", "granite", "olmo2", "seed_oss",
    "ernie4_5", "exaone4", "glm4", "hunyuan_dense", "internlm2", "lfm2", "lfm2moe", "granitehybrid",
    "falcon_h1", "phi2", "gpt2", "starcoder2", "stablelm", "falcon", "nemotron", "cohere2", "smollm3",
)  # fmt: skip
MODULES = tuple(import_module(f"{__name__}.{name}") for name in MODULE_NAMES)
ARCHITECTURES: dict[str, Architecture] = {m.ARCHITECTURE.name: m.ARCHITECTURE for m in MODULES}


def families_by_class() -> dict[str, tuple[Architecture, Family]]:
    """Return the Architecture and Family that convert a checkpoint, by the model class in its config.json."""
    return {n: (a, f) for a in ARCHITECTURES.values() for f in a.families for n in f.model_classes}
