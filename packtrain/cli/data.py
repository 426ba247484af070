"""packtrain data: formats and token counts of a data set, and samples with the trained tokens marked."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.cli import say
from packtrain.common.errors import InputError, printable
from packtrain.common.options import COLUMNS, option, positional, required, unescaped
from packtrain.common.text import in_colour, plural
from packtrain.data.chat_template import template_named
from packtrain.data.conversations import TRUNCATE, Dataset, Recipe, Samples, prepare
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF
from packtrain.kernels.runtime import cache_root, writable
from packtrain.training.ineffective_settings import TRAIN_ON, VAL_SPLIT, check_idle
from packtrain.training.train_settings import CHAT_TEMPLATE, SKIP_BAD

CONTEXT = 2048  # at most, without --ctx
LEARNT, PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Data:
    """Show data as the model sees it."""

    COMMON = "model show ctx columns val_split chat_template train_on mask_prompt skip_bad"

    data: Path = positional(
        "the data: .jsonl, .json, .csv, .tsv, .xlsx, .txt or .parquet, or a folder of them"
    )
    model: Path = required("the model to train, a GGUF file", flags="-m")
    show: int = option(0, "print N samples, with trained tokens in colour or [[ ]]", least=0)
    ctx: int | None = option(
        None, f"tokens of a sample; the model's context, at most {CONTEXT}", flags="-c", least=1
    )
    truncate: str = option(
        TRUNCATE[0], "longer conversations: cut their end, drop or split them", choices=TRUNCATE
    )
    mask_prompt: bool = option(True, "train on the assistant's words only, not the prompt")
    train_on: str = option(
        "all", "which of the assistant's turns to train on", choices=("all", "last")
    )
    separator: str | None = option(
        None, "text between documents of a .txt; <|endoftext|> is detected"
    )
    val_split: float = option(0.0, "share used for validation if the data has no validation file")
    skip_bad: bool = option(False, SKIP_BAD)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE")


def run(settings: Data) -> int:
    """Print the description, and samples if asked. Raises InputError."""
    check_idle(settings, (VAL_SPLIT, TRAIN_ON))
    metadata = GGUF(settings.model).metadata
    dataset = prepare(_recipe(settings, metadata), writable(cache_root() / "tokens"), say)
    for line in described(dataset):
        print(printable(line))
    if settings.show:
        tokenizer, colour = Tokenizer(metadata), in_colour(sys.stdout)
        for i in range(min(settings.show, len(dataset.train))):
            place = f" ({dataset.places[i]})" if i < len(dataset.places) else ""
            print(printable(f"---- sample {i + 1}{place}"))
            print(shown(tokenizer, *dataset.train[i], colour))
    return 0


def _recipe(settings: Data, metadata: dict[str, Any]) -> Recipe:
    key = f"{metadata.get('general.architecture')}.context_length"
    context = metadata.get(key, CONTEXT)
    if not isinstance(context, int) or context < 1:
        raise InputError(
            f"{settings.model}: {key} is {context!r}; it must be a whole number from 1"
        )
    return Recipe(
        settings.data,
        settings.model,
        settings.ctx or min(context, CONTEXT),
        settings.truncate,
        not settings.mask_prompt,
        settings.train_on == "last",
        settings.separator and unescaped(settings.separator),
        settings.val_split,
        settings.skip_bad,
        settings.chat_template and template_named(settings.chat_template),
        None,
        settings.columns,
    )


def described(dataset: Dataset) -> Iterator[str]:
    """The formats found, and the size of each split."""
    yield from dataset.notes
    for name, samples in (("training", dataset.train), ("validation", dataset.valid)):
        if samples is not None:
            yield f"{name}: {_size(samples)}"


def _size(samples: Samples) -> str:
    """Counts of samples, tokens and targets, and lengths of samples."""
    total, lengths = samples.ids.size, samples.lengths - 1  # fed; the last one is a target only
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99), method="higher")
    return (
        f"{plural(len(samples), 'sample')}, {total:,} tokens, {samples.targets:,} trained on"
        f" ({samples.targets / total:.1%}); tokens of a sample: half have at most {p50:,}, 90 % {p90:,},"
        f" 99 % {p99:,}, the longest {lengths.max():,}"
    )


def shown(tokenizer: Tokenizer, ids: np.ndarray, weights: np.ndarray, colour: bool) -> str:
    """A sample's text, special tokens by name, with trained tokens in colour or brackets."""
    begin, end = (LEARNT, PLAIN) if colour else ("[[", "]]")
    borders = np.flatnonzero(np.diff(weights)) + 1
    text = ""
    for part, weight in zip(np.split(ids, borders), np.split(weights, borders), strict=True):
        raw = b"".join(tokenizer.piece(id) for id in part.tolist()).decode(errors="replace")
        safe = "\n".join(map(printable, raw.split("\n")))
        text += f"{begin}{safe}{end}" if weight[0] else safe
    return text
