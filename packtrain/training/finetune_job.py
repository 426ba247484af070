"""Fine-tuning the model of a file: settings in, a TrainingJob out, like `training.training_job` for a new model.

Trains LoRA adapters, or the matrices themselves; all frozen tensors are read in place from the file."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import require_existing
from packtrain.common.options import unescape
from packtrain.common.text import plural
from packtrain.data.chat_template import load_template
from packtrain.data.conversations import DatasetRecipe, SampleDataset, prepare_dataset
from packtrain.data.tokenizer import Tokenizer
from packtrain.dtypes import DTYPES, RECODABLE, dtype_of, f32
from packtrain.engine.executor import Session
from packtrain.gguf import DeferredTensor, MetadataValue, tensor_nbytes, write_gguf
from packtrain.kernels.quant.quantized_arrays import dequantize, quantize
from packtrain.kernels.runtime.environment import cache_root, writable
from packtrain.models import transformer
from packtrain.models.adapter_file import Adapter, write_adapter
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.config import Config, check_context
from packtrain.models.lora import A, B, Lora
from packtrain.models.model_file import ModelFile, check_vocabularies, fingerprint, open_model
from packtrain.models.replay_loss import ReplayLoss
from packtrain.models.rewrite_model import stored_dtype, write_changed
from packtrain.planner.step_shape import BaseModel
from packtrain.training import finetune_defaults, training_job
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.pair_batches import PairBatches
from packtrain.training.reference_logprobs import uses_reference
from packtrain.training.replay_texts import ReplayBatches
from packtrain.training.sample_batches import SampleBatches, row_length
from packtrain.training.teacher_logits import TeacherBatches

CONTEXT = 2048  # most tokens of a row, without --ctx
UNPACK_CHUNK = 1 << 16  # values unpacked at a time, while the run holds all its memory
MODULE_GROUPS = {"all": "*", "attn": "attn_*", "mlp": "ffn_*"}
TEMPLATE = "tokenizer.chat_template"
ADAPTER = "adapter.gguf"  # in the run folder


@dataclass(frozen=True)
class TunedModel:
    """The model of a file, and which of its tensors are trained."""

    settings: TuneSettings
    model: ModelFile
    config: Config
    base: BaseModel
    chat_template: str | None = None  # chat template to add, if the file has none
    is_chat: bool = False  # whether the data is conversations, not running text
    eog_ids: tuple[int, ...] = ()

    @property
    def extra_metadata(self) -> Mapping[str, MetadataValue]:
        """Metadata that the tuned model adds to that of its base."""
        if self.chat_template is None:
            return {}
        return {TEMPLATE: MetadataValue("string", self.chat_template)}

    @cached_property
    def trained_names(self) -> list[str]:
        return [*self.base.trained_names(self.config, transformer.weights(self.config))]

    def shared(self) -> Mapping[str, np.ndarray]:
        trained = set(self.trained_names)
        return {name: array for name, array in self.model.stored().items() if name not in trained}

    def init_weights(self, session: Session) -> None:
        """Set trained weights to the file's values, LoRA's A as in PEFT to uniform ± 1 / sqrt(width), and B to 0."""
        for name in self.trained_names:
            if name.endswith(B):
                session.fill(name, lambda array: array.fill(0))
            elif name.endswith(A):
                draw = np.random.default_rng([self.settings.seed, zlib.crc32(name.encode())])
                session.fill(name, partial(_fill_uniform, draw=draw))
            else:
                stored = self.model.gguf.array(name)
                session.fill(name, partial(_unpack_into, stored=stored))

    def save_weights(self, path: Path, view: training_job.WeightReader) -> None:
        if self.config.lora is not None:
            write_adapter(path, self._adapter(view, self.config.lora), path.stem, self.model.gguf)
        else:
            tensors = {n: DeferredTensor.from_reader(view, n) for n in self.trained_names}
            write_gguf(path, {}, tensors)

    def write_result(self, view: training_job.WeightReader) -> None:
        """Write the LoRA adapter, which is merged later, when training memory is free; with --full the model."""
        s = self.settings
        if self.config.lora is not None:
            adapter = self._adapter(view, self.config.lora)
            adapter_path = s.output if s.merge == "none" else s.adapter
            for path in filter(None, (s.folder / ADAPTER, adapter_path)):
                write_adapter(path, adapter, name_of(s.output), self.model.gguf)
            return

        latest = lru_cache(1)(view)  # a view of device memory is a copy: keep one at a time
        changed_rows = {name: partial(_weight_rows, latest, name) for name in self.trained_names}
        dtype = DTYPES[s.type] if s.type else None
        name = name_of(s.output)
        base, extra = self.model.gguf, self.extra_metadata
        write_changed(s.output, base, changed_rows, name=name, dtype=dtype, extra_metadata=extra)

    def output_files(self) -> Mapping[Path, int]:
        s, gguf = self.settings, self.model.gguf
        output_dtype, sizes = DTYPES[s.type] if s.type else None, transformer.weights(self.config)
        trained_specs = [sizes[name].spec for name in self.trained_names]
        adapter = sum(spec.size * 4 for spec in trained_specs) + training_job.HEAD_NBYTES
        if s.merge == "none":
            return {s.output: adapter, s.folder / ADAPTER: adapter}
        sizes_by_path = {s.output: gguf.nbytes + training_job.HEAD_NBYTES}
        changed_names = {
            n.removesuffix(B) for n in self.trained_names if not n.endswith(A)
        } & gguf.entries.keys()
        if output_dtype is not None:
            for entry in (gguf.entries[name] for name in changed_names):
                target_dtype = stored_dtype(entry, output_dtype)
                sizes_by_path[s.output] += max(
                    tensor_nbytes(entry.shape, target_dtype) - entry.nbytes, 0
                )
        if not s.full:
            sizes_by_path |= dict.fromkeys(filter(None, (s.folder / ADAPTER, s.adapter)), adapter)
        return sizes_by_path

    def _adapter(self, view: training_job.WeightReader, lora: Lora) -> Adapter:
        names = [name.removesuffix(A) for name in self.trained_names if name.endswith(A)]
        pairs = {name: (view(name + A), view(name + B)) for name in names}
        return Adapter(self.config.architecture, lora.alpha, pairs, aware=lora.aware)

    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer()

    def with_data(self, dataset: SampleDataset) -> "TunedModel":
        """Return the model with the data's chat template and, if only answers are learned, the ids that end them."""
        # with --no-mask-prompt, only a chat template tells that the data is conversations
        has_template = dataset.template is not None or TEMPLATE in self.model.gguf.metadata
        is_chat = not dataset.train.weights.all() if self.settings.mask_prompt else has_template
        # where prompts are learned, too, these tokens also end turns of users, whose length nothing tells
        eog_ids = tuple(sorted(dataset.eog_ids)) if is_chat and self.settings.mask_prompt else ()
        return replace(self, chat_template=dataset.template, is_chat=is_chat, eog_ids=eog_ids)


def name_of(output: Path) -> str:
    """Return the model's name for the metadata of the output file."""
    return output.stem.encode(errors="replace").decode()


def _weight_rows(
    view: training_job.WeightReader, name: str, row_start: int, row_stop: int
) -> np.ndarray:
    """Return rows row_start … row_stop - 1 of a weight that `view` reads by name, as f32."""
    array = view(name)
    row_array = array.reshape(-1, array.shape[-1])[row_start:row_stop]
    return row_array if dtype_of(array) == f32 else dequantize(row_array)


def _fill_uniform(array: np.ndarray, draw: np.random.Generator) -> None:
    draw.random(dtype=np.float32, out=array)
    array *= 2
    array -= 1
    array *= np.float32(1 / math.sqrt(array.shape[-1]))


def _unpack_into(array: np.ndarray, stored: np.ndarray) -> None:
    """Convert stored values to the type of `array` and copy them into it, UNPACK_CHUNK values at a time."""
    rows, packed_rows = array.reshape(-1, array.shape[-1]), stored.reshape(-1, stored.shape[-1])
    chunk_rows, dtype = max(1, UNPACK_CHUNK // rows.shape[1]), dtype_of(array)
    for at in range(0, len(rows), chunk_rows):
        rows[at : at + chunk_rows] = quantize(dequantize(packed_rows[at : at + chunk_rows]), dtype)


# ---- building the job ------------------------------------------------------------------------------------------------


def build_job(settings: TuneSettings, report: Callable[[str], None]) -> training_job.TrainingJob:
    """Open the model, tokenize the data, fill in open settings, and return the job. Raises InputError."""
    for name, value in (("the model", settings.model), ("--data", settings.data)):
        if value is None:
            raise InputError(f"{name} must be given: packtrain finetune BASE.gguf --data FILE")
    settings = finetune_defaults.with_saved_choices(settings)
    assert settings.model is not None and settings.data is not None
    require_existing(settings.data, "--data")
    model = open_model(settings.model)
    _check_num_layers(settings.num_layers, model)
    config = replace(model.config, lora=None if settings.full else lora_of(settings, model.config))
    _check_aware(settings, model, config)
    last, tensor_types = max(settings.num_layers, 0), tuple(model.matrix_dtypes().items())
    base = BaseModel(tensor_types, settings.freeze, last, settings.strict, DTYPES[settings.masters])
    if not TunedModel(settings, model, config, base).trained_names:
        raise InputError("--freeze: nothing is left to train; freeze fewer tensors")
    train, valid, dataset = _make_batches(settings, model, config, report)
    sizes = config.embedding_length, len(dataset.train), train.windows
    settings = finetune_defaults.with_defaults(settings, *sizes)
    settings = replace(settings, replay=train.num_texts)
    for batches in filter(None, (train, valid)):
        batches.rows = settings.batch_size
    schedule = training_job.make_schedule(settings, len(train))
    num_samples, num_steps = len(dataset.train), schedule.steps
    report(finetune_defaults.prospect_text(num_samples, num_steps, train.windows, settings))
    needs_eval = valid is not None or uses_reference(settings.preference)
    size = train.rows, train.time
    shape = training_job.shape_of(settings, config, *size, needs_eval, base, report)
    if isinstance(train, PairBatches):
        shape = replace(shape, preference=settings.preference, max_pairs=train.max_pairs)
    if isinstance(train, TeacherBatches | ReplayBatches):
        shape = replace(shape, distill=train.loss_settings)
    optimizer = training_job.make_optimizer(settings)
    return training_job.TrainingJob(
        settings, f"{model.gguf.path.name}, {train.rows} × {train.time} tokens",
        TunedModel(settings, model, config, base).with_data(dataset), f"{dataset.fingerprint} {fingerprint(model)}",
        *(shape, optimizer, schedule, train, valid),
    )  # fmt: skip


def _make_batches(
    settings: TuneSettings, model: ModelFile, config: Config, report: Callable[[str], None]
) -> tuple[SampleBatches, SampleBatches | None, SampleDataset]:
    """Return training and validation batches, whose rows fit the longest sample, and their data set."""
    length = settings.ctx or min(config.context_length, CONTEXT)
    check_context(config, length, report)
    cache_folder = writable(cache_root() / "tokens")
    recipe = _dataset_recipe(settings, length)
    dataset = prepare_dataset(recipe, cache_folder, report, settings.memory, model.gguf)
    for note in dataset.notes:
        report(note)
    preference = settings.preference
    sample_sets = [sample_set for sample_set in (dataset.train, dataset.valid) if sample_set]
    valid_class: Callable[..., SampleBatches] = SampleBatches
    time = settings.ctx or row_length(length, *map(SampleBatches.item_lengths, sample_sets))
    if preference is not None:  # a row holds both answers, each as long as the context
        valid_class = partial(PairBatches, loss_settings=preference)
        time = row_length(2 * length, *map(PairBatches.item_lengths, sample_sets))
    size, train_class = (max(settings.batch_size, 1), time), valid_class
    num_texts = finetune_defaults.num_replay_texts(settings, config, dataset.train)
    if settings.distill is not None and settings.teacher is not None:
        teacher = open_model(require_existing(settings.teacher, "--teacher"))
        check_vocabularies(model, teacher, "a teacher")
        if config.final_softcap:
            fact = f"--teacher: {model.gguf.path.name} caps its logits, which it is not for"
            raise InputError(fact)
        mark = fingerprint(teacher)
        distill = settings.distill
        train_class = partial(TeacherBatches, loss_settings=distill, teacher=teacher, mark=mark)
    elif num_texts:
        length, width = min(finetune_defaults.REPLAY_TOKENS, time), config.embedding_length
        replay = ReplayLoss(length, settings.replay_weight, num_texts, width)
        train_class = partial(ReplayBatches, loss_settings=replay, base=model)
    order = {"pack": settings.pack, "shuffle_samples": settings.shuffle_samples is not False}
    train, valid = train_class(dataset.train, *size, seed=settings.seed, **order), None
    if dataset.valid is not None:
        valid = valid_class(dataset.valid, size[0], train.time, shuffle=False, pack=settings.pack)
    return train, valid, dataset


def _check_num_layers(last: int, model: ModelFile) -> None:
    count = model.config.block_count
    if last > count:
        fact = f"--num-layers {last}: {model.gguf.path.name} has {plural(count, 'block')}"
        raise InputError(f"{fact}; it must be at most that, or -1")


def _check_aware(settings: TuneSettings, model: ModelFile, config: Config) -> None:
    """Raise InputError if --aware (training with weights rounded as they will be stored) does not fit the model."""
    if not settings.aware or config.lora is None:
        return
    if config.expert_count:
        fact = f"--aware: {model.gguf.path.name} has experts, which it is not for; leave it out"
        raise InputError(fact)
    types, dtype_names = model.matrix_dtypes(), ", ".join(map(str, RECODABLE))
    adapted_types = {n: types[n] for n in transformer.weights(config) if config.lora.rank_of(n)}
    # the merge would lose part of what such a matrix learns, which no step sees
    for name, dtype in adapted_types.items():
        if dtype.quantized and dtype not in RECODABLE:
            raise InputError(
                f"--aware: {name} is {dtype}, and it is for matrices of {dtype_names}",
                "leave it out, or train other matrices (--lora-modules)",
            )
    if not set(adapted_types.values()) & set(RECODABLE):
        fact = "--aware: no matrix that is trained is quantized"
        raise InputError(f"{fact}; it is for matrices of {dtype_names}")


def _dataset_recipe(settings: TuneSettings, length: int) -> DatasetRecipe:
    training_job.check_split(settings.val_split)
    assert settings.model is not None and settings.data is not None
    return DatasetRecipe(
        settings.data, settings.model, length, settings.truncate, not settings.mask_prompt, settings.train_on == "last",
        settings.separator and unescape(settings.separator), settings.val_split, settings.skip_bad,
        settings.chat_template and load_template(settings.chat_template), settings.preference is not None,
        settings.columns,
    )  # fmt: skip


# ---- LoRA adapters --------------------------------------------------------------------------------------


def lora_of(settings: TuneSettings, config: Config) -> Lora:
    """Return the LoRA configuration that the settings ask for. Raises InputError."""
    matrix_kinds = list(_lora_matrix_kinds(config))
    module_names = settings.lora_modules.split(",")
    patterns = [MODULE_GROUPS.get(name, name) for name in module_names]
    chosen_kinds = [kind for kind in matrix_kinds if any(fnmatchcase(kind, p) for p in patterns)]
    for name, pattern in zip(module_names, patterns, strict=True):
        if not any(fnmatchcase(kind, pattern) for kind in matrix_kinds):
            raise InputError(
                f"--lora-modules: {name!r} is not a matrix of the model; choose all, attn, mlp, or some of"
                f" {', '.join(matrix_kinds)}"
            )
    ranks = dict.fromkeys(chosen_kinds, 0)
    for text in sorted(settings.lora_rank, key=lambda text: "=" in text):
        name, rank = _rank(text)
        if text != next(t for t in settings.lora_rank if _rank(t)[0] == name):
            raise InputError(f"--lora-rank {text}: another is for {name}, too; give one of them")
        matching_kinds = [kind for kind in chosen_kinds if fnmatchcase(kind, name)]
        if not matching_kinds:
            raise InputError(f"--lora-rank {text}: it must be for one of {', '.join(chosen_kinds)}")
        ranks |= dict.fromkeys(matching_kinds, rank)
    ranks = {kind: rank or _rank(TuneSettings.lora_rank[0])[1] for kind, rank in ranks.items()}
    alpha = settings.lora_alpha
    if alpha is None:
        default_ranks = [text for text in settings.lora_rank if "=" not in text]
        alpha = finetune_defaults.default_alpha(
            settings.rslora, _rank([*TuneSettings.lora_rank, *default_ranks][-1])[1]
        )
    if settings.rslora:
        if len(set(ranks.values())) > 1:
            raise InputError("--rslora: all ranks must be equal, because an adapter has one alpha")
        alpha *= math.sqrt(next(iter(ranks.values())))
    pattern_ranks = tuple((f"blk.*.{kind}.weight", rank) for kind, rank in ranks.items())
    stored_alpha = float(np.float32(alpha))  # as the adapter's file has it
    num_last_blocks, dropout = max(settings.num_layers, 0), settings.lora_dropout
    return Lora(pattern_ranks, num_last_blocks, stored_alpha, dropout, aware=settings.aware)


def _lora_matrix_kinds(config: Config) -> Iterator[str]:
    """Yield names within a block, such as attn_q, of matrices that can have a LoRA adapter in some block."""
    matrix_kinds = dict[str, None]()
    for name, leaf in transformer.weights(config).items():
        block, _, kind = name.removeprefix("blk.").removesuffix(".weight").partition(".")
        if block.isdecimal() and is_matrix(name, leaf.shape) and kind != "ffn_gate_inp":
            matrix_kinds[kind] = None
    yield from matrix_kinds


def _rank(text: str) -> tuple[str, int]:
    """Parse NAME=RANK to (name, rank); RANK alone is for all names, `*`. Raises InputError."""
    name, _, rank_text = text.rpartition("=")
    if not rank_text.isdecimal() or not 0 < int(rank_text) <= 4096:
        fact = f"--lora-rank {text}: it must be from 1 to 4096, or NAME=RANK such as attn_q=8"
        raise InputError(fact)
    return name or "*", int(rank_text)
