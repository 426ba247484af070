"""Embeddings of texts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import read_text
from packtrain.common.options import option
from packtrain.engine.backends import target
from packtrain.inference import embeddings
from packtrain.inference.kv_cache import Context
from packtrain.models.config import check_context
from packtrain.workflows import generation_settings


@dataclass(frozen=True)
class EmbedSettings(generation_settings.ModelOptions):
    """Compute embeddings of texts."""

    prompt: tuple[str, ...] = option((), "a text; repeatable", flags="-p")
    file: Path | None = option(None, "read texts from this file, one a line", flags="-f")
    pooling: str | None = option(
        None, "the mean of all tokens' vectors, the first one (cls), the last one, or each (none); default: the file's",
        choices=embeddings.POOLINGS,
    )  # fmt: skip
    embd_normalize: int = option(
        2, "norm of an embedding: -1 none, 0 the largest value is 32760, 1 taxicab, 2 Euclidean, more: p-norm",
        min_value=-1, max_value=100,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextEmbeddings:
    """Vectors (N, C) f32 of N texts, or with pooling none of their N tokens; the texts' token counts; the pooling."""

    vectors: np.ndarray
    tokens: tuple[int, ...]
    pooling: str


def embed(settings: EmbedSettings, events: Events) -> TextEmbeddings:
    """Return the embeddings of texts. Raises InputError, DoesNotFit, and Interrupted if it is stopped."""
    texts = [*settings.prompt]
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError("--prompt: the text is not UTF-8")
    if settings.file is not None:
        texts += read_text(settings.file, "--file").splitlines()
    if not texts:
        raise InputError("there is no text to embed; give some with --prompt or --file")
    model = generation_settings.opened(settings, events.message)
    pooling = settings.pooling or embeddings.model_pooling(model)
    token_ids = [*map(model.tokenizer().encode, texts)]  # BOS and EOS as the model's file says
    embeddings.check_texts(token_ids, settings.ctx or model.config.context_length)
    max_text_tokens = settings.ctx or max(map(len, token_ids))
    check_context(model.config, max_text_tokens, events.message)
    lengths = [len(text_ids) for text_ids in token_ids]
    num_cells, num_sequences = embeddings.context_dimensions(lengths)
    generation_settings.check_cache(model, num_cells, settings.cache_type)
    context = Context(
        model, cells=num_cells, sequences=num_sequences, cache=settings.cache_type, checkpoints=0, hidden=True,
        target=target(settings.device), longest=max_text_tokens,
    )  # fmt: skip
    vectors = list[np.ndarray]()
    with events.counting("embedding", "text") as report_progress, events.stopping() as stopped:
        for number, vector in enumerate(embeddings.embed_texts(context, token_ids, pooling)):
            if stopped():
                fact = f"stopped after {number} of {len(token_ids)} texts, without a result"
                raise Interrupted(fact)
            rows, norm = np.atleast_2d(vector), settings.embd_normalize
            vectors += [embeddings.normalize_vector(row, norm) for row in rows]
            report_progress(number + 1, len(token_ids))
    return TextEmbeddings(np.stack(vectors), tuple(map(len, token_ids)), pooling)
