"""A checkpoint folder in Hugging Face's layout: config.json, tensors, and values of the config by kind, checked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.convert.plain import read_json
from packtrain.convert.safetensors import Stored, open_tensors
from packtrain.errors import InputError

CONFIG = "config.json"
MOST = 2**31 - 1
LANGUAGE = ("language_model.model.", "model.language_model.")  # prefixes in models that see, too
OTHERS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
UNUSED = ".rotary_emb.inv_freq"  # computed from the config


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds: the config of the language model, and its tensors as if it were alone."""

    folder: Path
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Stored]

    def wrong(self, key: str, value: Any, right: str) -> InputError:
        shown = "missing" if value is None else " ".join(repr(value).split())[:80]
        return InputError(f"{self.folder / CONFIG}: {key} is {shown}; it must be {right}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self._given(key, default)
        if type(value) is not int or not 0 < value <= MOST:
            raise self.wrong(key, value, f"a whole number from 1 to {MOST}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        return self.number(key, self._given(key, default))

    def number(self, key: str, value: Any) -> float:
        """A value that came from within the config, as a number above 0."""
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def one_of(self, key: str, default: Any, *allowed: Any) -> None:
        """Refuse a value that would change the computation in a way no architecture here knows."""
        value = self._given(key, default)
        if value not in allowed:
            raise self.wrong(key, value, " or ".join(map(repr, allowed)))

    def _given(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises InputError for what is no checkpoint of one language model."""
    if not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; give the one with {CONFIG} and the tensors")
    config = read_json(folder / CONFIG)
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or not kinds or not isinstance(kinds[0], str):
        raise InputError(f"{folder / CONFIG}: architectures must name the model's class")
    if isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if config.get("quantization_config"):
        raise InputError(
            f"{folder / CONFIG}: quantization_config is there; only weights in f32, f16 or bf16 are converted"
        )
    tensors: dict[str, Stored] = {}
    for name, stored in open_tensors(folder).items():
        if not name.startswith(OTHERS) and not name.endswith(UNUSED):
            tensors[alone(name)] = stored
    return Checkpoint(folder, kinds[0], config, tensors)


def alone(name: str) -> str:
    """A tensor's name as it is in the language model alone."""
    for prefix in LANGUAGE:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")
