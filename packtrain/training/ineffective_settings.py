"""Settings that a run refuses in combination with others: the rules of their fields, and those of optimizers."""

from dataclasses import fields

from packtrain.common.errors import InputError
from packtrain.common.option_rules import check_rules, refuse_changed
from packtrain.common.options import WITH_OPTIMIZER, flag, resumable_names
from packtrain.engine.optim import OPTIMIZERS
from packtrain.training.run_settings import RunSettings


def optimizer_settings(settings_class: type[RunSettings]) -> set[str]:
    """Return the settings that only some optimizers have."""
    names = [{field.name for field in fields(optimizer)} for optimizer in OPTIMIZERS.values()]
    return {f.name for f in fields(settings_class)} & (
        set().union(*names) - names[0].intersection(*names)
    )


def check_effects(settings: RunSettings) -> None:
    """Raise InputError for a setting without effect. A resumed run keeps its original settings."""
    if settings.optimizer == "lbfgs" and getattr(settings, "masters", "f32") != "f32":
        raise InputError("--masters bf16 is too coarse for the line search of --optimizer lbfgs")
    if settings.resume and not settings.overwrite:
        return
    check_rules(settings)
    optimizer, settings_class = OPTIMIZERS[settings.optimizer], type(settings)
    option, names = f"--optimizer {optimizer.name}", {field.name for field in fields(optimizer)}
    refuse_changed(settings, sorted(optimizer_settings(settings_class) - names), f"with {option}")
    if optimizer.first_length is not None:
        idle_names = resumable_names(settings_class, WITH_OPTIMIZER) - {"lr", "optimizer"}
        reason = f"with {option}, which searches for the length of each step"
        refuse_changed(settings, sorted(idle_names), reason)
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
    if not settings.resume:
        check_rules(settings, {"has_validation": validates})
