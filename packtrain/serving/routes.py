"""What each route does. Functions of POST run in a thread, and get the body."""

import base64
import math
import re
import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from packtrain.common.errors import InputError
from packtrain.serving import request_parsing
from packtrain.serving.event_stream import answer
from packtrain.serving.generation_jobs import Job
from packtrain.serving.json_fields import Body, adapters_of, prompt_of, prompts_of
from packtrain.serving.llama_completion import Native, settings_of
from packtrain.serving.openai_completions import Chats, Texts
from packtrain.serving.prometheus_metrics import metrics_text
from packtrain.serving.response_shapes import FINGERPRINT, Refused
from packtrain.serving.server_state import Server
from packtrain.serving.slots import Writing
from packtrain.serving.tool_calls import Tools

VOCABULARIES = {"llama": 1, "gpt2": 2}  # llama_vocab_type
MOST_TEXTS = 2048
MOST_PIECES = 1 << 15
MOST_NUMBERS = 1 << 19  # of all embeddings of a request
OLLAMA = {
    "modified_at": "", "size": "", "digest": "", "description": "", "tags": [""], "parameters": "",
    "details": {
        "parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "",
        "quantization_level": "",
    },
}  # fmt: skip
NAME = re.compile(r"[\w-][\w.-]{0,127}", re.ASCII)  # temporary files begin with a dot


# ---- answers


def completion(server: Server, body: Body, request: Request) -> Response:
    jobs = request_parsing.completions(server, body)
    shape = Native(body, jobs, server.name, server.tokenizer)
    return answer(server, jobs, shape, body.flag("stream"))


def text_completion(server: Server, body: Body, request: Request) -> Response:
    text_request = request_parsing.texts(server, body)
    shape = Texts(server.name, server.tokenizer, text_request, verbose(server, body, text_request))
    return answer(server, text_request.jobs, shape, body.flag("stream"))


def chat_completion(server: Server, body: Body, request: Request) -> Response:
    chat_request = request_parsing.chat(server, body)
    shape = Chats(server.name, server.tokenizer, chat_request, verbose(server, body, chat_request))
    return answer(server, chat_request.jobs, shape, body.flag("stream"))


def verbose(server: Server, body: Body, openai_request: request_parsing.Asked) -> Native | None:
    """/completion's shape, if its fields are wanted beside OpenAI's."""
    if not body.flag("verbose"):
        return None
    return Native(body, openai_request.jobs, server.name, server.tokenizer)


# ---- texts and tokens


def tokenize(server: Server, body: Body, request: Request) -> Any:
    ids = tokens_of(server, body)
    if not body.flag("with_pieces"):
        return {"tokens": ids}
    if len(ids) > MOST_PIECES:
        raise InputError(f"content has {len(ids):,} tokens; at most {MOST_PIECES:,} with pieces")
    return {"tokens": [{"id": id, "piece": piece_of(server, id)} for id in ids]}


def tokens_of(server: Server, body: Body) -> list[int]:
    content, special = body.get("content"), body.flag("parse_special", True)
    add_bos = None if body.flag("add_special") else False
    if content is None:
        return []
    if isinstance(content, str):
        return server.tokenizer.encode(content, bos=add_bos, eos=False, special=special)
    return prompt_of(content, server.tokenizer, "content")


def piece_of(server: Server, id: int) -> str | list[int]:
    """The text of a token, or its bytes where they are no text."""
    piece = server.tokenizer.piece(id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]


def detokenize(server: Server, body: Body, request: Request) -> Any:
    ids = body.listed("tokens", 1 << 22)
    if not all(isinstance(id, int) and 0 <= id < server.tokenizer.vocab_size for id in ids):
        raise InputError(f"tokens must be ids below {server.tokenizer.vocab_size:,}")
    return {"content": server.tokenizer.decode(ids)}


def apply_template(server: Server, body: Body, request: Request) -> Any:
    return {"prompt": asked_text(server, body)}


def count_tokens(server: Server, body: Body, request: Request) -> Any:
    count = len(server.ids(asked_text(server, body)))
    return {"input_tokens": count, "object": "response.input_tokens"}


def asked_text(server: Server, body: Body) -> str:
    conversation = request_parsing.conversation_of(body)
    tools = Tools.of(body, conversation, server.style)
    return request_parsing.prompt_text(server, body, conversation, tools)


# ---- embeddings


def embeddings(server: Server, body: Body, request: Request) -> Any:
    """OpenAI's shape: `input` is a text or tokens, or several."""
    kind = body.text("encoding_format", "float")
    if kind not in ("float", "base64"):
        raise InputError(f"encoding_format is {kind!r}; it must be float or base64")
    if body.has("dimensions"):
        raise InputError("dimensions: this model's embeddings have one size")
    texts, vectors = embedded(server, body.get("input"))
    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, kind)}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, texts))
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": server.name, "data": data, "usage": counts}


def embedded(server: Server, content: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    """Tokens and embedding of each text. Raises Refused, InputError."""
    max_texts = min(MOST_TEXTS, MOST_NUMBERS // server.model.config.embedding_length)
    texts = prompts_of(content, server.tokenizer, max_texts, "input")
    return texts, server.embed(texts)


def encoded(vector: np.ndarray, kind: str) -> Any:
    """Numbers, or the bytes of f32 as base64."""
    if kind == "float":
        return [float(x) for x in vector]
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def embedding(server: Server, body: Body, request: Request) -> Any:
    """llama-server's own shape."""
    content = body.get("content") if body.has("content") else body.get("input")
    _, vectors = embedded(server, content)
    return [
        {"index": i, "embedding": [encoded(vector, "float")]} for i, vector in enumerate(vectors)
    ]


# ---- the server


def health(server: Server, request: Request) -> Any:
    return {"status": "ok"}


def models(server: Server, request: Request) -> Any:
    ollama_model = {
        "name": server.name,
        "model": server.name,
        "type": "model",
        "capabilities": ["completion"],
    }
    return {"object": "list", "models": [OLLAMA | ollama_model], "data": [described(server)]}


def one_model(server: Server, request: Request) -> Any:
    name = request.path_params["name"]
    if name not in (server.name, *server.aliases):
        raise Refused(404, f"there is no model {name!r}; there is {server.name!r}")
    return described(server)


def described(server: Server) -> dict[str, Any]:
    """The model, as lists of models have it."""
    config, gguf = server.model.config, server.model.gguf
    about = {
        "vocab_type": VOCABULARIES.get(str(gguf.metadata.get("tokenizer.ggml.model")), 0),
        "n_vocab": config.vocab_size,
        "n_ctx": server.engine.limit,
        "n_ctx_train": config.context_length,
        "n_embd": config.embedding_length,
        "n_params": sum(math.prod(entry.shape) for entry in gguf.entries.values()),
        "size": sum(entry.nbytes for entry in gguf.entries.values()),
        "ftype": ftype(server),
    }
    model_info = {
        "id": server.name,
        "object": "model",
        "created": int(server.began),
        "owned_by": "packtrain",
    }
    return model_info | {"aliases": [server.name, *server.aliases], "tags": [], "meta": about}


def ftype(server: Server) -> str:
    """The type that most of the weights have."""
    sizes = dict[str, int]()
    for entry in server.model.gguf.entries.values():
        name = str(entry.dtype).upper()
        sizes[name] = sizes.get(name, 0) + math.prod(entry.shape)
    return max(sizes, key=sizes.__getitem__)


def props(server: Server, request: Request) -> Any:
    text = server.tokenizer.piece
    bos, eos = server.tokenizer.bos, server.tokenizer.eos
    params = settings_of(Job(prompt=(0,), sampling=server.sampling, seed=server.seed))
    return {
        "default_generation_settings": {"params": params, "n_ctx": server.engine.limit},
        "total_slots": len(server.engine.slots),
        "model_alias": server.name,
        "model_path": server.model.gguf.path.name,
        "model_hash": server.model_hash,
        "model_ftype": ftype(server),
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": server.watched,
        "endpoint_props": False,
        "endpoint_metrics": server.measured,
        "ui": server.page,
        "is_sleeping": False,
        "chat_template": server.source,
        "chat_template_caps": {
            "supports_system_role": server.renderer.takes_system,
            "supports_tools": server.renderer.takes_tools,
            "supports_tool_calls": server.renderer.takes_calls,
            "supports_string_content": True,
        },
        "bos_token": "" if bos is None else text(bos).decode(errors="replace"),
        "eos_token": "" if eos is None else text(eos).decode(errors="replace"),
        "build_info": FINGERPRINT,
    }


def slots(server: Server, request: Request) -> Any:
    if not server.watched:
        raise Refused(501, "This server does not support slots endpoint. Start it with `--slots`")
    server_slots = server.engine.slots
    if "fail_on_no_slot" in request.query_params and all(slot.writing for slot in server_slots):
        raise Refused(503, "no slot available")
    entries = []
    for slot in server_slots:
        entry = {"id": slot.number, "n_ctx": server.engine.limit, "speculative": False}
        writing = slot.writing  # which another thread may end
        activity = {} if writing is None else busy(writing)
        entries.append(entry | {"is_processing": writing is not None} | activity)
    return entries


def busy(writing: Writing) -> dict[str, Any]:
    """What a slot does, without any text."""
    job, written = writing.job, len(writing.ids)
    left = -1 if job.count < 0 else job.count - written
    total = len(job.prompt)
    read = total if written else total - len(writing.left)
    return {
        "n_prompt_tokens": total,
        "n_prompt_tokens_processed": read - writing.cached,
        "n_prompt_tokens_cache": writing.cached,
        "params": settings_of(job),
        "next_token": [{"has_next_token": True, "n_remain": left, "n_decoded": written}],
    }


def metrics(server: Server, request: Request) -> Response:
    if not server.measured:
        raise Refused(
            501, "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    return PlainTextResponse(metrics_text(server.engine), media_type="text/plain; version=0.0.4")


# ---- adapters, and slots as files


def adapters(server: Server, request: Request) -> Any:
    both = zip(server.adapters, server.scales, strict=True)
    return [
        {"id": id, "path": file.name, "scale": scale, "run": file.run_name, "sha256": file.sha256}
        for id, (file, scale) in enumerate(both)
    ]


def set_adapters(server: Server, entries: Any, request: Request) -> Any:
    server.scales = adapters_of(entries, server.scales)
    return {"success": True}


def slot_action(server: Server, body: Body, request: Request) -> Any:
    """Save a slot to a file, restore it, or erase it."""
    try:
        number = int(request.path_params["id"])
    except ValueError:
        number = -1
    if not 0 <= number < len(server.engine.slots):
        raise InputError(f"there is no such slot; there are {len(server.engine.slots)}, from 0 on")
    action = request.query_params.get("action")
    if action == "erase":
        return {"id_slot": number, "n_erased": server.erase(number)}
    if action not in ("save", "restore"):
        raise InputError("action must be save, restore or erase")
    if server.slots is None:
        raise Refused(
            501, "This server does not support slots action. Start it with `--slot-save-path`"
        )
    name = body.text("filename")
    if not NAME.fullmatch(name):
        raise InputError(
            "filename must be a name of letters, digits, '.', '_' and '-', without a folder or a '.' at its beginning"
        )
    path, start_time = server.slots / name, time.perf_counter()
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{name} is no saved slot; choose another filename")
    count = (server.save if action == "save" else server.restore)(number, path)
    verb, moved = ("saved", "written") if action == "save" else ("restored", "read")
    return {
        "id_slot": number,
        "filename": name,
        f"n_{verb}": count,
        f"n_{moved}": path.stat().st_size,
        "timings": {f"{action}_ms": 1e3 * (time.perf_counter() - start_time)},
    }


ALL = (
    ("/health", "GET", health),
    ("/v1/health", "GET", health),
    ("/models", "GET", models),
    ("/v1/models", "GET", models),
    ("/v1/models/{name:path}", "GET", one_model),
    ("/props", "GET", props),
    ("/slots", "GET", slots),
    ("/metrics", "GET", metrics),
    ("/lora-adapters", "GET", adapters),
    ("/lora-adapters", "POST list", set_adapters),
    ("/slots/{id}", "POST engine", slot_action),
    ("/completion", "POST", completion),
    ("/completions", "POST", completion),
    ("/v1/completions", "POST", text_completion),
    ("/chat/completions", "POST", chat_completion),
    ("/v1/chat/completions", "POST", chat_completion),
    ("/chat/completions/input_tokens", "POST", count_tokens),
    ("/v1/chat/completions/input_tokens", "POST", count_tokens),
    ("/embedding", "POST engine", embedding),
    ("/embeddings", "POST engine", embedding),
    ("/v1/embeddings", "POST engine", embeddings),
    ("/tokenize", "POST", tokenize),
    ("/detokenize", "POST", detokenize),
    ("/apply-template", "POST", apply_template),
)
