"""packtrain data: formats and token counts of a data set, and samples with the trained tokens marked."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.cli import print_message
from packtrain.common.errors import InputError, printable
from packtrain.common.option_rules import check_rules
from packtrain.common.options import COLUMNS, option, positional, required, unescape
from packtrain.common.text import plural, use_colour
from packtrain.data import conversations
from packtrain.data.chat_template import load_template
from packtrain.data.text.documents import has_valid_file
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF
from packtrain.kernels.runtime.environment import cache_root, writable
from packtrain.training.run_settings import ALL_TURNS, CHAT_TEMPLATE, SKIP_BAD_HELP, VALID_FILE

CONTEXT = 2048  # most tokens of a sample, without --ctx
TRAINED_COLOUR, RESET_COLOUR = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class DataSettings:
    """Show data as the model sees it."""

    COMMON = "model show ctx columns val_split chat_template train_on mask_prompt skip_bad"

    data: Path = positional(
        "the data: .jsonl, .json, .csv, .tsv, .xlsx, .txt or .parquet, or a folder of them"
    )
    model: Path = required("the model to train, a GGUF file", flags="-m")
    show: int = option(0, "print N samples, with trained tokens in colour or [[ ]]", min_value=0)
    ctx: int | None = option(
        None, f"tokens of a sample; the model's context, at most {CONTEXT}", flags="-c", min_value=1
    )
    truncate: str = option(
        conversations.TRUNCATE_CHOICES[0], "longer conversations: cut their end, drop or split them",
        choices=conversations.TRUNCATE_CHOICES,
    )  # fmt: skip
    mask_prompt: bool = option(True, "train on the assistant's words only, not the prompt")
    train_on: str = option(
        "all", "which of the assistant's turns to train on", choices=("all", "last"), conflicts=ALL_TURNS,
    )  # fmt: skip
    separator: str | None = option(None, "text between .txt documents; <|endoftext|> is detected")
    val_split: float = option(
        0.0, "share used for validation if the data has no validation file", conflicts=VALID_FILE
    )
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE")

    @property
    def has_valid_file(self) -> bool:
        return has_valid_file(self.data)


def run(settings: DataSettings) -> int:
    """Print formats and token counts of the data, and samples if asked. Raises InputError."""
    check_rules(settings)
    metadata = GGUF(settings.model).metadata
    recipe, folder = _recipe(settings, metadata), writable(cache_root() / "tokens")
    dataset = conversations.prepare_dataset(recipe, folder, print_message)
    for line in description_lines(dataset):
        print(printable(line))
    if settings.show:
        tokenizer, is_coloured = Tokenizer(metadata), use_colour(sys.stdout)
        for i in range(min(settings.show, len(dataset.train))):
            location_text = f" ({dataset.locations[i]})" if i < len(dataset.locations) else ""
            print(printable(f"---- sample {i + 1}{location_text}"))
            print(shown(tokenizer, *dataset.train[i], is_coloured))
    return 0


def _recipe(settings: DataSettings, metadata: dict[str, Any]) -> conversations.DatasetRecipe:
    key = f"{metadata.get('general.architecture')}.context_length"
    context = metadata.get(key, CONTEXT)
    if not isinstance(context, int) or context < 1:
        fact = f"{settings.model}: {key} is {context!r}; it must be a whole number from 1"
        raise InputError(fact)
    return conversations.DatasetRecipe(
        settings.data, settings.model, settings.ctx or min(context, CONTEXT), settings.truncate,
        not settings.mask_prompt, settings.train_on == "last", settings.separator and unescape(settings.separator),
        settings.val_split, settings.skip_bad, settings.chat_template and load_template(settings.chat_template), None,
        settings.columns,
    )  # fmt: skip


def description_lines(dataset: conversations.SampleDataset) -> Iterator[str]:
    """Yield lines about the data's formats, and the size of each split."""
    yield from dataset.notes
    for name, samples in (("training", dataset.train), ("validation", dataset.valid)):
        if samples is not None:
            yield f"{name}: {_size_text(samples)}"


def _size_text(samples: conversations.TokenizedSamples) -> str:
    """Format counts of samples, tokens and targets, and quantiles of the samples' lengths."""
    total, lengths = samples.ids.size, samples.lengths - 1  # inputs, without the last token
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99), method="higher")
    return (
        f"{plural(len(samples), 'sample')}, {total:,} tokens, {samples.targets:,} trained on"
        f" ({samples.targets / total:.1%}); --ctx that samples need: half at most {p50:,}, 90 % {p90:,},"
        f" 99 % {p99:,}, the longest {lengths.max():,}"
    )


def shown(tokenizer: Tokenizer, ids: np.ndarray, weights: np.ndarray, is_coloured: bool) -> str:
    """Return a sample as text, special tokens by name, trained tokens (weights above 0) in colour, else in [[ ]]."""
    start_mark, end_mark = (TRAINED_COLOUR, RESET_COLOUR) if is_coloured else ("[[", "]]")
    borders = np.flatnonzero(np.diff(weights)) + 1
    text = ""
    for part, weight in zip(np.split(ids, borders), np.split(weights, borders), strict=True):
        raw_text = b"".join(tokenizer.piece(id) for id in part.tolist()).decode(errors="replace")
        printable_text = "\n".join(map(printable, raw_text.split("\n")))
        text += f"{start_mark}{printable_text}{end_mark}" if weight[0] else printable_text
    return text
