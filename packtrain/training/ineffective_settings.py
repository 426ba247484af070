"""Settings that have no effect in combination with others, in one table. A run with one of them is refused."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.options import flag
from packtrain.data.text.documents import has_valid_file
from packtrain.engine.optim import OPTIMIZERS
from packtrain.training.finetune_settings import NEXT_TOKEN, TuneSettings
from packtrain.training.train_settings import RunSettings, TrainSettings

EffectRule = tuple[str, Callable[[Any], bool], str]  # names, whether without effect, reason


def optimizer_rules() -> Iterator[EffectRule]:
    """Yield a rule per optimizer, for the settings that only other optimizers have."""
    of = {name: {field.name for field in fields(kind)} for name, kind in OPTIMIZERS.items()}
    all_options = {field.name for field in fields(RunSettings)} & set().union(*of.values())
    for name, local_options in of.items():
        yield (
            " ".join(sorted(all_options - local_options)),
            _uses_optimizer(name),
            f"with --optimizer {name}",
        )


def _uses_optimizer(name: str) -> Callable[[Any], bool]:
    return lambda settings: bool(settings.optimizer == name)


VAL_SPLIT_RULE: EffectRule = (
    "val_split",
    lambda s: s.data is not None and has_valid_file(s.data),
    "with the valid file in the folder --data",
)
TRAIN_ON_RULE: EffectRule = (
    "train_on",
    lambda s: not s.mask_prompt,
    "with --no-mask-prompt, which trains on all turns",
)

RUN_RULES: tuple[EffectRule, ...] = (
    ("epochs", lambda s: s.iters is not None, "with --iters, which sets the length"),
    ("lr_min", lambda s: s.lr_scheduler == "constant", "with a constant rate"),
    (
        "lr_cycles",
        lambda s: s.lr_scheduler not in ("cosine", "linear"),
        "without --lr-scheduler cosine or linear",
    ),
    ("lr_cycle_growth", lambda s: s.lr_cycles == 1, "without --lr-cycles"),
    ("lr_half_every", lambda s: s.lr_scheduler != "halving", "without --lr-scheduler halving"),
    ("warmup_lr", lambda s: not s.warmup_ratio, "without warm-up"),
    *optimizer_rules(),
    (
        "lr_scheduler lr_min lr_cycles warmup_ratio warmup_lr max_grad_norm max_grad_value",
        lambda s: OPTIMIZERS[s.optimizer].first_length is not None,
        "with --optimizer lbfgs, which searches for the length of each step",
    ),
    ("decay_axes", lambda s: not s.weight_decay, "without --weight-decay"),
    ("nesterov", lambda s: not s.momentum, "without --momentum"),
    ("delta", lambda s: not s.past, "without --past"),
    ("sample_prompt", lambda s: not s.sample_every, "without --sample-every"),
    ("overwrite", lambda s: s.resume, "with --resume"),
    ("force_reshuffle", lambda s: not s.resume, "without --resume"),
    (
        "patience",
        lambda s: s.steps_per_eval == 0,
        "with --steps-per-eval 0, which validates once, at the end",
    ),
    ("offload", lambda s: s.spread.target.private, "without a --device with a memory of its own"),
    VAL_SPLIT_RULE,
)
TRAIN_RULES: tuple[EffectRule, ...] = (
    (
        "preset vocab_size",
        lambda s: s.from_checkpoint is not None,
        "with --from, whose file has its own sizes",
    ),
    ("vocab_size", lambda s: s.vocab is not None, "with --vocab, which has its own size"),
    ("random_offsets shuffle_samples", lambda s: not s.fill_samples, "with --no-fill-samples"),
    (
        "separator random_offsets fill_samples shuffle_samples",
        lambda s: s.sample_start is not None,
        "with --sample-start, which begins windows there",
    ),
    ("strict", lambda s: True, "in train, which maps no weights from a file"),
)
TUNE_RULES: tuple[EffectRule, ...] = (
    (
        "lora_rank lora_alpha lora_modules lora_dropout rslora adapter merge tensor_type aware",
        lambda s: s.full,
        "with --full, which trains the weights themselves",
    ),
    ("save_model", lambda s: s.full, "with --full, whose checkpoints hold the weights"),
    (
        "type adapter tensor_type",
        lambda s: s.merge == "none",
        "with --merge none, which writes the adapter alone",
    ),
    (
        "distill_weight distill_temperature distill_top",
        lambda s: s.teacher is None,
        "without --teacher",
    ),
    ("teacher", lambda s: s.loss != NEXT_TOKEN, "with a loss of pairs"),
    ("replay_weight", lambda s: s.replay == 0, "with --replay 0"),
    ("masters freeze", lambda s: not s.full, "without --full"),
    (
        "type tensor_type lora_dropout",
        lambda s: s.aware,
        "with --aware, which trains what the matrices' own blocks can hold",
    ),
    ("merge", lambda s: s.aware and s.merge == "plain", "with --aware, which merges as it trains"),
    TRAIN_ON_RULE,
    ("shuffle_samples", lambda s: not s.pack, "with --no-pack"),
)
RULES_BY_SETTINGS: tuple[tuple[type, tuple[EffectRule, ...]], ...] = (
    (RunSettings, RUN_RULES),
    (TrainSettings, TRAIN_RULES),
    (TuneSettings, TUNE_RULES),
)
VALIDATION_RULES: tuple[EffectRule, ...] = (
    ("patience steps_per_eval val_batches", lambda s: True, "without validation data"),
)


def check_effects(settings: RunSettings) -> None:
    """Raise InputError for a setting without effect. A resumed run keeps its original settings."""
    if settings.optimizer == "lbfgs" and getattr(settings, "masters", "f32") != "f32":
        raise InputError("--masters bf16 is too coarse for the line search of --optimizer lbfgs")
    if settings.resume and not settings.overwrite:
        return
    for settings_class, rules in RULES_BY_SETTINGS:
        if isinstance(settings, settings_class):
            check_rules(settings, rules)
    if settings.learning_rate == 0:
        raise InputError("--lr 0 trains nothing; it must be more than 0")
    for name in ("save_name", "save_model"):
        pattern = getattr(settings, name)
        if pattern and (
            "ITERATION" not in pattern or "/" in pattern or not pattern.endswith(".gguf")
        ):
            raise InputError(
                f"{flag(name)} {pattern}: it must be a file name with ITERATION in it, such as model-ITERATION.gguf"
            )


def check_validation(settings: RunSettings, validates: bool) -> None:
    """Raise InputError for validation settings of a run without validation data."""
    if not validates and not settings.resume:
        check_rules(settings, VALIDATION_RULES)


def check_rules(settings: Any, rules: tuple[EffectRule, ...]) -> None:
    """Raise InputError for a changed setting that one of the rules finds without effect."""
    defaults = {field.name: field.default for field in fields(settings)}
    for names, has_no_effect, reason in rules:
        for name in names.split():
            if getattr(settings, name) != defaults[name] and has_no_effect(settings):
                option = flag(name) if getattr(settings, name) is not False else flag(f"no_{name}")
                raise InputError(f"{option} has no effect {reason}; leave one of them out")
