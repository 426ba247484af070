"""/embeddings and /v1/embeddings: vectors of texts in llama-server's and OpenAI's shape."""

import base64
from typing import Any

import numpy as np
from starlette.requests import Request

from packtrain.common.errors import InputError
from packtrain.serving.json_fields import JsonBody, parse_prompts
from packtrain.serving.server_state import Server

MAX_TEXTS = 2048
MAX_EMBEDDING_NUMBERS = 1 << 19  # most numbers in all embeddings of a request


def openai_embeddings(server: Server, body: JsonBody, request: Request) -> Any:
    """Answer embeddings in OpenAI's shape; `input` is a text or tokens, or several."""
    encoding_format = body.text("encoding_format", "float")
    width = server.model.config.embedding_length
    if encoding_format not in ("float", "base64"):
        raise InputError(f"encoding_format is {encoding_format!r}; it must be float or base64")
    dimensions = body.number("dimensions", width)
    if dimensions != width:
        raise InputError(f"dimensions is {dimensions:,}; this model's embeddings have {width:,}")
    if server.pooling == "none":
        raise InputError("--pooling none: OpenAI's API has one vector of a text; use /embeddings")
    texts, vectors = embed_content(server, body, body.get("input"))
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    num_tokens = sum(map(len, texts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "model": server.name, "data": data, "usage": usage}


def llama_embedding(server: Server, body: JsonBody, request: Request) -> Any:
    """Answer embeddings in llama-server's own shape: of each text a list of vectors."""
    content = body.get("content") if body.has("content") else body.get("input")
    _, vectors = embed_content(server, body, content)
    return [
        {"index": i, "embedding": [encoded(row, "float") for row in np.atleast_2d(vector)]}
        for i, vector in enumerate(vectors)
    ]


def embed_content(
    server: Server, body: JsonBody, content: Any
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return tokens and embedding of each text. Raises HttpRefusal, InputError."""
    max_vectors = MAX_EMBEDDING_NUMBERS // server.model.config.embedding_length
    texts = parse_prompts(content, server.tokenizer, min(MAX_TEXTS, max_vectors), "input")
    num_tokens = sum(map(len, texts))
    if server.pooling == "none" and num_tokens > max_vectors:
        raise InputError(
            f"input has {num_tokens:,} tokens; at most {max_vectors:,} are embedded at once"
        )
    return texts, server.embed(texts, body.number("embd_normalize", 2, -1, 100))


def encoded(vector: np.ndarray, encoding_format: str) -> Any:
    """Encode a vector as a list of numbers, or its f32 bytes as base64."""
    if encoding_format == "float":
        return [float(x) for x in vector]
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
