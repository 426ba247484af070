"""Continue a prompt: with one text, with several that have seeds of their own, or with the likeliest ones."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import read_text
from packtrain.common.option_rules import refuse_changed
from packtrain.common.options import option
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.beam_search import BeamSearch, BeamSearchConfig
from packtrain.inference.generator import GenerationLimits, Reply
from packtrain.inference.grammar import Grammar
from packtrain.inference.kv_cache import Context
from packtrain.inference.kv_cache.kv_cells import SEQUENCES
from packtrain.inference.parallel_answers import ParallelAnswers
from packtrain.inference.sampling import Sampling
from packtrain.models.config import Config
from packtrain.workflows import generation_settings
from packtrain.workflows.generation_settings import CONSTRAINTS, GeneratedText, GenerationSettings

UNDRAFTED = "--parallel writes tokens of all answers together; it takes no --model-draft"
# settings without effect on beams, which are not sampled
SAMPLING_NAMES = [f.name for f in fields(Sampling) if f.name != "logit_bias"]


@dataclass(frozen=True)
class GenerateSettings(GenerationSettings):
    """Generate text after a prompt."""

    COMMON = "prompt file n_predict temp top_k top_p seed stop json_schema lora ctx parallel"

    prompt: str | None = option(
        None, "text to continue", flags="-p",
        conflicts={"file": "--prompt and --file are both given; leave one of them out"},
    )  # fmt: skip
    file: Path | None = option(None, "read the prompt from this file", flags="-f")
    n_predict: int = option(
        128, "most tokens to generate; -1: until an end token or a full context", flags="-n", min_value=-1,
    )  # fmt: skip
    parallel: int = option(
        1, "answers to write at once; the prompt is read once", flags="-np", min_value=1, max_value=SEQUENCES,
        conflicts=dict.fromkeys(("draft_lookup", "model_draft"), UNDRAFTED),
    )  # fmt: skip
    num_beams: int = option(
        0, "search for the likeliest text, following this many at once; -np prints the best of them; 0: sample",
        flags="--beams", min_value=0, max_value=SEQUENCES,
    )  # fmt: skip
    length_penalty: float = option(
        1.0, "beams: the sum of log-probabilities is divided by the length to this power; 0: short texts are favoured",
        min_value=-10, max_value=10, requires="num_beams",
    )  # fmt: skip
    display_prompt: bool = option(True, "print the prompt before the text")


def generate(settings: GenerateSettings, events: Events) -> GeneratedText:
    """Continue the prompt, report text as it comes, return all of it. Raises InputError, DoesNotFit, Interrupted."""
    settings.check()
    if settings.num_beams:
        reason = "with --num-beams, which searches for the likeliest text"
        names = *SAMPLING_NAMES, "seed", *CONSTRAINTS, "draft_lookup", "model_draft"
        refuse_changed(settings, names, reason)
    if settings.num_beams and settings.parallel > settings.num_beams:
        fact = f"--parallel is {settings.parallel}"
        raise InputError(f"{fact}, and --num-beams {settings.num_beams} follows fewer texts")
    prompt = _read_prompt(settings)
    model = generation_settings.opened(settings, events.message)
    tokenizer = model.tokenizer()
    grammar = generation_settings.load_grammar(settings, tokenizer)
    ids = tokenizer.encode(prompt, eos=False)
    generation_settings.warm(settings, model, events)
    num_sequences = max(settings.parallel, settings.num_beams)
    size, total_cells = _context_sizes(settings, len(ids), num_sequences, model.config, events)
    generator = generation_settings.load_generator(
        settings, model, total_cells, num_sequences=num_sequences, longest=size
    )
    seed = settings.drawn_seed()
    several_texts = SeveralTexts(settings, generator.context, tokenizer, ids, events)
    if settings.num_beams:
        return several_texts.search(prompt)
    if settings.parallel > 1:
        return several_texts.sample(grammar, seed, size)
    with events.stopping() as stopped:
        limits = GenerationLimits(settings.n_predict, settings.stop, stopped, settings.loop_tokens)
        drafter = next(iter(generation_settings.make_drafters(settings, model, total_cells)), None)
        reply_options = drafter, settings.draft_max, grammar
        reply = Reply(generator, tokenizer, ids, settings.sampling, seed, limits, *reply_options)
        if settings.display_prompt:
            events.text(prompt)
        return generation_settings.generate_reply(reply, seed, events)


def _context_sizes(
    settings: GenerateSettings, prompt: int, num_sequences: int, config: Config, events: Events
) -> tuple[int, int]:
    """Return (most tokens of one text, most of all texts together, which share a prompt of `prompt` tokens)."""
    max_new_tokens = settings.n_predict
    num_tokens = generation_settings.CONTEXT if max_new_tokens < 0 else prompt + max_new_tokens
    max_seq_tokens = generation_settings.cells(
        settings, config, max(num_tokens, prompt + 1), events
    )
    if settings.ctx is not None or max_new_tokens < 0:
        return max_seq_tokens, max_seq_tokens
    total_size = max_seq_tokens + (num_sequences - 1) * max(max_seq_tokens - prompt, 0)
    return max_seq_tokens, max(
        max_seq_tokens, min(total_size, config.context_length)
    ) if settings.num_beams else total_size


@dataclass(frozen=True, slots=True)
class SeveralTexts:
    """Several texts after one prompt: answers with seeds of their own, or the likeliest ones."""

    settings: GenerateSettings
    context: Context
    tokenizer: Tokenizer
    ids: list[int]  # of the prompt
    events: Events

    def sample(self, grammar: Grammar | None, seed: int, size: int) -> GeneratedText:
        """Report and return --parallel answers by seeds `seed`, `seed` + 1, …; `size`: most tokens with the prompt."""
        s = self.settings
        seeds = [(seed + n) % (generation_settings.MAX_SEED + 1) for n in range(s.parallel)]
        shown_index = -1
        with self.events.stopping() as stopped:
            limits = GenerationLimits(s.n_predict, s.stop, stopped, s.loop_tokens)
            answer_options = s.sampling, seeds, limits, grammar, size
            answers = ParallelAnswers(self.context, self.tokenizer, self.ids, *answer_options)
            for number, piece in answers:
                if number > shown_index:
                    shown_index = number
                    self._print_heading(number, f"seed {seeds[number]}")
                self.events.text(piece)
        speeds = answers.reading, answers.writing
        first_answer, *other_answers = (
            GeneratedText(answer.text, tuple(answer.ids), answer.end_reason, answer.seed, *speeds)
            for answer in answers.answers
        )
        return replace(first_answer, others=tuple(other_answers))

    def search(self, prompt: str) -> GeneratedText:
        """Search for the likeliest texts after `prompt`, report --parallel; return the best, the rest in `others`."""
        s = self.settings
        search_config = BeamSearchConfig(s.num_beams, s.parallel, s.length_penalty, s.biases)
        with self.events.stopping() as stopped:
            limits = GenerationLimits(s.n_predict, s.stop, stopped)
            beams = BeamSearch(self.context, self.tokenizer, self.ids, search_config, limits)
            best_beams = beams.run()
        results, speeds = list[GeneratedText](), (beams.reading, beams.writing)
        for number, beam in enumerate(best_beams):
            text, score = beams.beam_text(beam), beam.score(search_config.penalty)
            results.append(GeneratedText(text, beam.ids, beam.end_reason, 0, *speeds, score=score))
            if s.parallel > 1:
                self._print_heading(number, f"score {score:.4f}")
            elif s.display_prompt:
                self.events.text(prompt)
            self.events.text(text)
        return replace(results[0], others=tuple(results[1:]))

    def _print_heading(self, number: int, label: str) -> None:
        blank_lines = "\n\n" * (number > 0)
        self.events.text(f"{blank_lines}--- {number + 1}, {label} ---\n")


def _read_prompt(settings: GenerateSettings) -> str:
    if settings.file is None:
        prompt = settings.prompt or ""
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError("--prompt: the text is not UTF-8")
        return prompt
    return read_text(settings.file, "--file")
