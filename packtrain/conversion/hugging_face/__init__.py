"""Converts checkpoints in Hugging Face's layout (config.json, safetensors, tokenizer files) to GGUF files.

Writes a file that llama.cpp loads, tensor by tensor: the model is never in memory as a whole. A tied model gets no
output.weight, also where the checkpoint repeats the embedding."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import check_output
from packtrain.conversion.hugging_face.checkpoint_folder import open_checkpoint
from packtrain.conversion.hugging_face.config_translation import describe_checkpoint
from packtrain.conversion.hugging_face.tensor_names import MXFP4, ConvertedTensor, MXFP4Tensor
from packtrain.conversion.hugging_face.vocabulary import vocabulary_metadata
from packtrain.dtypes import DTYPES, Dtype, f16, f32
from packtrain.gguf import DeferredTensor, write_gguf
from packtrain.inference.kv_cache import Context
from packtrain.kernels.quant import quantized_arrays
from packtrain.models.arch.architecture import FILTERS, SCAN_FILTERS
from packtrain.models.model_file import open_model
from packtrain.models.model_metadata import general_metadata
from packtrain.models.model_with_adapters import adapted, read_scaled

__all__ = ["AUTO", "TYPES", "check_runs", "checkpoint_files", "convert"]

AUTO = "auto"
TYPES = ("f32", "f16", "q8_0", "bf16")  # types that matrices can get
# llama.cpp reads these only as f32, as it does all tensors but weights: biases, and decays and skips of scans
ALWAYS_F32 = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight",
    FILTERS, SCAN_FILTERS, "altup_correct_coef.weight", "altup_predict_coef.weight",
)  # fmt: skip
MAX_HALF = 65_504.0


def convert(
    folder: Path, path: Path, dtype: str = AUTO, overwrite: bool = True,
    report: Callable[[str], object] = warnings.warn,
) -> dict[str, DeferredTensor | np.ndarray]:  # fmt: skip
    """Write the checkpoint in `folder` to a GGUF file; return the written tensors by name.

    dtype      type of the matrices, one of TYPES; AUTO takes that of the checkpoint's embedding
    overwrite  whether an existing file may be replaced; files of the checkpoint never are
    report     takes sentences about what readers of the file do otherwise than the checkpoint's code
    Raises InputError for what cannot be converted; no file is left, also if weights prove unusable while written.
    """
    check_output(path, "-o", checkpoint_files(folder), overwrite)
    checkpoint = open_checkpoint(folder)
    description = describe_checkpoint(checkpoint)
    type_name = str(description.tensors[0].sources[0].dtype) if dtype == AUTO else dtype
    architecture = description.metadata["general.architecture"].value
    metadata = {
        **description.metadata, **general_metadata(architecture, folder.resolve().name, type_name),
        **vocabulary_metadata(checkpoint, description.vocab_size, description.model_family, report),
    }  # fmt: skip
    tensors: dict[str, DeferredTensor | np.ndarray] = {**description.computed_tensors}
    for tensor in description.tensors:
        tensors[tensor.name] = _deferred(tensor, _stored_type(tensor, DTYPES[type_name]))
    write_gguf(path, metadata, tensors, check=lambda part_path: check_runs(part_path, path))
    for note in checkpoint.config.notes:
        report(f"{checkpoint.config.path}: {note}")
    return tensors


def check_runs(part_path: Path, path: Path, base: Path | None = None) -> None:
    """Raise InputError, which names `path`, unless packtrain opens the file at `part_path`, to be moved to `path`, and
    computes finite logits with the file: a model, or with `base` an adapter of that model."""
    try:
        model = open_model(base or part_path)
        model = adapted(model, read_scaled((f"{part_path}:1",), model.gguf)) if base else model
        model.tokenizer()
        sound = np.isfinite(Context(model, cells=1, cache="f32", prompts=(1,)).decode([0])).all()
    except InputError as error:
        raise InputError(str(error).replace(str(part_path), str(path))) from None
    if not sound:
        fact = f"{path}: a token gets logits that are not finite; the weights are not usable"
        raise InputError(fact)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files in a folder, except models that were converted."""
    return [path for path in folder.glob("*") if path.suffix != ".gguf"]


def _stored_type(tensor: ConvertedTensor, dtype: Dtype) -> Dtype:
    """Return the type to write: `dtype`; f32 for vectors and ALWAYS_F32, f16 for unfilled blocks, MXFP4 as it is."""
    if isinstance(tensor, MXFP4Tensor):
        return MXFP4
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
    if not is_matrix or tensor.name.endswith(ALWAYS_F32):
        return f32
    return f16 if tensor.shape[-1] % dtype.block else dtype


def _deferred(tensor: ConvertedTensor, dtype: Dtype) -> DeferredTensor:
    """Return a tensor whose values are read, checked and packed while the file is written."""

    def make_parts() -> Iterator[np.ndarray]:
        for values in tensor.value_parts():
            yield values if isinstance(tensor, MXFP4Tensor) else _pack_values(tensor, values, dtype)

    return DeferredTensor(dtype, tensor.shape, make_parts)


def _pack_values(tensor: ConvertedTensor, weight_values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Quantize values of a tensor to its stored type. Raises InputError for values that are not finite or too large."""
    location = f"{tensor.sources[0].path}: {tensor.sources[0].name}"
    max_value = float(np.abs(weight_values).max(initial=0))
    if not np.isfinite(max_value):
        raise InputError(f"{location} has values that are not finite; weights must be numbers")
    if dtype is f16 and max_value > MAX_HALF:
        fact = f"{location} has values up to {max_value:.3g}, beyond f16; write bf16 or f32"
        raise InputError(fact)
    return quantized_arrays.quantize(weight_values, dtype)
