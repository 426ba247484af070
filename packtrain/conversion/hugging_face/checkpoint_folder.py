"""Opens a checkpoint folder in Hugging Face's layout: the values of config.json, and tensors."""

from dataclasses import dataclass
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face.plain_checkpoint import read_json
from packtrain.conversion.hugging_face.safetensors import SafetensorsTensor, open_tensors
from packtrain.models.arch.hf_config import HFConfig

CONFIG = "config.json"
LANGUAGE_PREFIXES = ("language_model.model.", "model.language_model.")  # prefixes in vision models
OTHER_PREFIXES = (
    "vision_tower.", "vision_model.", "visual.", "model.visual.", "mtp.", "model.mtp.",
    "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
    "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
)  # fmt: skip
UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # computed from the config


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The config and the tensors of the language model in a folder."""

    folder: Path
    model_class: str
    config: HFConfig
    tensors: dict[str, SafetensorsTensor]


def open_checkpoint(folder: Path) -> CheckpointFolder:
    """Open the checkpoint in a folder. Raises InputError if it is not a checkpoint of a language model."""
    if not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; give the folder of {CONFIG} and the tensors")
    config = read_json(folder / CONFIG)
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or not kinds or not isinstance(kinds[0], str):
        raise InputError(f"{folder / CONFIG}: architectures must name the model's class")
    if isinstance(text := config.get("text_config"), dict):
        shared_keys = text.keys() & config.keys() - {"architectures", "model_type"}
        for key in sorted(shared_keys) if kinds[0].endswith("ForCausalLM") else ():
            if text[key] != config[key]:
                fact = f"{folder / CONFIG}: {key} is {config[key]!r}"
                raise InputError(fact, f"it must be {text[key]!r}, as in text_config")
        config = {**config, **text}
    packed = config.get("quantization_config")
    if packed and not (isinstance(packed, dict) and packed.get("quant_method") == "mxfp4"):
        raise InputError(
            f"{folder / CONFIG}: quantization_config is present; only weights in f32, f16 or bf16 and gpt-oss's MXFP4"
            " are converted"
        )
    tensors: dict[str, SafetensorsTensor] = {}
    for name, stored_tensor in open_tensors(folder).items():
        if not name.startswith(OTHER_PREFIXES) and not name.endswith(UNUSED_SUFFIX):
            tensors[language_model_name(name)] = stored_tensor
    if not tensors:
        raise InputError(f"{folder}: its files have no tensors of a language model")
    return CheckpointFolder(folder, kinds[0], HFConfig(folder / CONFIG, config), tensors)


def language_model_name(name: str) -> str:
    """Return a tensor's name without the prefix of a vision model."""
    for prefix in LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")
