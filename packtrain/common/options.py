"""Settings as typed dataclasses: one declaration feeds the flags, the YAML file and the help.

    @dataclass(frozen=True)
    class Generate:
        model: Path = positional("the model, a GGUF file")
        temp: float = option(0.8, "temperature; 0 takes the likeliest token", flags="--temperature")

A field `batch_size` is the flag `--batch-size` and the YAML key `batch_size`; a bool has `--x` and `--no-x`;
`X | None` is unset by default; a tuple's flag may be repeated. `COMMON = "temp top_k seed"` in a class with many
options lists, in order, the options of its short help. `requires` and `conflicts` are read by common.option_rules.
"""

import argparse
import dataclasses
import importlib
import math
import os
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from packtrain.common.errors import InputError
from packtrain.common.familiar_names import advice, canonical_option
from packtrain.common.text import did_you_mean

T = TypeVar("T")
# headings of the help, in order
GROUPS = (
    "data", "model", "training", "optimizer", "validation", "preferences", "LoRA", "sampling", "memory", "output",
)  # fmt: skip
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
COLUMNS = "columns by other names: question=prompt,answer=completion; names with commas in quotes; common ones known"
PAGES = "limit of private memory and of pages of the read and written model in memory, together, such as 2GiB"
BOTH_LIMITS = {"memory": "{flag} limits private memory, too; give it without --memory"}
# when a resumed run may change a setting: alike on all ranks, or only together with the optimizer
ON_ALL_RANKS, WITH_OPTIMIZER = "on all ranks", "with the optimizer"
Rules = str | Mapping[str, str]  # conditions, each with a reason, see common.option_rules
VARIABLE_PREFIX = "PACKTRAIN_"
SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False),
}  # fmt: skip
EXPECTED_TYPES = {int: "a whole number", float: "a number", bool: "true or false"}


def option(
    default: Any, help: str, *, flags: str = "", choices: Sequence[str] = (), min_value: float | None = None,
    max_value: float | None = None, group: str = "", metavar: str = "", requires: Rules = "", conflicts: Rules = "",
    resumable: bool | str = False,
) -> Any:  # fmt: skip
    """Declare a setting with a default.

    flags                 further flags of the setting, separated by spaces
    min_value, max_value  bounds of a number
    group                 heading in the help, one of GROUPS
    metavar               placeholder for the value
    requires, conflicts   settings without which, or with which, this one is refused, see common.option_rules
    resumable             whether a resumed run may change it; ON_ALL_RANKS or WITH_OPTIMIZER restrict that
    """
    metadata = {
        "help": help, "flags": flags.split(), "choices": choices, "bounds": (min_value, max_value), "group": group,
        "metavar": metavar, "requires": requires, "conflicts": conflicts, "resumable": resumable,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


# `option` with a heading of the help
DATA, MODEL = partial(option, group="data"), partial(option, group="model")
TRAINING, SAMPLING = partial(option, group="training"), partial(option, group="sampling")
MEMORY, OPTIMIZER = partial(option, group="memory"), partial(option, group="optimizer")
# options that a resumed run may change: no bit of a step depends on outputs and resources
OUTPUT = partial(option, group="output", resumable=True)
RESOURCES = partial(MEMORY, resumable=True)
SOURCE = partial(DATA, resumable=True)  # a checkpoint has a checksum of the data
# which steps and validations there are
STOPPING = partial(option, group="validation", resumable=ON_ALL_RANKS)
UPDATE = partial(OPTIMIZER, resumable=WITH_OPTIMIZER)


def positional(
    help: str, default: Any = dataclasses.MISSING, *, resumable: bool | str = False
) -> Any:
    """Declare a positional argument, required if it has no default."""
    metadata = {"help": help, "positional": True, "resumable": resumable}
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str, *, flags: str = "", group: str = "") -> Any:
    """Declare a required flag or YAML key."""
    return dataclasses.field(metadata={"help": help, "flags": flags.split(), "group": group})


def option_fields(cls: type) -> list["dataclasses.Field[Any]"]:
    """Return the dataclass fields of a class that are declared as options."""
    return [field for field in _fields(cls) if "help" in field.metadata]


def resumable_names(cls: type, *kinds: bool | str) -> frozenset[str]:
    """Return the settings whose `resumable` is one of `kinds`: by default those that any resumed run may change."""
    kind_by_name = {field.name: field.metadata.get("resumable", False) for field in _fields(cls)}
    accepted_kinds = kinds or (True, ON_ALL_RANKS)
    return frozenset(name for name, kind in kind_by_name.items() if kind in accepted_kinds)


def add_flags(parser: argparse.ArgumentParser, cls: type) -> list[str]:
    """Add `--config FILE` and the flags of a settings class to a parser; returns the headings of their groups. The
    parsed namespace has only the flags on the command line, as text; `from_flags` checks them."""
    types_, fields = _type_hints(cls), _fields(cls)
    parser.add_argument(
        "--config", metavar="FILE", help="read settings from a YAML file; flags override it"
    )
    used_groups = {field.metadata.get("group", "") for field in fields}
    homes = {group: parser.add_argument_group(group) for group in GROUPS if group in used_groups}
    for field in fields:
        _add_flag(homes.get(field.metadata.get("group", ""), parser), field, types_[field.name])
    return [*homes]


def _add_flag(home: argparse._ActionsContainer, field: "dataclasses.Field[Any]", hint: Any) -> None:
    metadata, (value_type, is_list) = field.metadata, _value_type(hint)
    argument_options: dict[str, Any] = {"help": _help_text(field), "default": argparse.SUPPRESS}
    if metadata.get("positional"):
        is_required = field.default is dataclasses.MISSING
        nargs = ("+" if is_required else "*") if is_list else None if is_required else "?"
        home.add_argument(field.name, metavar=field.name.upper(), nargs=nargs, **argument_options)
        return
    if value_type is bool:
        argument_options["action"] = argparse.BooleanOptionalAction
    else:
        choices = metadata.get("choices")
        placeholder = f"{{{','.join(choices)}}}" if choices else METAVARS[value_type]
        argument_options |= {
            "metavar": metadata.get("metavar") or placeholder, "action": "append" if is_list else "store",
        }  # fmt: skip
    flag_names = [flag(field.name), *metadata["flags"]]
    home.add_argument(*sorted(flag_names, key=len), dest=field.name, **argument_options)


def positionals(cls: type) -> list[str]:
    """Return the positional arguments as a usage line shows them: `MODEL`, `[PROMPT]`, `FILES …`."""
    field_types = _type_hints(cls)
    defaults = {f.name: f.default for f in _fields(cls) if f.metadata.get("positional")}
    shown = {n: f"{n.upper()} …" if _value_type(field_types[n])[1] else n.upper() for n in defaults}
    missing = dataclasses.MISSING
    return [text if defaults[n] is missing else f"[{text}]" for n, text in shown.items()]


def flag(name: str) -> str:
    """Return the flag of a setting: lora_rank is --lora-rank."""
    return f"--{name.replace('_', '-')}"


def _help_text(field: "dataclasses.Field[Any]") -> str:
    text, default = str(field.metadata["help"]).replace("%", "%%"), field.default
    if default in (None, (), "", dataclasses.MISSING) or default is False:
        return text
    default_text = (
        " ".join(default) if isinstance(default, tuple) else "on" if default is True else default
    )
    return f"{text} (default: {default_text})"


def _value_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value of a field, and whether the field takes several values."""
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None)), False
    return hint, False


def variables(cls: type) -> dict[str, "dataclasses.Field[Any]"]:
    """Return the environment variables of a class's flags: PACKTRAIN_LORA_RANK of --lora-rank."""
    fields = (field for field in option_fields(cls) if not field.metadata.get("positional"))
    return {f"{VARIABLE_PREFIX}{field.name.upper()}": field for field in fields}


def add_variables(namespace: argparse.Namespace, cls: type) -> dict[str, str]:
    """Add settings from environment variables that the command line lacks; returns the variable by each of its flags. A
    value is what would follow the flag; true, yes, on or 1, and false, no, off or 0, turn on and off; a YAML list in
    brackets gives several values. An empty variable counts as unset."""
    variable_by_flag = dict[str, str]()
    for variable, field in variables(cls).items():
        text: Any = os.environ.get(variable, "")
        if text and not hasattr(namespace, field.name):
            value_type, is_list = _value_type(_type_hints(cls)[field.name])
            if value_type is bool:
                text = SWITCH_WORDS.get(text.lower(), text)
            elif is_list and text.startswith("["):
                text = _parse_yaml(text, variable)
            setattr(namespace, field.name, text)
            flags = flag(field.name), flag(f"no_{field.name}"), *field.metadata["flags"]
            variable_by_flag |= dict.fromkeys(flags, variable)
    namespace.config = namespace.config or os.environ.get(f"{VARIABLE_PREFIX}CONFIG")
    return variable_by_flag


def from_flags(cls: type[T], namespace: argparse.Namespace) -> T:
    """Build settings from a parsed command line: its flags over the YAML file over defaults. Raises InputError."""
    read = read_yaml(cls, namespace.config) if namespace.config else {}
    flags = {f.name: getattr(namespace, f.name) for f in _fields(cls) if hasattr(namespace, f.name)}
    return _complete(cls, check_values(cls, read, str(namespace.config)) | check_values(cls, flags))


def from_values(cls: type[T], values: Mapping[str, Any], source: str | None) -> T:
    """Check plain values and build settings of them. InputError names the file `source`, or for None a keyword."""
    named_values = _by_setting(cls, values, f"{source}: " if source else "")
    return _complete(cls, check_values(cls, named_values, source), source and "")


def _complete(cls: type[T], values: Mapping[str, Any], source: str | None = "") -> T:
    """Build the settings. Raises InputError if a required value is missing."""
    for f in _fields(cls):
        if f.name not in values and f.default is dataclasses.MISSING:
            raise InputError(f"{_location_of(f, source)} must be given: {f.metadata['help']}")
    return cls(**values)


def check_values(cls: type, values: Mapping[str, Any], source: str | None = "") -> dict[str, Any]:
    """Convert values to their fields' types. InputError names the file `source`, a flag (""), or a keyword (None)."""
    hints = _type_hints(cls)
    return {name: _checked(cls, name, hints, value, source) for name, value in values.items()}


@cache
def _type_hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _setting_fields(cls: type) -> Mapping[str, "dataclasses.Field[Any]"]:
    return {field.name: field for field in _fields(cls)}


def _fields(cls: type) -> tuple["dataclasses.Field[Any]", ...]:
    return dataclasses.fields(cls)


def _location_of(field: "dataclasses.Field[Any]", source: str | None) -> str:
    """Return a setting's name in errors: `run.yaml: batch_size`, --batch-size for "", batch_size for None (Python)."""
    if source or source is None:
        return f"{source}: {field.name}" if source else field.name
    return field.name.upper() if field.metadata.get("positional") else flag(field.name)


def _checked(cls: type, name: str, hints: Mapping[str, Any], value: Any, source: str | None) -> Any:
    """Return the value of setting `name` in the type of its field. Raises InputError, which names `source`."""
    field = _setting_fields(cls)[name]
    value_type, is_list = _value_type(hints[name])
    if is_list:
        value_list = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_check_value(field, value_type, v, source) for v in value_list)
    if value is None and field.default is None:
        return None
    return _check_value(field, value_type, value, source)


def _check_value(field: "dataclasses.Field[Any]", kind: Any, value: Any, source: str | None) -> Any:
    location, metadata = _location_of(field, source), field.metadata
    if kind is Path and value == "":  # Path("") would be the current folder
        raise InputError(f"{location} is empty; give a name")
    if field.name == "output" and isinstance(value, str) and value.endswith(("/", os.sep)):
        raise InputError(f"{location}: {value} is a folder; add a file's name: {value}model.gguf")
    value = _convert_value(value, kind)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{location} is {value!r}; it must be {EXPECTED_TYPES.get(kind, 'text')}")
    choices, (min_value, max_value) = metadata.get("choices"), metadata.get("bounds", (None, None))
    if choices and value not in choices:
        suggestion = did_you_mean(value, choices)
        fact = f"{location} is {value}; it must be one of {', '.join(choices)}{suggestion}"
        raise InputError(fact)
    if kind is float and not math.isfinite(value):
        raise InputError(f"{location} is {value}; it must be finite")
    if kind in (int, float) and not (
        (min_value is None or value >= min_value) and (max_value is None or value <= max_value)
    ):
        raise InputError(f"{location} is {value}; it must be {_bounds_text(min_value, max_value)}")
    return value


def _convert_value(value: Any, kind: Any) -> Any:
    """Convert text to a number or path, and an int to a float or text, as the field requires."""
    # text of a flag, or 1e-3, which YAML 1.1 reads as text
    if isinstance(value, str) and kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    if isinstance(value, Real) and not isinstance(value, int | float):  # NumPy's numbers
        value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, int) and not isinstance(value, bool) and kind in (float, str):
        with suppress(OverflowError):
            return kind(value)
    if isinstance(value, Path) and kind is str:
        return str(value)
    return Path(value) if kind is Path and isinstance(value, str) else value


def _bounds_text(min_value: float | None, max_value: float | None) -> str:
    if max_value is None:
        return f"{min_value} or more"
    return f"{max_value} or less" if min_value is None else f"from {min_value} to {max_value}"


def yaml() -> Any:
    """Import and return the yaml package, which takes long to load and is needed rarely."""
    return importlib.import_module("yaml")


def read_yaml(cls: type, path: str | Path) -> dict[str, Any]:
    """Read settings from a YAML file, as plain values by name. Raises InputError."""
    try:
        values = _parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        fact = f"--config: {path} cannot be read: {str(error.strerror).lower()}"
        raise InputError(fact) from None
    except UnicodeDecodeError as error:
        raise InputError(f"--config: {path} is not UTF-8 text: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path}: a settings file has lines like `lr: 0.001`")
    return _by_setting(cls, values, f"{path}: ")


def _parse_yaml(text: str, source: str | Path) -> Any:
    try:
        loader = yaml().SafeLoader(text)
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except yaml().YAMLError as error:
        message = f"{source}: this is not YAML: {' '.join(str(error).split())}"
        raise InputError(message) from None
    keys = [key.value for key, _ in node.value] if isinstance(values, dict) else []
    if repeated_keys := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"{source}: {repeated_keys[0]} is there twice; leave one of them out")
    return values


def _by_setting(cls: type, values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return values by setting; keys are its name, a flag or another tool's name. Raises InputError after `place`."""
    names = {key: _setting_name(cls, key, place) for key in values}
    for name in names.values():
        if len(keys := [key for key in names if names[key] == name]) > 1:
            raise InputError(f"{place}{' and '.join(keys)} are one setting; leave one of them out")
    return {names[key]: value for key, value in values.items()}


def _setting_name(cls: type, key: str, place: str) -> str:
    if key in (settings := _setting_fields(cls)):
        return key
    names = {
        name: f.name for f in _fields(cls) for name in [flag(f.name), *f.metadata.get("flags", ())]
    }
    if name := canonical_option(flag(key), names):
        return names[name]
    suggestion = advice(key, names) or did_you_mean(key, settings)
    suggestion = suggestion or f"; there are {', '.join(settings)}"
    raise InputError(f"{place}there is no setting {key}{suggestion}")


def to_yaml(settings: Any) -> str:
    """Return all settings of a run as YAML that `--config` can read."""

    def to_plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [to_plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    values = {f.name: to_plain(getattr(settings, f.name)) for f in _fields(type(settings))}
    return str(yaml().safe_dump(values, sort_keys=False, allow_unicode=True))


def unescape(text: str) -> str:
    r"""Return a text with \n and \t, as typed on a command line, as a line feed and a tab."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")
