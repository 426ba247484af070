"""Continue a prompt."""

from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import InputError
from packtrain.events import Events
from packtrain.files import existing
from packtrain.generation import Limits, Reply
from packtrain.settings import option
from packtrain.tasks.speak import (
    CONTEXT,
    Generated,
    Speaking,
    cells,
    drafter,
    load_generator,
    opened,
    written,
)


@dataclass(frozen=True)
class Generate(Speaking):
    """Generate text after a prompt."""

    prompt: str | None = option(None, "text to continue", flags="-p")
    file: Path | None = option(None, "read the prompt from this file", flags="-f")
    n_predict: int = option(
        128,
        "most tokens to generate; -1: until an end token or a full context",
        flags="-n",
        least=-1,
    )
    display_prompt: bool = option(True, "print the prompt before the text")


def generate(settings: Generate, events: Events) -> Generated:
    """Continue the prompt. Raises InputError, DoesNotFit."""
    prompt = _prompt(settings)
    settings.check()
    model = opened(settings)
    tokenizer = model.tokenizer()
    ids = tokenizer.encode(prompt, eos=False)
    wanted = len(ids) + settings.n_predict if settings.n_predict >= 0 else CONTEXT
    most = cells(settings, model.config.context_length, max(wanted, len(ids) + 1), events)
    generator, seed = load_generator(settings, model, most), settings.drawn_seed()
    with events.stopping() as stopped:
        limits = Limits(settings.n_predict, settings.stop, stopped)
        how = drafter(settings, model, most), settings.draft_max
        reply = Reply(generator, tokenizer, ids, settings.sampling, seed, limits, *how)
        if settings.display_prompt:
            events.text(prompt)
        return written(reply, seed, events)


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
