"""The handlers of all routes. Handlers of POST run in a thread, and get the body."""

import math
import re
import time
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from packtrain.common.errors import InputError
from packtrain.models.quant_recipe import MIXES
from packtrain.serving import anthropic_messages, openai_responses, request_parsing
from packtrain.serving.embedding_requests import llama_embedding, openai_embeddings, rerank
from packtrain.serving.event_stream import make_response
from packtrain.serving.fill_in_middle import fill_prompt
from packtrain.serving.generation_jobs import GenerationJob
from packtrain.serving.json_fields import JsonBody, adapters_of, parse_prompt
from packtrain.serving.llama_completion import LlamaCompletionFormat, settings_of
from packtrain.serving.openai_completions import ChatCompletionFormat, TextCompletionFormat
from packtrain.serving.request_parsing import OpenAIRequest
from packtrain.serving.response_shapes import FINGERPRINT, HttpRefusal, missing_flag
from packtrain.serving.server_state import Server
from packtrain.serving.slots import SlotAnswer
from packtrain.serving.tool_calls import RequestTools

PREFIX = "llamacpp:"


VOCAB_TYPES = {"llama": 1, "gpt2": 2}  # llama_vocab_type
MAX_PIECES = 1 << 15
OLLAMA = {
    "modified_at": "", "size": "", "digest": "", "description": "", "tags": [""], "parameters": "",
    "details": {
        "parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "",
        "quantization_level": "",
    },
}  # fmt: skip
FILE_NAME = re.compile(r"[\w-][\w.-]{0,127}", re.ASCII)  # temporary files begin with a dot


# ---- answers


def completion(server: Server, body: JsonBody, request: Request) -> Response:
    jobs = request_parsing.parse_llama_completion(server, body)
    response_format = LlamaCompletionFormat(body, jobs, server.name, server.tokenizer)
    return make_response(server, jobs, response_format, body.get_flag("stream"))


def infill(server: Server, body: JsonBody, request: Request) -> Response:
    """Answer /infill: the text between a prefix and a suffix, in /completion's shape."""
    return completion(server, body.replaced((), {"prompt": fill_prompt(server, body)}), request)


def text_completion(server: Server, body: JsonBody, request: Request) -> Response:
    text_request = request_parsing.parse_text_completion(server, body)
    return openai_response(server, body, text_request, TextCompletionFormat)


def chat_completion(server: Server, body: JsonBody, request: Request) -> Response:
    chat_request = request_parsing.parse_chat_completion(server, body)
    return openai_response(server, body, chat_request, ChatCompletionFormat)


def messages(server: Server, body: JsonBody, request: Request) -> Response:
    """Answer /v1/messages, a chat in Anthropic's shape."""
    chat_request = request_parsing.parse_chat_completion(server, anthropic_messages.chat_body(body))
    names = server.name, server.tokenizer
    has_budget = JsonBody(body.get_object("thinking")).has("budget_tokens")
    warnings = ["thinking.budget_tokens: thoughts are not cut here"] if has_budget else []
    response_format = anthropic_messages.MessagesFormat(*names, chat_request, warnings)
    return make_response(server, chat_request.jobs, response_format, body.get_flag("stream"))


def count_message_tokens(server: Server, body: JsonBody, request: Request) -> Any:
    prompt = requested_prompt(server, anthropic_messages.chat_body(body))
    return {"input_tokens": len(server.encode_prompt(prompt))}


def responses(server: Server, body: JsonBody, request: Request) -> Response:
    """Answer /v1/responses, a chat in the shape of OpenAI's Responses."""
    chat = openai_responses.chat_body(body, server.stored_responses)
    chat_request = request_parsing.parse_chat_completion(server, chat)
    names = server.name, server.tokenizer
    response_format = openai_responses.ResponsesFormat(
        *names, chat_request, body, chat.get("messages"), server.stored_responses
    )
    return make_response(server, chat_request.jobs, response_format, body.get_flag("stream"))


def openai_response(
    server: Server, body: JsonBody, openai_request: OpenAIRequest, format_class: type[TextCompletionFormat]
) -> Response:  # fmt: skip
    """Return an answer in OpenAI's shape, with the fields of /completion if the request wants them, too."""
    jobs, names, verbose = openai_request.jobs, (server.name, server.tokenizer), None
    if body.get_flag("verbose", server.is_verbose):
        verbose = LlamaCompletionFormat(body, jobs, *names)
    response_format = format_class(*names, openai_request, verbose)
    return make_response(server, jobs, response_format, body.get_flag("stream"))


# ---- texts and tokens


def tokenize(server: Server, body: JsonBody, request: Request) -> Any:
    ids = parse_content_ids(server, body)
    if not body.get_flag("with_pieces"):
        return {"tokens": ids}
    if len(ids) > MAX_PIECES:
        raise InputError(f"content has {len(ids):,} tokens; at most {MAX_PIECES:,} with pieces")
    return {"tokens": [{"id": id, "piece": token_piece(server, id)} for id in ids]}


def parse_content_ids(server: Server, body: JsonBody) -> list[int]:
    content, has_special_tokens = body.get("content"), body.get_flag("parse_special", True)
    add_bos = None if body.get_flag("add_special") else False
    if content is None:
        return []
    if isinstance(content, str):
        return server.tokenizer.encode(content, bos=add_bos, eos=False, special=has_special_tokens)
    return parse_prompt(content, server.tokenizer, "content", add_bos, has_special_tokens)


def token_piece(server: Server, id: int) -> str | list[int]:
    """Return a token's text, or its bytes where they are no text."""
    piece = server.tokenizer.piece(id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]


def detokenize(server: Server, body: JsonBody, request: Request) -> Any:
    token_ids = body.get_list("tokens", 1 << 22)
    if not all(isinstance(id, int) and 0 <= id < server.tokenizer.vocab_size for id in token_ids):
        raise InputError(f"tokens must be ids below {server.tokenizer.vocab_size:,}")
    return {"content": server.tokenizer.decode(token_ids)}


def apply_template(server: Server, body: JsonBody, request: Request) -> Any:
    return {"prompt": requested_prompt(server, body)}


def count_tokens(server: Server, body: JsonBody, request: Request) -> Any:
    num_tokens = len(server.encode_prompt(requested_prompt(server, body)))
    return {"input_tokens": num_tokens, "object": "response.input_tokens"}


def count_response_tokens(server: Server, body: JsonBody, request: Request) -> Any:
    return count_tokens(server, openai_responses.chat_body(body, server.stored_responses), request)


def requested_prompt(server: Server, body: JsonBody) -> str:
    conversation = request_parsing.parse_conversation(body)
    tools = RequestTools.from_request(body, conversation, server.style)
    return request_parsing.prompt_text(server, body, conversation, tools)


# ---- the server


def get_health(server: Server, request: Request) -> Any:
    return {"status": "ok"}


def list_models(server: Server, request: Request) -> Any:
    ollama_model = {
        "name": server.name, "model": server.name, "type": "model", "capabilities": ["completion"],
    }  # fmt: skip
    return {"object": "list", "models": [OLLAMA | ollama_model], "data": [describe_model(server)]}


def get_model(server: Server, request: Request) -> Any:
    model_name = request.path_params["name"]
    if model_name not in (server.name, *server.aliases):
        raise HttpRefusal(404, f"there is no model {model_name!r}; there is {server.name!r}")
    return describe_model(server)


def describe_model(server: Server) -> dict[str, Any]:
    """Return the JSON that describes the model in lists of models."""
    config, gguf = server.model.config, server.model.gguf
    model_meta = {
        "vocab_type": VOCAB_TYPES.get(str(gguf.metadata.get("tokenizer.ggml.model")), 0), "n_vocab": config.vocab_size,
        "n_ctx": server.engine.max_seq_tokens, "n_ctx_train": config.context_length, "n_embd": config.embedding_length,
        "n_params": sum(math.prod(tensor_entry.shape) for tensor_entry in gguf.entries.values()),
        "size": sum(tensor_entry.nbytes for tensor_entry in gguf.entries.values()), "ftype": weight_type(server),
    }  # fmt: skip
    return {
        "id": server.name, "object": "model", "created": int(server.start_time), "owned_by": "packtrain",
        "aliases": [server.name, *server.aliases], "tags": [*server.tags], "meta": model_meta,
    }  # fmt: skip


def weight_type(server: Server) -> str:
    """Return the type that the file names, such as Q4_K_M, else the element type of most of its weights."""
    gguf, sizes = server.model.gguf, Counter[str]()
    for tensor_entry in gguf.entries.values():
        sizes[str(tensor_entry.dtype).upper()] += math.prod(tensor_entry.shape)
    file_type = gguf.metadata.get("general.file_type")
    type_names = (name for name, mix in MIXES.items() if mix.file_type == file_type)
    return next(type_names, max(sizes, key=sizes.__getitem__))


def get_props(server: Server, request: Request) -> Any:
    token_bytes = server.tokenizer.piece
    bos, eos = server.tokenizer.bos, server.tokenizer.eos
    params = settings_of(GenerationJob(prompt=(0,), sampling=server.sampling, seed=server.seed))
    return {
        "default_generation_settings": {"params": params, "n_ctx": server.engine.max_seq_tokens},
        "total_slots": len(server.engine.slots), "model_alias": server.name, "model_path": server.model.gguf.path.name,
        "model_hash": server.model_hash, "model_ftype": weight_type(server),
        "modalities": {"vision": False, "video": False, "audio": False}, "endpoint_slots": server.has_slots,
        "endpoint_props": False, "endpoint_metrics": server.has_metrics, "ui": server.has_page, "is_sleeping": False,
        "chat_template": server.template_source,
        "chat_template_caps": {
            "supports_system_role": server.renderer.takes_system, "supports_tools": server.renderer.takes_tools,
            "supports_tool_calls": server.renderer.takes_calls, "supports_string_content": True,
        },
        "bos_token": "" if bos is None else token_bytes(bos).decode(errors="replace"),
        "eos_token": "" if eos is None else token_bytes(eos).decode(errors="replace"), "build_info": FINGERPRINT,
    }  # fmt: skip


def get_slots(server: Server, request: Request) -> Any:
    if not server.has_slots:
        raise missing_flag("slots endpoint", "--slots")
    server_slots = server.engine.slots
    if "fail_on_no_slot" in request.query_params and all(slot.answer for slot in server_slots):
        raise HttpRefusal(503, "no slot available")
    slot_entries = []
    for slot in server_slots:
        slot_answer = slot.answer  # another thread may end the answer
        slot_entry = {
            "id": slot.index, "n_ctx": server.engine.max_seq_tokens, "speculative": slot.drafter is not None,
            "is_processing": slot_answer is not None,
        }  # fmt: skip
        slot_entries.append(slot_entry | (slot_activity(slot_answer) if slot_answer else {}))
    return slot_entries


def slot_activity(slot_answer: SlotAnswer) -> dict[str, Any]:
    """Return the fields of /slots for a busy slot: counts and settings, but no text."""
    job, num_written = slot_answer.job, len(slot_answer.output_ids)
    left = -1 if job.max_tokens < 0 else job.max_tokens - num_written
    num_prompt_tokens = len(job.prompt)
    num_read = num_prompt_tokens if num_written else num_prompt_tokens - len(slot_answer.left)
    return {
        "n_prompt_tokens": num_prompt_tokens, "n_prompt_tokens_processed": num_read - slot_answer.num_cached,
        "n_prompt_tokens_cache": slot_answer.num_cached, "params": settings_of(job),
        "next_token": [{"has_next_token": True, "n_remain": left, "n_decoded": num_written}],
    }  # fmt: skip


def get_metrics(server: Server, request: Request) -> Response:
    if not server.has_metrics:
        raise missing_flag("metrics endpoint", "--metrics")
    headers = {"Process-Start-Time-Unix": str(int(server.start_time))}
    t = server.engine.totals
    num_busy_slots = sum(slot.answer is not None for slot in server.engine.slots)
    metric_rows = (
        ("prompt_tokens_total", "counter", "tokens of prompts that were read", t.read),
        ("prompt_tokens_cached_total", "counter", "tokens of prompts that were known", t.cached),
        ("prompt_seconds_total", "counter", "seconds of reading prompts", t.reading),
        ("tokens_predicted_total", "counter", "tokens that were written", t.output_tokens),
        ("tokens_predicted_seconds_total", "counter", "seconds of writing", t.output_seconds),
        ("spec_decode_num_drafts_total", "counter", "times that tokens were guessed", t.drafts),
        ("spec_decode_num_draft_tokens_total", "counter", "tokens that were guessed", t.drafted),
        ("spec_decode_num_accepted_tokens_total", "counter", "guessed tokens that came", t.accepted),
        ("n_decode_total", "counter", "runs of the model", t.runs),
        ("n_tokens_max", "counter", "tokens of the longest text", t.max_text_tokens),
        ("n_busy_slots_per_decode", "gauge", "busy slots of a run, mean", t.busy / (t.runs or 1)),
        ("prompt_tokens_seconds", "gauge", "tokens read a second, mean", t.read / (t.reading or 1)),
        ("predicted_tokens_seconds", "gauge", "tokens written a second, mean",
         t.decode_steps / (t.output_seconds or 1)),
        ("requests_processing", "gauge", "requests in slots", num_busy_slots),
        ("requests_deferred", "gauge", "requests that wait for a slot", server.engine.num_waiting),
    )  # fmt: skip
    text = "".join(
        f"# HELP {PREFIX}{name} {about}\n# TYPE {PREFIX}{name} {metric_type}\n{PREFIX}{name} {value:.10g}\n"
        for name, metric_type, about, value in metric_rows
    )
    return PlainTextResponse(text, headers=headers, media_type="text/plain; version=0.0.4")


# ---- adapters, and slots as files


def get_adapters(server: Server, request: Request) -> Any:
    adapter_scales = zip(server.adapters, server.scales, strict=True)
    return [
        {"id": id, "path": file.name, "scale": scale, "run": file.run_name, "sha256": file.sha256}
        for id, (file, scale) in enumerate(adapter_scales)
    ]


def set_adapters(server: Server, adapter_entries: Any, request: Request) -> Any:
    server.scales = adapters_of(adapter_entries, server.scales)
    return {"success": True}


def slot_action(server: Server, body: JsonBody, request: Request) -> Any:
    """Save, restore or erase a slot; returns counts of tokens and bytes. Raises InputError, HttpRefusal, ServerBusy."""
    try:
        slot_index = int(request.path_params["id"])
    except ValueError:
        slot_index = -1
    if not 0 <= slot_index < len(server.engine.slots):
        raise InputError(f"there is no such slot; there are {len(server.engine.slots)}, from 0 on")
    action = request.query_params.get("action")
    if action == "erase":
        return {"id_slot": slot_index, "n_erased": server.erase_slot(slot_index)}
    if action not in ("save", "restore"):
        raise InputError("action must be save, restore or erase")
    if server.slots_folder is None:
        raise missing_flag("slots action", "--slot-save-path")
    file_name = body.text("filename")
    if not FILE_NAME.fullmatch(file_name):
        fact = "filename must be a name of letters, digits, '.', '_' and '-'"
        raise InputError(f"{fact}, without a folder or a '.' at its beginning")
    file_path, start_time = server.slots_folder / file_name, time.perf_counter()
    if file_path.is_symlink() or (file_path.exists() and not file_path.is_file()):
        raise InputError(f"{file_name} is no saved slot; choose another filename")
    num_tokens = (server.save_slot if action == "save" else server.restore)(slot_index, file_path)
    verb, nbytes_verb = ("saved", "written") if action == "save" else ("restored", "read")
    return {
        "id_slot": slot_index, "filename": file_name, f"n_{verb}": num_tokens,
        f"n_{nbytes_verb}": file_path.stat().st_size,
        "timings": {f"{action}_ms": 1e3 * (time.perf_counter() - start_time)},
    }  # fmt: skip


ROUTES_WITH_V1 = (  # also below /v1
    ("/health", "GET", get_health), ("/models", "GET", list_models), ("/chat/completions", "POST", chat_completion),
    ("/responses", "POST", responses), ("/chat/completions/input_tokens", "POST", count_tokens),
    ("/responses/input_tokens", "POST", count_response_tokens), ("/rerank", "POST engine", rerank),
    ("/reranking", "POST engine", rerank),
)  # fmt: skip
ROUTES = (
    *((v1 + path, method, handler) for path, method, handler in ROUTES_WITH_V1 for v1 in ("", "/v1")),
    ("/v1/models/{name:path}", "GET", get_model), ("/props", "GET", get_props), ("/slots", "GET", get_slots),
    ("/metrics", "GET", get_metrics), ("/lora-adapters", "GET", get_adapters), ("/infill", "POST", infill),
    ("/lora-adapters", "POST list", set_adapters), ("/slots/{id}", "POST engine", slot_action),
    ("/completion", "POST", completion), ("/completions", "POST", completion),
    ("/v1/completions", "POST", text_completion), ("/v1/messages", "POST", messages),
    ("/v1/messages/count_tokens", "POST", count_message_tokens), ("/embedding", "POST engine", llama_embedding),
    ("/embeddings", "POST engine", llama_embedding), ("/v1/embeddings", "POST engine", openai_embeddings),
    ("/tokenize", "POST", tokenize), ("/detokenize", "POST", detokenize), ("/apply-template", "POST", apply_template),
)  # fmt: skip
