"""From a DatasetRecipe to a SampleDataset: read from the cache, or built there by a child process."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.data.conversations.build_samples import NOTES_FILE, DatasetRecipe
from packtrain.data.conversations.conversation_renderer import DEVELOPER_NOTE, WEIGHTLESS
from packtrain.data.text.corpus_cache import checksum, plain_metadata
from packtrain.data.text.documents import TRAIN, VALID, find_sources, splits_of, unread_notes
from packtrain.data.text.field_names import ALIASES
from packtrain.data.text.text_streams import DATA_SUFFIXES
from packtrain.data.text.token_files import TokenizedSamples, read_samples
from packtrain.data.token_cache import ReportProgress, read_or_build
from packtrain.data.tokenizer import KEYS
from packtrain.gguf import GGUF

FORMAT = 11  # increase it to rebuild all caches
IDENTITY = 7  # increase it if the same data gives other samples, so that no older run resumes
# matches notes of data that gives other samples since IDENTITY was chosen
SINCE = re.compile(
    rf"^{WEIGHTLESS}|^{DEVELOPER_NOTE}|: columns: .*\b({'|'.join(ALIASES)})\b.* → ", re.IGNORECASE
)
# for some vocabularies the model's name decides how whitespace is treated
VOCABULARY_KEYS = ("tokenizer.", "general.name")


@dataclass(frozen=True, slots=True)
class SampleDataset:
    """Samples by split; `valid` is None if the cache has none.

    fingerprint  hash of the samples' sources; `notes` are messages to print
    template     chat template if it is not the model's own; the trained model's file must then contain it
    eog_ids      ids that end an answer; `locations` are places of the first training samples in the data
    """

    train: TokenizedSamples
    valid: TokenizedSamples | None
    fingerprint: str
    notes: tuple[str, ...]
    template: str | None = None
    eog_ids: frozenset[int] = frozenset()
    locations: tuple[str, ...] = ()


def prepare_dataset(
    recipe: DatasetRecipe, cache: Path, report: ReportProgress, memory: str | None = None, model: GGUF | None = None,
) -> SampleDataset:  # fmt: skip
    """Return a recipe's samples, cached in `cache`; `model`: recipe.model, if open. Raises as `build_folder`."""
    if not 0 <= recipe.val_split <= 0.5:
        raise InputError(f"--val-split: {recipe.val_split:g} must be from 0 to 0.5")
    sources, file = find_sources(recipe.data, DATA_SUFFIXES), model or GGUF(recipe.model)
    options = {**asdict(recipe), "data": "", "model": ""}
    values = {key: value for key, value in file.values.items() if key.startswith(VOCABULARY_KEYS)}
    if recipe.columns is None:  # as in runs from before the option existed
        del options["columns"]
    cache_key = sorted(options.items()), plain_metadata(values)
    folder = cache / checksum((FORMAT, *cache_key), sources)
    splits = splits_of(recipe.val_split, sources)
    file_names = [source.path.name for source in sources]
    vocab_size = len(file.metadata.get(f"{KEYS}tokens", ()))
    dataset = read_or_build(
        lambda path: read_dataset(path, splits, vocab_size, file_names),
        folder, __package__, recipe, report, memory, vocab_size, True,
    )  # fmt: skip
    is_new = any(map(SINCE.search, dataset.notes))
    fingerprint = checksum((IDENTITY + is_new, *cache_key), sources)
    notes = *unread_notes(recipe.data, sources), *dataset.notes
    return replace(dataset, fingerprint=fingerprint, notes=notes)


def read_dataset(
    folder: Path, splits: Sequence[str], vocab_size: int, file_names: Sequence[str] = ()
) -> SampleDataset:
    """Read a folder of the cache; `file_names` are current names of the data files, which may have changed since.
    Raises OSError or ValueError if the folder is incomplete."""
    metadata = json.loads((folder / NOTES_FILE).read_text(encoding="utf-8"))
    train = read_samples(folder, TRAIN, vocab_size)
    has_valid = VALID in splits and VALID in metadata["parts"]
    valid = read_samples(folder, VALID, vocab_size) if has_valid else None
    current_names = dict(zip(metadata.get("names", ()), file_names, strict=False))

    def with_current_names(texts: Sequence[str]) -> tuple[str, ...]:
        split = (text.partition(": ") for text in texts)
        return tuple(f"{current_names.get(f, f)}{colon}{rest}" for f, colon, rest in split)

    notes, locations = with_current_names(metadata["notes"]), with_current_names(metadata["places"])
    eog_ids = frozenset(metadata["ends"])
    return SampleDataset(train, valid, folder.name, notes, metadata["template"], eog_ids, locations)
