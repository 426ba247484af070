"""packtrain finetune: tune a GGUF model on conversations or text, in a planned amount of memory."""

import re
import shlex
from collections.abc import Iterator
from typing import cast

from packtrain.cli import DONE, INTERRUPTED
from packtrain.cli.event_output import run_events
from packtrain.distributed import rank
from packtrain.engine.memory_plan import size_text
from packtrain.training.finetune_job import ADAPTER, TunedModel, name_of
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.monitoring.history import MODELFILE
from packtrain.workflows.finetuning import finetune

INVALID_NAME_CHARS = re.compile(r"[^A-Za-z0-9_.-]+")  # not allowed in Ollama's model names


def run(settings: TuneSettings) -> int:
    """Tune; returns 0, or 130 if a signal stopped it after saving. Raises InputError, OSError, ArithmeticError."""
    events = run_events(settings)
    result = finetune(settings, events)
    if result.stopped or rank():
        return INTERRUPTED if result.stopped else DONE
    job = result.plan.job  # a resumed run may have taken settings from its folder
    events.message(f"{result.output}: {size_text(result.output.stat().st_size)}")
    tuned = cast(TunedModel, job.model)
    # beside latent attention, llama.cpp leaves out an adapter's attention
    adapter_works = not tuned.model.config.kv_lora_rank
    for command in _uses(cast(TuneSettings, job.settings), tuned, adapter_works):
        events.message(f"  {command}")
    return DONE


def _uses(settings: TuneSettings, tuned: TunedModel, adapter_works: bool) -> Iterator[str]:
    """Yield commands that chat or generate with the result; `adapter_works`: llama.cpp can use the adapter, too."""
    is_chat, short_context = tuned.is_chat, tuned.model.config.short_context
    name, base_text = shlex.quote(str(settings.output)), shlex.quote(str(settings.model))
    if settings.merge == "none" and settings.aware:  # beside the base it is not what was trained
        merged_path = settings.output.with_stem(f"{settings.output.stem}-merged")
        yield f"packtrain merge {base_text} {name} -o {shlex.quote(str(merged_path))}"
        return
    if settings.merge == "none":
        name = f"{base_text} --lora {name}"
    yield f"packtrain chat {name}" if is_chat else f"packtrain generate {name} -p 'Once'"
    prompt_flags = f" -c {short_context}" if 0 < (settings.ctx or 1) <= short_context else ""
    prompt_flags += "" if is_chat else " -no-cnv -p 'Once'"
    if adapter_works or settings.merge != "none":
        yield f"llama-cli -m {name}{prompt_flags}"
    if adapter_works and not (settings.full or settings.aware) and settings.merge != "none":
        adapter_text = shlex.quote(str(settings.adapter or settings.folder / ADAPTER))
        yield f"llama-cli -m {base_text} --lora {adapter_text}{prompt_flags}"
    ollama_name = INVALID_NAME_CHARS.sub("-", name_of(settings.output)).strip("-.") or "tuned"
    yield f"ollama create {ollama_name} -f {shlex.quote(str(settings.folder / MODELFILE))}"
