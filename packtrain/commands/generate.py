"""packtrain generate: continue a prompt; text goes to standard output, seed and speed to standard error."""

from dataclasses import dataclass
from pathlib import Path

from packtrain.commands import say
from packtrain.commands.speak import CONTEXT, ENDS, Speaking, cells, opened, ready, write
from packtrain.errors import InputError
from packtrain.files import existing
from packtrain.generate import Limits, Reply
from packtrain.settings import option
from packtrain.stop import stop_on_signals

DONE, INTERRUPTED = 0, 130


@dataclass(frozen=True)
class Generate(Speaking):
    """Write text after a prompt."""

    prompt: str | None = option(None, "text to continue", flags="-p")
    file: Path | None = option(None, "read the prompt from this file", flags="-f")
    n_predict: int = option(
        128,
        "tokens to write at most; -1: until an end token or a full context",
        flags="-n",
        least=-1,
    )
    display_prompt: bool = option(True, "print the prompt before the text")


def run(settings: Generate) -> int:
    """Generate as the settings say; 130 when a signal ended it. Raises InputError, DoesNotFit."""
    prompt = _prompt(settings)
    settings.check()
    model = opened(settings)
    tokenizer = model.tokenizer()
    ids = tokenizer.encode(prompt, eos=False)
    wanted = len(ids) + settings.n_predict if settings.n_predict >= 0 else CONTEXT
    context = model.config.context_length
    generator = ready(settings, model, cells(settings, context, max(wanted, len(ids) + 1)))
    seed = settings.drawn_seed()
    with stop_on_signals() as stopped:
        limits = Limits(settings.n_predict, settings.stop, stopped)
        reply = Reply(generator, tokenizer, ids, settings.sampling, seed, limits)
        if settings.display_prompt:
            write(prompt)
        for piece in reply:
            write(piece)
    write("\n")
    say(f"prompt {reply.reading}; generation {reply.writing}")
    say(f"seed {seed}; ended by {ENDS[reply.ended]}")
    return INTERRUPTED if reply.ended == "interrupted" else DONE


def _prompt(settings: Generate) -> str:
    if settings.file is None:
        prompt = settings.prompt or ""
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError("--prompt: the text is not UTF-8")
        return prompt
    if settings.prompt is not None:
        raise InputError("--prompt and --file are both given; leave one of them out")
    if existing(settings.file, "--file").is_dir():
        raise InputError(f"--file: {settings.file} is a folder; give a text file")
    try:
        return settings.file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"--file: {settings.file} is not UTF-8 text: {error}") from None
