"""Settings of finetune that its user leaves open: they follow from the model's width and the number of examples.

    82 examples in 17 rows, width 640  ->  lr 4.4e-4, 1 row a step, 11 epochs: 187 updates
    9,000 examples in 4,000 rows       ->  4 rows a step, 1 epoch: 1,000 updates

Rates: LoRA Without Regret (Schulman et al. 2025) finds that the best rate falls with the width, does not depend on the
rank at a fixed alpha / rank, and is ten times that of full fine-tuning; docs/figures.md has the sweep behind RATE."""

import math
from dataclasses import replace
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.options import read_yaml
from packtrain.common.text import plural
from packtrain.data.conversations import TokenizedSamples
from packtrain.distributed import current_world
from packtrain.models.config import Config
from packtrain.training.finetune_settings import NEXT_TOKEN, TuneSettings

RATE, WIDTH, POWER = 1e-4, 4096, 0.8  # LoRA's rate at a width, and how it grows for smaller ones
FULL, PAIR_RATE_SHARE = 0.1, 0.1  # shares of LoRA's rate for all weights, and for losses of pairs
LORA_SCALE, RSLORA_ALPHA = 2.0, 32.0  # alpha / rank; alpha / sqrt(rank) has no usual value
MIN_UPDATES = 30  # a run with fewer is reported as too short
GOOD_UPDATES = 180  # updates for small data, made by smaller batches and more epochs
EPOCHS = ((500, 3), (2000, 2))  # (max_examples, epochs); 1 epoch for more examples
MAX_EPOCHS = 12
BATCH_SIZES = (4, 2, 1)
LEGACY_DEFAULTS = {"batch_size": 4, "epochs": 1.0}  # settings of runs that began before these rules
OPEN = ("lr", "batch_size", "epochs", "lora_alpha", "replay")
REPLAY_TEXTS, REPLAY_TOKENS = 64, 128  # texts that the base writes, and tokens of each


def default_rate(settings: TuneSettings, width: int) -> float:
    """Return the default peak learning rate for a model with embeddings of `width` numbers, rounded to two digits."""
    rate = RATE * (WIDTH / width) ** POWER
    rate *= (FULL if settings.full else 1) * (PAIR_RATE_SHARE if settings.loss != NEXT_TOKEN else 1)
    return float(f"{rate:.1e}")


def default_alpha(rslora: bool, rank: int) -> float:
    """Return LoRA's default alpha: twice the rank, for a scale alpha / rank of 2 at any rank; with rsLoRA always 32."""
    return RSLORA_ALPHA if rslora else LORA_SCALE * rank


def with_defaults(settings: TuneSettings, width: int, examples: int, num_rows: int) -> TuneSettings:
    """Return the settings with defaults for learning rate, batch size and epochs, by the model's embedding `width` and
    the training data: `examples` is how many there are, packed into `num_rows` rows."""
    if settings.lr is None and settings.optimizer != "lbfgs" and not resumes_run(settings):
        settings = replace(settings, lr=default_rate(settings, width))
    num_epochs = settings.epochs
    if num_epochs is None or settings.iters is not None:  # the usual passes over so many examples
        num_epochs = next((n for max_examples, n in EPOCHS if examples <= max_examples), 1)
    if not settings.batch_size:
        settings = replace(settings, batch_size=_batch_size(settings, num_rows, num_epochs))
    if settings.iters is None and settings.epochs is None:
        if count_updates(settings, num_rows, num_epochs) < GOOD_UPDATES:
            per_epoch = count_updates(settings, num_rows, 1)
            num_epochs = min(max(num_epochs, math.ceil(GOOD_UPDATES / per_epoch)), MAX_EPOCHS)
        settings = replace(settings, epochs=float(num_epochs))
    return settings


def resumes_run(settings: TuneSettings) -> bool:
    """Return whether --resume continues a run in the folder: its saved settings then replace defaults."""
    return settings.resume and not settings.overwrite and (settings.folder / "run.yaml").exists()


def num_replay_texts(settings: TuneSettings, config: Config, samples: TokenizedSamples) -> int:
    """Return how many texts the base writes for --replay; 0: none. Raises InputError where it cannot be used."""
    model_name = "" if settings.model is None else settings.model.name
    reasons = {
        "--teacher says what all texts should be like": settings.teacher is not None,
        f"--loss {settings.loss} has no such term": settings.loss != NEXT_TOKEN,
        "with --full all weights change, and it is for adapters": settings.full,
        f"{model_name} caps its logits, which it is not for": bool(config.final_softcap),
    }
    for reason, applies in reasons.items():
        if applies and settings.replay:
            raise InputError(f"--replay {settings.replay}: {reason}; leave it out")
    if settings.replay is not None:
        return settings.replay
    # where whole texts are learned, the data is to shape everything that the model writes
    use_default = not samples.weights.all() and not resumes_run(settings)
    return REPLAY_TEXTS if use_default and not any(reasons.values()) else 0


def with_saved_choices(settings: TuneSettings) -> TuneSettings:
    """Return the settings; in a resumed run, lr, epochs … that are not given come from run.yaml. Raises InputError."""
    if not resumes_run(settings):
        return settings
    path = settings.folder / "run.yaml"
    saved_settings: dict[str, Any] = {**LEGACY_DEFAULTS}
    saved_settings |= {k: v for k, v in read_yaml(TuneSettings, path).items() if v is not None}
    missing = {name for name in OPEN if not getattr(settings, name) and name in saved_settings}
    if settings.iters is not None or saved_settings.get("iters") is not None:
        missing -= {"epochs"}
    return replace(settings, **{name: saved_settings[name] for name in missing})


def _batch_size(settings: TuneSettings, num_rows: int, num_epochs: float) -> int:
    """Return the largest default batch size with GOOD_UPDATES steps, or with --iters in at most `num_epochs` passes."""
    num_ranks = max(current_world().world_size, settings.nproc)
    batch_sizes = [size for size in BATCH_SIZES if size % num_ranks == 0] or [num_ranks]
    for batch_size in batch_sizes:
        sized_settings = replace(settings, batch_size=batch_size)
        if settings.iters is None:
            is_enough = count_updates(sized_settings, num_rows, num_epochs) >= GOOD_UPDATES
        else:
            is_enough = settings.iters <= count_updates(sized_settings, num_rows, num_epochs)
        if is_enough:
            return batch_size
    return batch_sizes[-1]


def count_updates(settings: TuneSettings, num_rows: int, num_epochs: float) -> int:
    """Return the number of optimizer steps in `num_epochs` passes over the training rows, at least 1."""
    num_batches = -(-num_rows // settings.batch_size)
    return max(math.ceil(num_batches * num_epochs / settings.grad_accumulation_steps), 1)


def prospect_text(examples: int, num_updates: int, num_rows: int, settings: TuneSettings) -> str:
    """Say what a run can teach, by its steps: `82 examples, 187 updates …: enough for a style, not for facts`."""
    epoch_share = settings.batch_size * settings.grad_accumulation_steps / num_rows
    num_passes = num_updates * epoch_share
    epochs = "1 epoch" if f"{num_passes:.2g}" == "1" else f"{num_passes:.2g} epochs"
    opening = (
        f"{plural(examples, 'example')}, {plural(num_updates, 'update')} ({epochs}, learning rate"
        f" {settings.learning_rate:.1e}): "
    )
    if num_updates < MIN_UPDATES:
        num_epochs = math.ceil(MIN_UPDATES * epoch_share)
        return f"{opening}too few to change how the model answers; --epochs {num_epochs} or more examples would"
    if examples < 50:
        return f"{opening}enough for a tone; 50 to 100 examples make a style"
    if examples < 500:
        return f"{opening}enough for a style, not for facts"
    return f"{opening}enough for a style or a task; facts belong in the prompt"
