"""Fine-tuning the model of a file: settings in, a Job out, like `training.training_job` for a new model.

Trains LoRA adapters, or the matrices themselves; all frozen tensors are read in place from the file.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import existing
from packtrain.common.options import unescaped
from packtrain.common.text import plural
from packtrain.data.chat_template import template_named
from packtrain.data.conversations import Dataset, Recipe, prepare
from packtrain.data.tokenizer import Tokenizer
from packtrain.dtypes import DTYPES, RECODABLE, dtype_of, f32
from packtrain.engine.executor import Session
from packtrain.gguf import Deferred, Value, tensor_nbytes, write
from packtrain.kernels.quantized_arrays import dequantize, quantize
from packtrain.kernels.runtime import cache_root, writable
from packtrain.models import transformer
from packtrain.models.adapter_file import Adapter, write_adapter
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.config import Config, check_context
from packtrain.models.lora import A, B, Lora
from packtrain.models.model_file import ModelFile, check_vocabularies, fingerprint, open_model
from packtrain.models.replay_loss import Replay
from packtrain.models.rewrite_model import Rows, stored_type, write_changed
from packtrain.planner.step_shape import Base
from packtrain.training.finetune_defaults import (
    REPLAY_LENGTH,
    as_begun,
    completed,
    prospect,
    replayed,
    usual_alpha,
)
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.pair_batches import PairBatches
from packtrain.training.reference_logprobs import refers
from packtrain.training.replay_texts import ReplayBatches
from packtrain.training.sample_batches import SampleBatches, row_length
from packtrain.training.teacher_logits import TeacherBatches
from packtrain.training.training_job import (
    HEAD_NBYTES,
    Job,
    View,
    check_split,
    optimizer_of,
    schedule_of,
    shape_of,
)

CONTEXT = 2048  # at most, without --ctx
PART = 1 << 16  # values unpacked at a time, while the run holds all its memory
GROUPS = {"all": "*", "attn": "attn_*", "mlp": "ffn_*"}
TEMPLATE = "tokenizer.chat_template"
ADAPTER = "adapter.gguf"  # in the run folder


@dataclass(frozen=True, slots=True)
class Tuned:
    """The model of a file, and which of its tensors are trained."""

    settings: TuneSettings
    model: ModelFile
    config: Config
    base: Base
    template: str | None = None  # chat template, if the file has none
    chats: bool = False  # whether the data is conversations, not running text
    ends: tuple[int, ...] = ()

    @property
    def more(self) -> Mapping[str, Value]:
        """Metadata that a tuned model has in addition to that of its base."""
        return {} if self.template is None else {TEMPLATE: Value("string", self.template)}

    @property
    def trained(self) -> list[str]:
        leaves = transformer.weights(self.config).items()
        return [name for name, leaf in leaves if self.base.trains(self.config, leaf)]

    def shared(self) -> Mapping[str, np.ndarray]:
        trained = set(self.trained)
        return {n: array for n, array in self.model.stored().items() if n not in trained}

    def begin(self, session: Session) -> None:
        """Values of the file; LoRA A is initialized as in PEFT, uniform up to 1 / sqrt(width), and B is 0."""
        for name in self.trained:
            if name.endswith(B):
                session.fill(name, lambda array: array.fill(0))
            elif name.endswith(A):
                draw = np.random.default_rng([self.settings.seed, zlib.crc32(name.encode())])
                session.fill(name, partial(_uniform, draw=draw))
            else:
                stored = self.model.gguf.array(name)
                session.fill(name, partial(_unpack, stored=stored))

    def keep(self, path: Path, view: View) -> None:
        if self.config.lora is not None:
            write_adapter(path, self._adapter(view, self.config.lora), path.stem, self.model.gguf)
        else:
            write(path, {}, {name: Deferred.of(view, name) for name in self.trained})

    def write(self, view: View) -> None:
        """Write the adapter, which is merged later, when the memory of the run is free; or the tuned model."""
        s = self.settings
        if self.config.lora is not None:
            adapter = self._adapter(view, self.config.lora)
            adapter_path = s.output if s.merge == "none" else s.adapter
            for path in filter(None, (s.folder / ADAPTER, adapter_path)):
                write_adapter(path, adapter, name_of(s.output), self.model.gguf)
            return

        latest = lru_cache(1)(view)  # of a memory that only copies can be seen of, one at a time

        def rows(name: str) -> Rows:
            def changed(start: int, stop: int) -> np.ndarray:
                array = latest(name)
                part = array.reshape(-1, array.shape[-1])[start:stop]
                return part if dtype_of(array) == f32 else dequantize(part)

            return changed

        changes = {name: rows(name) for name in self.trained}
        dtype = DTYPES[s.type] if s.type else None
        name = name_of(s.output)
        write_changed(s.output, self.model.gguf, changes, name=name, dtype=dtype, more=self.more)

    def files(self) -> Mapping[Path, int]:
        s, gguf = self.settings, self.model.gguf
        stored, sizes = DTYPES[s.type] if s.type else None, transformer.weights(self.config)
        trained = [sizes[name].spec for name in self.trained]
        adapter = sum(spec.size * 4 for spec in trained) + HEAD_NBYTES
        if s.merge == "none":
            return {s.output: adapter, s.folder / ADAPTER: adapter}
        sizes_by_path = {s.output: gguf.nbytes + HEAD_NBYTES}
        changed = {
            n.removesuffix(B) for n in self.trained if not n.endswith(A)
        } & gguf.entries.keys()
        if stored is not None:
            for entry in (gguf.entries[name] for name in changed):
                target_dtype = stored_type(entry, stored)
                sizes_by_path[s.output] += max(
                    tensor_nbytes(entry.shape, target_dtype) - entry.nbytes, 0
                )
        if not s.full:
            sizes_by_path |= dict.fromkeys(filter(None, (s.folder / ADAPTER, s.adapter)), adapter)
        return sizes_by_path

    def _adapter(self, view: View, lora: Lora) -> Adapter:
        names = [name.removesuffix(A) for name in self.trained if name.endswith(A)]
        pairs = {name: (view(name + A), view(name + B)) for name in names}
        return Adapter(self.config.architecture, lora.alpha, pairs, aware=lora.aware)

    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer()

    def taught_by(self, data: Dataset) -> "Tuned":
        """The same, with what the data says: its chat template and, if only answers are learned, how they end."""
        chats = _has_chats(self.settings, self.model, data)
        # where prompts are learned, too, these tokens also end turns of users, whose length nothing tells
        eos_ids = tuple(sorted(data.ends)) if chats and self.settings.mask_prompt else ()
        return replace(self, template=data.template, chats=chats, ends=eos_ids)


def name_of(output: Path) -> str:
    """The model's name in the metadata of the output file."""
    return output.stem.encode(errors="replace").decode()


def _uniform(array: np.ndarray, draw: np.random.Generator) -> None:
    draw.random(dtype=np.float32, out=array)
    array *= 2
    array -= 1
    array *= np.float32(1 / math.sqrt(array.shape[-1]))


def _unpack(array: np.ndarray, stored: np.ndarray) -> None:
    """Convert values of the file to the type of the array, PART at a time."""
    rows, packed = array.reshape(-1, array.shape[-1]), stored.reshape(-1, stored.shape[-1])
    step, dtype = max(1, PART // rows.shape[1]), dtype_of(array)
    for at in range(0, len(rows), step):
        rows[at : at + step] = quantize(dequantize(packed[at : at + step]), dtype)


# ---- building the job ------------------------------------------------------------------------------------------------


def build_job(settings: TuneSettings, report: Callable[[str], None]) -> Job:
    """Open the model, tokenize the data, and fill in what the settings leave open. Raises InputError."""
    for name, value in (("the model", settings.model), ("--data", settings.data)):
        if value is None:
            raise InputError(f"{name} must be given: packtrain finetune BASE.gguf --data FILE")
    settings = as_begun(settings)
    assert settings.model is not None and settings.data is not None
    existing(settings.data, "--data")
    model = open_model(settings.model)
    _check_blocks(settings.num_layers, model)
    config = replace(model.config, lora=None if settings.full else lora_of(settings, model.config))
    _check_aware(settings, model, config)
    last, types = max(settings.num_layers, 0), tuple(model.types().items())
    base = Base(types, settings.freeze, last, settings.strict, DTYPES[settings.masters])
    if not Tuned(settings, model, config, base).trained:
        raise InputError("--freeze: nothing is left to train; leave some tensors out of it")
    train, valid, data = _batches(settings, model, config, report)
    settings = completed(settings, config.embedding_length, len(data.train), train.windows)
    settings = replace(settings, replay=train.texts)
    for part in filter(None, (train, valid)):
        part.rows = settings.batch_size
    schedule = schedule_of(settings, len(train))
    report(prospect(len(data.train), schedule.steps, train.windows, settings))
    evaluates = valid is not None or refers(settings.preference)
    shape = shape_of(settings, config, train.rows, train.time, evaluates, base, report)
    if isinstance(train, PairBatches):
        shape = replace(shape, preference=settings.preference, pairs=train.most)
    if isinstance(train, TeacherBatches | ReplayBatches):
        shape = replace(shape, distill=train.how)
    return Job(
        settings,
        f"{model.gguf.path.name}, {train.rows} × {train.time} tokens",
        Tuned(settings, model, config, base).taught_by(data),
        f"{data.fingerprint} {fingerprint(model)}",
        shape,
        optimizer_of(settings),
        schedule,
        train,
        valid,
    )


def _batches(
    settings: TuneSettings, model: ModelFile, config: Config, report: Callable[[str], None]
) -> tuple[SampleBatches, SampleBatches | None, Dataset]:
    """Batches for training and validation, as long as the longest sample needs, and their data set."""
    length = settings.ctx or min(config.context_length, CONTEXT)
    check_context(config, length, report)
    cache = writable(cache_root() / "tokens")
    dataset = prepare(_recipe(settings, length), cache, report, settings.memory)
    for note in dataset.notes:
        report(note)
    preference = settings.preference
    parts = [part for part in (dataset.train, dataset.valid) if part]
    make: Callable[..., SampleBatches] = SampleBatches
    time = settings.ctx or row_length(length, *map(SampleBatches.lengths_of, parts))
    if preference is not None:  # a row holds both answers, each as long as the context
        make = partial(PairBatches, how=preference)
        time = row_length(2 * length, *map(PairBatches.lengths_of, parts))
    size, make_train = (max(settings.batch_size, 1), time), make
    count = replayed(settings, config, dataset.train)
    if settings.distill is not None and settings.teacher is not None:
        teacher = open_model(existing(settings.teacher, "--teacher"))
        check_vocabularies(model, teacher, "a teacher")
        if config.final_softcap:
            raise InputError(
                f"--teacher: {model.gguf.path.name} caps its logits, which it is not for"
            )
        mark = fingerprint(teacher)
        make_train = partial(TeacherBatches, how=settings.distill, teacher=teacher, mark=mark)
    elif count:
        length, width = min(REPLAY_LENGTH, time), config.embedding_length
        replay = Replay(length, settings.replay_weight, count, width)
        make_train = partial(ReplayBatches, how=replay, base=model)
    train, valid = make_train(dataset.train, *size, seed=settings.seed, pack=settings.pack), None
    if dataset.valid is not None:
        valid = make(dataset.valid, size[0], train.time, shuffle=False, pack=settings.pack)
    return train, valid, dataset


def _check_blocks(last: int, model: ModelFile) -> None:
    count = model.config.block_count
    if last > count:
        raise InputError(
            f"--num-layers {last}: {model.gguf.path.name} has {plural(count, 'block')}; it must be at most that, or -1"
        )


def _check_aware(settings: TuneSettings, model: ModelFile, config: Config) -> None:
    """Raise InputError if --aware could not be kept."""
    if not settings.aware or config.lora is None:
        return
    if config.expert_count:
        raise InputError(
            f"--aware: {model.gguf.path.name} has experts, which it is not for; leave it out"
        )
    types, fits = model.types(), ", ".join(map(str, RECODABLE))
    adapted_types = {n: types[n] for n in transformer.weights(config) if config.lora.rank(n)}
    # the merge would lose part of what such a matrix learns, which no step sees
    for name, dtype in adapted_types.items():
        if dtype.quantized and dtype not in RECODABLE:
            raise InputError(
                f"--aware: {name} is {dtype}, and it is for matrices of {fits}",
                "leave it out, or train other matrices (--lora-modules)",
            )
    if not set(adapted_types.values()) & set(RECODABLE):
        raise InputError(
            f"--aware: no matrix that is trained is quantized; it is for matrices of {fits}"
        )


def _has_chats(settings: TuneSettings, model: ModelFile, data: Dataset) -> bool:
    """Whether the data is conversations; with --no-mask-prompt, whether the model has a chat template."""
    if settings.mask_prompt:
        return not data.train.weights.all()
    return data.template is not None or TEMPLATE in model.gguf.metadata


def _recipe(settings: TuneSettings, length: int) -> Recipe:
    check_split(settings.val_split)
    assert settings.model is not None and settings.data is not None
    return Recipe(
        settings.data,
        settings.model,
        length,
        settings.truncate,
        not settings.mask_prompt,
        settings.train_on == "last",
        settings.separator and unescaped(settings.separator),
        settings.val_split,
        settings.skip_bad,
        settings.chat_template and template_named(settings.chat_template),
        settings.preference is not None,
        settings.columns,
    )


# ---- LoRA adapters --------------------------------------------------------------------------------------


def lora_of(settings: TuneSettings, config: Config) -> Lora:
    """The LoRA adapters that the settings ask for. Raises InputError."""
    kinds = list(_matrices(config))
    names = settings.lora_modules.split(",")
    patterns = [GROUPS.get(name, name) for name in names]
    chosen = [kind for kind in kinds if any(fnmatchcase(kind, p) for p in patterns)]
    for name, pattern in zip(names, patterns, strict=True):
        if not any(fnmatchcase(kind, pattern) for kind in kinds):
            raise InputError(
                f"--lora-modules: {name!r} is not a matrix of the model; choose all, attn, mlp, or some of"
                f" {', '.join(kinds)}"
            )
    ranks = dict.fromkeys(chosen, 0)
    for text in sorted(settings.lora_rank, key=lambda text: "=" in text):
        name, rank = _rank(text)
        matching_kinds = [kind for kind in chosen if fnmatchcase(kind, name)]
        if not matching_kinds:
            raise InputError(f"--lora-rank {text}: it must be for one of {', '.join(chosen)}")
        ranks |= dict.fromkeys(matching_kinds, rank)
    ranks = {kind: rank or _rank(TuneSettings.lora_rank[0])[1] for kind, rank in ranks.items()}
    alpha = settings.lora_alpha
    if alpha is None:
        default_ranks = [text for text in settings.lora_rank if "=" not in text]
        alpha = usual_alpha(
            settings.rslora, _rank([*TuneSettings.lora_rank, *default_ranks][-1])[1]
        )
    if settings.rslora:
        if len(set(ranks.values())) > 1:
            raise InputError("--rslora: all ranks must be equal, because an adapter has one alpha")
        alpha *= math.sqrt(next(iter(ranks.values())))
    patterns_ranks = tuple((f"blk.*.{kind}.weight", rank) for kind, rank in ranks.items())
    stored = float(np.float32(alpha))  # as the adapter's file has it
    last, dropout = max(settings.num_layers, 0), settings.lora_dropout
    return Lora(patterns_ranks, last, stored, dropout, aware=settings.aware)


def _matrices(config: Config) -> Iterator[str]:
    """Names, within a block, of the matrices that can have a LoRA adapter: in some blocks, if not in all."""
    matrix_kinds = dict[str, None]()
    for name, leaf in transformer.weights(config).items():
        block, _, kind = name.removeprefix("blk.").removesuffix(".weight").partition(".")
        if block.isdecimal() and is_matrix(name, leaf.shape) and kind != "ffn_gate_inp":
            matrix_kinds[kind] = None
    yield from matrix_kinds


def _rank(text: str) -> tuple[str, int]:
    """Name and rank of NAME=RANK, or of RANK alone for all names."""
    name, _, number = text.rpartition("=")
    if not number.isdecimal() or not 0 < int(number) <= 4096:
        raise InputError(
            f"--lora-rank {text}: it must be from 1 to 4096, or NAME=RANK such as attn_q=8"
        )
    return name or "*", int(number)
