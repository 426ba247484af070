"""A fully specified training run: settings in, data, sizes, schedule and number of steps out."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.options import resumable_names, unescape
from packtrain.common.text import plural
from packtrain.data.text import CorpusRecipe, prepare_corpus
from packtrain.data.tokenizer import Tokenizer
from packtrain.distributed import check_device, current_world
from packtrain.dtypes import DTYPES, f32
from packtrain.engine.executor import Session
from packtrain.engine.optim import OPTIMIZERS, Optimizer, RankShare
from packtrain.gguf import MetadataValue
from packtrain.kernels.runtime.environment import cache_root, supports_precision, writable
from packtrain.models import transformer
from packtrain.models.attention_choice import with_flash
from packtrain.models.config import PRESETS, Config
from packtrain.models.llama_cpp_checkpoint import LlamaCppCheckpoint, open_start
from packtrain.models.model_file import save_model
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.training.indexed_batches import Batch, IndexedBatches
from packtrain.training.lr_schedule import LrSchedule, steps_per_eval
from packtrain.training.run_settings import RunSettings
from packtrain.training.text_batches import TextBatches
from packtrain.training.train_settings import TrainSettings

MAX_VOCABULARY, MIN_SPLIT = 1_000_000, 1e-4
GLIMPSE_POSITIONS = 1 << 17  # most positions of the data that are examined before planning
HEAD_NBYTES = 1 << 16  # upper bound of a GGUF header: names, shapes and padding
SOURCES = ("data", "vocab", "vocab_size", "model")  # settings that name input files

WeightReader = Callable[[str], np.ndarray]


class TrainableModel(Protocol):
    """The model of a training job: sets initial values of leaves, and writes trained ones.

    eog_ids  ids that end an answer, if the data is conversations
    """

    @property
    def eog_ids(self) -> tuple[int, ...]: ...

    def shared(self) -> Mapping[str, np.ndarray]:
        """Return the frozen tensors by name, which are read in place from the model's file."""

    def init_weights(self, session: Session) -> None:
        """Set the initial values of all weights of the session but those of `shared`."""

    def save_weights(self, path: Path, view: WeightReader) -> None:
        """Write the trained tensors, which `view` returns by name, to a GGUF file, under their own names."""

    def write_result(self, view: WeightReader) -> None:
        """Write the run's result in the format that the settings ask for; view(name) returns a trained tensor."""

    def output_files(self) -> Mapping[Path, int]:
        """Return the files of the result, each with an upper bound of its bytes."""

    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class TrainingJob:
    """A training run: model, data, optimizer and number of steps. `fingerprint`: checksum of the data, and of the base.

    offloaded  whether moments of weights on a device live in the process's memory; None: not decided
    """

    settings: RunSettings
    title: str
    model: TrainableModel
    fingerprint: str
    shape: StepShape
    optimizer: Optimizer
    schedule: LrSchedule
    train: IndexedBatches
    valid: IndexedBatches | None
    offloaded: bool | None = None

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def config(self) -> Config:
        return self.shape.config

    def batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step, from 1; a step has the same rows at any micro-batch size."""
        num_accumulated = self.settings.grad_accumulation_steps
        # if a step is an epoch, its order stays, so that optimizers can compare evaluations
        is_fixed = self.shape.num_evaluations > 1 and len(self.train) <= num_accumulated
        first_index = 0 if is_fixed else (step - 1) * num_accumulated
        size = self.settings.batch_size
        num_rows = self.shape.micro_batch_size * self.shape.num_micro_batches
        # each rank takes an equal run of the step's rows
        row_start = current_world().rank * num_rows
        micro_batches = list[Batch]()
        for i in range(row_start // size, -(-(row_start + num_rows) // size)):
            row_bounds = max(row_start - i * size, 0), min(row_start + num_rows - i * size, size)
            micro_batches += self._parts(self.train[first_index + i], *row_bounds)
        return micro_batches

    def first_batches(self) -> list[Batch]:
        """Return the first micro-batches of step 1, at most GLIMPSE_POSITIONS, to measure the data before planning."""
        num_rows = GLIMPSE_POSITIONS // self.shape.seq_len
        count = min(num_rows // self.settings.batch_size, self.settings.grad_accumulation_steps)
        return [micro_batch for i in range(count) for micro_batch in self._parts(self.train[i])]

    def validation_batches(self) -> Iterator[Batch]:
        """Yield the micro-batches of one validation: of all batches, or of --val-batches evenly spaced ones."""
        assert self.valid is not None
        num_valid, num_batches = len(self.valid), self.num_eval_batches
        for i in range(num_batches):
            yield from self._parts(self.valid[i * num_valid // num_batches])

    def counted(self, report: Callable[[int, int], None]) -> Iterator[Batch]:
        """Yield the micro-batches of one validation; after each, call report(number done, number in all)."""
        size = self.shape.micro_batch_size
        num_parts = self.num_eval_batches * -(-self.settings.batch_size // size)
        for num_done, batch in enumerate(self.validation_batches(), 1):
            yield batch
            report(num_done, num_parts)

    @property
    def steps_per_eval(self) -> int:  # 0: only at the end
        return steps_per_eval(self.settings.steps_per_eval, self.steps)

    @property
    def num_eval_batches(self) -> int:
        """The number of batches of one validation."""
        num_valid = 0 if self.valid is None else len(self.valid)
        return min(self.settings.val_batches or num_valid, num_valid)

    def _parts(
        self, batch: Mapping[str, Any], row_start: int = 0, row_end: int | None = None
    ) -> list[Batch]:
        """Cut rows row_start … row_end (None: the last) of a batch into micro-batches."""
        rows = self.shape.micro_batch_size
        starts = range(row_start, self.settings.batch_size if row_end is None else row_end, rows)
        return [{name: value[at : at + rows] for name, value in batch.items()} for at in starts]

    def about(self) -> dict[str, Any]:
        """Return what must be equal to resume, as plain data; `sources` only name the files whose checksum is `data`.

        Rows, chunk, `layered` and tiles fix the order of floating-point additions; recomputation does not change a bit.
        """
        s, shape = self.settings, self.shape
        resumable = resumable_names(type(s))
        setting_names = [field.name for field in fields(s) if field.name not in resumable]
        info = {
            **{name: getattr(s, name) for name in setting_names}, **asdict(self.config),
            "shuffle_samples": self.train.shuffle_samples, "data": self.fingerprint,
            "sources": {name: getattr(s, name) for name in SOURCES if hasattr(s, name)}, "steps": self.steps,
            "rows": shape.micro_batch_size, "chunk": shape.chunk, "layered": shape.layered, "ranks": shape.world_size,
            "tiles": shape.num_row_tiles, "offloaded": bool(self.offloaded),
        }  # fmt: skip
        # values as a checkpoint returns them
        return dict(json.loads(json.dumps(info, default=lambda path: str(path.absolute()))))


@dataclass(frozen=True, slots=True)
class NewModel:
    """A new model with random weights and its own vocabulary: the subject of `packtrain train`."""

    settings: TrainSettings
    config: Config
    vocabulary: Mapping[str, MetadataValue]
    start: LlamaCppCheckpoint | None = None  # with the initial weights; None: random ones

    def shared(self) -> Mapping[str, np.ndarray]:
        return {}

    def init_weights(self, session: Session) -> None:
        if self.start is not None:
            self.start.init_weights(session)
        else:
            transformer.initialize_weights(self.config, self.settings.seed, session.fill)

    def save_weights(self, path: Path, view: WeightReader) -> None:
        self._save_as_dtype(path, view, "f32")

    def write_result(self, view: WeightReader) -> None:
        self._save_as_dtype(self.settings.output, view, self.settings.type)

    def output_files(self) -> Mapping[Path, int]:
        weights = transformer.weights(self.config).values()
        vector_nbytes = sum(w.spec.nbytes for w in weights if len(w.shape) == 1)
        num_matrix_values = sum(w.spec.size for w in weights if len(w.shape) > 1)
        words = sum(len(token) + 24 for token in self.vocabulary["tokenizer.ggml.tokens"].value)
        matrix_nbytes = DTYPES[self.settings.type].row_nbytes(num_matrix_values)
        return {self.settings.output: matrix_nbytes + vector_nbytes + words + HEAD_NBYTES}

    def _save_as_dtype(self, path: Path, view: WeightReader, dtype: str) -> None:
        name = self.settings.output.stem.encode(errors="replace").decode()
        save_model(path, self.config, self.vocabulary, view, dtype=dtype, name=name)

    @property
    def eog_ids(self) -> tuple[int, ...]:
        return ()

    def tokenizer(self) -> Tokenizer:
        return Tokenizer({key: value.value for key, value in self.vocabulary.items()})


def build_job(settings: TrainSettings, report: Callable[[str], None]) -> TrainingJob:
    """Read and tokenize the data, fill in open settings, and return the job. Raises InputError."""
    if settings.data is None:
        fact = "--data must be given: a text file, or a folder with train.txt and valid.txt"
        raise InputError(fact)
    folder = writable(cache_root() / "tokens")
    start = open_start(settings)
    corpus = prepare_corpus(_corpus_recipe(settings, start), folder, report, settings.memory)
    config = (start or settings).config(len(corpus.vocabulary["tokenizer.ggml.tokens"].value))
    notes = (
        start.notes(settings) if start else _context_warning(settings.preset, config.context_length)
    )
    for note in (*corpus.notes, *notes):
        report(note)
    size = settings.batch_size, config.context_length
    shape = shape_of(settings, config, *size, corpus.valid is not None, report=report)
    fill = settings.fill_samples and settings.sample_start is None
    batches = partial(TextBatches, rows=size[0], time=size[1], fill=fill)
    shuffles, offsets = settings.shuffle_samples is not False, settings.random_offsets
    train = batches(
        corpus.train, seed=settings.seed, random_offsets=offsets, shuffle_samples=shuffles
    )
    valid = None if corpus.valid is None else batches(corpus.valid, shuffle=False)
    schedule = make_schedule(settings, len(train))
    return TrainingJob(
        settings, f"{start.name if start else settings.preset}, {shape.micro_batch_size} × {shape.seq_len} tokens",
        NewModel(settings, config, corpus.vocabulary, start), corpus.fingerprint,
        *(shape, make_optimizer(settings), schedule, train, valid),
    )  # fmt: skip


def _context_warning(preset: str, ctx: int) -> Iterator[str]:
    """Yield a warning about a context that is longer than the preset's."""
    preset_ctx = PRESETS[preset].context_length
    if ctx > preset_ctx:
        yield (
            f"--ctx {ctx:,} is more than the context of {preset}, {plural(preset_ctx, 'token')}: it is trained on"
            " the longer one, with more time and memory for each step"
        )


def shape_of(
    settings: RunSettings, config: Config, rows: int, time: int, has_eval: bool, base: BaseModel | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> StepShape:  # fmt: skip
    """Return the StepShape of a step of micro-batches of at most `rows` × `time` tokens, for the planner. `has_eval`:
    the run validates; `base`: the model to tune, None: a new one; `report` gets warnings. Raises InputError."""
    check_precision(settings.precision, settings.device)
    config = replace(config, precision=settings.precision, saved=settings.saved_activations)
    config = with_flash(config, settings.flash_attn, settings.target, report, None)
    optimizer = OPTIMIZERS[settings.optimizer]
    num_ranks, total_rows = current_world().world_size, rows * settings.grad_accumulation_steps
    if num_ranks > 1:
        check_device(settings.device, settings.gpu_layers is not None)
    if total_rows % num_ranks:
        raise InputError(
            f"{num_ranks} processes cannot share out the {total_rows} rows of a step (--batch-size times"
            " --grad-accumulation-steps) equally"
        )
    if len(settings.target.every) > 1 and OPTIMIZERS[settings.optimizer].first_length is not None:
        raise InputError(f"--optimizer {settings.optimizer} works on one device")
    rank_rows = total_rows // num_ranks
    max_norm, max_value = settings.max_grad_norm or None, settings.max_grad_value or None
    if optimizer.first_length is not None:
        max_norm = max_value = None
    micro_rows = math.gcd(rows, rank_rows)
    return StepShape(
        *(config, micro_rows, time, rank_rows // micro_rows, max_norm, has_eval), num_evaluations=optimizer.evaluations,
        world_size=num_ranks, moment_share=_moment_share(settings, optimizer, base),
        scatters_gradients=settings.zero > 1, base=base, max_value=max_value,
    )  # fmt: skip


def _moment_share(
    settings: RunSettings, optimizer: type[Optimizer], base: BaseModel | None
) -> RankShare | None:
    """Return (rank, number of ranks) if --zero shares out the optimizer's moments, else None. Raises InputError."""
    if current_world().world_size == 1 and settings.zero and not settings.resume:
        fact = f"--zero {settings.zero} is for several processes; give --nproc, or leave it out"
        raise InputError(fact)
    if current_world().world_size == 1 or not settings.zero:
        return None
    if not optimizer.by_parts:
        raise InputError(
            f"--zero {settings.zero}: {optimizer.name} needs all of a tensor for its update, so its moments cannot be"
            " shared out; leave out --zero"
        )
    if base is not None and base.masters != f32:
        fact = f"--zero {settings.zero} needs trained weights in f32"
        raise InputError(f"{fact}; leave out --masters {base.masters}")
    return current_world().rank, current_world().world_size


def make_optimizer(settings: RunSettings) -> Optimizer:
    """Create the optimizer of the settings, with its options."""
    optimizer_class = OPTIMIZERS[settings.optimizer]
    names = [field.name for field in fields(optimizer_class) if hasattr(settings, field.name)]
    options = {name: getattr(settings, name) for name in names}
    return optimizer_class(**options | {"lr": settings.learning_rate})


def _corpus_recipe(settings: TrainSettings, start: LlamaCppCheckpoint | None) -> CorpusRecipe:
    is_auto = settings.vocab_size == "auto"
    if not is_auto and not settings.vocab_size.isdecimal():
        raise InputError(f"--vocab-size {settings.vocab_size}: it must be a number, or auto")
    size = PRESETS[settings.preset].vocab_size if is_auto else int(settings.vocab_size)
    if size > MAX_VOCABULARY:
        raise InputError(f"--vocab-size {size}: a vocabulary has at most {MAX_VOCABULARY:,} tokens")
    check_split(settings.val_split)
    assert settings.data is not None
    has_sample_start = settings.sample_start is not None
    if settings.sample_start == "":
        raise InputError("--sample-start is empty; it must be some text")
    separator = settings.sample_start if has_sample_start else settings.separator
    separator = separator and unescape(separator)
    split, skip, columns = settings.val_split, settings.skip_bad, settings.columns
    vocabulary = start.vocab if start else settings.vocab, size, is_auto
    return CorpusRecipe(
        settings.data, *vocabulary, separator, split, skip, has_sample_start, columns
    )


def check_split(val_split: float) -> None:
    """Raise InputError for a --val-split between 0 and MIN_SPLIT."""
    if 0 < val_split < MIN_SPLIT:
        raise InputError(f"--val-split {val_split}: it must be 0 or at least {MIN_SPLIT}")


def make_schedule(settings: RunSettings, batches: int) -> LrSchedule:
    """Create the learning-rate schedule for --iters steps, or for --epochs passes over an epoch's `batches`."""
    epochs = 1.0 if settings.epochs is None else settings.epochs
    steps = max(math.ceil(batches * epochs / settings.grad_accumulation_steps), 1)
    steps = steps if settings.iters is None else settings.iters
    rate, decay = settings.learning_rate, settings.lr_scheduler
    if OPTIMIZERS[settings.optimizer].first_length is not None:
        return LrSchedule("constant", rate, rate, 0, steps)
    floor = (0 if decay == "halving" else rate / 10) if settings.lr_min is None else settings.lr_min
    half_every = settings.lr_half_every or math.ceil(batches / settings.grad_accumulation_steps)
    num_warmup = math.ceil(settings.warmup_ratio * steps)
    cycles = settings.lr_cycles, settings.lr_cycle_growth, settings.warmup_lr, half_every
    return LrSchedule(decay, rate, floor, num_warmup, steps, *cycles)


def check_precision(precision: str, device: str) -> None:
    """Raise InputError for a precision that the device lacks, or that gains nothing there."""
    if precision == "bf16x3" and device != "cpu" and not device.startswith("cuda"):
        fact = "--precision bf16x3: faster than f32 only on CPUs with AMX and on cuda"
        raise InputError(f"{fact}, not on {device}; leave it out")
    if device == "cpu" and not supports_precision(precision):
        missing_feature = "no AVX512_BF16" if precision == "bf16" else "no AMX, or Linux refuses it"
        fact = f"--precision {precision}: this CPU has {missing_feature}"
        raise InputError(f"{fact}, without which it is not faster; leave it out")
