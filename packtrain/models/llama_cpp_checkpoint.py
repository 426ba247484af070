"""Checkpoints of llama.cpp's former train-text-from-scratch: a new run begins with their weights (train --from).

Such a GGUF file has the tensors of a llama in F32, keys `training.*` and the optimizer's state. The program wrote
training.file_version 1; its script convert-train-checkpoint-to-gguf.py wrote version 0, without vocabulary and context
length. The moments of all weights are one row, in the order in which the program walked its graph: it depended on flags
and on which order took less memory, and is not in the file. llama.cpp, common/train.cpp, save_train_state_gguf."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.options import flag
from packtrain.common.text import plural
from packtrain.engine.executor import Session
from packtrain.gguf import GGUF, MetadataValue
from packtrain.models.config import Config
from packtrain.models.model_file import TOKENS_KEY, ModelFile, check_tensors
from packtrain.models.model_metadata import read_config

VERSION_KEY, ITERATIONS_KEY = "training.file_version", "training.iteration_count"
VERSIONS, LORA = (0, 1), "finetune_lora"
OPTIMIZER = "optimizer."  # begins the keys and tensors of the optimizer's state
CONTEXT_KEY = "llama.context_length"
# settings of train that a checkpoint decides, and their values in its configuration
DECIDED_SETTINGS: Mapping[str, Callable[[Config], float]] = MappingProxyType(
    {
        "dim": lambda config: config.embedding_length, "layers": lambda config: config.block_count,
        "heads": lambda config: config.head_count, "kv_heads": lambda config: config.head_count_kv,
        "ffn": lambda config: config.feed_forward_length, "norm_rms_eps": lambda config: config.rms_eps,
        "rope_freq_base": lambda config: config.rope_freq_base,
        "rope_freq_scale": lambda config: 1 / config.rope_scaling.factor,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LlamaCppCheckpoint:
    """An open, validated checkpoint; `vocab` is the GGUF file with its vocabulary."""

    model: ModelFile
    vocab: Path
    num_iterations: int

    @property
    def name(self) -> str:
        return self.model.gguf.path.name

    def notes(self, settings: Any) -> Iterator[str]:
        """Yield what a new run takes from the checkpoint, and why no moments; nothing for a resumed run."""
        if not settings.resume:
            yield (
                f"the weights are those of {self.model.gguf.path} after {plural(self.num_iterations, 'iteration')};"
                " the optimizer begins with zero moments: the file does not say which moments belong to which weight"
            )

    def init_weights(self, session: Session) -> None:
        """Set all weights of a session."""
        for name in self.model.weight_names:
            session.set({name: self.model.weight(name)})

    def config(self, num_tokens: int) -> Config:
        """Return the model's Config. Raises InputError unless the embedding has `num_tokens` rows, the vocabulary's."""
        if num_tokens != self.model.config.vocab_size:
            raise InputError(
                f"{self.vocab}: its vocabulary has {plural(num_tokens, 'token')}, and token_embd.weight of"
                f" {self.model.gguf.path} {self.model.config.vocab_size} rows; both must be equal"
            )
        return self.model.config


def open_start(settings: Any) -> LlamaCppCheckpoint | None:
    """Open the checkpoint with whose weights the settings let a train run begin; None: with random weights. Raises
    InputError for another file, and for settings that the checkpoint contradicts."""
    path: Path | None = settings.from_checkpoint
    if path is None:
        return None
    gguf = GGUF(path)
    metadata = gguf.metadata
    _check_version(path, metadata)
    context = settings.ctx or metadata.get(CONTEXT_KEY)
    if context is None:
        raise InputError(f"--ctx must be given: {path} does not say its context length")
    gguf.values[CONTEXT_KEY] = MetadataValue("u32", context)
    for name in [name for name in gguf.entries if name.startswith(OPTIMIZER)]:
        del gguf.entries[name]
    config = read_config(gguf)
    check_tensors(gguf, config)
    defaults = {field.name: field.default for field in fields(settings)}
    for name, saved_value in DECIDED_SETTINGS.items():
        requested, saved = getattr(settings, name), saved_value(config)
        if requested != defaults[name] and not math.isclose(requested, saved, rel_tol=1e-6):
            raise InputError(f"{flag(name)} {requested:g}: {path} has {saved:g}; leave it out")
    has_vocabulary, vocab = TOKENS_KEY in metadata, settings.vocab
    if has_vocabulary and vocab is not None:
        fact = f"--vocab has no effect with {path}, which holds a vocabulary; leave it out"
        raise InputError(fact)
    if not has_vocabulary and vocab is None:
        raise InputError(f"--vocab must be given: {path} holds no vocabulary")
    return LlamaCppCheckpoint(ModelFile(gguf, config), vocab or path, int(metadata[ITERATIONS_KEY]))


def _check_version(path: Path, metadata: Mapping[str, Any]) -> None:
    version = metadata.get(VERSION_KEY)
    if version is None or metadata.get("training.type") == LORA:
        raise InputError(
            f"{path}: this is not a checkpoint of train-text-from-scratch, which has whole weights and {VERSION_KEY};"
            " to train a model further, use packtrain finetune --full"
        )
    if version not in VERSIONS:
        raise InputError(f"{path}: {VERSION_KEY} is {version!r}; 0 and 1 can be read")
    if not isinstance(metadata.get(ITERATIONS_KEY), int):
        raise InputError(f"{path}: {ITERATIONS_KEY} must be a whole number")
