"""Quantizing with an importance matrix (--imatrix), which weights the errors."""

import math
from collections.abc import Mapping

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.text import plural
from packtrain.conversion.calibration.importance_matrix import ImportanceMatrix, load_importance
from packtrain.dtypes import Dtype
from packtrain.gguf import GGUF, MetadataValue
from packtrain.models.quant_recipe import is_quantizable
from packtrain.workflows.quantization import QuantizeSettings

IMATRIX_KEY = "quantize.imatrix"


def weights(
    settings: QuantizeSettings, gguf: GGUF, types: Mapping[str, Dtype], events: Events
) -> tuple[dict[str, np.ndarray], dict[str, MetadataValue]]:
    """Return ({matrix: mean squares of its inputs, (experts, columns)}, metadata on the data). Raises InputError."""
    assert settings.imatrix is not None
    importance = load_importance(settings.imatrix)
    weights_by_name = dict[str, np.ndarray]()
    for name, tensor_entry in gguf.entries.items():
        matrix_weights = importance.weights(name)
        if matrix_weights is None:
            continue
        expected_shape = (math.prod(tensor_entry.shape[:-2]), tensor_entry.shape[-1])
        if matrix_weights.size != math.prod(expected_shape):
            raise InputError(
                f"{settings.imatrix}: {name} has {matrix_weights.size} weights, in {gguf.path}"
                f" {math.prod(expected_shape)} inputs; measure this model with `packtrain imatrix`"
            )
        weights_by_name[name] = matrix_weights.reshape(expected_shape)
    block_matrices = [
        n for n, e in gguf.entries.items() if n.startswith("blk.") and is_quantizable(n, e.shape)
    ]
    missing = [tensor_name for tensor_name in block_matrices if tensor_name not in weights_by_name]
    if block_matrices and len(missing) == len(block_matrices):
        raise InputError(
            f"{settings.imatrix}: it has no weights for any matrix of {gguf.path}; measure this model with"
            " `packtrain imatrix`"
        )
    if other_names := importance.sums.keys() - gguf.entries.keys():
        fact = f"{settings.imatrix} has weights for matrices that {gguf.path} does not have"
        events.message(f"{fact}, the first: {min(other_names)}; it may be of another model")
    if missing:
        events.message(
            f"{settings.imatrix} has no weights for {plural(len(missing), 'matrix', 'matrices')}, "
            f"the first: {missing[0]}"
        )
    if not any("weigh" in types[name].code for name in weights_by_name):
        events.message("--imatrix has no effect: no matrix gets a type that can weigh errors")
    return weights_by_name, _origin(settings, importance)


def _origin(settings: QuantizeSettings, importance: ImportanceMatrix) -> dict[str, MetadataValue]:
    """Return the metadata that llama-quantize adds for an importance matrix."""
    return {
        f"{IMATRIX_KEY}.file": MetadataValue("string", str(settings.imatrix)),
        f"{IMATRIX_KEY}.dataset": MetadataValue("string", importance.source_text),
        f"{IMATRIX_KEY}.entries_count": MetadataValue("u32", len(importance.sums)),
        f"{IMATRIX_KEY}.chunks_count": MetadataValue("u32", importance.num_chunks),
    }
