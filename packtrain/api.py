"""The commands as functions: each takes the settings of its command as keywords and returns a result.

    done = pt.finetune("base.gguf", "chats.jsonl", output="mine.gguf", memory="1GiB", on_step=print)

What a command prints goes to `on_message`; its errors are raised as InputError, DoesNotFit or DiskFull with the same
message. A task runs in the calling thread; `start` runs it in a new thread and returns a handle.
"""

import inspect
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from packtrain.common.errors import InputError, in_keywords, keyworded
from packtrain.common.events import Callbacks
from packtrain.common.options import from_values, options
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.monitoring.notebook import Library, data_path
from packtrain.training.train_settings import RunSettings, TrainSettings
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
from packtrain.workflows.generation_settings import Generated
from packtrain.workflows.planned_run import Prepare, Ready
from packtrain.workflows.training_result import Trained

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
File = Any  # a path, or its text
CALLBACKS = {field.name for field in fields(Callbacks) if field.init}


def command(cls: type | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn a function of settings into one of the library: its signature and docstring list those of `cls` and the
    callbacks, and its errors name keywords."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        call = in_keywords(function)
        if cls is None:
            return call
        call.__signature__ = _signature(cls, function)  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{described(cls)}"
        return call

    return decorate


def _signature(cls: type, function: Callable[..., R]) -> inspect.Signature:
    """Its parameters, then settings and callbacks as keywords, with types and defaults."""
    signature = inspect.signature(function)
    first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    listed = {p.name for p in first}
    extra = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for part in (cls, Callbacks)
        for p in inspect.signature(part).parameters.values()
        if p.name not in listed
    ]
    return signature.replace(parameters=[*first, *extra])


def described(cls: type) -> str:
    """The settings of a class for a docstring: by group, with type, default and help."""
    groups: dict[str, list[str]] = {}
    for setting in options(cls):
        about, default = setting.metadata, setting.default
        value = "" if about.get("positional") or default is MISSING else f" = {default!r}"
        kind = inspect.formatannotation(setting.type)
        lines = textwrap.wrap(keyworded(about["help"]), 100)
        text = "\n".join([f"    {setting.name}: {kind}{value}", *(f"        {x}" for x in lines)])
        groups.setdefault(about.get("group") or "settings", []).append(text)
    return "\n\n".join("\n".join([f"{name}:", *texts]) for name, texts in groups.items())


def settings_of(cls: type[S], options: dict[str, Any]) -> tuple[S, Callbacks]:
    """Split keywords into settings, checked as on the command line, and callbacks. Raises InputError."""
    assert is_dataclass(cls)
    called = {name: options[name] for name in options.keys() & CALLBACKS}
    for name, function in called.items():
        if name == "cancel" and not hasattr(function, "is_set"):
            raise InputError(f"cancel is {function!r}; it must be a threading.Event")
        if name != "cancel" and function is not None and not callable(function):
            raise InputError(f"{name} is {function!r}; it must be a function")
    rest = {name: value for name, value in options.items() if name not in CALLBACKS}
    if type(rest.get("memory")) is int:
        rest["memory"] = f"{rest['memory']}B"
    for name in rest.keys() & {"data", "calibrate"}:
        rest[name] = data_path(rest[name], name)
    return from_values(cls, rest, None), Library(**called)


@command(TrainSettings)
def train(data: File, **settings: Any) -> Trained:
    """Train a new model on text, as `packtrain train`.

        pt.train("notes.txt", preset="1m", iters=500, output="notes.gguf")

    Raises InputError, DoesNotFit, DiskFull, OSError, NotFinite.
    """
    return training.train(*settings_of(TrainSettings, settings | {"data": data}))


@command(TuneSettings)
def finetune(model: File, data: File, **settings: Any) -> Trained:
    """Tune the model of a GGUF file on conversations or text, as `packtrain finetune`.

        pt.finetune("base.gguf", "chats.csv", memory="1GiB", output="tuned.gguf")

    Raises InputError, DoesNotFit, DiskFull, OSError, ArithmeticError.
    """
    options = settings | {"model": model, "data": data}
    return tuning.finetune(*settings_of(TuneSettings, options))


@command(None)
def plan(task: Callable[..., Trained], *given: Any, **settings: Any) -> Ready:
    """Memory, time and choices of `train` or `finetune`, without running it.

        pt.plan(pt.finetune, "base.gguf", "chats.csv", memory="1GiB")

    `str()` is the table that the command prints. If no plan fits, returns the smallest, with the reason in `refusal`.
    Raises InputError.
    """
    if task not in PREPARES:
        raise InputError("plan takes pt.train or pt.finetune, and then what these take")
    cls, prepare = PREPARES[task]
    names = dict(zip(inspect.signature(task).parameters, given, strict=False))
    parsed: tuple[RunSettings, Callbacks] = settings_of(cls, settings | names)
    return prepare(parsed[0], parsed[1].message)


@command(evaluating.Evaluate)
def evaluate(model: File, data: File, **settings: Any) -> evaluating.Measured:
    """Losses of models (one, or a list) on a text or on conversations, as `packtrain eval`.

        pt.evaluate(["base.gguf", "tuned.gguf"], "test.csv").loss()

    Raises InputError; Interrupted if it is stopped.
    """
    options = settings | {"model": model, "data": data}
    return evaluating.evaluate(*settings_of(evaluating.Evaluate, options))


@command(comparing.Compare)
def compare(model: File, data: File, **settings: Any) -> comparing.Compared:
    """Models (a list, the base first) side by side on conversations, as `packtrain compare`.

        pt.compare(["base.gguf", "tuned.gguf"], "test.csv")

    Raises InputError, DoesNotFit; Interrupted if it is stopped.
    """
    options = settings | {"model": model, "data": data}
    return comparing.compare(*settings_of(comparing.Compare, options))


@command(choosing.Choose)
def choose(model: File, tuned: File, output: File, data: File, **settings: Any) -> choosing.Chosen:
    """Write a tuned model as the smallest file that keeps what tuning gained, as `packtrain choose`.

        pt.choose("base.gguf", "tuned.run/adapter.gguf", "small.gguf", "test.csv")

    Raises InputError, DoesNotFit; Interrupted if it is stopped.
    """
    options = settings | {"model": model, "tuned": tuned, "output": output, "data": data}
    return choosing.choose(*settings_of(choosing.Choose, options))


@command(generating.Generate)
def generate(model: File, prompt: str = "", **settings: Any) -> Generated:
    """Continue a prompt, as `packtrain generate`; pieces of the text go to `on_text` as they come.

        pt.generate("notes.gguf", "Dear diary", n_predict=50).text

    Raises InputError, DoesNotFit.
    """
    options = {"display_prompt": False} | settings | {"model": model, "prompt": prompt}
    return generating.generate(*settings_of(generating.Generate, options))


@command(chatting.Chat)
def chat(model: File, **settings: Any) -> chatting.Talk:
    """A conversation with a model: `.answer("a message")` returns its answer. Raises InputError, DoesNotFit."""
    return chatting.Talk(*settings_of(chatting.Chat, settings | {"model": model}))


@command(embedding.Embed)
def embed(
    model: File, texts: Sequence[str], *, normalize: bool = True, **settings: Any
) -> np.ndarray:
    """Embeddings (N, C) f32 of N texts, as `packtrain embed`; normalize=False is embd_normalize=-1.

    Raises InputError, DoesNotFit; Interrupted if it is stopped.
    """
    every = texts if isinstance(texts, list | tuple) else [texts]
    wrong = [text for text in every if not isinstance(text, str)]
    if wrong:
        raise InputError(f"texts has {wrong[0]!r}; each must be a text")
    if "prompt" in settings:
        raise InputError("prompt: leave it out; texts are what is embedded")
    if not isinstance(normalize, bool):
        raise InputError(f"normalize is {normalize!r}; it must be True or False")
    defaults = {} if normalize else {"embd_normalize": -1}
    options = defaults | settings | {"model": model, "prompt": texts}
    return embedding.embed(*settings_of(embedding.Embed, options)).vectors


@command(quantizing.Quantize)
def quantize(model: File, output: File, type: str, **settings: Any) -> quantizing.Written:
    """Convert the weights of a GGUF file to other types, as `packtrain quantize`. Raises InputError.

    pt.quantize("notes.gguf", "notes-q4.gguf", "Q4_K_M")
    """
    options = settings | {"model": model, "output": output, "type": type}
    return quantizing.quantize(*settings_of(quantizing.Quantize, options))


@command(merging.Merge)
def merge(model: File, adapters: File, output: File, **settings: Any) -> quantizing.Written:
    """Merge adapters (one, or a list) into a model, as `packtrain merge`. Raises InputError, DoesNotFit.

    pt.merge("base.gguf", "tuned.run/adapter.gguf", "tuned.gguf", calibrate="chats.csv")
    """
    options = settings | {"model": model, "adapters": adapters, "output": output}
    return merging.merge(*settings_of(merging.Merge, options))


class Run(Generic[R]):
    """A task running in its own thread."""

    def __init__(
        self, task: Callable[..., R], given: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._stop = named.setdefault("cancel", threading.Event())
        self._result: list[R] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._work, args=(task, given, named), daemon=True)
        self._thread.start()

    def _work(self, task: Callable[..., R], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            self._result.append(task(*args, **named))
        except BaseException as error:  # `result` raises it
            self._error.append(error)

    def __repr__(self) -> str:
        return f"Run({'done' if self.done else 'running; .stop() lets it save and end'})"

    def stop(self) -> None:
        """Ask the task to save and stop; `result` then reports that it was stopped."""
        self._stop.set()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result. Raises what the task raised, or TimeoutError after `timeout` seconds."""
        self._thread.join(timeout)
        if not self.done:
            raise TimeoutError(f"still running after {timeout} s")
        if self._error:
            raise self._error[0]
        return self._result[0]


def start(task: Callable[..., R], *args: Any, **settings: Any) -> Run[R]:
    """Start `train(…)`, `finetune(…)` or another task in its own thread."""
    return Run(task, args, settings)


PREPARES: dict[Any, tuple[type[RunSettings], Prepare]] = {
    train: (TrainSettings, training.prepare),
    finetune: (TuneSettings, tuning.prepare),
}
