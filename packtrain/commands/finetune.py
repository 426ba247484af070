"""packtrain finetune: tune a GGUF model on conversations or text, in a planned amount of memory."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

from packtrain.commands.train import Work, carry_out, say
from packtrain.dtypes import DTYPES, Dtype
from packtrain.errors import InputError
from packtrain.files import check_writable, write_text
from packtrain.gguf import GGUF
from packtrain.models.adapted import adapted
from packtrain.models.adapter import read_adapter
from packtrain.models.file import ModelFile, open_model
from packtrain.models.merge import merged, stored_type, write_changed
from packtrain.plan import size_text
from packtrain.quant import WRITABLE
from packtrain.train.engine import evaluate
from packtrain.train.fit import Fit
from packtrain.train.job import Job
from packtrain.train.measure import losses_of
from packtrain.train.plans import Shape
from packtrain.train.probe import probe
from packtrain.train.settings import TuneSettings
from packtrain.train.tune import ADAPTER, Tuned, decide, name_of

ENOUGH = 0.8  # of the adapter's gain that a merge should keep
TRIAL = ".trial.gguf"
OTHERS = re.compile(r"[^A-Za-z0-9_.-]+")  # what no name in Ollama has


def run(settings: TuneSettings) -> int:
    """Tune; 130 if a signal ended it, after saving. Raises InputError, OSError, ArithmeticError."""
    _check(settings)
    return carry_out(settings, Work("finetune", decide, _before, _after))


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


def _before(fit: Fit) -> None:
    probe(fit.job, fit.engine, say)


# ---- the end of a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Losses:
    """Validation losses, each of what is in its file."""

    base: float
    merged: float
    adapter: float | None = None

    @property
    def kept(self) -> float:
        """What part of the adapter's gain is left when it is merged; 1 where it gains nothing."""
        gain = self.base - (self.merged if self.adapter is None else self.adapter)
        return (self.base - self.merged) / gain if gain > 0 else 1.0

    def __str__(self) -> str:
        middle = "" if self.adapter is None else f"with the adapter {self.adapter:.4f}, "
        last = "merged" if self.adapter is not None else "tuned"
        gains = self.adapter is not None and self.adapter < self.base
        kept = f" ({self.kept:.0%} of the gain)" if gains else ""
        return f"validation loss: base {self.base:.4f}, {middle}{last} {self.merged:.4f}{kept}"


def _after(job: Job, shape: Shape) -> None:
    """Merge, measure what came of it, and say how it is used. The memory of the run is free."""
    settings, subject = cast(TuneSettings, job.settings), cast(Tuned, job.subject)
    base, adapter_path = subject.model, settings.folder / ADAPTER
    if not settings.full:
        _merge(subject, adapter_path, settings.output, settings.type)
    if job.valid is not None:
        measured = Measured(job, shape)
        with_adapter = None
        if not settings.full:
            adapter = read_adapter(adapter_path)
            with_adapter = measured.loss(adapted(base, [(adapter, 1.0)]))
        tuned = measured.loss(open_model(settings.output))
        losses = Losses(measured.loss(base), tuned, with_adapter)
        say(str(losses))
        if losses.kept < ENOUGH:
            _advise(measured, losses, subject, settings)
    _write_modelfile(settings, base)
    _tell(settings, subject.chats)


def _merge(subject: Tuned, adapter: Path, output: Path, dtype: str | None) -> None:
    base, stored = subject.model.gguf, DTYPES[dtype] if dtype else None
    changes = merged(base, [(read_adapter(adapter), 1.0)])
    write_changed(output, base, changes, name=name_of(output), dtype=stored, more=subject.more)
    narrow = [
        name for name in changes if stored not in (None, stored_type(base.entries[name], stored))
    ]
    if narrow and output == subject.settings.output:
        say(
            f"--type {dtype}: rows of {len(narrow)} matrices are no blocks of it; they keep their type"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """The validation of a job, for models in files."""

    job: Job
    shape: Shape

    def loss(self, model: ModelFile) -> float:
        run = losses_of(model, self.shape.rows, self.shape.time, self.shape.chunk)
        return evaluate(run, self.job.validation()).loss


def _advise(measured: Measured, losses: Losses, subject: Tuned, settings: TuneSettings) -> None:
    """Say which type the merged matrices should have: the smallest that keeps enough, by trial."""
    base, adapter, trial = subject.model, settings.folder / ADAPTER, settings.folder / TRIAL
    try:
        for dtype in _larger(base, read_adapter(adapter).pairs, settings.type):
            _merge(subject, adapter, trial, str(dtype))
            found = Losses(losses.base, measured.loss(open_model(trial)), losses.adapter)
            if found.kept >= ENOUGH:
                say(
                    f"warning: the merge keeps less than {ENOUGH:.0%} of what the adapter gains; with --type {dtype}"
                    f" it keeps {found.kept:.0%}, or use the adapter beside the base"
                )
                return
    finally:
        trial.unlink(missing_ok=True)
    say(f"warning: no type keeps {ENOUGH:.0%} of what the adapter gains; use it beside the base")


def _larger(base: ModelFile, names: object, asked: str | None) -> Iterator[Dtype]:
    """Types with more bits a weight than the changed matrices have now, the smallest first."""
    entries = [base.gguf.entries[name] for name in cast(dict[str, object], names)]
    now = DTYPES[asked] if asked else None
    least = max(bits(stored_type(entry, now)) for entry in entries)
    yield from sorted((dtype for dtype in WRITABLE if bits(dtype) > least), key=bits)


def bits(dtype: Dtype) -> float:
    return 8 * dtype.block_nbytes / dtype.block


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
