"""Settings that generate and chat share, and loading a model to generate with."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.common.errors import DoesNotFit, InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import read_text
from packtrain.common.memory import total_nbytes
from packtrain.common.option_rules import check_rules, refuse_changed
from packtrain.common.options import MODEL, SAMPLING, flag, option, positional
from packtrain.data.chat_template import choose_template, load_template, template_source
from packtrain.data.tokenizer import Tokenizer
from packtrain.dtypes import DTYPES, PRECISIONS, Dtype
from packtrain.engine.backends import DEVICES, target
from packtrain.engine.memory_plan import size_text
from packtrain.inference.generator import LOOP_TOKENS, Drafter, Generator, Reply, Speed
from packtrain.inference.grammar import Grammar
from packtrain.inference.kv_cache.context_size import ContextPlan
from packtrain.inference.kv_cache.decode_plans import CACHE_TYPES, CHECKPOINTS, RunSizes
from packtrain.inference.sampling import Sampling
from packtrain.inference.speculative import ModelDrafter, NgramDrafter
from packtrain.models import activation_rounding
from packtrain.models.activation_rounding import ACTIVATIONS_HELP, AUTO_HELP, F32, Q8
from packtrain.models.attention_choice import AUTO, FLASH_HELP, FLASH_MODES, with_flash
from packtrain.models.config import Config, check_context
from packtrain.models.model_file import ModelFile, check_vocabularies, open_model
from packtrain.models.model_with_adapters import adapted, read_scaled, with_activations
from packtrain.planner.budget import ReportFunction
from packtrain.planner.kernel_memory import model_kernel_modules
from packtrain.training.run_settings import DEVICE_HELP
from packtrain.training.training_job import check_precision

WARMUP_HELP = "read all experts of a mixture from the file before the first token"
CONTEXT = 4096  # most tokens, without --ctx
MAX_SEED = 2**63 - 1
CONSTRAINTS = dict.fromkeys(
    ("grammar", "grammar_file", "json_schema", "json_schema_file"),
    "--grammar, --grammar-file, --json-schema and --json-schema-file exclude each other",
)
# settings of samplers that are off by default, by the setting that turns each on
SAMPLER_PARTS = {
    "dynatemp_range": ("dynatemp_exp",), "xtc_probability": ("xtc_threshold",),
    "mirostat": ("mirostat_lr", "mirostat_ent"),
    "dry_multiplier": ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breaker"),
}  # fmt: skip
REASONING_HELP = "whether the chat template lets the model think: off, or on (auto) where it can"
REASONING = partial(option, AUTO, REASONING_HELP, choices=(AUTO, "on", "off"))
SWA_FULL_HELP = "layers with a sliding window keep all tokens in the cache, not only the window's"


@dataclass(frozen=True)
class ModelOptions:
    """The model of commands that run it, and how it is opened."""

    model: Path = positional("the model, a GGUF file")
    ctx: int | None = MODEL(
        None, "context length in tokens (default: as needed, up to the model's)", flags="-c", min_value=1,
    )  # fmt: skip
    lora: tuple[str, ...] = MODEL(
        (), "LoRA adapter, FILE or FILE:SCALE; repeatable", metavar="FILE[:SCALE]"
    )
    cache_type: str = MODEL("f16", "element type of the KV cache", choices=CACHE_TYPES)
    flash_attn: str = MODEL(AUTO, FLASH_HELP, flags="-fa", choices=FLASH_MODES)
    activations: str = MODEL(AUTO, f"{ACTIVATIONS_HELP}; {AUTO_HELP}", choices=(AUTO, F32, Q8))
    precision: str = MODEL("f32", activation_rounding.PRECISION_HELP, choices=PRECISIONS)
    device: str = MODEL("cpu", DEVICE_HELP, choices=tuple(DEVICES))


@dataclass(frozen=True)
class DecodingOptions(ModelOptions):
    """The cache of commands that write texts, and the tokens that they guess ahead."""

    swa_full: bool = MODEL(False, SWA_FULL_HELP)
    model_draft: Path | None = MODEL(
        None,
        "a small model with the same vocabulary, which guesses tokens that this one checks together: the text stays",
        flags="-md",
    )
    draft_lookup: bool = MODEL(
        False, "guess tokens from what followed earlier in the text; needs no other model",
        conflicts={"model_draft": "{flag} and --model-draft both guess tokens; use one of them"},
    )  # fmt: skip
    draft_max: int = MODEL(
        7, "most tokens guessed at once; up to 8 tokens of a run cost the least", min_value=1, max_value=32,
        requires={"is_drafting": "without --model-draft or --draft-lookup"},
    )  # fmt: skip
    draft_p_min: float = MODEL(
        0.75, "the draft model stops guessing below this probability", min_value=0, max_value=1,
        requires="model_draft",
    )  # fmt: skip
    warmup: bool = MODEL(True, WARMUP_HELP)
    resident: str | None = MODEL(
        None, "limit on private memory and pages of the model in memory, together: 3GiB or 50%; the model is then read"
        " from its file while it writes", metavar="SIZE",
        requires="device=cpu", conflicts={"model_draft": "a second model"},
    )  # fmt: skip

    @property
    def is_drafting(self) -> bool:
        """Whether a drafter guesses tokens."""
        return self.draft_lookup or self.model_draft is not None


@dataclass(frozen=True)
class GenerationSettings(Sampling, DecodingOptions):
    """Settings of the commands that generate text."""

    seed: int | None = SAMPLING(
        None, "random seed; -1: a new one each time", flags="-s", min_value=-1, max_value=MAX_SEED
    )
    stop: tuple[str, ...] = SAMPLING((), "stop before this text; repeatable")
    stop_loops: bool = SAMPLING(True, "end a text that repeats the same words without end")
    grammar: str | None = SAMPLING(
        None, "the text follows this grammar, in GBNF", conflicts=CONSTRAINTS
    )
    grammar_file: Path | None = SAMPLING(
        None, "the text follows the grammar in this file", conflicts=CONSTRAINTS
    )
    json_schema: str | None = SAMPLING(
        None, "the text is JSON of this schema; {}: any JSON", flags="-j", metavar="SCHEMA", conflicts=CONSTRAINTS,
    )  # fmt: skip
    json_schema_file: Path | None = SAMPLING(
        None, "the text is JSON of the schema in this file", flags="-jf", conflicts=CONSTRAINTS
    )

    @property
    def loop_tokens(self) -> int:
        return LOOP_TOKENS if self.stop_loops else 0

    def drawn_seed(self) -> int:
        """Return --seed, or if it is missing or -1 a random seed, another one at each call."""
        return secrets.randbits(32) if self.seed in (None, -1) else self.seed

    def check(self) -> None:
        """Raise InputError for settings that are out of range or exclude each other."""
        self.check_sampling()
        if "" in self.stop:
            raise InputError("--stop: the text is empty; it must have at least one character")
        check_rules(self)
        for switch, names in SAMPLER_PARTS.items():
            if not getattr(self, switch):
                refuse_changed(self, names, f"without {flag(switch)}")


def opened(
    settings: ModelOptions, report: ReportFunction, *, by_token: bool = False, extra_tensors: Sequence[str] = (),
) -> ModelFile:  # fmt: skip
    """Open the model with the requested adapters, precision and attention. Raises InputError.

    by_token  each token has its own scales of the adapters
    extra_tensors    tensors that the file may have beside the model's
    """
    model = open_model(settings.model, extra_tensors)
    has_advice = any(key.startswith("general.sampling.") for key in model.gguf.metadata)
    if has_advice and isinstance(settings, Sampling):
        report(f"{settings.model} has keys general.sampling, which are not read: only flags count")
    model = adapted(model, read_scaled(settings.lora, model.gguf), by_token=by_token)
    return configured(model, settings, report)


def configured(model: ModelFile, settings: Any, report: ReportFunction) -> ModelFile:
    """Return the model with precision, activations and attention as in a command's settings. Raises InputError."""
    check_precision(settings.precision, settings.device)
    may_round = settings.precision == F32 and settings.device == "cpu"
    is_exact = settings.activations == AUTO and not may_round
    model = with_activations(model, F32 if is_exact else settings.activations)
    config, device = replace(model.config, precision=settings.precision), target(settings.device)
    kv_dtype = None if settings.cache_type is None else cache_dtype(config, settings.cache_type)
    return replace(model, config=with_flash(config, settings.flash_attn, device, report, kv_dtype))


def choose_chat_template(name: str | None, model: ModelFile, events: Events) -> str:
    """Return the source of the chat template `name`, by default the model's; reports why if that is not used."""
    metadata = model.gguf.metadata
    template = choose_template(metadata, template_source(metadata), name and load_template(name))
    if template.reason:
        events.message(template.note)
    return template.source


def token_text(tokenizer: Tokenizer, id: int | None) -> str:
    """Return the text of token `id` as the vocabulary writes it; "" for None."""
    return "" if id is None else tokenizer.tokens[id].decode(errors="replace")


def load_grammar(settings: GenerationSettings, tokenizer: Tokenizer) -> Grammar | None:
    """Load the grammar that texts must follow; None without one. Raises InputError."""
    schema_text = settings.json_schema
    if settings.json_schema_file is not None:
        schema_text = read_text(settings.json_schema_file, "--json-schema-file")
    if schema_text is not None:
        return Grammar.from_schema(tokenizer, schema_text)
    grammar_text = settings.grammar
    if settings.grammar_file is not None:
        grammar_text = read_text(settings.grammar_file, "--grammar-file")
    return None if grammar_text is None else Grammar.from_gbnf(tokenizer, grammar_text)


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """Generated text and token ids, why it ended, the seed, speeds, and how many tokens were guessed: see `Reply`.

    score  score of a beam, whose ids include the end token; `others`: further answers or beams, in order
    """

    text: str
    ids: tuple[int, ...]
    ended: str
    seed: int
    reading: Speed
    writing: Speed
    drafted: int = 0
    accepted: int = 0
    score: float | None = None
    others: tuple["GeneratedText", ...] = ()

    def __str__(self) -> str:
        return self.text


def generate_reply(reply: Reply, seed: int, events: Events) -> GeneratedText:
    """Generate the reply, reporting each piece of text as it comes, and return the result."""
    text_pieces = []
    for piece in reply:
        text_pieces.append(piece)
        events.text(piece)
    ids = tuple(reply.ids)
    speeds = reply.reading, reply.writing
    return GeneratedText(
        "".join(text_pieces), ids, reply.end_reason, seed, *speeds, reply.drafted, reply.accepted
    )


def cells(settings: GenerationSettings, config: Config, num_tokens: int, events: Events) -> int:
    """Return the context length: --ctx, else `num_tokens`, at most the model's; warns and raises as check_context."""
    context_size = settings.ctx or max(min(config.context_length, num_tokens), 1)
    check_context(config, context_size, events.message)
    return context_size


def make_drafters(
    settings: DecodingOptions, model: ModelFile, num_cells: int, num_texts: int = 1
) -> list[Drafter]:
    """Create the drafters that guess tokens, one for each of `num_texts` texts, with contexts of `num_cells` tokens in
    all; none by default. Raises InputError, DoesNotFit."""
    if settings.draft_lookup:
        return [NgramDrafter() for _ in range(num_texts)]
    if settings.model_draft is None:
        return []
    small = open_model(settings.model_draft)
    check_vocabularies(model, small)
    shared = min(model.config.vocab_size, small.config.vocab_size)
    context = load_generator(settings, small, num_cells, 1, num_texts).context
    return [
        ModelDrafter(Generator(context, seq), settings.draft_p_min, shared)
        for seq in range(num_texts)
    ]


def drafter_nbytes(settings: DecodingOptions, num_cells: int, num_texts: int) -> int:
    """Return the private bytes of the draft model's context of `num_cells` tokens, for `num_texts` texts; 0 without."""
    if settings.model_draft is None:
        return 0
    sizes, device = RunSizes.of(num_cells, 1), target(settings.device)
    plan_options = settings.cache_type, settings.swa_full, False, 0, CHECKPOINTS, False, device
    return ContextPlan(open_model(settings.model_draft), sizes, num_texts, *plan_options).nbytes(
        num_cells
    )


def cache_dtype(config: Config, type: str) -> Dtype:
    """Return the KV cache's element type called `type`. Raises InputError if heads do not fit its blocks."""
    dtype = DTYPES[type]
    head_widths = (config.cached_heads(i)[1] for i in range(config.block_count))
    unaligned_width = next((width for width in head_widths if width % dtype.block), 0)
    if unaligned_width:
        fact = f"--cache-type: {dtype} packs {dtype.block} values, and heads have {unaligned_width}"
        raise InputError(f"{fact}; use f16 or f32")
    return dtype


def check_cache(model: ModelFile, num_cells: int, type: str) -> None:
    """Raise DoesNotFit for a cache of `num_cells` tokens beyond this machine, InputError for its type; load kernels."""
    c, available_nbytes, dtype = model.config, total_nbytes(), cache_dtype(model.config, type)
    cache_blocks = (i for i in range(c.block_count) if c.attends(i) and c.source_of(i) == i)
    each = (heads * dtype.row_nbytes(width) for heads, width in map(c.cached_heads, cache_blocks))
    cache_nbytes = len(c.cached_tensors) * num_cells * sum(each)
    if cache_nbytes > available_nbytes:
        raise DoesNotFit(
            f"--ctx: the KV cache of {num_cells:,} tokens needs {size_text(cache_nbytes)};"
            f" {size_text(available_nbytes)} are available"
        )
    kernels.prepare((*kernels.GENERATION_KERNELS, *model_kernel_modules(c)))


def load_generator(
    settings: DecodingOptions, model: ModelFile, num_cells: int, rows: int = 0, num_sequences: int = 1,
    longest: int = 0,
) -> Generator:  # fmt: skip
    """Create a generator with the model's weights, and load its kernels. Raises DoesNotFit.

    rows     most tokens whose logits a run gives; 0: a drafter's tokens + 1, or without one, one for each sequence
    longest  tokens of one sequence; 0: all cells
    """
    check_cache(model, num_cells, settings.cache_type)
    rows = rows or (settings.draft_max + 1 if settings.is_drafting else num_sequences)
    generator = Generator.from_model(
        model, num_cells, DTYPES[settings.cache_type], target(settings.device), rows, sequences=num_sequences,
        swa_full=settings.swa_full, longest=longest, resident=settings.resident,
    )  # fmt: skip
    generator.feed([0])  # loads the kernels, so that the prompt's time does not include it
    return generator


EXPERT_SUFFIX = "_exps.weight"  # ending of the names of experts' matrices
PAGE_NBYTES, PART_NBYTES = 4096, 64 << 20  # bytes; a stop takes effect between parts


def warm(settings: DecodingOptions, model: ModelFile, events: Events) -> None:
    """With --warmup, read all experts' weights from the file, if they may stay and fit into memory: then it does not
    matter which ones a token chooses. Raises Interrupted if it is stopped."""
    if not settings.warmup or settings.resident is not None:
        return
    expert_names = [name for name in model.gguf.entries if name.endswith(EXPERT_SUFFIX)]
    expert_arrays = [model.gguf.array(name) for name in expert_names]
    expert_nbytes, available_nbytes = sum(array.nbytes for array in expert_arrays), total_nbytes()
    if expert_nbytes > available_nbytes:
        events.message(
            f"the experts have {size_text(expert_nbytes)} and the memory"
            f" {size_text(available_nbytes)}; they are read as they are needed"
        )
        return
    with (
        events.counting("reading experts", "matrix") as report_progress,
        events.stopping() as stopped,
    ):
        for num_done, array in enumerate(expert_arrays, 1):
            flat_bytes = array.reshape(-1).view("u1")
            for part_start in range(0, flat_bytes.size, PART_NBYTES):
                if stopped():
                    raise Interrupted("stopped while the experts were read")
                flat_bytes[part_start : part_start + PART_NBYTES : PAGE_NBYTES].max()
            report_progress(num_done, len(expert_arrays))
