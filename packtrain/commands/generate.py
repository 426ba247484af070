"""packtrain generate: text that a model writes after a prompt, to standard output; seed and speed to standard error."""

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import DoesNotFit, InputError
from packtrain.files import existing
from packtrain.generate import Generator, Limits, Reply
from packtrain.memory import total_nbytes
from packtrain.models.file import ModelFile, open_model
from packtrain.plan import size_text
from packtrain.run import Session
from packtrain.sample import Sampling
from packtrain.settings import option, positional
from packtrain.stop import stop_on_signals

CONTEXT = 4096  # at most, where neither -c nor -n says
DONE, INTERRUPTED = 0, 130
ENDS = {
    "end": "an end token",
    "stop": "a stop text",
    "count": "the number of tokens",
    "context": "a full context",
    "interrupted": "an interruption",
}


@dataclass(frozen=True)
class Generate:
    """Write text after a prompt."""

    model: Path = positional("the model, a GGUF file")
    prompt: str | None = option(None, "the text to go on from", flags="-p")
    file: Path | None = option(None, "a file with the text to go on from", flags="-f")
    n_predict: int = option(
        128, "how many tokens; -1 goes on to an end or a full context", flags="-n", least=-1
    )
    temp: float = option(
        0.8, "temperature; 0 takes the likeliest token", flags="--temperature", least=0
    )
    top_k: int = option(40, "choose from so many tokens; 0 is all", least=0)
    top_p: float = option(0.95, "choose from tokens of this probability together", least=0, most=1)
    min_p: float = option(
        0.05, "choose from tokens this likely, relative to the likeliest", least=0, most=1
    )
    repeat_penalty: float = option(1.0, "how much less likely recent tokens become", least=0.01)
    repeat_last_n: int = option(64, "how many tokens are recent; -1 is all", least=-1)
    seed: int | None = option(
        None, "seed of the choice; without it or with -1 a random one", flags="-s", least=-1
    )
    stop: tuple[str, ...] = option((), "end before this text; may be given several times")
    ctx: int | None = option(
        None, "context in tokens; as long as needed, at most the model's", flags="-c", least=1
    )
    display_prompt: bool = option(True, "begin with the prompt")


def run(settings: Generate) -> int:
    """Generate as the settings say; 130 when a signal ended it. Raises InputError, DoesNotFit."""
    prompt = _prompt(settings)
    if "" in settings.stop:
        raise InputError("--stop: the text is empty; it must have a character at least")
    model = open_model(settings.model)
    tokenizer = model.tokenizer()
    ids = tokenizer.encode(prompt, eos=False)
    generator = _generator(model, _cells(settings, model.config.context_length, len(ids)))
    seed = secrets.randbits(32) if settings.seed in (None, -1) else settings.seed
    with stop_on_signals() as stopped:
        limits = Limits(settings.n_predict, settings.stop, stopped)
        reply = Reply(generator, tokenizer, ids, _sampling(settings), seed, limits)
        if settings.display_prompt:
            _write(prompt)
        for piece in reply:
            _write(piece)
    _write("\n")
    print(f"prompt {reply.reading}; generation {reply.writing}", file=sys.stderr)
    print(f"seed {seed}; ended by {ENDS[reply.ended]}", file=sys.stderr)
    return INTERRUPTED if reply.ended == "interrupted" else DONE


def _prompt(settings: Generate) -> str:
    if settings.file is None:
        prompt = settings.prompt or ""
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError("--prompt: the text is no UTF-8")
        return prompt
    if settings.prompt is not None:
        raise InputError("--prompt and --file are both given; one of them must be left out")
    if existing(settings.file, "--file").is_dir():
        raise InputError(f"--file: {settings.file} is a folder; give a text file")
    try:
        return settings.file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"--file: {settings.file} is no UTF-8 text: {error}") from None


def _cells(settings: Generate, context: int, prompt: int) -> int:
    if settings.ctx is not None:
        return settings.ctx
    limited = settings.n_predict >= 0
    wanted = prompt + settings.n_predict if limited else max(CONTEXT, prompt + 1)
    return max(min(context, wanted), 1)


def _generator(model: ModelFile, cells: int) -> Generator:
    c, there = model.config, total_nbytes()
    cache = 2 * 4 * cells * c.block_count * c.head_count_kv * c.head_width
    if cache > there:
        raise DoesNotFit(
            f"--ctx: the cache of {cells:,} tokens needs {size_text(cache)}, and there are {size_text(there)}"
        )
    session = Session()
    generator = Generator.of(model.config, session, cells)
    for name in model.names:
        session.set({name: model.weight(name)})
    generator.feed([0])  # loads the kernels, so that they do not count as the prompt's time
    return generator


def _sampling(settings: Generate) -> Sampling:
    return Sampling(
        settings.temp,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.repeat_penalty,
        settings.repeat_last_n,
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
