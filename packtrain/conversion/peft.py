"""Reads and writes PEFT adapters: a folder of adapter_config.json and adapter_model.safetensors.

The base determines the names of the matrices in a checkpoint, and whose rows are permuted in GGUF files. Refuses
contents that a GGUF adapter cannot store (DoRA, biases, whole modules)."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import write_text
from packtrain.conversion.hugging_face.checkpoint_folder import language_model_name
from packtrain.conversion.hugging_face.plain_checkpoint import as_list, as_object, read_json
from packtrain.conversion.hugging_face.safetensors import SafetensorsTensor, open_file, write_file
from packtrain.conversion.hugging_face.tensor_names import halved, order, pair_halves, turned_heads
from packtrain.dtypes import WRITABLE
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.models.adapter_file import Adapter, Pair
from packtrain.models.arch.architecture import RowSpans, is_matrix
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import ModelFile

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
HALF_PATTERN = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?"
)
COPY_PATTERN = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight")
HEAD_MODULE = "lm_head"
# Every field of PEFT's configuration: those that count, those that do not change what a trained adapter adds, and those
# with which a folder stores more than A and B, or uses them differently.
CONFIG_FIELDS = {
    "honoured": """peft_type bias init_lora_weights lora_alpha alpha_pattern use_rslora target_modules exclude_modules
        layers_to_transform layers_pattern""",
    "without effect": """r rank_pattern lora_dropout fan_in_fan_out inference_mode task_type base_model_name_or_path
        revision auto_mapping peft_version megatron_core runtime_config qalora_group_size loftq_config eva_config
        corda_config lora_ga_config velora_config""",
    "refused": """use_dora modules_to_save lora_bias layer_replication trainable_token_indices target_parameters
        use_qalora alora_invocation_tokens megatron_config use_bdlora arrow_config kasa_config monteclora_config
        ensure_weight_tying""",
}  # fmt: skip
FIELD_KINDS = {name: kind for kind, names in CONFIG_FIELDS.items() for name in names.split()}
OFF_VALUES: tuple[Any, ...] = None, False, "", [], {}
# starts of A and B that leave the base as it is; with all others, PEFT subtracts A and B from the base it loads
NEUTRAL_INITS = None, True, False, "true", "gaussian", "orthogonal", "eva", "lora_ga"
FIELD_TYPES = {"use_rslora": bool, "alpha_pattern": dict, "rank_pattern": dict, "r": int}
SCALE_TOLERANCE, NUM_COMPARED_ROWS = 1e-9, 1 << 10


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """The place of a checkpoint's matrix in the base: its tensor, its expert, and its heads if rows are permuted."""

    tensor: str
    expert: int | None = None
    heads: int = 0
    # rows of the checkpoint in the order of the base, each (from, to); none: all, in their order
    row_spans: RowSpans = ()
    column_spans: RowSpans = ()  # columns of the checkpoint, likewise

    def to_base_order(self, a: np.ndarray, b: np.ndarray) -> Pair:
        """Return (A, B) with A's columns and B's rows in the order of the base's file, from the checkpoint's."""
        a = a[:, order(self.column_spans)] if self.column_spans else a
        if self.heads and len(b) % (2 * self.heads) == 0:
            return a, pair_halves(b, self.heads)
        return a, b[order(self.row_spans)] if self.row_spans else b

    def to_checkpoint_order(self, a: np.ndarray, b: np.ndarray) -> Pair:
        """Return (A, B) with A's columns and B's rows in the order of the checkpoint, from the base's file's."""
        a = a[:, np.argsort(order(self.column_spans))] if self.column_spans else a
        if self.heads:
            return a, halved(b, self.heads)
        return a, b[np.argsort(order(self.row_spans))] if self.row_spans else b


def adapted_matrices(model: ModelFile) -> dict[str, AdaptedMatrix]:
    """Return the matrices that adapters fit, by their module's name in a checkpoint. Raises InputError if none do."""
    c, tensor_entries, matrices = model.config, model.gguf.entries, dict[str, AdaptedMatrix]()
    if any(family.has_scaled_matrices for family in c.traits.families):
        raise InputError(
            f"{model.gguf.path}: the multipliers of a {c.architecture} are in its matrices, so adapters of PEFT, which"
            " are beside them, do not fit"
        )
    for family, i in ((f, i) for f in c.traits.families for i in range(c.block_count)):
        at, heads = f"{family.names.prefix}{family.names.blocks}.{i}", turned_heads(c, family)
        for module, part in family.block_modules.items():
            tensor_name = f"blk.{i}.{part}.weight"
            if (
                tensor_name in tensor_entries
                and is_matrix(tensor_name, tensor_entries[tensor_name].shape)
                and "{}" not in module
            ):
                span_args = family.row_spans(c).get(part, ()), family.column_spans(c).get(part, ())
                matrices[f"{at}.{module}"] = AdaptedMatrix(
                    tensor_name, None, heads.get(part, 0), *span_args
                )
        for module, part in family.experts.matrix_modules.items() if family.experts else ():
            for expert in range(c.expert_count):
                name = f"{at}.{module.format(expert)}"
                matrices[name] = AdaptedMatrix(f"blk.{i}.{part}.weight", expert)
    if not c.tied:  # if tied, an adapter of the embedding would change the head, too
        matrices |= {name: AdaptedMatrix(EMBEDDING) for name in _embedding_modules(model)}
        matrices[HEAD_MODULE] = AdaptedMatrix("output.weight")
    return matrices


def _embedding_modules(model: ModelFile) -> list[str]:
    families = model.config.traits.families
    return [f"{family.names.prefix}{family.names.embedding}" for family in families]


# ---- reading -------------------------------------------------------------------------------------------------


def read_peft(folder: Path, model: ModelFile) -> Adapter:
    """Read the adapter in a PEFT folder, for the base `model`. Raises InputError for what GGUF cannot store."""
    config = _read_config(folder / CONFIG)
    halves = _read_halves(folder / TENSORS, config, model)
    alpha, by_tensor = 0.0, dict[str, dict[int | None, Pair]]()
    modules = adapted_matrices(model)
    for name, (a, b) in halves.items():
        matrix, rank = modules[language_model_name(name)], b.shape[-1]
        scale = _lora_scale(folder / CONFIG, config, name, rank)
        alpha = alpha or scale * rank
        if abs(scale * rank / alpha - 1) > SCALE_TOLERANCE:  # a GGUF adapter has one alpha
            b = b * np.float32(scale * rank / alpha)
        a = a.T if matrix.tensor == EMBEDDING else a
        by_tensor.setdefault(matrix.tensor, {})[matrix.expert] = matrix.to_base_order(a, b)
    count = model.config.expert_count
    pairs = {name: _stacked(folder / TENSORS, name, of, count) for name, of in by_tensor.items()}
    return Adapter(model.config.architecture, alpha, pairs)


def _read_config(path: Path) -> dict[str, Any]:
    """Read the configuration. Raises InputError for a field that is set and neither honoured nor without effect."""
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {config.get('peft_type')!r}; it must be 'LORA'")
    for key, value in config.items():
        field_kind, field_type = FIELD_KINDS.get(key), FIELD_TYPES.get(key)
        if field_type and type(value) not in (field_type, type(None)):
            fact = f"{path}: {key} is {value!r}"
            raise InputError(f"{fact}; it must be of type {field_type.__name__}")
        if field_kind in ("honoured", "without effect") or _is_any(value, OFF_VALUES):
            continue
        problem = "which an adapter file cannot hold" if field_kind else "unknown to packtrain"
        raise InputError(f"{path}: {key} is set, {problem}; merge it with PEFT instead")
    if config.get("bias") not in (None, "none"):
        raise InputError(f"{path}: bias is {config['bias']!r}; an adapter file holds no biases")
    start = config.get("init_lora_weights")
    if not _is_any(start, NEUTRAL_INITS):
        raise InputError(
            f"{path}: init_lora_weights is {start!r}: PEFT takes A and B out of the base's matrices when it loads this"
            " adapter, so it does not fit the base as it is; save it with PEFT's save_pretrained(FOLDER,"
            " path_initial_model_for_weight_conversion=FOLDER_BEFORE_TRAINING), or merge it with PEFT"
        )
    return config


def _is_any(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether the value is one of these, where 0 and 1 differ from False and True."""
    return any(type(value) is type(candidate) and value == candidate for candidate in allowed)


def _check_is_target(path: Path, config: Mapping[str, Any], module: str) -> None:
    """Raise InputError for a module that is not among the targets: PEFT would ignore its A and B."""

    def is_listed(key: str) -> bool:
        listed_values = config.get(key)
        if isinstance(listed_values, str):
            return listed_values == "all-linear" or _is_match(path, key, listed_values, module)
        return any(f".{module}".endswith(f".{name}") for name in as_list(listed_values))

    def layer() -> bool:
        listed, layer_names = (config.get(f"layers_{end}") for end in ("to_transform", "pattern"))
        layer_names = [layer_names] if isinstance(layer_names, str) else as_list(layer_names)
        pattern = "|".join(re.escape(str(name)) for name in layer_names) or "[^.]*"
        layer_match = re.fullmatch(rf".*\.(?:{pattern})\.([0-9]+)\..*", f".{module}.")
        listed = listed if isinstance(listed, list) else [listed]
        return listed == [None] or bool(layer_match and int(layer_match[1]) in listed)

    is_targeted = not config.get("target_modules") or is_listed("target_modules")
    if not is_targeted or not layer() or is_listed("exclude_modules"):
        raise InputError(
            f"{path}: {module} has A and B, and target_modules, exclude_modules or layers_to_transform leave it out;"
            " PEFT would not use them: remove one or the other"
        )


def _is_match(path: Path, key: str, pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error:
        raise InputError(f"{path}: {key}: {pattern!r} is not a regular expression") from None


def _lora_scale(path: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the module's LoRA scale by PEFT's config: alpha / rank, or alpha / sqrt(rank). Raises InputError."""

    def setting(key: str, pattern_key: str, default: Any) -> Any:
        names = {module, language_model_name(module)}  # versions of transformers name it otherwise
        for pattern, value in as_object(config.get(pattern_key)).items():
            if any(_is_match(path, pattern_key, rf"(.*\.)?({pattern})", name) for name in names):
                return value
        return config.get(key, default)

    alpha = setting("lora_alpha", "alpha_pattern", 8)
    if setting("r", "rank_pattern", rank) not in (rank, None):
        raise InputError(f"{path}: the rank of {module} is not the {rank} of its A and B")
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or alpha == 0:
        fact = f"{path}: lora_alpha of {module} is {alpha!r}; it must be a number other than 0"
        raise InputError(fact)
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_halves(path: Path, config: Mapping[str, Any], model: ModelFile) -> dict[str, Pair]:
    """Return {module's name in the file: (A, B) f32}; skips copies of the base's embedding or head. InputError."""
    by_module, names = dict[str, dict[str, np.ndarray]](), dict[str, str]()
    modules = adapted_matrices(model)
    for name, stored_tensor in open_file(path).items():
        name_match = HALF_PATTERN.fullmatch(name)
        if name_match is None and _is_copy(path, name, stored_tensor, model):
            continue
        if name_match is None:
            fact = f"{path}: tensor {name} is neither A nor B of a LoRA adapter"
            raise InputError(f"{fact}; nothing else is supported")
        module = language_model_name(name_match[1])
        if module not in modules:
            raise InputError(f"{path}: {_unknown_module_message(module, model)}")
        _check_is_target(path.with_name(CONFIG), config, name_match[1])
        half_matrix = dequantize(stored_tensor.array())
        if half_matrix.ndim != 2 or 0 in half_matrix.shape or not np.isfinite(half_matrix).all():
            fact = f"{path}: {name} is {[*half_matrix.shape]}"
            raise InputError(f"{fact}; it must be a matrix of finite numbers")
        if name_match[2] in by_module.setdefault(module, {}):
            raise InputError(f"{path}: {module} has {name_match[2]} twice; one of them must go")
        by_module[module][name_match[2]], names[module] = half_matrix, name_match[1]
    for module, halves in by_module.items():
        if len(halves) < 2 or halves["A"].shape[0] != halves["B"].shape[1]:
            raise InputError(f"{path}: {module} must have A of [rank, …] and B of […, rank]")
    if not by_module:
        raise InputError(f"{path}: there are no tensors; an adapter has A and B of some matrices")
    return {names[module]: (halves["A"], halves["B"]) for module, halves in by_module.items()}


def _is_copy(path: Path, name: str, stored: SafetensorsTensor, model: ModelFile) -> bool:
    """Whether `name` is the embedding or head, which PEFT saves, too. InputError if it is not equal to the base's."""
    name_match = COPY_PATTERN.fullmatch(name)
    module = language_model_name(name_match[1]) if name_match else ""
    if module not in (*_embedding_modules(model), HEAD_MODULE):
        return False
    tensor = EMBEDDING if model.config.tied or module != HEAD_MODULE else "output.weight"
    base_array, values, entry = model.gguf.array(tensor), stored.array(), model.gguf.entries[tensor]
    if (
        entry.shape != values.shape
        or entry.dtype not in WRITABLE
        or any(
            quantize(dequantize(values[i : i + NUM_COMPARED_ROWS]), entry.dtype).tobytes()
            != base_array[i : i + NUM_COMPARED_ROWS].tobytes()
            for i in range(0, len(values), NUM_COMPARED_ROWS)
        )
    ):
        raise InputError(
            f"{path}: {name} is not {tensor} of {model.gguf.path} as {entry.dtype}: the adapter brings its own;"
            " use the adapter's base, not quantized, or merge it with PEFT"
        )
    return True


def _unknown_module_message(module: str, model: ModelFile) -> str:
    if module in (*_embedding_modules(model), HEAD_MODULE):
        return f"{module} is adapted, but {model.gguf.path} has one matrix for embedding and head; merge it with PEFT"
    return f"{module} is not a matrix of {model.gguf.path}, a {model.config.architecture}; use the adapter's base"


def _stacked(path: Path, name: str, by_expert: Mapping[int | None, Pair], num_experts: int) -> Pair:
    """Return (A, B) at key None, or all experts' stacked, zeros for those without. InputError if shapes differ."""
    if None in by_expert:
        return by_expert[None]
    first_pair = next(iter(by_expert.values()))
    shapes = {(a.shape, b.shape) for a, b in by_expert.values()}
    if len(shapes) > 1:
        fact = f"{path}: the experts of {name} have other shapes or ranks; they must be equal"
        raise InputError(fact)
    zero_pair = tuple(np.zeros_like(half) for half in first_pair)
    a, b = zip(*(by_expert.get(e, zero_pair) for e in range(num_experts)), strict=True)
    return np.stack(a), np.stack(b)


# ---- writing -------------------------------------------------------------------------------------------------


def write_peft(folder: Path, adapter: Adapter, model: ModelFile) -> int:
    """Write an adapter of the base `model` as a PEFT folder; return the number of tensors. Raises InputError."""
    modules = {
        module: p for module, p in adapted_matrices(model).items() if p.tensor in adapter.lora_pairs
    }
    missing_names = adapter.lora_pairs.keys() - {matrix.tensor for matrix in modules.values()}
    if missing_names:
        raise InputError(
            f"{model.gguf.path}: {min(missing_names)} has no name of its own in a checkpoint of this model"
        )
    tensors = dict[str, np.ndarray]()
    for module, matrix in modules.items():
        a, b = adapter.lora_pairs[matrix.tensor]
        if matrix.expert is not None:
            a, b = a[matrix.expert], b[matrix.expert]
        is_embedding = matrix.tensor == EMBEDDING
        a, b = matrix.to_checkpoint_order(a, b)
        a = a.T if is_embedding else a
        for half, half_matrix in (("A", a), ("B", b)):
            suffix = f"lora_embedding_{half}" if is_embedding else f"lora_{half}.weight"
            tensors[f"base_model.model.{module}.{suffix}"] = half_matrix
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / TENSORS, tensors)
    write_text(folder / CONFIG, json.dumps(_peft_config(adapter, modules), indent=2) + "\n")
    return len(tensors)


def _peft_config(adapter: Adapter, modules: Mapping[str, AdaptedMatrix]) -> dict[str, Any]:
    """Return the adapter_config.json with which PEFT computes what the adapter does here."""
    ranks = {m: adapter.lora_pairs[place.tensor][1].shape[-1] for m, place in modules.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    other_ranks = {re.escape(module): r for module, r in ranks.items() if r != rank}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
        "r": rank, "lora_alpha": adapter.alpha or rank, "rank_pattern": other_ranks,
        "alpha_pattern": {} if adapter.alpha else other_ranks, "target_modules": list(modules), "lora_dropout": 0.0,
        "bias": "none", "use_rslora": False, "use_dora": False,
    }  # fmt: skip
