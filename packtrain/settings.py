"""Settings as typed dataclasses: one declaration feeds the flags, the YAML file and the help.

    @dataclass(frozen=True)
    class Generate:
        model: Path = positional("the model, a GGUF file")
        temp: float = option(0.8, "temperature; 0 takes the likeliest token", flags="--temperature")

A field `batch_size` is the flag `--batch-size` and the YAML key `batch_size`; a bool has `--x` and `--no-x`;
`X | None` is unset by default; a tuple takes the flag again and again.
"""

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from packtrain.errors import InputError

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    flags: str = "",
    choices: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with a default; `flags` are further names of its flag, `least` and `most` bound a number."""
    about = {"help": help, "flags": flags.split(), "choices": choices, "bounds": (least, most)}
    return dataclasses.field(default=default, metadata=about)


def positional(help: str, default: Any = dataclasses.MISSING) -> Any:
    """A field that stands on the command line without a flag, and must be given if it has no default."""
    return dataclasses.field(default=default, metadata={"help": help, "positional": True})


def required(help: str, *, flags: str = "") -> Any:
    """A flag, or YAML key, that must be given."""
    return dataclasses.field(metadata={"help": help, "flags": flags.split(), "required": True})


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """The flags of a settings class, and `--config FILE` for its YAML; what is not given stays out of the namespace."""
    types_ = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        about, (kind, many) = field.metadata, _kind(types_[field.name])
        rule: dict[str, Any] = {"help": _help(field), "default": argparse.SUPPRESS}
        if about.get("positional"):
            rule |= {"type": kind, "metavar": field.name.upper(), "nargs": "+" if many else None}
            if field.default is not dataclasses.MISSING:
                rule |= {"type": str, "nargs": "?"}  # argparse would convert SUPPRESS to a Path
            parser.add_argument(field.name, **rule)
            continue
        names = [f"--{field.name.replace('_', '-')}", *about["flags"]]
        if kind is bool:
            rule["action"] = argparse.BooleanOptionalAction
        else:
            rule |= {"type": kind, "metavar": kind.__name__.upper()}
            if about.get("choices"):
                rule |= {"choices": about["choices"], "metavar": None}
            if many:
                rule["action"] = "append"
        parser.add_argument(*sorted(names, key=len), dest=field.name, **rule)
    parser.add_argument("--config", type=Path, help="settings from a YAML file; flags override it")


def _help(field: "dataclasses.Field[Any]") -> str:
    unset = field.default in (None, (), "", dataclasses.MISSING)
    said = str(field.metadata["help"]).replace("%", "%%")
    if unset or isinstance(field.default, bool):
        return said
    default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"{said} ({default})"


def _kind(hint: Any) -> tuple[Any, bool]:
    """What one value of a field is, and whether there may be several."""
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None)), False
    return hint, False


def from_flags(cls: type[T], given: argparse.Namespace) -> T:
    """Settings from a parsed command line: flags over the YAML file over defaults. Raises InputError."""
    values: dict[str, Any] = {}
    if given.config:
        values |= read_yaml(cls, given.config)
    values |= {f.name: getattr(given, f.name) for f in _fields(cls) if hasattr(given, f.name)}
    return made(cls, values, str(given.config or "command line"))


def made(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    """Settings from plain values, each checked against its field's type, choices and bounds. Raises InputError."""
    hints = typing.get_type_hints(cls)
    clean = {name: _checked(cls, name, hints, value, source) for name, value in values.items()}
    missing = [
        f.name for f in _fields(cls) if f.name not in clean and f.default is dataclasses.MISSING
    ]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise InputError(f"{source}: {flags} must be given")
    return cls(**clean)


def _fields(cls: type) -> tuple["dataclasses.Field[Any]", ...]:
    return dataclasses.fields(cls)


def _checked(cls: type, name: str, hints: Mapping[str, Any], value: Any, source: str) -> Any:
    field = next((f for f in _fields(cls) if f.name == name), None)
    if field is None:
        known = ", ".join(f.name for f in _fields(cls))
        raise InputError(f"{source}: there is no setting {name}; there are {known}")
    kind, many = _kind(hints[name])
    if many:
        listed = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_one(field, kind, v, source) for v in listed)
    if value is None and field.default is None:
        return None
    return _one(field, kind, value, source)


def _one(field: "dataclasses.Field[Any]", kind: Any, value: Any, source: str) -> Any:
    wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-3 as a text
        try:
            value = float(value)
        except ValueError:
            raise InputError(f"{source}: {field.name} is {value!r}; it must be {wanted}") from None
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if kind is Path and isinstance(value, str):
        value = Path(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{source}: {field.name} is {value!r}; it must be {wanted}")
    choices, (least, most) = (
        field.metadata.get("choices"),
        field.metadata.get("bounds", (None, None)),
    )
    if choices and value not in choices:
        raise InputError(
            f"{source}: {field.name} is {value}; it must be one of {', '.join(choices)}"
        )
    if kind is float and not math.isfinite(value):
        raise InputError(f"{source}: {field.name} is {value}; it must be finite")
    if kind in (int, float) and not (
        (least is None or value >= least) and (most is None or value <= most)
    ):
        raise InputError(f"{source}: {field.name} is {value}; it must be {_range(least, most)}")
    return value


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return f"{least} or more"
    return f"{most} or less" if least is None else f"from {least} to {most}"


def read_yaml(cls: type, path: Path) -> dict[str, Any]:
    """Settings in a YAML file, as plain values by name. Raises InputError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"--config: {path} cannot be read: {str(error.strerror).lower()}"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"--config: {path} is no UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: this is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path}: a settings file has lines like `lr: 0.001`")
    return values


def to_yaml(settings: Any) -> str:
    """All settings of a run, as text that `--config` reads again."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    values = {f.name: plain(getattr(settings, f.name)) for f in _fields(type(settings))}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def unescaped(text: str) -> str:
    r"""A text as it is meant where a command line writes \n and \t."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")
