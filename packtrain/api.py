"""The commands as functions: each takes the settings of its command as keywords and returns a result.

    done = pt.finetune("base.gguf", "chats.jsonl", output="mine.gguf", memory="1GiB", on_step=print)

Messages that a command prints go to `on_message`; its errors are raised as InputError, DoesNotFit or DiskFull with
equal texts. A task runs in the calling thread; `start` runs it in a new thread and returns a handle.
"""

import inspect
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import MISSING, Field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from packtrain.common.errors import InputError, name_keywords, with_keywords
from packtrain.common.events import TaskCallbacks
from packtrain.common.options import GROUPS, from_values, option_fields
from packtrain.common.text import did_you_mean
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.monitoring.notebook import LibraryCallbacks, records_path
from packtrain.training.run_settings import RunSettings
from packtrain.training.train_settings import TrainSettings
from packtrain.workflows import adapter_merge as merging
from packtrain.workflows import chat_session as chatting
from packtrain.workflows import comparison as comparing
from packtrain.workflows import evaluation as evaluating
from packtrain.workflows import finetuning as tuning
from packtrain.workflows import quantization as quantizing
from packtrain.workflows import text_embeddings as embedding
from packtrain.workflows import text_generation as generating
from packtrain.workflows import training_run as training
from packtrain.workflows import type_choice as choosing
from packtrain.workflows.eval_data import EvaluateSettings
from packtrain.workflows.generation_settings import GeneratedText
from packtrain.workflows.planned_run import PlannedRun, PrepareRun
from packtrain.workflows.training_result import TrainingResult

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
File = Any  # a path, or its text
CALLBACK_NAMES = {field.name for field in fields(TaskCallbacks) if field.init}


def command(cls: type | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a library function: its signature and docstring list the settings of `cls` and the callbacks, and its
    errors name keywords instead of flags."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        call = name_keywords(function)
        if cls is None:
            return call
        call.__signature__ = _signature(cls, function)  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{settings_doc(option_fields(cls))}"
        return call

    return decorate


def _signature(cls: type, function: Callable[..., R]) -> inspect.Signature:
    """Return the signature of `function` with a keyword for each field of `cls` and each callback; for a training run
    with the settings of the short help, and `**settings` for the others, which `options` has by group."""
    parameters = dict(inspect.signature(function).parameters)
    variadic, is_run = parameters.pop("settings"), issubclass(cls, RunSettings)
    shown_names = {*getattr(cls, "COMMON", "").split(), *CALLBACK_NAMES}
    for settings_class in (cls, TaskCallbacks):
        for name, parameter in inspect.signature(settings_class).parameters.items():
            if not is_run or name in shown_names:
                parameters.setdefault(name, parameter.replace(kind=parameter.KEYWORD_ONLY))
    return inspect.Signature([*parameters.values(), *[variadic] * is_run])


def _option_group(heading: str) -> Callable[..., dict[str, Any]]:
    """Return a function whose keywords are the settings under a heading of the help, and which returns them."""
    run_fields = [*option_fields(TrainSettings), *option_fields(TuneSettings)]
    fields = {field.name: field for field in run_fields if field.metadata.get("group") == heading}

    @name_keywords
    def group(**settings: Any) -> dict[str, Any]:
        for name in settings.keys() - fields:
            raise InputError(f"{name} is no setting of {heading}{did_you_mean(name, fields)}")
        return settings

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fields]
    group.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    group.__doc__ = f"Return settings of `train` and `finetune`.\n\n{settings_doc(fields.values())}"
    return group


def settings_doc(settings: Iterable["Field[Any]"]) -> str:
    """Return docstring text that lists settings by group, with type, default and help."""
    groups: dict[str, list[str]] = {}
    for setting in settings:
        metadata, default = setting.metadata, setting.default
        value = "" if metadata.get("positional") or default is MISSING else f" = {default!r}"
        kind = inspect.formatannotation(setting.type)
        lines = textwrap.wrap(with_keywords(metadata["help"]), 100)
        text = "\n".join([f"    {setting.name}: {kind}{value}", *(f"        {x}" for x in lines)])
        groups.setdefault(metadata.get("group") or "settings", []).append(text)
    return "\n\n".join("\n".join([f"{name}:", *texts]) for name, texts in groups.items())


# pt.finetune("base.gguf", "chats.csv", **pt.options.lora(lora_rank=8, rslora=True), memory="1GiB")
options = SimpleNamespace(**{heading.lower(): _option_group(heading) for heading in GROUPS})


def split_settings(cls: type[S], keywords: dict[str, Any], **named: Any) -> tuple[S, TaskCallbacks]:
    """Split `keywords | named` into settings of `cls`, checked as flags are, and callbacks. Raises InputError."""
    assert is_dataclass(cls)
    task_settings = keywords | named
    callbacks = {name: task_settings[name] for name in task_settings.keys() & CALLBACK_NAMES}
    for name, function in callbacks.items():
        if name == "cancel" and not hasattr(function, "is_set"):
            raise InputError(f"cancel is {function!r}; it must be a threading.Event")
        if name != "cancel" and function is not None and not callable(function):
            raise InputError(f"{name} is {function!r}; it must be a function")
    setting_values = {n: value for n, value in task_settings.items() if n not in CALLBACK_NAMES}
    if type(setting_values.get("memory")) is int:
        setting_values["memory"] = f"{setting_values['memory']}B"
    if isinstance(columns := setting_values.get("columns"), dict):
        setting_values["columns"] = ",".join(f'"{name}"={field}' for name, field in columns.items())
    for name in setting_values.keys() & {"data", "calibrate"}:
        setting_values[name] = records_path(setting_values[name], name)
    return from_values(cls, setting_values, None), LibraryCallbacks(**callbacks)


@command(TrainSettings)
def train(data: File, **settings: Any) -> TrainingResult:
    """Train a new model on text, as `packtrain train`; returns the written files, the plan and the losses.

        pt.train("notes.txt", preset="1m", iters=500, output="notes.gguf")

    Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite.
    """
    return training.train(*split_settings(TrainSettings, settings, data=data))


@command(TuneSettings)
def finetune(model: File, data: File, **settings: Any) -> TrainingResult:
    """Tune the model of a GGUF file on conversations or text, as `packtrain finetune`; returns files, plan and losses.

        pt.finetune("base.gguf", "chats.csv", memory="1GiB", output="tuned.gguf")

    Raises InputError, DoesNotFit, DiskFull, OSError, ArithmeticError.
    """
    return tuning.finetune(*split_settings(TuneSettings, settings, model=model, data=data))


@command(None)
def plan(task: Callable[..., TrainingResult], *args: Any, **settings: Any) -> PlannedRun:
    """Plan `train` or `finetune` without running it: memory, time and choices.

        pt.plan(pt.finetune, "base.gguf", "chats.csv", memory="1GiB")

    `str()` is the table that the command prints. If no plan fits, returns the smallest, with the reason in `refusal`.
    Raises InputError.
    """
    if task not in PREPARE_FUNCTIONS:
        raise InputError("plan takes pt.train or pt.finetune, and then what these take")
    cls, prepare = PREPARE_FUNCTIONS[task]
    names = dict(zip(inspect.signature(task).parameters, args, strict=False))
    parsed_settings: tuple[RunSettings, TaskCallbacks] = split_settings(cls, settings | names)
    return prepare(parsed_settings[0], parsed_settings[1].message)


@command(EvaluateSettings)
def evaluate(model: File, data: File | None = None, **settings: Any) -> evaluating.EvalResult:
    """Measure losses of models (one, or a list) on a text or on conversations, as `packtrain eval`.

        pt.evaluate(["base.gguf", "tuned.gguf"], "test.csv").loss()

    Raises InputError, DoesNotFit; Interrupted if it is stopped.
    """
    return evaluating.evaluate(*split_settings(EvaluateSettings, settings, model=model, data=data))


@command(comparing.CompareSettings)
def compare(model: File, data: File, **settings: Any) -> comparing.ComparisonResult:
    """Compare models (a list, the base first) side by side on conversations, as `packtrain compare`.

        pt.compare(["base.gguf", "tuned.gguf"], "test.csv")

    Raises InputError, DoesNotFit; Interrupted if it is stopped.
    """
    task_settings = settings | {"model": model, "data": data}
    return comparing.compare(*split_settings(comparing.CompareSettings, task_settings))


@command(choosing.ChooseSettings)
def choose(
    model: File, tuned: File, output: File, data: File, **settings: Any
) -> choosing.TypeChoiceResult:
    """Write a tuned model as the smallest file that keeps what tuning gained, as `packtrain choose`.

        pt.choose("base.gguf", "tuned.run/adapter.gguf", "small.gguf", "test.csv")

    Raises InputError, DoesNotFit; Interrupted if it is stopped.
    """
    task_settings = settings | {"model": model, "tuned": tuned, "output": output, "data": data}
    return choosing.choose(*split_settings(choosing.ChooseSettings, task_settings))


@command(generating.GenerateSettings)
def generate(model: File, prompt: str = "", **settings: Any) -> GeneratedText:
    """Continue a prompt, as `packtrain generate`; pieces of the text go to `on_text` as they come.

        pt.generate("notes.gguf", "Dear diary", n_predict=50).text

    Raises InputError, DoesNotFit; Interrupted if it is stopped while `warmup` reads experts.
    """
    task_settings = {"display_prompt": False} | settings | {"model": model, "prompt": prompt}
    return generating.generate(*split_settings(generating.GenerateSettings, task_settings))


@command(chatting.ChatSettings)
def chat(model: File, **settings: Any) -> chatting.ChatSession:
    """Return a conversation with a model; `.answer("a message")` returns its answer. Raises InputError, DoesNotFit."""
    return chatting.ChatSession(*split_settings(chatting.ChatSettings, settings | {"model": model}))


@command(embedding.EmbedSettings)
def embed(
    model: File, texts: Sequence[str], *, normalize: bool = True, **settings: Any
) -> np.ndarray:
    """Return embeddings (N, C) f32 of N texts, as `packtrain embed`; normalize=False is embd_normalize=-1.

    Raises InputError, DoesNotFit; Interrupted if it is stopped.
    """
    text_list = texts if isinstance(texts, list | tuple) else [texts]
    bad_texts = [text for text in text_list if not isinstance(text, str)]
    if bad_texts:
        raise InputError(f"texts has {bad_texts[0]!r}; each must be a text")
    if "prompt" in settings:
        raise InputError("prompt: leave it out; texts are what is embedded")
    if not isinstance(normalize, bool):
        raise InputError(f"normalize is {normalize!r}; it must be True or False")
    defaults = {} if normalize else {"embd_normalize": -1}
    task_settings = defaults | settings | {"model": model, "prompt": texts}
    return embedding.embed(*split_settings(embedding.EmbedSettings, task_settings)).vectors


@command(quantizing.QuantizeSettings)
def quantize(model: File, output: File, type: str, **settings: Any) -> quantizing.WrittenModel:
    """Convert the weights of a GGUF file to other types, as `packtrain quantize`. Raises InputError, DoesNotFit.

    pt.quantize("notes.gguf", "notes-q4.gguf", "Q4_K_M")
    """
    task_settings = settings | {"model": model, "output": output, "type": type}
    return quantizing.quantize(*split_settings(quantizing.QuantizeSettings, task_settings))


@command(merging.MergeSettings)
def merge(model: File, adapters: File, output: File, **settings: Any) -> quantizing.WrittenModel:
    """Merge adapters (one, or a list) into a model, as `packtrain merge`. Raises InputError, DoesNotFit.

    pt.merge("base.gguf", "tuned.run/adapter.gguf", "tuned.gguf", calibrate="chats.csv")
    """
    task_settings = settings | {"model": model, "adapters": adapters, "output": output}
    return merging.merge(*split_settings(merging.MergeSettings, task_settings))


class Run(Generic[R]):
    """A task, such as `train`, running in its own thread: `result()` waits for it, `stop()` lets it save and end."""

    def __init__(
        self, task: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._stop_event = kwargs.setdefault("cancel", threading.Event())
        self._future: Future[R] = Future()
        threading.Thread(target=self._work, args=(task, args, kwargs), daemon=True).start()

    def _work(self, task: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._future.set_result(task(*args, **kwargs))
        except BaseException as error:  # `result` raises it
            self._future.set_exception(error)

    def __repr__(self) -> str:
        return f"Run({'done' if self.done else 'running; .stop() lets it save and end'})"

    def stop(self) -> None:
        """Ask the task to save and stop: `result` then has `stopped` set, or raises Interrupted."""
        self._stop_event.set()

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result of the task. Raises what the task raised, or TimeoutError after `timeout` seconds."""
        wait([self._future], timeout)
        if not self.done:
            raise TimeoutError(f"still running after {timeout} s")
        return self._future.result()


def start(task: Callable[..., R], *args: Any, **settings: Any) -> Run[R]:
    """Start `train(…)`, `finetune(…)` or another task in its own thread; returns its handle."""
    return Run(task, args, settings)


PREPARE_FUNCTIONS: dict[Any, tuple[type[RunSettings], PrepareRun]] = {
    train: (TrainSettings, training.prepare),
    finetune: (TuneSettings, tuning.prepare),
}
