"""packtrain finetune: tune a GGUF model on conversations or text, in a planned amount of memory."""

import re
import shlex
from collections.abc import Iterator
from typing import cast

from packtrain.cli import INTERRUPTED, say
from packtrain.cli.event_output import shown
from packtrain.distributed import rank
from packtrain.engine.memory_plan import size_text
from packtrain.training.finetune_job import ADAPTER, Tuned, name_of
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.monitoring.history import MODELFILE
from packtrain.workflows.finetuning import finetune

OTHERS = re.compile(r"[^A-Za-z0-9_.-]+")  # not allowed in Ollama's model names


def run(settings: TuneSettings) -> int:
    """Tune; returns 130 if a signal stopped it after saving. Raises InputError, OSError, ArithmeticError."""
    done = finetune(settings, shown())
    if done.stopped:
        return INTERRUPTED
    if rank():
        return 0
    job = done.plan.job  # a resumed run may have taken settings from its folder
    say(f"{done.output}: {size_text(done.output.stat().st_size)}")
    tuned = cast(Tuned, job.subject)
    # there llama.cpp leaves an adapter's attention out
    adapter_works = not tuned.model.config.kv_lora_rank
    for command in _uses(cast(TuneSettings, job.settings), tuned, adapter_works):
        say(f"  {command}")
    return 0


def _uses(settings: TuneSettings, tuned: Tuned, adapter_works: bool) -> Iterator[str]:
    """Commands that chat or generate with the result; with `adapter_works`, also with the adapter in llama.cpp."""
    chats, short = tuned.chats, tuned.model.config.short_context
    name, base = shlex.quote(str(settings.output)), shlex.quote(str(settings.model))
    if settings.merge == "none" and settings.aware:  # beside the base it is not what was trained
        merged = settings.output.with_stem(f"{settings.output.stem}-merged")
        yield f"packtrain merge {base} {name} -o {shlex.quote(str(merged))}"
        return
    if settings.merge == "none":
        name = f"{base} --lora {name}"
    yield f"packtrain chat {name}" if chats else f"packtrain generate {name} -p 'Once'"
    prompt = f" -c {short}" if 0 < (settings.ctx or 1) <= short else ""
    prompt += "" if chats else " -no-cnv -p 'Once'"
    if adapter_works or settings.merge != "none":
        yield f"llama-cli -m {name}{prompt}"
    if adapter_works and not (settings.full or settings.aware) and settings.merge != "none":
        adapter = shlex.quote(str(settings.adapter or settings.folder / ADAPTER))
        yield f"llama-cli -m {base} --lora {adapter}{prompt}"
    model = OTHERS.sub("-", name_of(settings.output)).strip("-.") or "tuned"
    yield f"ollama create {model} -f {shlex.quote(str(settings.folder / MODELFILE))}"
