"""/embeddings, /v1/embeddings: vectors of texts in llama-server's and OpenAI's shape; /rerank: texts for a query."""

import base64
import re
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.models.model_file import RERANK_HEAD, ModelFile
from packtrain.serving.json_fields import JsonBody, parse_prompts
from packtrain.serving.response_shapes import HttpRefusal
from packtrain.serving.server_state import Server

MAX_TEXTS = 2048
MAX_EMBEDDING_NUMBERS = 1 << 19  # most numbers in all embeddings of a request


def openai_embeddings(server: Server, body: JsonBody, request: Request) -> Any:
    """Return OpenAI's embeddings of the field `input`: one or several texts, or lists of ids. Raises InputError."""
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
    """Return llama-server's embeddings of the field `content`, else `input`: a list of vectors for each text."""
    content = body.get("content") if body.has("content") else body.get("input")
    _, vectors = embed_content(server, body, content)
    return [
        {"index": i, "embedding": [encoded(row, "float") for row in np.atleast_2d(vector)]}
        for i, vector in enumerate(vectors)
    ]


def embed_content(
    server: Server, body: JsonBody, content: Any
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return the token ids and the embedding of each text in `content`. Raises HttpRefusal, InputError."""
    body.refuse_unmet("embeddings")
    max_vectors = MAX_EMBEDDING_NUMBERS // server.model.config.embedding_length
    texts = parse_prompts(content, server.tokenizer, min(MAX_TEXTS, max_vectors), "input")
    num_tokens = sum(map(len, texts))
    if server.pooling == "none" and num_tokens > max_vectors:
        fact = f"input has {num_tokens:,} tokens; at most {max_vectors:,} are embedded at once"
        raise InputError(fact)
    return texts, server.embed(texts, body.number("embd_normalize", 2, -1, 100))


def encoded(vector: np.ndarray, encoding_format: str) -> Any:
    """Encode a vector as a list of numbers, or for `encoding_format` base64 its f32 bytes as base64."""
    if encoding_format == "float":
        return [float(x) for x in vector]
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


MAX_DOCUMENTS = 2048
TEMPLATE_KEY = "tokenizer.chat_template.rerank"


def rerank_head(model: ModelFile) -> np.ndarray:
    """Return a reranker's classifier (N, C); row 0 is for "the document fits". Raises InputError for other models."""
    architecture, entry = model.config.architecture, model.gguf.entries.get(RERANK_HEAD)
    if architecture != "qwen3" or entry is None:
        raise InputError(
            f"--reranking: {model.gguf.path} is a {architecture} {'with' if entry else 'without'} {RERANK_HEAD};"
            " rerankers of Qwen3 can be served, such as Qwen3-Reranker-0.6B, whose files have that tensor"
        )
    head = model.weight(RERANK_HEAD)
    if head.ndim != 2 or head.shape[1] != model.config.embedding_length:
        raise InputError(
            f"{model.gguf.path}: {RERANK_HEAD} has shape {[*head.shape]}; it must be [labels,"
            f" {model.config.embedding_length}]"
        )
    return head


def rerank(server: Server, body: JsonBody, request: Request) -> Any:
    """Return scores, 0 to 1, of documents for a query in Jina's shape; for `texts` in text-embeddings-inference's."""
    if server.rerank_head is None:
        raise HttpRefusal(
            501, "This server does not support reranking. Start it with `--reranking`"
            " and a reranker, such as Qwen3-Reranker-0.6B"
        )  # fmt: skip
    if not body.has("query"):
        raise InputError("'query' is required")
    body.refuse_unmet("ranks")
    is_tei = not body.has("documents") and body.has("texts")
    documents = _documents(body, "texts" if is_tei else "documents")
    template = server.model.gguf.metadata.get(TEMPLATE_KEY)
    query = body.text("query")
    prompts = [rerank_ids(server.tokenizer, template, query, document) for document in documents]
    hidden = np.stack(server.embed(prompts, norm=-1)).astype(np.float64)
    logits = hidden @ server.rerank_head.T.astype(np.float64)
    odds = np.exp(logits - logits.max(1, keepdims=True))
    scores = odds[:, 0] / odds.sum(1)
    best = np.argsort(-scores, kind="stable")[: body.number("top_n", len(documents), 0)]
    has_texts = body.get_flag("return_text") or body.get_flag("return_documents")
    label = "score" if is_tei else "relevance_score"
    results: list[dict[str, Any]] = [{"index": int(i), label: float(scores[i])} for i in best]
    for result in results if has_texts else ():
        text = documents[result["index"]]
        result |= {"text": text} if is_tei else {"document": {"text": text}}
    num_tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer = {"object": "list", "model": server.name, "usage": usage, "results": results}
    return results if is_tei else answer


def _documents(body: JsonBody, name: str) -> list[str]:
    """Return the texts of the field `name`: a list of texts, or of objects with `text`. Raises InputError."""
    values = body.get_list(name, MAX_DOCUMENTS)
    texts: list[Any] = [value.get("text") if isinstance(value, dict) else value for value in values]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"'{name}' must be a list of at least one text")
    return texts


def rerank_ids(tokenizer: Tokenizer, template: Any, query: str, document: str) -> list[int]:
    """Return the tokens of a query and a document: by the file's template, else [BOS] query [EOS] document [EOS]."""
    if isinstance(template, str):
        texts = {"{query}": query, "{document}": document}
        prompt = re.sub("|".join(map(re.escape, texts)), lambda name: texts[name[0]], template)
        return tokenizer.encode(prompt, bos=False, eos=False)
    end = [tokenizer.eos] if tokenizer.add_eos and tokenizer.eos is not None else []
    start = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    encode = partial(tokenizer.encode, bos=False, eos=False, special=False)
    ids = encode(query), encode(document)
    return [*start, *ids[0], *end, *ids[1], *end]
