"""Loading a server of a model, which answers over HTTP: its settings, contexts and engine."""

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import read_text, remove_temp_files
from packtrain.common.mapped_file import pages_within
from packtrain.common.memory import parse_size
from packtrain.common.option_rules import check_rules
from packtrain.common.options import MEMORY, MODEL, SAMPLING, option
from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations.conversation_renderer import ConversationRenderer
from packtrain.data.tokenizer import Tokenizer
from packtrain.engine.backends import target
from packtrain.inference.embeddings import POOLINGS, model_pooling
from packtrain.inference.kv_cache import Context
from packtrain.inference.kv_cache.context_size import ContextPlan
from packtrain.inference.kv_cache.decode_plans import RunSizes
from packtrain.inference.sampling import Sampling
from packtrain.models.config import check_context
from packtrain.models.model_file import RERANK_HEAD, ModelFile, fingerprint
from packtrain.models.model_with_adapters import split_scale
from packtrain.planner.kernel_memory import model_kernel_modules
from packtrain.serving.engine_thread import CHUNK, SIMILAR, ServingEngine
from packtrain.serving.reasoning_text import AUTO as THOUGHTS
from packtrain.serving.reasoning_text import FORMATS
from packtrain.serving.server_state import AdapterFile, RequestLimits, Server
from packtrain.training.run_settings import CHAT_TEMPLATE
from packtrain.workflows import generation_settings
from packtrain.workflows.generation_settings import warm

CONTEXT = 8192  # most tokens, without --ctx
MAX_EMBEDDING_TOKENS = 2048  # most tokens of texts that are embedded at once
RENDERED = 40 << 20  # most bytes that the template takes for a request
REQUESTS_NBYTES = 128 << 20  # bytes that requests need while they are read and answered


@dataclass(frozen=True)
class ServeSettings(Sampling, generation_settings.DecodingOptions):
    """Settings of the server: llama-server's names and defaults, where it has them."""

    COMMON = "host port api_key alias lora ctx parallel n_predict temp memory ui chat_template"

    host: str = option(
        "127.0.0.1", "address to listen on, or several with commas; 0.0.0.0: all of this machine's"
    )
    port: int = option(8080, "port to listen on; 0: any that is free", min_value=0, max_value=65535)
    alias: str | None = option(
        None, "name of the model for clients, or several with commas (default: its file's)", flags="-a",
    )  # fmt: skip
    tags: str | None = option(None, "tags of the model for clients, with commas between them")
    api_key: tuple[str, ...] = option((), "requests need this key; repeatable", metavar="KEY")
    api_key_file: Path | None = option(None, "requests need a key of this file, one a line")
    ctx: int | None = MODEL(
        None, f"tokens that fit, of all slots together (default: the model's own, up to {CONTEXT:,})",
        flags="-c --ctx-size", min_value=1,
    )  # fmt: skip
    parallel: int = option(4, "slots: answers at once", flags="-np", min_value=1, max_value=63)
    kv_unified: bool = option(
        True, "slots share all of the context, instead of each having a part", flags="-kvu"
    )
    slot_prompt_similarity: float = option(
        SIMILAR, "a slot that knows this share of a prompt is taken for it", flags="-sps", min_value=0, max_value=1,
    )  # fmt: skip
    ubatch_size: int = option(
        CHUNK, "most tokens of a run: longer prompts are read in parts between others' tokens", flags="-ub",
        min_value=32, max_value=512,
    )  # fmt: skip
    context_shift: bool = option(
        False, "an answer that fills the context goes on: tokens in the middle of the text are forgotten",
    )  # fmt: skip
    n_predict: int = option(
        -1, "most tokens of an answer whose request says none; -1: no limit", flags="-n", min_value=-1
    )  # fmt: skip
    queue: int = option(256, "most requests that wait for a slot; others are refused", min_value=1)
    timeout: int = option(3600, "seconds after which an answer is ended", flags="-to", min_value=1)
    seed: int = SAMPLING(
        -1, "random seed; -1: a new one each time", flags="-s", min_value=-1, max_value=generation_settings.MAX_SEED,
    )  # fmt: skip
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE|TEXT")
    reasoning_format: str = option(
        THOUGHTS, "thoughts of models that think, in <think>: in reasoning_content, or none: as text", choices=FORMATS
    )  # fmt: skip
    reasoning: str = generation_settings.REASONING()
    swa_checkpoints: int = MODEL(
        4, "states of the window that are kept for each slot", flags="--ctx-checkpoints", min_value=0,
    )  # fmt: skip
    embeddings: bool = option(False, "answer /v1/embeddings, too", flags="--embedding")
    reranking: bool = option(
        False, "answer /v1/rerank, by a Qwen3 reranker", flags="--rerank",
        conflicts={"pooling": "as a reranker has its own pooling"},
    )  # fmt: skip
    pooling: str | None = option(
        None, "pooling of embeddings; default: the file's, else mean", choices=POOLINGS, requires="embeddings",
    )  # fmt: skip
    slots: bool = option(True, "answer /slots: what each slot does")
    metrics: bool = option(False, "answer /metrics, for Prometheus")
    verbose: bool = option(
        False, "answers of OpenAI's API have /completion's fields, too, with the prompt", flags="-v"
    )
    ui: bool = option(True, "show a page to compare models at /")
    slot_save_path: Path | None = option(None, "folder in which requests may save slots")
    memory: str | None = MEMORY(
        None, "memory limit, such as 2GiB; refused if it does not fit", metavar="SIZE"
    )

    def keys(self) -> list[str]:
        """Return the API keys of --api-key and --api-key-file; []: none is needed. Raises InputError for empty ones."""
        api_keys = [*self.api_key]
        if self.api_key_file is not None:
            lines = read_text(self.api_key_file, "--api-key-file").splitlines()
            api_keys += [line.strip() for line in lines if line.strip()]
            if not api_keys:
                fact = f"--api-key-file: {self.api_key_file} has no key; write one a line"
                raise InputError(fact)
        if "" in api_keys:
            raise InputError("--api-key is empty; give a key, or leave it out")
        return api_keys


def split_names(names: str | None) -> list[str]:
    """Split names with commas between them into a list without repetitions; [] for None."""
    unique_names = dict.fromkeys(name.strip() for name in (names or "").split(","))
    return [name for name in unique_names if name]


def load_server(settings: ServeSettings, events: Events) -> Server:
    """Load the model, reserve all planned memory, start the engine. Raises InputError, DoesNotFit, Interrupted."""
    settings.check_sampling()
    check_rules(settings)
    folder = settings.slot_save_path
    if folder is not None:
        if not folder.is_dir():
            raise InputError(f"--slot-save-path: {folder} is not a folder")
        remove_temp_files(folder)
    model = generation_settings.opened(
        settings, events.message, by_token=True, extra_tensors=(RERANK_HEAD,)
    )
    tokenizer = model.tokenizer()
    renderer, template_text, bos_text = load_renderer(settings, model, tokenizer, events)
    kernels.prepare((*kernels.GENERATION_KERNELS, *model_kernel_modules(model.config)))
    context, embedder = make_contexts(settings, model, events)
    warm(settings, model, events)
    engine = make_engine(settings, model, tokenizer, context)
    names = split_names(settings.alias) or [settings.model.name]
    adapters = [split_scale(adapter) for adapter in settings.lora]
    server = Server(
        model, tokenizer, renderer, template_text, bos_text, engine,
        name=names[0], aliases=tuple(names[1:]), sampling=settings.sampling, seed=settings.seed,
        limits=RequestLimits(max_answer_tokens=settings.n_predict, max_seconds=settings.timeout),
        model_hash=fingerprint(model), adapters=tuple(adapter_file(path) for path, _ in adapters),
        scales=tuple(scale for _, scale in adapters),
        embedder=embedder, slots_folder=folder, has_slots=settings.slots, has_page=settings.ui,
        has_metrics=settings.metrics, reasoning_format=settings.reasoning_format,
        thinks=settings.reasoning != "off", tags=tuple(split_names(settings.tags)), is_verbose=settings.verbose,
    )  # fmt: skip
    if settings.reranking:
        requests = import_module("packtrain.serving.embedding_requests")
        server.pooling, server.rerank_head = "last", requests.rerank_head(model)
    elif embedder is not None:
        server.pooling = settings.pooling or model_pooling(model)
    return server


def make_engine(
    settings: ServeSettings, model: ModelFile, tokenizer: Tokenizer, context: Context
) -> ServingEngine:
    """Create the drafters and the engine, whose thread starts. Raises InputError, DoesNotFit."""
    num_cells = context.cache.num_cells
    drafters = generation_settings.make_drafters(settings, model, num_cells, settings.parallel)
    return ServingEngine(
        context, tokenizer, max_waiting=settings.queue, chunk=settings.ubatch_size,
        min_similarity=settings.slot_prompt_similarity, use_context_shift=settings.context_shift,
        drafters=drafters, draft_max=settings.draft_max,
    )  # fmt: skip


def adapter_file(path: Path) -> AdapterFile:
    """Return the names and the hash by which clients tell adapters apart. (A base is known by a fingerprint: hashing
    its gigabytes at each start is too slow.)"""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    folder = path.absolute().parent
    return AdapterFile(path.name, (folder if folder.suffix == ".run" else path).stem, sha256)


def make_contexts(
    settings: ServeSettings, model: ModelFile, events: Events
) -> tuple[Context, Context | None]:
    """Create (context of answers, that of --embeddings and --reranking or None). Raises InputError, DoesNotFit."""
    context_length = settings.ctx or min(model.config.context_length, CONTEXT)
    check_context(model.config, context_length, events.message)
    generation_settings.check_cache(model, context_length, settings.cache_type)
    limit_nbytes = None if settings.memory is None else parse_size(settings.memory, "--memory")
    plan_options: Any = {"cache": settings.cache_type, "target": target(settings.device)}
    context_options: Any = plan_options | {"sequences": settings.parallel, "say": events.message}
    has_embedder = settings.embeddings or settings.reranking
    embedding_cells, embedder = min(context_length, MAX_EMBEDDING_TOKENS), None
    run_sizes = RunSizes.of(embedding_cells, 0)
    embedder_plan = ContextPlan(model, run_sizes, settings.parallel, hidden=True, **plan_options)

    def reserved_nbytes(num_cells: int) -> int:
        drafter_nbytes = generation_settings.drafter_nbytes(settings, num_cells, settings.parallel)
        num_cells = min(num_cells, embedding_cells) if has_embedder else 0
        embedder_nbytes = embedder_plan.nbytes(num_cells) if num_cells else 0
        return REQUESTS_NBYTES + drafter_nbytes + embedder_nbytes

    context = Context(
        model, cells=context_length, parts=not settings.kv_unified, swa_full=settings.swa_full,
        prompts=(settings.ubatch_size, min(settings.ubatch_size, 32)), checkpoints=settings.swa_checkpoints,
        memory=limit_nbytes, beside=reserved_nbytes, resident=settings.resident, has_hidden_states=True,
        rows=max(settings.parallel, settings.draft_max + 1) if settings.is_drafting else 0,
        **context_options,
    )  # fmt: skip
    if has_embedder:  # in the memory that is reserved above
        with pages_within(settings.resident, lambda: 0, shared=context.pages):
            embedder = Context(
                model, cells=embedding_cells, checkpoints=0, hidden=True, **context_options
            )
    for opened_context in (context, embedder):
        if opened_context is not None:  # loads the kernels
            opened_context.decode([0])
            opened_context.remove(0)
    return context, embedder


def load_renderer(
    settings: ServeSettings, model: ModelFile, tokenizer: Tokenizer, events: Events
) -> tuple[ConversationRenderer, str, str]:
    """Return (conversation renderer, template's source, text of BOS). Raises InputError."""
    template = generation_settings.choose_chat_template(settings.chat_template, model, events)
    bos, eos = (
        generation_settings.token_text(tokenizer, id) for id in (tokenizer.bos, tokenizer.eos)
    )
    eos_texts = [generation_settings.token_text(tokenizer, id) for id in tokenizer.eog_ids]
    chat_template = ChatTemplate(template, bos, eos, memory=RENDERED)
    return ConversationRenderer(chat_template, eos_texts), template, bos
