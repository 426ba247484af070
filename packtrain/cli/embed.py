"""packtrain embed: compute embeddings of texts, printed as JSON."""

import json
from dataclasses import dataclass

import numpy as np

from packtrain.cli import DONE, print_message
from packtrain.cli.event_output import TerminalEvents
from packtrain.common.options import option
from packtrain.common.text import plural
from packtrain.workflows.text_embeddings import EmbedSettings, embed

OUTPUT_FORMATS = "array", "json", "json+"


@dataclass(frozen=True)
class EmbedOutputSettings(EmbedSettings):
    """Print embeddings of texts."""

    COMMON = "prompt file pooling embd_normalize embd_output_format ctx lora"

    embd_output_format: str = option(
        "array", "array: a list of arrays; json: as OpenAI's API; json+: the same with the cosine of each two",
        choices=OUTPUT_FORMATS,
    )  # fmt: skip


def run(settings: EmbedOutputSettings) -> int:
    """Print embeddings as JSON; returns the exit code. Raises InputError, DoesNotFit, Interrupted."""
    result = embed(settings, TerminalEvents())
    # as short as f32 allows
    vectors = [[float(str(value)) for value in row] for row in result.vectors]
    if settings.embd_output_format == "array":
        print("[" + ",\n".join(map(json.dumps, vectors)) + "]")
    else:
        embeddings = [
            {"object": "embedding", "index": i, "embedding": vector}
            for i, vector in enumerate(vectors)
        ]
        num_tokens = sum(result.tokens)
        response: dict[str, object] = {
            "object": "list", "data": embeddings, "model": settings.model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }  # fmt: skip
        if settings.embd_output_format == "json+":
            vectors_f64 = result.vectors.astype(np.float64)
            norms = np.sqrt((vectors_f64 * vectors_f64).sum(1, keepdims=True))
            unit_vectors = vectors_f64 / np.where(norms == 0, 1, norms)
            response["cosineSimilarity"] = np.round(unit_vectors @ unit_vectors.T, 6).tolist()
        print(json.dumps(response, indent=1))
    num_texts, width = len(result.tokens), result.vectors.shape[1]
    tokens_text = plural(sum(result.tokens), "token")
    print_message(
        f"{plural(num_texts, 'text')} of {tokens_text}; {width:,} values each, pooling {result.pooling}"
    )
    return DONE
