"""packtrain eval: loss and perplexity of a model on a text, with the text's documents cut as training cuts them."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.commands import say
from packtrain.corpus import Text, prepare
from packtrain.errors import InputError, Interrupted
from packtrain.kernels.runtime import cache_root, writable
from packtrain.models.adapted import adapted, read_scaled
from packtrain.models.file import ModelFile, open_model
from packtrain.settings import option, positional, required, unescaped
from packtrain.stop import stop_on_signals
from packtrain.train.batches import Batches
from packtrain.train.engine import evaluate
from packtrain.train.measure import losses_of

CONTEXT = 512  # at most, where --ctx does not say
HUGE = 700.0  # e to the power of more is beyond a float


@dataclass(frozen=True)
class Evaluate:
    """Measure a model on a text."""

    model: Path = positional("the model, a GGUF file")
    data: Path = required(
        "the text: .txt or .jsonl, or a folder, of which valid is taken if it has one"
    )
    ctx: int | None = option(
        None, f"tokens of a window; the model's context, at most {CONTEXT}", flags="-c", least=1
    )
    lora: tuple[str, ...] = option(
        (), "an adapter of this model, FILE or FILE:SCALE; may be given several times"
    )
    batch_size: int = option(4, "windows at a time", least=1)
    separator: str | None = option(
        None, "text between two documents; found by itself if it is <|endoftext|>"
    )


def run(settings: Evaluate) -> int:
    """Print loss, perplexity and speed. Raises InputError, and Interrupted when a signal came."""
    model = open_model(settings.model)
    model = adapted(model, read_scaled(settings.lora, model.gguf))
    batches = _batches(settings, model)
    executor = losses_of(model, batches.rows, batches.time)
    executor(batches[0])  # loads the kernels, so that they do not count as time of the first batch
    began = time.perf_counter()
    found = evaluate(executor, _until_stopped(batches))
    speed = found.tokens / (time.perf_counter() - began)
    if not math.isfinite(found.loss):
        raise InputError(
            f"{settings.model}: the loss is {found.loss}; the weights must give finite numbers"
        )
    perplexity = math.exp(found.loss) if found.loss < HUGE else math.inf
    print(
        f"loss {found.loss:.4f} ± {found.error:.4f}  perplexity {perplexity:.4f}"
        f"  {found.tokens:,} tokens  {speed:,.0f} tokens/s"
    )
    return 0


def _batches(settings: Evaluate, model: ModelFile) -> Batches:
    """The whole text, once and in order, as tokens of the model's own vocabulary."""
    separator = settings.separator and unescaped(settings.separator)
    text = Text(settings.data, settings.model, model.config.vocab_size, False, separator, 0.0)
    corpus = prepare(text, writable(cache_root() / "tokens"), say)
    tokens = corpus.valid or corpus.train
    own = model.config.context_length
    context = min(settings.ctx or min(own, CONTEXT), len(tokens.ids) - 1)  # not beyond the text
    if context > own:
        say(f"windows of {context:,} tokens are more than the model's own context of {own:,}")
    windows = -(-(len(tokens.ids) - 1) // context)
    return Batches(tokens, min(settings.batch_size, windows), context, shuffle=False)


def _until_stopped(batches: Batches) -> Iterator[dict[str, np.ndarray]]:
    with stop_on_signals() as stopped:
        for i in range(len(batches)):
            if stopped():
                raise Interrupted(f"stopped after {i} of {len(batches)} batches, without a result")
            yield batches[i]
