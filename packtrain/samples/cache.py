"""From a Recipe to a Dataset: found in the cache by what it was made from, else made there by a child process."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain.corpus.cache import checksum, plain
from packtrain.corpus.documents import TRAIN, VALID, left_out
from packtrain.errors import InputError
from packtrain.gguf import GGUF
from packtrain.kept import Say, make
from packtrain.samples.build import NOTES_FILE, Recipe, parts_of, sources_of
from packtrain.samples.store import Samples, read_samples
from packtrain.tokenizer import KEYS

FORMAT = 6  # with another number all caches are built again
VOCABULARY = "tokenizer.", "general.name"  # the name tells how some vocabularies treat whitespace


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples by part. `fingerprint` says what they were made from; `notes` are lines worth printing.

    `template` is what conversations were written by if it is not the model's own: what learns from them must carry it.
    """

    train: Samples
    valid: Samples | None
    fingerprint: str
    notes: tuple[str, ...]
    template: str | None = None


def prepare(recipe: Recipe, cache: Path, say: Say) -> Dataset:
    """The samples of a recipe, kept in `cache/<fingerprint>/`. Raises InputError for whatever is wrong."""
    if not 0 <= recipe.val_split <= 0.5:
        raise InputError(f"--val-split: {recipe.val_split:g} must be from 0 to 0.5")
    sources, file = sources_of(recipe), GGUF(recipe.model)
    options = {**asdict(recipe), "data": "", "model": ""}
    values = {key: value for key, value in file.values.items() if key.startswith(VOCABULARY)}
    fingerprint = checksum((FORMAT, sorted(options.items()), plain(values)), sources)
    folder, parts = cache / fingerprint, parts_of(recipe, sources)
    size = len(file.metadata.get(f"{KEYS}tokens", ()))
    try:
        found = read_dataset(folder, parts, size)
    except (OSError, ValueError):  # not there, or damaged
        request = asdict(recipe) | {"data": str(recipe.data), "model": str(recipe.model)}
        make(folder, __package__, request, say)
        found = read_dataset(folder, parts, size)
    return replace(found, notes=(*left_out(recipe.data, sources), *found.notes))


def read_dataset(folder: Path, parts: Sequence[str], vocab_size: int) -> Dataset:
    """What a folder of the cache holds. Raises OSError or ValueError if it is not whole."""
    kept = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    train = read_samples(folder, TRAIN, vocab_size)
    valid = read_samples(folder, VALID, vocab_size) if VALID in parts else None
    return Dataset(train, valid, folder.name, tuple(kept["notes"]), kept["template"])
