"""packtrain finetune: tune a GGUF model on conversations or text, in a planned amount of memory."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import cast

from packtrain.commands.merged import End, note, space
from packtrain.commands.train import Ready, Work, carry_out, say
from packtrain.errors import InputError, Interrupted
from packtrain.files import check_writable, write_text
from packtrain.gguf import GGUF
from packtrain.models.file import ModelFile
from packtrain.plan import size_text
from packtrain.train.fit import Fit
from packtrain.train.job import Batch
from packtrain.train.probe import probe
from packtrain.train.settings import TuneSettings
from packtrain.train.state import Progress
from packtrain.train.tune import ADAPTER, Tuned, decide, name_of
from packtrain.watch.count import Count

OTHERS = re.compile(r"[^A-Za-z0-9_.-]+")  # what no name in Ollama has


def run(settings: TuneSettings) -> int:
    """Tune; 130 if a signal ended it, after saving. Raises InputError, OSError, ArithmeticError."""
    _check(settings)
    return carry_out(settings, Work("finetune", decide, _before, _after, note, space))


def _check(settings: TuneSettings) -> None:
    """No output may be what is read, or replace what is not this run's."""
    base = None if settings.model is None else GGUF(settings.model)
    _check_trained(settings, base)
    outputs = {"--output": settings.output, "--adapter": settings.adapter}
    for flag, path in outputs.items():
        if path is None or not path.exists():
            continue
        if base is not None and any(path.samefile(part) for part in base.paths):
            raise InputError(f"{flag}: {path} is the base itself; give another name")
        if settings.data is not None and settings.data.exists() and path.samefile(settings.data):
            raise InputError(f"{flag}: {path} is the data; give another name")
    if settings.adapter is None:
        return
    check_writable(settings.adapter, "--adapter")
    if settings.adapter.resolve() == settings.output.resolve():
        raise InputError(f"--adapter: {settings.adapter} is the --output, too; give another name")
    if settings.adapter.exists() and not (settings.overwrite or settings.resume):
        raise InputError(f"--adapter: {settings.adapter} exists; give another name, or --overwrite")


def _check_trained(settings: TuneSettings, base: GGUF | None) -> None:
    """No setting may mean nothing."""
    if settings.num_layers == 0:
        raise InputError("--num-layers 0: it must be at least 1, or -1 for all")
    for pattern in settings.freeze:
        if base is not None and not any(fnmatchcase(name, pattern) for name in base.entries):
            raise InputError(f"--freeze {pattern}: {base.path} has no such tensor")


def _before(fit: Fit, stopped: Callable[[], bool]) -> None:
    """Look whether everything learns, and validate once: what the base loses, to which the end compares."""
    say("checking that every trained tensor gets a gradient …")
    probe(fit.job, fit.engine, say)
    if fit.job.valid is not None:
        with Count(sys.stderr, "validation of the base", "batch") as count:
            found = fit.engine.evaluate(_until(stopped, fit.job.counted(count)))
        fit.progress = replace(fit.progress, base=found.loss, batches=fit.job.validated)
        say(f"validation loss of the base: {found.loss:.4f}")


def _until(stopped: Callable[[], bool], batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if stopped():
            raise Interrupted("stopped before step 1")
        yield batch


# ---- the end of a run ----------------------------------------------------------------------------------------


def _after(made: Ready, progress: Progress) -> None:
    """Merge, measure what came of it, and say how it is used. The memory of the run is free."""
    End(made.job, made.plans.shape, progress, made.budget).finish()
    settings, subject = cast(TuneSettings, made.job.settings), cast(Tuned, made.job.subject)
    _write_modelfile(settings, subject.model)
    _tell(settings, subject.chats)


def _write_modelfile(settings: TuneSettings, base: ModelFile) -> None:
    """What `ollama create` reads. Ollama takes the chat template from the GGUF file, so none is written here."""
    tokenizer = base.tokenizer()
    ends = [tokenizer.piece(id).decode(errors="replace") for id in sorted(tokenizer.ends)]
    stops = [f'PARAMETER stop "{end}"' for end in ends if end and '"' not in end]
    lines = [f"FROM ../{settings.output.name}", *stops, ""]
    write_text(settings.folder / "Modelfile", "\n".join(lines))


def _uses(settings: TuneSettings, chats: bool) -> Iterator[str]:
    """The commands that use the result, in the way it was tuned for."""
    name = shlex.quote(str(settings.output))
    yield f"packtrain chat {name}" if chats else f"packtrain generate {name} -p 'Once'"
    prompt = "" if chats else " -no-cnv -p 'Once'"
    yield f"llama-cli -m {name}{prompt}"
    if not settings.full:
        adapter = shlex.quote(str(settings.adapter or settings.folder / ADAPTER))
        base = shlex.quote(str(settings.model))
        yield f"llama-cli -m {base} --lora {adapter}{prompt}"
    model = OTHERS.sub("-", name_of(settings.output)).strip("-.") or "tuned"
    yield f"ollama create {model} -f {shlex.quote(str(settings.folder / 'Modelfile'))}"


def _tell(settings: TuneSettings, chats: bool) -> None:
    """Where everything is, and the commands that use it."""
    say(f"{settings.output}: {size_text(settings.output.stat().st_size)}")
    for command in _uses(settings, chats):
        say(f"  {command}")
