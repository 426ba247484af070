"""Quantizing with an importance matrix (--imatrix): errors count by it."""

import math

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.text import plural
from packtrain.conversion.calibration.importance import Importance, load
from packtrain.gguf import GGUF, Value
from packtrain.models.quant_recipe import quantizable
from packtrain.workflows.quantization import Quantize

IMATRIX = "quantize.imatrix"


def weights(
    settings: Quantize, gguf: GGUF, events: Events
) -> tuple[dict[str, np.ndarray], dict[str, Value]]:
    """Weights by matrix, and what the file says of them. Raises InputError."""
    assert settings.imatrix is not None
    importance = load(settings.imatrix)
    return _weights(settings, gguf, importance, events), _origin(settings, importance)


def _weights(
    settings: Quantize, gguf: GGUF, importance: Importance, events: Events
) -> dict[str, np.ndarray]:
    """Weights by matrix, (experts, columns). Raises InputError if they are another model's."""
    weights_by_name = dict[str, np.ndarray]()
    for name, entry in gguf.entries.items():
        weights = importance.weights(name)
        if weights is None:
            continue
        expected_shape = (math.prod(entry.shape[:-2]), entry.shape[-1])
        if weights.size != math.prod(expected_shape):
            raise InputError(
                f"{settings.imatrix}: {name} has {weights.size} weights, in {gguf.path}"
                f" {math.prod(expected_shape)} inputs;"
                " measure this model with `packtrain imatrix`"
            )
        weights_by_name[name] = weights.reshape(expected_shape)
    blocks = [
        n for n, e in gguf.entries.items() if n.startswith("blk.") and quantizable(n, e.shape)
    ]
    missing = [name for name in blocks if name not in weights_by_name]
    if blocks and len(missing) == len(blocks):
        raise InputError(
            f"{settings.imatrix}: it has no weights for any matrix of {gguf.path}; measure this model with"
            " `packtrain imatrix`"
        )
    if missing:
        events.message(
            f"{settings.imatrix} has no weights for {plural(len(missing), 'matrix', 'matrices')}, "
            f"the first: {missing[0]}"
        )
    return weights_by_name


def _origin(settings: Quantize, importance: Importance) -> dict[str, Value]:
    """The metadata that llama-quantize adds for an importance matrix."""
    return {
        f"{IMATRIX}.file": Value("string", str(settings.imatrix)),
        f"{IMATRIX}.dataset": Value("string", importance.source),
        f"{IMATRIX}.entries_count": Value("u32", len(importance.sums)),
        f"{IMATRIX}.chunks_count": Value("u32", importance.chunks),
    }
