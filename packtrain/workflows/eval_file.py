"""The file of a folder that `eval`, `compare` and `choose` measure, and its split as finetune splits it."""

from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.files import require_existing
from packtrain.data.text.documents import TRAIN, VALID, find_file

TEST = "test"
SPLITS = {TEST: (TEST,), VALID: (VALID, "val"), TRAIN: (TRAIN,)}  # split -> names of its files


def find_eval_file(data: Path, split: str | None) -> tuple[Path, str]:
    """Find the file or folder to measure, and its split if it is split as in finetune; "": all of it."""
    require_existing(data, "--data")
    if not data.is_dir():
        if split == TEST:
            raise InputError(
                f"--split test: {data} is one file; give a folder with a test file, or no --split"
            )
        return data, split or ""
    path_by_split = {name: find_file(data, *names) for name, names in SPLITS.items()}
    split_files = {name: path for name, path in path_by_split.items() if path is not None}
    if split is None:
        return next(iter(split_files.values()), data), ""
    if TRAIN in split_files and VALID not in split_files and split != TEST:  # finetune splits it
        return split_files[TRAIN], split
    if split in split_files:
        return split_files[split], ""
    raise InputError(f"--split {split}: {data} has no {split}.jsonl, {split}.txt or the like")
