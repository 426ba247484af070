"""Builds our side of a comparison: steps that train a preset, or LoRA on a model file, with random tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.memory import private_nbytes
from packtrain.devtools.bench.timing import TimedStep, timed_steps
from packtrain.engine.backends import Target
from packtrain.engine.executor import Executor
from packtrain.engine.optim import AdamW
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from packtrain.models.model_file import open_model
from packtrain.planner.machine_speed import measure_rates_in_children
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import find_fastest_shape, unlimited
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.training_plans import STEP, make_plans, packed_weight_types
from packtrain.training.finetune_job import TunedModel, lora_of
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_engine import Batch, TrainingEngine
from packtrain.training.training_job import shape_of

ROWS = {"1m": 4, "15m": 4, "110m": 1}  # rows of a batch, each of the preset's whole context
FILE_CONTEXT = 512  # tokens of the row that trains a model file
LR, MAX_NORM = 1e-3, 1.0


@dataclass
class TrainingBench:
    """An engine with the micro-batches that every step trains on."""

    name: str
    engine: TrainingEngine
    batches: list[Batch]
    step_number: int = 0

    def step(self) -> float:
        """Run one training step and return its loss."""
        self.step_number += 1
        return self.engine.step(self.batches, self.step_number, LR).loss

    @property
    def tokens(self) -> int:
        return sum(int(batch["tokens"].size) for batch in self.batches)

    @property
    def run(self) -> Executor:
        return self.engine.run[STEP]


def batch_of(config: Config, num_rows: int, time: int) -> dict[str, np.ndarray]:
    """Return a batch of random tokens whose weights are all 1."""
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (num_rows, time + 1), np.int32)
    pos = np.tile(np.arange(time, dtype=np.int32), (num_rows, 1))
    return {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((num_rows, time), np.float32), "pos": pos,
        "seq": np.zeros_like(pos),
    }  # fmt: skip


def of_preset(
    name: str, precision: str = "f32", device: str = "cpu", memory: int | None = None
) -> TrainingBench:
    """Prepare a step of `packtrain train --preset` in `memory` bytes (None: no limit). Raises InputError if too few."""
    config = replace(PRESETS[name], precision=precision)
    num_rows, context_length = ROWS[name], config.context_length
    shape = StepShape(config, num_rows, context_length, max_norm=MAX_NORM, evaluate=False)
    training = _prepare(name, shape, TrainSettings(device=device).target, memory)
    transformer.initialize_weights(config, 0, training.engine.session.fill)
    return training


def of_base(
    path: Path, num_rows: int = 1, time: int = FILE_CONTEXT, precision: str = "f32", memory: int | None = None,
    device: str = "cpu",
) -> TrainingBench:  # fmt: skip
    """Prepare a LoRA step of `packtrain finetune` on model `path`; `memory` as in of_preset. Raises InputError."""
    settings, model = TuneSettings(model=path, precision=precision, device=device), open_model(path)
    config = replace(model.config, lora=lora_of(settings, model.config))
    time = min(time, config.context_length)
    base = BaseModel(tuple(model.matrix_dtypes().items()))
    subject = TunedModel(settings, model, config, base)
    shape = replace(shape_of(settings, config, num_rows, time, False, base), max_norm=MAX_NORM)
    name = f"LoRA on {path.name}"
    training = _prepare(name, shape, settings.target, memory, subject.shared())
    subject.init_weights(training.engine.session)
    return training


def _prepare(
    name: str, shape: StepShape, target: Target, memory: int | None,
    shared: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> TrainingBench:  # fmt: skip
    """Plan a step of this shape in `memory` bytes, and make its engine, without initial weights, and its batches;
    `shared`: frozen weights by name, mapped from a file."""
    update, num_rows = AdamW(lr=LR), shape.micro_batch_size
    packed_types = packed_weight_types(shape)
    speed = measure_rates_in_children(False, lambda _: None, packed_types, target=target)
    request = PlanRequest(update, speed, private_nbytes(), target=target)
    batch = batch_of(shape.config, num_rows, shape.seq_len)
    shape = unlimited(shape, request) if memory is None else fit_memory(memory, shape, request)
    engine = TrainingEngine(make_plans(shape, update, target=target), update, shared)
    title = f"{name}, {num_rows} × {shape.seq_len} tokens"
    return TrainingBench(title, engine, split_batch(batch, shape.micro_batch_size))


def fit_memory(memory: int, shape: StepShape, request: PlanRequest) -> StepShape:
    """Return the fastest step shape that fits `memory` bytes. Raises InputError if none fits."""
    best_plan = find_fastest_shape(shape, request.with_limit(memory))
    if not best_plan.is_within_limits:
        raise InputError(f"a step does not fit {memory >> 20} MiB")
    return best_plan.shape


def split_batch(batch: Batch, num_rows: int) -> list[Batch]:
    """Split a batch into micro-batches of `num_rows` rows."""
    row_starts = range(0, len(batch["tokens"]), num_rows)
    return [{name: array[at : at + num_rows] for name, array in batch.items()} for at in row_starts]


def prepare_timed_steps(
    threads: int, preset: str, precision: str, memory: int | None = None
) -> Callable[..., TimedStep]:
    """Set this process's threads, load kernels, and return a function that times a step; for a process of its own."""
    kernels.set_threads(threads)
    kernels.load_all((*kernels.TRAINING_KERNELS, "update"))
    return timed_steps(of_preset(preset, precision, memory=memory).step)
