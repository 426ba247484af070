"""Continue a prompt."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import read_text
from packtrain.common.options import option
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.beam_search import Beams, Search
from packtrain.inference.generator import Limits, Reply
from packtrain.inference.grammar import Grammar
from packtrain.inference.kv_cache import Context
from packtrain.inference.parallel_answers import Answers
from packtrain.inference.sampling import Sampling
from packtrain.models.config import Config
from packtrain.models.kv_cell_table import SEQUENCES
from packtrain.training.ineffective_settings import Rule, check_idle
from packtrain.workflows import generation_settings
from packtrain.workflows.generation_settings import (
    CONTEXT,
    MOST_SEED,
    Generated,
    Speaking,
    cells,
    drafter,
    opened,
)
from packtrain.workflows.warmup import warm

SAMPLED = " ".join(field.name for field in fields(Sampling) if field.name != "logit_bias")
IDLE: tuple[Rule, ...] = (
    (
        f"{SAMPLED} seed grammar grammar_file json_schema json_schema_file draft_lookup model_draft",
        lambda s: s.num_beams > 0,
        "with --num-beams, which searches for the likeliest text",
    ),
    ("length_penalty", lambda s: not s.num_beams, "without --num-beams"),
)


@dataclass(frozen=True)
class Generate(Speaking):
    """Generate text after a prompt."""

    COMMON = "prompt file n_predict temp top_k top_p seed stop json_schema lora ctx parallel"

    prompt: str | None = option(None, "text to continue", flags="-p")
    file: Path | None = option(None, "read the prompt from this file", flags="-f")
    n_predict: int = option(
        128,
        "most tokens to generate; -1: until an end token or a full context",
        flags="-n",
        least=-1,
    )
    parallel: int = option(
        1, "answers to write at once; the prompt is read once", flags="-np", least=1, most=SEQUENCES
    )
    num_beams: int = option(
        0,
        "search for the likeliest text, following this many at once; -np prints the best of them; 0: sample",
        flags="--beams",
        least=0,
        most=SEQUENCES,
    )
    length_penalty: float = option(
        1.0,
        "beams: the sum of log-probabilities is divided by the length to this power; 0: short texts are favoured",
        least=-10,
        most=10,
    )
    display_prompt: bool = option(True, "print the prompt before the text")


def generate(settings: Generate, events: Events) -> Generated:
    """Continue the prompt. Raises InputError, DoesNotFit."""
    prompt = _prompt(settings)
    settings.check()
    _check_beams(settings)
    model = opened(settings, events.message)
    tokenizer = model.tokenizer()
    grammar = generation_settings.grammar_of(settings, tokenizer)
    ids = tokenizer.encode(prompt, eos=False)
    if settings.warmup:
        warm(model, events)
    sequences = max(settings.parallel, settings.num_beams)
    size, total_cells = _sizes(settings, len(ids), sequences, model.config, events)
    generator = generation_settings.load_generator(
        settings, model, total_cells, sequences=sequences, longest=size
    )
    seed = settings.drawn_seed()
    if settings.num_beams:
        return searched(settings, generator.context, tokenizer, ids, prompt, events)
    if settings.parallel > 1 and (settings.draft_lookup or settings.model_draft):
        raise InputError(
            "--parallel writes tokens of all answers together; it takes no --model-draft"
        )
    if settings.parallel > 1:
        return several(settings, generator.context, tokenizer, ids, seed, grammar, size, events)
    with events.stopping() as stopped:
        limits = Limits(settings.n_predict, settings.stop, stopped, settings.loop_tokens)
        options = drafter(settings, model, total_cells), settings.draft_max, grammar
        reply = Reply(generator, tokenizer, ids, settings.sampling, seed, limits, *options)
        if settings.display_prompt:
            events.text(prompt)
        return generation_settings.written(reply, seed, events)


def _sizes(
    settings: Generate, prompt: int, sequences: int, config: Config, events: Events
) -> tuple[int, int]:
    """The most tokens of one text, and of all together, which share the prompt."""
    count = settings.n_predict
    num_tokens = CONTEXT if count < 0 else prompt + count
    size = cells(settings, config, max(num_tokens, prompt + 1), events)
    if settings.ctx is not None or count < 0:
        return size, size
    total_size = size + (sequences - 1) * max(size - prompt, 0)
    return size, max(
        size, min(total_size, config.context_length)
    ) if settings.num_beams else total_size


def several(
    settings: Generate,
    context: Context,
    tokenizer: Tokenizer,
    ids: list[int],
    seed: int,
    grammar: Grammar | None,
    size: int,
    events: Events,
) -> Generated:
    """--parallel answers, each with the seed after that of the one before."""
    seeds = [(seed + n) % (MOST_SEED + 1) for n in range(settings.parallel)]
    current = -1
    with events.stopping() as stopped:
        limits = Limits(settings.n_predict, settings.stop, stopped, settings.loop_tokens)
        options = settings.sampling, seeds, limits, grammar, size
        answers = Answers(context, tokenizer, ids, *options)
        for number, piece in answers:
            if number > current:
                current = number
                events.text(
                    f"{chr(10) * 2 * (number > 0)}--- {number + 1}, seed {seeds[number]} ---\n"
                )
            events.text(piece)
    speeds = answers.reading, answers.writing
    first, *other_answers = (
        Generated(answer.text, tuple(answer.ids), answer.ended, answer.seed, *speeds)
        for answer in answers.every
    )
    return replace(first, others=tuple(other_answers))


def _check_beams(settings: Generate) -> None:
    check_idle(settings, IDLE)
    if settings.num_beams and settings.parallel > settings.num_beams:
        raise InputError(
            f"--parallel is {settings.parallel}, and --num-beams {settings.num_beams} follows fewer texts"
        )


def searched(
    settings: Generate,
    context: Context,
    tokenizer: Tokenizer,
    ids: list[int],
    prompt: str,
    events: Events,
) -> Generated:
    """The --parallel best texts of a search."""
    search = Search(settings.num_beams, settings.parallel, settings.length_penalty, settings.biases)
    with events.stopping() as stopped:
        limits = Limits(settings.n_predict, settings.stop, stopped)
        beams = Beams(context, tokenizer, ids, search, limits)
        best_beams = beams.run()
    results = list[Generated]()
    for number, beam in enumerate(best_beams):
        text, score = beams.text(beam), beam.score(search.penalty)
        speeds = beams.reading, beams.writing
        results.append(Generated(text, beam.ids, beam.ended, 0, *speeds, score=score))
        if settings.parallel > 1:
            begin = "\n\n" * (number > 0)
            events.text(f"{begin}--- {number + 1}, score {score:.4f} ---\n")
        elif settings.display_prompt:
            events.text(prompt)
        events.text(text)
    return replace(results[0], others=tuple(results[1:]))


def _prompt(settings: Generate) -> str:
    if settings.file is None:
        prompt = settings.prompt or ""
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError("--prompt: the text is not UTF-8")
        return prompt
    if settings.prompt is not None:
        raise InputError("--prompt and --file are both given; leave one of them out")
    return read_text(settings.file, "--file")
