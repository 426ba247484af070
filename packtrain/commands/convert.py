"""packtrain convert: a Hugging Face checkpoint (config.json, safetensors, tokenizer) to a GGUF file."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from packtrain.convert import AUTO, FILE_TYPES, convert
from packtrain.gguf import Deferred
from packtrain.settings import option, positional


@dataclass(frozen=True)
class Convert:
    """Make a GGUF file of a checkpoint folder."""

    folder: Path = positional(
        "the folder with config.json, *.safetensors and the tokenizer's files"
    )
    output: Path | None = option(None, "the file to write; FOLDER.gguf if not given", flags="-o")
    type: str = option(
        AUTO, "of the matrices; auto keeps the checkpoint's", choices=(AUTO, *FILE_TYPES)
    )


def run(settings: Convert) -> int:
    """Convert and say what was written. Raises InputError for what cannot be converted."""
    folder = settings.folder
    path = settings.output or Path(f"{folder.resolve()}.gguf")
    written = convert(folder, path, settings.type)
    types = Counter(str(t.dtype) if isinstance(t, Deferred) else "f32" for t in written.values())
    counts = ", ".join(f"{count} {name}" for name, count in types.most_common())
    print(f"{path}: {len(written)} tensors ({counts}), {path.stat().st_size:,} bytes")
    return 0
