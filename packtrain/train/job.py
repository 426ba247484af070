"""A training run with everything decided: settings in, data, sizes, schedule and number of steps out."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.corpus import Corpus, Text, prepare
from packtrain.errors import InputError
from packtrain.kernels.runtime import cache_root, writable
from packtrain.models.config import PRESETS, Config
from packtrain.settings import unescaped
from packtrain.train.batches import Batches
from packtrain.train.optim import SGD, AdamW, Optimizer
from packtrain.train.plans import Shape
from packtrain.train.schedule import Schedule
from packtrain.train.settings import FREE, TrainSettings

VOCABULARY, LEAST_SPLIT = 1_000_000, 1e-4


@dataclass(frozen=True)
class Job:
    """What is trained, on what, for how many steps."""

    settings: TrainSettings
    corpus: Corpus
    config: Config
    shape: Shape
    optimizer: Optimizer
    schedule: Schedule
    train: Batches
    valid: Batches | None

    @property
    def steps(self) -> int:
        return self.schedule.steps

    def batches(self, step: int) -> list[dict[str, Any]]:
        """The micro-batches of step 1, 2, …: the same windows however many rows of them are taken at a time."""
        asked = self.settings.grad_accumulation_steps
        first = (step - 1) * asked
        return [part for i in range(asked) for part in self._parts(self.train[first + i])]

    def validation(self) -> Iterator[dict[str, Any]]:
        """The batches of one validation: all, or as many as asked for, always the same."""
        assert self.valid is not None
        count = len(self.valid)
        most = min(self.settings.val_batches or count, count)
        for i in range(most):
            yield from self._parts(self.valid[i * count // most])

    def _parts(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = self.shape.rows
        starts = range(0, self.settings.batch_size, rows)
        return [{name: value[at : at + rows] for name, value in batch.items()} for at in starts]

    def about(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to go on with this job, as plain data.

        Rows, chunk and `layered` decide about the order of additions; what is computed again does not change a bit.
        """
        s, shape = self.settings, self.shape
        names = [name for name in s.__dataclass_fields__ if name not in FREE]
        return {
            **{name: getattr(s, name) for name in names},
            **json.loads(json.dumps(asdict(self.config))),  # as a checkpoint gives it back
            "data": self.corpus.fingerprint,
            "steps": self.steps,
            "rows": shape.rows,
            "chunk": shape.chunk,
            "layered": shape.layered,
        }


def decide(settings: TrainSettings, say: Callable[[str], None]) -> Job:
    """Read and tokenize the data, and fill in what the settings leave open. Raises InputError."""
    if settings.data is None:
        raise InputError(
            "--data must be given: a text file, or a folder with train.txt and valid.txt"
        )
    corpus = prepare(_text(settings), writable(cache_root() / "tokens"), say)
    config = settings.config(len(corpus.vocabulary["tokenizer.ggml.tokens"].value))
    shape = Shape(
        config,
        settings.batch_size,
        config.context_length,
        settings.grad_accumulation_steps,
        settings.max_grad_norm or None,
        corpus.valid is not None,
    )
    size = settings.batch_size, config.context_length
    train = Batches(
        corpus.train,
        *size,
        seed=settings.seed,
        random_offsets=settings.random_offsets,
        fill=settings.fill_samples,
    )
    valid = None
    if corpus.valid is not None:
        valid = Batches(corpus.valid, *size, shuffle=False, fill=settings.fill_samples)
    optimizer, schedule = _optimizer(settings), _schedule(settings, len(train))
    return Job(settings, corpus, config, shape, optimizer, schedule, train, valid)


def _optimizer(settings: TrainSettings) -> Optimizer:
    if settings.optimizer == "sgd":
        return SGD(settings.learning_rate, settings.weight_decay)
    betas = settings.beta1, settings.beta2
    return AdamW(settings.learning_rate, *betas, weight_decay=settings.weight_decay)


def _text(settings: TrainSettings) -> Text:
    auto = settings.vocab_size == "auto"
    if not auto and not settings.vocab_size.isdecimal():
        raise InputError(f"--vocab-size {settings.vocab_size}: it must be a number, or auto")
    size = PRESETS[settings.preset].vocab_size if auto else int(settings.vocab_size)
    if size > VOCABULARY:
        raise InputError(f"--vocab-size {size}: a vocabulary has at most {VOCABULARY:,} tokens")
    if 0 < settings.val_split < LEAST_SPLIT:
        raise InputError(
            f"--val-split {settings.val_split}: it must be 0 or at least {LEAST_SPLIT}"
        )
    assert settings.data is not None
    separator = settings.separator
    if separator is not None:
        separator = unescaped(separator)
    return Text(settings.data, settings.vocab, size, auto, separator, settings.val_split)


def _schedule(settings: TrainSettings, batches: int) -> Schedule:
    """The schedule over --iters steps, or as many as --epochs take."""
    epochs = 1.0 if settings.epochs is None else settings.epochs
    steps = settings.iters or max(math.ceil(batches * epochs / settings.grad_accumulation_steps), 1)
    rate = settings.learning_rate
    least = rate / 10 if settings.lr_min is None else settings.lr_min
    warmup = math.ceil(settings.warmup_ratio * steps)
    return Schedule(settings.lr_scheduler, rate, least, warmup, steps, settings.lr_cycles)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a checkpoint says otherwise than the job, in words."""
    names = {**before, **now}.keys() - {"steps"}
    return [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in sorted(names)
        if before.get(name) != now.get(name)
    ]
