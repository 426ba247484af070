"""Perplexity on a text, or loss on conversations, of one model or of several side by side."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import check_writable
from packtrain.common.option_rules import check_rules
from packtrain.common.text import clock, plural
from packtrain.engine.backends import Target, target
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, read_scaled
from packtrain.planner.budget import ReportFunction
from packtrain.planner.kernel_memory import model_kernel_modules
from packtrain.training.model_loss import MeanEstimate, counted, loss_executor
from packtrain.workflows import multiple_choice
from packtrain.workflows.calibration_data import compile_kernels
from packtrain.workflows.eval_data import EvalData, EvalDataLoader, EvaluateSettings
from packtrain.workflows.generation_settings import check_cache, configured
from packtrain.workflows.kl_divergence import (
    CachedPredictions,
    Divergence,
    measure_divergence,
    read_batches,
)
from packtrain.workflows.saved_logits import SavedLogits, is_saved_logits, save_logits, windows_of

Losses = Callable[[Iterable[Mapping[str, np.ndarray]]], Iterator[np.ndarray]]


@dataclass(frozen=True, slots=True, repr=False)
class EvalResult:
    """Losses of models on the same data.

    losses       loss of each scored token, (N,) f32 in nats, by the name of the model: its path, with its adapters
    method       what was scored, as a sentence
    divergences  KL divergences from the predictions of --kl-base, by the name of the model
    choices      with --choices, whose tokens `losses` are of: accuracies, by the name of the model
    same         whether all models tokenize the data alike, so that their losses can be compared
    """

    losses: Mapping[str, np.ndarray]
    method: str
    same: bool
    divergences: Mapping[str, Divergence] = field(default_factory=dict)
    choices: Mapping[str, multiple_choice.ChoiceScores] = field(default_factory=dict)

    def loss(self, name: str | None = None) -> MeanEstimate:
        """Return a model's mean loss, by default the first's, with its error; `.exponential` is the perplexity."""
        return MeanEstimate.of(self.losses[name or next(iter(self.losses))])

    def mean_kl(self, name: str | None = None) -> MeanEstimate | None:
        """Return a model's mean KL divergence from --kl-base, by default the first's; None without it."""
        divergence = self.divergences.get(name or next(iter(self.losses)))
        return divergence.mean_kl if divergence else None

    def __repr__(self) -> str:
        scores = (f"{Path(name).name} {self.loss(name)}" for name in self.losses)
        return f"EvalResult({self.method}: {', '.join(scores)})"


def evaluate(settings: EvaluateSettings, events: Events) -> EvalResult:
    """Measure and return the losses of models on data. Raises InputError, DoesNotFit; Interrupted if it is stopped."""
    if settings.data is None and settings.choices is None:
        fact = "--data must be given: text or conversations"
        raise InputError(f"{fact}; or --choices, a file of multiple choice")
    check_rules(settings)
    if settings.resident is not None and len(settings.model) > 1:
        raise InputError("--resident is for one model; measure one at a time")
    check_writable(settings.save_logits, "--save-logits")
    named_models = _load_models(settings, events.message)
    compile_kernels(settings.memory)
    max_context = min(model.config.context_length for _, model in named_models)
    datasets, choices = dict[Path, EvalData](), dict[str, multiple_choice.ChoiceScores]()
    losses, device = dict[str, np.ndarray](), target(settings.device)
    for name, model in named_models:
        model_path = model.gguf.path
        names = (*kernels.GENERATION_KERNELS, "loss", *model_kernel_modules(model.config))
        # with a limit, they are loaded now, so that the measured memory counts them
        (kernels.load_all if settings.memory or settings.resident else kernels.prepare)(names)
        if model_path not in datasets:
            datasets[model_path] = EvalDataLoader(settings, model, events.message).load(max_context)
        run = _reader(settings, model, datasets[model_path], device)
        losses[name] = _measured(name, run, datasets[model_path], len(named_models) > 1, events)
        if questions := datasets[model_path].questions:
            choices[name] = multiple_choice.score_choices(questions, losses[name])
    first_data, *other_data = datasets.values()
    is_same = all(np.array_equal(first_data.ids, other.ids) for other in other_data)
    cache_note = settings.cache_type and f"; read through a cache in {settings.cache_type}"
    divergences = _divergences(settings, named_models, datasets, device, events)
    _save_logits(settings, named_models, first_data, device, events)
    return EvalResult(
        losses, first_data.description + (cache_note or ""), is_same, divergences, choices
    )


def _divergences(
    settings: EvaluateSettings, named_models: Sequence[tuple[str, ModelFile]], datasets: Mapping[Path, EvalData],
    device: Target, events: Events,
) -> dict[str, Divergence]:  # fmt: skip
    """Return {model: divergence of its predictions from --kl-base's}, or {}. Raises InputError, Interrupted."""
    base_path, cache_type = settings.kl_base, settings.cache_type or "f32"
    if base_path is None:
        return {}
    base = SavedLogits.open(base_path) if is_saved_logits(base_path) else open_model(base_path)
    if isinstance(base, ModelFile):
        base = configured(base, settings, events.message)
    divergences = dict[str, Divergence]()
    for name, model in named_models:
        events.message(f"comparing {name} with {base_path} …")
        batches = datasets[model.gguf.path].batches
        divergences[name] = measure_divergence(base, model, batches, cache_type, device, events)
    return divergences


def _save_logits(
    settings: EvaluateSettings, named_models: Sequence[tuple[str, ModelFile]], data: EvalData, device: Target,
    events: Events,
) -> None:  # fmt: skip
    """Write a model's predictions to the file of --save-logits, if it is given. Raises InputError, Interrupted."""
    if settings.save_logits is None:
        return
    if len(named_models) > 1:
        raise InputError("--save-logits writes predictions of one model", "name one")
    windows, model = windows_of(data.batches, "--save-logits"), named_models[0][1]
    with events.counting("saving", "window") as progress, events.stopping() as stopped:
        reader = CachedPredictions(model, windows.time, device, settings.cache_type or "f32")
        rows = chain.from_iterable(map(reader.rows, read_batches(windows, stopped, progress)))
        save_logits(settings.save_logits, windows, model.config.vocab_size, rows)


def _load_models(settings: EvaluateSettings, report: ReportFunction) -> list[tuple[str, ModelFile]]:
    """Open the models to measure, the first with --lora; returns (printed name, model) pairs. Raises InputError."""
    (base_path, base_model), *other_models = [
        (str(path), configured(open_model(path), settings, report)) for path in settings.model
    ]
    scaled_adapters = read_scaled(settings.lora, base_model.gguf)
    named_models = [(" + ".join([base_path, *settings.lora]), adapted(base_model, scaled_adapters))]
    if settings.compare:
        pairs = zip(settings.lora, scaled_adapters, strict=True)
        named_models = [
            (base_path, base_model),
            *((f"{base_path} + {text}", adapted(base_model, [adapter])) for text, adapter in pairs),
        ]
    return list(dict([*named_models, *other_models]).items())  # a repeated name is measured once


def _reader(settings: EvaluateSettings, model: ModelFile, data: EvalData, device: Target) -> Losses:
    """Return the function that computes losses of batches: of whole rows at once, or through a KV cache."""
    batches, cache = data.batches, settings.cache_type or ("f32" if data.questions else None)
    if cache is None:
        run = loss_executor(
            model, batches.rows, batches.time, skipped=data.skipped, target=device, resident=settings.resident,
        )  # fmt: skip
        return partial(counted, run)
    check_cache(model, batches.time, cache)
    return CachedPredictions(model, batches.time, device, cache, swa_full=settings.swa_full).losses


def _measured(
    model_name: str, loss_function: Losses, data: EvalData, is_multiple: bool, events: Events
) -> np.ndarray:
    """Return the losses (N,) f32 of all scored tokens, and report progress; `is_multiple`: with the name, as one of
    several models. Raises InputError, Interrupted."""
    batches = data.batches
    batch_losses, loss_sum, count, start_time = list[np.ndarray](), 0.0, 0, time.monotonic()
    data_label = f"{plural(batches.windows, 'window')}{f' of {model_name}' if is_multiple else ''}"
    events.message(f"measuring {data_label} …")
    with (
        events.counting(model_name if is_multiple else "measuring", "window") as report_progress,
        events.stopping() as stopped,
    ):
        for losses in loss_function(read_batches(batches, stopped)):
            batch_losses.append(losses)
            loss_sum, count = loss_sum + float(losses.sum(dtype=np.float64)), count + len(losses)
            if not math.isfinite(loss_sum):
                fact = f"{model_name}: the loss is {loss_sum}; the weights must give finite numbers"
                raise InputError(fact)
            perplexity = MeanEstimate(loss_sum / max(count, 1), 0.0).exponential.value
            num_windows = min(len(batch_losses) * batches.rows, batches.windows)
            report_progress(num_windows, batches.windows, f"perplexity {perplexity:.4f}")
    events.message(f"{data_label} in {clock(time.monotonic() - start_time)}")
    return np.concatenate(batch_losses)
