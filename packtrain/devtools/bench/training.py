"""Our own side of a step: training a preset from scratch, or LoRA on the model of a file, with random tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.memory import private_nbytes
from packtrain.devtools.bench.timing import Stepped, stepping
from packtrain.engine.executor import Executor
from packtrain.engine.optim import AdamW
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from packtrain.models.model_file import open_model
from packtrain.planner.machine_speed import rates_apart
from packtrain.planner.plan_request import Request
from packtrain.planner.plan_search import search, unlimited
from packtrain.planner.step_shape import Base, StepShape
from packtrain.planner.training_plans import STEP, make_plans, packed_types
from packtrain.training.finetune_job import Tuned, lora_of
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_engine import Batch, Engine
from packtrain.training.training_job import shape_of

ROWS = {"1m": 4, "15m": 4, "110m": 1}  # windows of a preset's whole context
TIME = 512  # tokens of the only row on the model of a file
LR, MAX_NORM = 1e-3, 1.0


@dataclass
class Training:
    """An engine with the micro-batches that it is fed, the same in each step."""

    name: str
    engine: Engine
    batches: list[Batch]
    number: int = 0

    def step(self) -> float:
        """One step; its loss."""
        self.number += 1
        return self.engine.step(self.batches, self.number, LR).loss

    @property
    def tokens(self) -> int:
        return sum(int(batch["tokens"].size) for batch in self.batches)

    @property
    def run(self) -> Executor:
        return self.engine.run[STEP]


def batch_of(config: Config, rows: int, time: int) -> dict[str, np.ndarray]:
    """Random tokens, each of which counts."""
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (rows, time + 1), np.int32)
    pos = np.tile(np.arange(time, dtype=np.int32), (rows, 1))
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": np.ones((rows, time), np.float32),
        "pos": pos,
        "seq": np.zeros_like(pos),
    }


def of_preset(
    name: str, precision: str = "f32", device: str = "cpu", memory: int | None = None
) -> Training:
    """A step of `packtrain train --preset`, planned for `memory` bytes of this process. Raises InputError."""
    config = replace(PRESETS[name], precision=precision)
    rows, time = ROWS[name], config.context_length
    update = AdamW(lr=LR)
    shape = StepShape(config, rows, time, max_norm=MAX_NORM, evaluate=False)
    on = TrainSettings(device=device).target
    speed = rates_apart(False, _quiet, target=on)
    request = Request(update, speed, private_nbytes(), target=on)
    shape = unlimited(shape, request) if memory is None else within(memory, shape, request)
    engine = Engine(make_plans(shape, update, target=on), update)
    transformer.initialise(config, 0, engine.session.fill)
    batches = parts(batch_of(config, rows, time), shape.rows)
    return Training(f"{name}, {rows} × {time} tokens", engine, batches)


def of_base(
    path: Path,
    rows: int = 1,
    time: int = TIME,
    precision: str = "f32",
    memory: int | None = None,
    device: str = "cpu",
) -> Training:
    """A step of `packtrain finetune` with its own adapters; this process keeps to `memory` bytes. Raises InputError."""
    settings, model = TuneSettings(model=path, precision=precision, device=device), open_model(path)
    config = replace(model.config, lora=lora_of(settings, model.config))
    time = min(time, config.context_length)
    base = Base(tuple(model.types().items()))
    subject, update = Tuned(settings, model, config, base), AdamW(lr=LR)
    shape = replace(shape_of(settings, config, rows, time, False, base), max_norm=MAX_NORM)
    on = settings.target
    speed = rates_apart(False, _quiet, packed_types(shape), target=on)
    request = Request(update, speed, private_nbytes(), target=on)
    shape = unlimited(shape, request) if memory is None else within(memory, shape, request)
    engine = Engine(make_plans(shape, update, target=on), update, subject.shared())
    subject.begin(engine.session)
    name = f"LoRA on {path.name}, {rows} × {time} tokens"
    return Training(name, engine, parts(batch_of(config, rows, time), shape.rows))


def _quiet(_: str) -> None:
    """Says nothing of what is measured."""


def within(memory: int, shape: StepShape, request: Request) -> StepShape:
    """The fastest step of so many bytes. Raises InputError."""
    best_plan = search(shape, request.within(memory))
    if not best_plan.fits:
        raise InputError(f"a step does not fit {memory >> 20} MiB")
    return best_plan.shape


def parts(batch: Batch, rows: int) -> list[Batch]:
    """Micro-batches of so many rows."""
    starts = range(0, len(batch["tokens"]), rows)
    return [{name: array[at : at + rows] for name, array in batch.items()} for at in starts]


def peer(
    threads: int, preset: str, precision: str, memory: int | None = None
) -> Callable[[], Stepped]:
    """Our side of a comparison, in a process of its own."""
    kernels.set_threads(threads)
    kernels.load_all((*kernels.LEARNING, "update"))
    return stepping(of_preset(preset, precision, memory=memory).step)
