"""Embeddings of texts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import read_text
from packtrain.common.options import MODEL, option
from packtrain.data.tokenizer import Tokenizer
from packtrain.dtypes import PRECISIONS
from packtrain.engine.backends import DEVICES, target
from packtrain.inference.embeddings import (
    POOLINGS,
    check_texts,
    embeddings,
    normalized,
    pooling_of,
    room,
)
from packtrain.inference.kv_cache import Context
from packtrain.inference.kv_cache.decode_plans import CACHES
from packtrain.models.activation_rounding import ACTIVATIONS, F32, PRECISION, Q8
from packtrain.models.attention_choice import AUTO, FLASH, MODES
from packtrain.models.config import check_context
from packtrain.training.train_settings import DEVICE
from packtrain.workflows.generation_settings import CACHE, CTX, LORA, Speaker, check_cache, opened


@dataclass(frozen=True)
class Embed(Speaker):
    """Compute embeddings of texts."""

    prompt: tuple[str, ...] = option((), "a text; repeatable", flags="-p")
    file: Path | None = option(None, "read texts from this file, one a line", flags="-f")
    pooling: str | None = option(
        None,
        "the mean of all tokens' vectors, the first token's (cls) or the last one's; default: the file's, else mean",
        choices=POOLINGS,
    )
    embd_normalize: int = option(
        2,
        "norm of an embedding: -1 none, 0 the largest value is 32760, 1 taxicab, 2 Euclidean, more: p-norm",
        least=-1,
        most=100,
    )
    ctx: int | None = MODEL(None, CTX, flags="-c", least=1)
    lora: tuple[str, ...] = MODEL((), LORA, metavar="FILE[:SCALE]")
    cache_type: str = MODEL("f16", CACHE, choices=CACHES)
    flash_attn: str = MODEL(AUTO, FLASH, flags="-fa", choices=MODES)
    activations: str = MODEL("f32", ACTIVATIONS, choices=(F32, Q8))
    precision: str = MODEL("f32", PRECISION, choices=PRECISIONS)
    device: str = MODEL("cpu", DEVICE, choices=tuple(DEVICES))


@dataclass(frozen=True, slots=True)
class Embedded:
    """vectors (N, C) f32 of N texts, how many tokens each has, and how they were pooled."""

    vectors: np.ndarray
    tokens: tuple[int, ...]
    pooling: str


def embed(settings: Embed, events: Events) -> Embedded:
    """The embeddings. Raises InputError, DoesNotFit, and Interrupted if it is stopped."""
    texts = _texts(settings)
    model = opened(settings, events.message)
    pooling = settings.pooling or pooling_of(model)
    ids = _encoded(model.tokenizer(), texts)
    max_tokens = settings.ctx or model.config.context_length
    check_texts(ids, max_tokens)
    longest = settings.ctx or max(map(len, ids))
    check_context(model.config, longest, events.message)
    cells, sequences = room([len(text) for text in ids])
    check_cache(model, cells, settings.cache_type)
    context = Context(
        model, cells=cells, sequences=sequences, cache=settings.cache_type, checkpoints=0, hidden=True,
        target=target(settings.device), longest=longest,
    )  # fmt: skip
    vectors = list[np.ndarray]()
    with events.counting("embedding", "text") as report_progress, events.stopping() as stopped:
        for vector in embeddings(context, ids, pooling):
            if stopped():
                raise Interrupted(
                    f"stopped after {len(vectors)} of {len(ids)} texts, without a result"
                )
            vectors.append(normalized(vector, settings.embd_normalize))
            report_progress(len(vectors), len(ids))
    return Embedded(np.stack(vectors), tuple(map(len, ids)), pooling)


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """With BOS and EOS as the file says."""
    return [tokenizer.encode(text) for text in texts]


def _texts(settings: Embed) -> list[str]:
    texts = [*settings.prompt]
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError("--prompt: the text is not UTF-8")
    if settings.file is not None:
        texts += read_text(settings.file, "--file").splitlines()
    if not texts:
        raise InputError("there is no text to embed; give some with --prompt or --file")
    return texts
