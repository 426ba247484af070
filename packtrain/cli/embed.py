"""packtrain embed: compute embeddings of texts, printed as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtrain.cli import DONE, say
from packtrain.cli.event_output import Shown
from packtrain.common.options import option
from packtrain.common.text import plural
from packtrain.workflows.text_embeddings import Embed, Embedded, embed

FORMATS = "array", "json", "json+"


@dataclass(frozen=True)
class Embedding(Embed):
    """Print embeddings of texts."""

    COMMON = "prompt file pooling embd_normalize embd_output_format ctx lora"

    embd_output_format: str = option(
        "array",
        "array: a list of arrays; json: as OpenAI's API; json+: the same with the cosine of each two",
        choices=FORMATS,
    )


def run(settings: Embedding) -> int:
    """Print the embeddings. Raises InputError, DoesNotFit, and Interrupted on a signal."""
    done = embed(settings, Shown())
    vectors = [_numbers(row) for row in done.vectors]
    if settings.embd_output_format == "array":
        print("[" + ",\n".join(map(json.dumps, vectors)) + "]")
    else:
        print(json.dumps(_openai(settings, done, vectors), indent=1))
    count, width = done.vectors.shape
    tokens = plural(sum(done.tokens), "token")
    say(f"{plural(count, 'text')} of {tokens}; {width:,} values each, pooling {done.pooling}")
    return DONE


def _openai(
    settings: Embedding, done: Embedded, vectors: Sequence[Sequence[float]]
) -> dict[str, object]:
    data = [
        {"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)
    ]
    count = sum(done.tokens)
    response: dict[str, object] = {
        "object": "list",
        "data": data,
        "model": settings.model.name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    if settings.embd_output_format == "json+":
        wide = done.vectors.astype(np.float64)
        length = np.sqrt((wide * wide).sum(1, keepdims=True))
        unit = wide / np.where(length == 0, 1, length)
        response["cosineSimilarity"] = np.round(unit @ unit.T, 6).tolist()
    return response


def _numbers(row: np.ndarray) -> list[float]:
    """As short as f32 allows."""
    return [float(str(value)) for value in row]
