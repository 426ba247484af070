"""Reads text and JSON files of a checkpoint folder, untrusted: anything unexpected raises InputError."""

import json
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError


def read_text(path: Path) -> str:
    """Read a UTF-8 text file. Raises InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {str(error.strerror).lower()}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: this is not UTF-8 text: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file. Raises InputError."""
    return parse_json_object(path, read_text(path), "this")


def parse_json_object(path: Path, text: str | bytes, title: str) -> dict[str, Any]:
    """Parse an object from JSON text; `title` names the text in errors. Raises InputError, also for lone surrogates."""
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {title} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: {title} must be a JSON object")
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Return the value if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []
