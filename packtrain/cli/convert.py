"""packtrain convert: convert a Hugging Face checkpoint (config.json, safetensors, tokenizer) to a GGUF file.

With --base it converts a LoRA adapter of that model: a PEFT folder to GGUF, or a GGUF file to --peft FOLDER.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.files import check_output
from packtrain.common.option_rules import check_rules
from packtrain.common.options import option, positional
from packtrain.common.text import plural
from packtrain.conversion.hugging_face import AUTO, TYPES, check_runs, checkpoint_files, convert
from packtrain.conversion.peft import CONFIG, TENSORS, read_peft, write_peft
from packtrain.gguf import DeferredTensor
from packtrain.models.adapter_file import check_fits, fit_adapter, read_adapter, write_adapter
from packtrain.models.model_file import open_model


@dataclass(frozen=True)
class ConvertSettings:
    """Convert a checkpoint folder, or a LoRA adapter, to GGUF; or an adapter to a PEFT folder."""

    folder: Path = positional(
        "folder with config.json, *.safetensors and the tokenizer's files; with --base: folder of a PEFT adapter"
    )
    output: Path | None = option(
        None, "GGUF file to write (default: FOLDER.gguf)", flags="-o", conflicts="peft"
    )
    type: str = option(
        AUTO, "element type of the matrices; auto: the checkpoint's", choices=(AUTO, *TYPES),
        conflicts={"base": ": adapters are f32"},
    )  # fmt: skip
    base: Path | None = option(None, "convert an adapter of this model, a GGUF file")
    peft: Path | None = option(
        None, "with --base: convert the adapter, a GGUF file, to this PEFT folder",
        requires={"base": "{flag}: --base must be given, too: the model that the adapter is for"},
    )  # fmt: skip
    overwrite: bool = option(False, "replace the output if it exists", conflicts="peft")


def run(settings: ConvertSettings) -> int:
    """Convert a checkpoint or an adapter, and print what was written; returns 0. Raises InputError if it cannot."""
    folder = settings.folder
    path = settings.output or Path(f"{folder.resolve()}.gguf")
    check_rules(settings)
    if settings.base is not None:
        if settings.peft is not None:
            return _convert_to_peft(folder, settings.base, settings.peft)
        return _convert_from_peft(folder, settings.base, path, settings.overwrite)
    written = convert(folder, path, settings.type, settings.overwrite, print)
    type_counts = Counter(
        str(t.dtype) if isinstance(t, DeferredTensor) else "f32" for t in written.values()
    )
    counts = ", ".join(f"{count} {name}" for name, count in type_counts.most_common())
    print(f"{path}: {plural(len(written), 'tensor')} ({counts}), {path.stat().st_size:,} bytes")
    return 0


def _convert_from_peft(folder: Path, base_path: Path, path: Path, overwrite: bool) -> int:
    model = open_model(base_path)
    check_output(path, "-o", [*checkpoint_files(folder), *model.gguf.paths], overwrite)
    adapter = read_peft(folder, model)
    check_fits(adapter, folder, model.gguf)
    name = path.stem.encode(errors="replace").decode()
    write_adapter(path, adapter, name, model.gguf, lambda part: check_runs(part, path, base_path))
    print(
        f"{path}: an adapter of {plural(len(adapter.lora_pairs), 'matrix', 'matrices')}, {path.stat().st_size:,} bytes"
    )
    return 0


def _convert_to_peft(adapter_path: Path, base_path: Path, folder: Path) -> int:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--peft: {folder} is a file; give the name of a folder")
    if (folder / TENSORS).exists():
        raise InputError(f"--peft: {folder / TENSORS} exists; give another folder")
    model = open_model(base_path)
    adapter = fit_adapter(read_adapter(adapter_path), adapter_path, model.gguf)
    num_tensors = write_peft(folder, adapter, model)
    try:
        read_peft(folder, model)
    except InputError:
        for name in (CONFIG, TENSORS):
            (folder / name).unlink()
        raise
    print(f"{folder}: {plural(num_tensors, 'tensor')}, {(folder / TENSORS).stat().st_size:,} bytes")
    return 0
