"""packtrain merge: a model with adapters added to its matrices, everything else byte for byte."""

from dataclasses import dataclass
from pathlib import Path

from packtrain.dtypes import DTYPES
from packtrain.errors import InputError
from packtrain.files import check_writable
from packtrain.gguf import GGUF
from packtrain.models.adapted import read_scaled
from packtrain.models.merge import merged, write_changed
from packtrain.plan import size_text
from packtrain.settings import option, positional, required
from packtrain.train.settings import WRITTEN


@dataclass(frozen=True)
class Merge:
    """Add adapters to a model for good."""

    model: Path = positional("the base, a GGUF file")
    adapters: tuple[str, ...] = positional("adapters of this base: FILE, or FILE:SCALE")
    output: Path = required("the model to write", flags="-o")
    type: str | None = option(
        None, "type of changed matrices; by default what each has in the base", choices=WRITTEN
    )
    overwrite: bool = option(False, "replace the output if it exists")


def run(settings: Merge) -> int:
    """Write the merged model. Raises InputError."""
    check_writable(settings.output, "--output")
    if settings.output.exists() and not settings.overwrite:
        raise InputError(f"--output: {settings.output} exists; give another, or --overwrite")
    base = GGUF(settings.model)
    inputs = [*base.paths, *(Path(text.rpartition(":")[0] or text) for text in settings.adapters)]
    if settings.output.resolve() in [path.resolve() for path in inputs]:
        raise InputError(f"--output: {settings.output} is what is merged; give another name")
    changes = merged(base, read_scaled(settings.adapters, base))
    dtype = DTYPES[settings.type] if settings.type else None
    name = settings.output.stem.encode(errors="replace").decode()
    write_changed(settings.output, base, changes, name=name, dtype=dtype)
    size = size_text(settings.output.stat().st_size)
    print(f"{settings.output}: {size}, {len(changes)} of {len(base.entries)} tensors changed")
    return 0
