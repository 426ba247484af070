"""Rules of a flag, which stand in its field: the settings that it requires, and those that exclude it.

    lora_alpha: float | None = LORA(None, "scale", conflicts={"full": "which trains the weights themselves"})
    delta: float = TRAINING(1e-5, "change of the loss that ends a run", requires="past")

    --lora-alpha has no effect with --full, which trains the weights themselves; leave one of them out
    --delta has no effect without --past; leave one of them out

A condition names a setting or property that must be on, as `full`, or its values, as `merge=none` or `loss=dpo|orpo`;
of several conditions between spaces, all must hold. Its reason follows it in the sentence; a reason that begins with
with, without or in stands for both, and one that begins with a flag, or {flag}, is the whole sentence.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.options import flag

SENTENCE_STARTS = "--", "{flag}"
NO_FACTS: Mapping[str, bool] = {}


def check_rules(settings: Any, facts: Mapping[str, bool] = NO_FACTS) -> None:
    """Raise InputError for a changed setting that one of its rules refuses.

    facts  values of conditions that are no settings; a rule with a condition that is unknown is not checked
    """
    changed = _changed_values(settings)
    for name, condition, reason, is_required in rules(type(settings)):
        if name in changed:
            terms = [term.partition("=") for term in condition.split()]
            states = [_is_set(settings, facts, term, values) for term, _, values in terms]
            if None not in states and all(states) != is_required:
                raise _refusal(name, changed[name], _full_reason(terms[0], reason, is_required))


def refuse_changed(settings: Any, names: Iterable[str], reason: str) -> None:
    """Raise InputError, with the reason, for a setting of `names` that differs from its default."""
    changed = _changed_values(settings)
    for name in names:
        if name in changed:
            raise _refusal(name, changed[name], reason)


def _changed_values(settings: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {f.name: values[f.name] for f in fields(settings) if values[f.name] != f.default}


def _is_set(settings: Any, facts: Mapping[str, bool], name: str, values: str) -> bool | None:
    """Return whether a setting, property or fact is on, or has one of `values`, such as "a|b"; None if unknown."""
    if name not in facts and not hasattr(settings, name):
        return None
    value = facts[name] if name in facts else getattr(settings, name)
    if values:
        return str(value) in values.split("|")
    is_unset_by_default = getattr(type(settings), name, False) is None
    return bool(value) or (value is not None and is_unset_by_default)


def _full_reason(term: tuple[str, str, str], reason: str, is_required: bool) -> str:
    """Return the reason behind its condition, `with --full, which …`, unless the reason names the condition itself.
    term: the condition in three parts, (setting, "=" or "", values or ""), is_required: the rule refuses without it."""
    if reason.startswith((*SENTENCE_STARTS, "with ", "without ", "in ")):
        return reason
    name, _, values = term
    text = flag(f"no_{name}") if values == "False" else flag(name)
    text += f" {values.replace('|', ' or ')}" if values not in ("", "False") else ""
    link = "" if reason[:1] in ("", ":") else ", "
    return f"{'without' if is_required else 'with'} {text}{link}{reason}"


def _refusal(name: str, value: Any, reason: str) -> InputError:
    option = flag(name if value is not False else f"no_{name}")
    if reason.startswith(SENTENCE_STARTS):
        return InputError(reason.format(flag=option))
    return InputError(f"{option} has no effect {reason}; leave one of them out")


def rules(cls: type) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the rules of a settings class: (setting, condition, reason, True if required, False if excluded)."""
    for field in fields(cls):
        for kind in ("requires", "conflicts"):
            conditions = field.metadata.get(kind, "")
            reasons = {conditions: ""} if isinstance(conditions, str) else conditions
            for condition, reason in reasons.items():
                if condition not in ("", field.name):
                    yield field.name, condition, reason, kind == "requires"
