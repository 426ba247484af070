"""Random adapters for the models of tests.architectures: what tests and the comparison with llama.cpp share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from packtrain.models.adapter_file import Adapter, write_adapter
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.lora import EMBEDDING, fitting
from packtrain.models.model_file import ModelFile

RANK, ALPHA = 4, 6.0


def random_adapter(
    path: Path, model: ModelFile, *, seed: int = 0, excluded_names: Sequence[str] = ()
) -> str:
    """Write additions to all matrices that an adapter can have beside the base, large enough to change its logits.

    excluded_names  names of matrices within their block that get none
    """
    rng, pairs = np.random.RandomState(seed), {}
    for name, entry in model.gguf.entries.items():
        is_adaptable = name.startswith("blk.") or (name == EMBEDDING and not model.config.tied)
        if (
            is_matrix(name, entry.shape)
            and is_adaptable
            and name.split(".")[-2] not in excluded_names
        ):
            pairs[name] = tuple(
                (rng.standard_normal(shape) * (0.3 / shape[-1]) ** 0.5).astype(np.float32)
                for shape in fitting(entry.shape, name, RANK)
            )
    write_adapter(path, Adapter(model.config.architecture, ALPHA, pairs), "random", model.gguf)
    return str(path)
