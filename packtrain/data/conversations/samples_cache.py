"""From a Recipe to a Dataset: read from the cache, or built there by a child process."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.data.conversations.build_samples import NOTES_FILE, Recipe, parts_of, sources_of
from packtrain.data.conversations.conversation_renderer import WEIGHTLESS
from packtrain.data.conversations.samples_store import Samples, read_samples
from packtrain.data.text.corpus_cache import checksum, plain
from packtrain.data.text.documents import TRAIN, VALID, left_out
from packtrain.data.text.field_names import ALIASES
from packtrain.data.token_cache import Say, make
from packtrain.data.tokenizer import KEYS
from packtrain.gguf import GGUF

FORMAT = 9  # increase it to rebuild all caches
IDENTITY = 7  # increase it where the same data gives other samples, so that no older run resumes
# in notes: data that gives other samples since IDENTITY was chosen
SINCE = re.compile(rf"^{WEIGHTLESS}|: columns: .*\b({'|'.join(ALIASES)})\b.* → ", re.IGNORECASE)
# for some vocabularies the name decides how whitespace is treated
VOCABULARY = ("tokenizer.", "general.name")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples by split. `fingerprint` is a hash of their sources; `notes` are messages to print.

    `template` is the chat template if it is not the model's own; the trained model's file must then contain it.
    `ends` are the ids that end an answer, `places` where the first training samples are in the data.
    """

    train: Samples
    valid: Samples | None
    fingerprint: str
    notes: tuple[str, ...]
    template: str | None = None
    ends: frozenset[int] = frozenset()
    places: tuple[str, ...] = ()


def prepare(recipe: Recipe, cache: Path, report: Say, memory: str | None = None) -> Dataset:
    """The samples of a recipe, cached in a folder of `cache`. Raises InputError for bad data, and as `make`."""
    if not 0 <= recipe.val_split <= 0.5:
        raise InputError(f"--val-split: {recipe.val_split:g} must be from 0 to 0.5")
    sources, file = sources_of(recipe), GGUF(recipe.model)
    options = {**asdict(recipe), "data": "", "model": ""}
    values = {key: value for key, value in file.values.items() if key.startswith(VOCABULARY)}
    if recipe.columns is None:  # as of runs from before there was such an option
        del options["columns"]
    read = sorted(options.items()), plain(values)
    folder, parts = cache / checksum((FORMAT, *read), sources), parts_of(recipe, sources)
    names = [source.path.name for source in sources]
    size = len(file.metadata.get(f"{KEYS}tokens", ()))
    try:
        dataset = read_dataset(folder, parts, size, names)
    except (OSError, ValueError):  # missing or damaged
        request = asdict(recipe) | {"data": str(recipe.data), "model": str(recipe.model)}
        make(folder, __package__, request, report, memory, size, renders_chats=True)
        dataset = read_dataset(folder, parts, size, names)
    is_new = any(map(SINCE.search, dataset.notes))
    fingerprint = checksum((IDENTITY + is_new, *read), sources)
    notes = *left_out(recipe.data, sources), *dataset.notes
    return replace(dataset, fingerprint=fingerprint, notes=notes)


def read_dataset(
    folder: Path, parts: Sequence[str], vocab_size: int, names: Sequence[str] = ()
) -> Dataset:
    """Read a folder of the cache. Raises OSError or ValueError if it is incomplete.

    names  of its files now, which may be others than when it was made
    """
    metadata = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    train = read_samples(folder, TRAIN, vocab_size)
    held_out = VALID in parts and VALID in metadata["parts"]
    valid = read_samples(folder, VALID, vocab_size) if held_out else None
    current_names = dict(zip(metadata.get("names", ()), names, strict=False))

    def renamed(texts: Sequence[str]) -> tuple[str, ...]:
        split = (text.partition(": ") for text in texts)
        return tuple(
            f"{current_names.get(first, first)}{colon}{rest}" for first, colon, rest in split
        )

    notes, places = renamed(metadata["notes"]), renamed(metadata["places"])
    eos_ids = frozenset(metadata["ends"])
    return Dataset(train, valid, folder.name, notes, metadata["template"], eos_ids, places)
