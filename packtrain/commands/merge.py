"""packtrain merge: a model with adapters made part of its matrices; all else stays as it is, byte for byte."""

import time
from dataclasses import dataclass
from pathlib import Path

from packtrain.commands import say
from packtrain.commands.quantize import MIB, TYPES, check_output, line, writable_dtype
from packtrain.dtypes import Dtype
from packtrain.gguf import GGUF, Entry
from packtrain.models.adapted import read_scaled, split_scale
from packtrain.models.lora import EMBEDDING
from packtrain.models.merge import merged, write_changed
from packtrain.settings import option, positional, required
from packtrain.words import plural

HEAD = "output.weight"


@dataclass(frozen=True)
class Merge:
    """Write a model with adapters merged into it."""

    model: Path = positional("the base, a GGUF file")
    adapters: tuple[str, ...] = positional("adapters, GGUF files; FILE:SCALE adds SCALE times one")
    output: Path = required("the GGUF file to write", flags="-o")
    type: str | None = option(None, f"of what is changed; else what it is in the base: {TYPES}")
    overwrite: bool = option(False, "replace the output if it exists")


def run(settings: Merge) -> int:
    """Write the file and print a line per merged tensor. Raises InputError; what was there then stays."""
    began = time.perf_counter()
    dtype = writable_dtype(settings.type, "--type")
    base = GGUF(settings.model)
    read = [*base.paths, *(split_scale(text)[0] for text in settings.adapters)]
    adapters = read_scaled(settings.adapters, base)
    check_output(settings.output, "-o", read, settings.overwrite)
    ignored = sorted({name for adapter, _ in adapters for name in adapter.ignored})
    if ignored:
        say(
            f"{plural(len(ignored), 'vector')} in the adapters left out, which no merge uses; the first: {ignored[0]}"
        )
    changes = merged(base, adapters)
    if EMBEDDING in changes and HEAD not in base.entries:
        say(f"{EMBEDDING} is the head, too: both are changed")

    def done(entry: Entry, stored: Dtype, error: float) -> None:
        narrow = f"  rows of {entry.shape[-1]} are no blocks of {dtype}"
        print(line(entry, stored, error) + (narrow if dtype not in (None, stored) else ""))

    name = settings.output.stem.encode(errors="replace").decode()
    write_changed(settings.output, base, changes, name=name, dtype=dtype, done=done)
    print(
        f"{settings.output}: {len(changes)} of {len(base.entries)} tensors changed, "
        f"{base.nbytes / MIB:.2f} -> {settings.output.stat().st_size / MIB:.2f} MiB, "
        f"{time.perf_counter() - began:.1f} s"
    )
    return 0
