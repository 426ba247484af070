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
from packtrain.common.options import COLUMNS, option, positional, unescape
from packtrain.common.text import clock, plural
from packtrain.data.chat_template import load_template
from packtrain.data.conversations import DatasetRecipe, prepare_dataset
from packtrain.data.text.documents import END_OF_TEXT, VALID, has_valid_file
from packtrain.data.text.text_streams import RECORDS, suffix_of
from packtrain.dtypes import PRECISIONS
from packtrain.engine.backends import DEVICES, Target, target
from packtrain.inference.kv_cache.decode_plans import CACHE_TYPES
from packtrain.kernels.runtime.environment import cache_root, writable
from packtrain.models.activation_rounding import ACTIVATIONS_HELP, F32, PRECISION_HELP, Q8
from packtrain.models.attention_choice import AUTO, FLASH_HELP, FLASH_MODES
from packtrain.models.config import check_context
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, read_scaled
from packtrain.planner.budget import ReportFunction
from packtrain.planner.kernel_memory import model_kernel_modules
from packtrain.training.model_loss import MeanEstimate, counted, loss_executor
from packtrain.training.perplexity_windows import PerplexityWindows, read_single_text
from packtrain.training.run_settings import CHAT_TEMPLATE, DEVICE_HELP, SKIP_BAD_HELP, VALID_FILE
from packtrain.training.sample_batches import SampleBatches, row_length
from packtrain.workflows import multiple_choice
from packtrain.workflows.eval_file import SPLITS, find_eval_file
from packtrain.workflows.generation_settings import SWA_FULL_HELP, check_cache, configured
from packtrain.workflows.kl_divergence import (
    CachedPredictions,
    Divergence,
    measure_divergence,
    read_batches,
)
from packtrain.workflows.saved_logits import (
    Batches,
    SavedLogits,
    is_saved_logits,
    save_logits,
    windows_of,
)

Losses = Callable[[Iterable[Mapping[str, np.ndarray]]], Iterator[np.ndarray]]
TEXT_CONTEXT, SAMPLE_CONTEXT = 512, 2048  # most tokens of a window without --ctx
BATCH_TOKENS, CHOICE_ROWS = 2048, 16  # tokens, or choices, of a batch


@dataclass(frozen=True)
class EvaluateSettings:
    """Measure models on a text or on conversations."""

    COMMON = "data split ctx lora compare skip_bad separator chat_template"

    model: tuple[Path, ...] = positional("the model, a GGUF file; several are compared")
    data: Path | None = option(
        None,
        "text or conversations, in any form that `packtrain data` reads; of a folder, the test file, else valid,"
        " else train", metavar="FILE",
    )  # fmt: skip
    choices: Path | None = option(
        None, "multiple choice: question, choices and answer a row; print acc and acc_norm as lm-eval does",
        metavar="FILE",
        conflicts=dict.fromkeys(
            ["data", "split", "separator", "chat_template", "all_positions", "kl_base", "save_logits"], "without text"
        ),
    )  # fmt: skip
    split: str | None = option(
        None, "use this file of a folder; of a single file, the part that finetune would use",
        choices=tuple(SPLITS),
    )  # fmt: skip
    val_split: float = option(
        0.05, "with --split on a single file: finetune's --val-split", min_value=0.0001, max_value=0.5,
        requires="split", conflicts=VALID_FILE,
    )  # fmt: skip
    ctx: int | None = option(
        None,
        f"tokens of a window; default: the model's context, up to {TEXT_CONTEXT} for text, {SAMPLE_CONTEXT:,} for"
        " conversations", flags="-c", min_value=3,
    )  # fmt: skip
    all_positions: bool = option(
        False,
        "score every token: also the first half of each window of a text, and the prompts of conversations",
    )
    lora: tuple[str, ...] = option(
        (), "an adapter for the first model, FILE or FILE:SCALE; several are added together"
    )
    kl_base: Path | None = option(
        None,
        "a model of the same vocabulary, such as the unquantized one, or its --save-logits: print KL"
        " divergences from its predictions", metavar="FILE",
    )  # fmt: skip
    save_logits: Path | None = option(
        None, "write the model's predictions, for --kl-base and llama-perplexity's --kl-divergence-base",
        metavar="FILE", conflicts={"compare": "which has several models", "kl_base": "which reads such a file"},
    )  # fmt: skip
    compare: bool = option(
        False, "measure the first model alone, then with each --lora",
        requires={"lora": "{flag}: there is no adapter to compare; name some with --lora"},
    )  # fmt: skip
    batch_size: int | None = option(
        None, f"windows at a time (default: {BATCH_TOKENS:,} tokens)", min_value=1
    )
    separator: str | None = option(
        None,
        f"text between documents; {END_OF_TEXT} on its own line is recognized; '' for one text",
    )
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE|TEXT")
    cache_type: str | None = option(
        None, "read through a KV cache of this element type, as `generate` does, instead of all at once",
        choices=CACHE_TYPES,
    )  # fmt: skip
    swa_full: bool = option(False, SWA_FULL_HELP, requires="cache_type")
    flash_attn: str = option(AUTO, FLASH_HELP, flags="-fa", choices=FLASH_MODES)
    activations: str = option("f32", ACTIVATIONS_HELP, choices=(F32, Q8))
    precision: str = option("f32", PRECISION_HELP, choices=PRECISIONS)
    device: str = option("cpu", DEVICE_HELP, choices=tuple(DEVICES))

    @property
    def has_valid_file(self) -> bool:
        return self.data is not None and has_valid_file(self.data)


@dataclass(frozen=True, slots=True)
class EvalData:
    """The data as a model reads it: batches, their token ids, and a description of what is scored."""

    batches: Batches
    ids: np.ndarray
    description: str
    questions: Sequence[multiple_choice.ChoiceQuestion] = ()

    @property
    def skipped(self) -> int:
        return self.batches.skipped if isinstance(self.batches, PerplexityWindows) else 0


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
    """Measure the losses of the models. Raises InputError, and Interrupted if it is stopped."""
    if settings.data is None and settings.choices is None:
        raise InputError(
            "--data must be given: text or conversations; or --choices, a file of multiple choice"
        )
    check_rules(settings)
    check_writable(settings.save_logits, "--save-logits")
    named_models = _load_models(settings, events.message)
    max_context = min(model.config.context_length for _, model in named_models)
    datasets, choices = dict[Path, EvalData](), dict[str, multiple_choice.ChoiceScores]()
    losses, device = dict[str, np.ndarray](), target(settings.device)
    for name, model in named_models:
        model_path = model.gguf.path
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
    """Measure how far each model is from --kl-base; {} without it. Raises InputError, Interrupted."""
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
    """Write --save-logits of the model. Raises InputError, Interrupted."""
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
    """Open the models to measure; returns them with their printed names."""
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


# ---- the data ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalDataLoader:
    """Loads the data as one of the models reads it, and reports what is noteworthy."""

    settings: EvaluateSettings
    model: ModelFile
    report: ReportFunction

    def load(self, max_context: int) -> EvalData:
        """Load the windows of a text, or else samples. Raises InputError."""
        settings = self.settings
        if settings.choices is not None:
            return self._questions(settings.choices, settings.ctx or max_context)
        assert settings.data is not None  # see evaluate
        path, split_name = find_eval_file(settings.data, settings.split)
        is_text = not path.is_dir() and suffix_of(path) not in RECORDS
        length = settings.ctx or min(max_context, TEXT_CONTEXT if is_text else SAMPLE_CONTEXT)
        check_context(self.model.config, length, self.report)
        if is_text and not split_name and not settings.all_positions:
            tokenizer = self.model.tokenizer()
            token_ids = read_single_text(path, self._separator, tokenizer)
            if token_ids is not None:
                bos = tokenizer.bos if tokenizer.add_bos else None
                return self._windows(path, token_ids, bos, length)
            self.report(
                f"{path} has several documents, each scored from its start; --separator '' reads the file as one"
                " text, as llama-perplexity does"
            )
        return self._samples(path, split_name, length)

    @property
    def _separator(self) -> str | None:
        return self.settings.separator and unescape(self.settings.separator)

    def _windows(self, path: Path, ids: np.ndarray, bos_id: int | None, length: int) -> EvalData:
        """Cut a text into windows, as llama-perplexity does."""
        if len(ids) < 3:
            raise InputError(f"--data: {path} has {len(ids)} tokens; there must be 3 or more")
        if len(ids) < length:
            self.report(
                f"{path} has {len(ids):,} tokens, fewer than a window of {length:,}; it is one window"
            )
        length = min(length, len(ids))
        batches = PerplexityWindows(ids, bos_id, self._rows(length, len(ids) // length), length)
        bos_note = "" if bos_id is None else ", each starting with BOS"
        num_scored = batches.windows * (batches.time - batches.skipped)
        description = (
            f"{path}: {plural(batches.windows, 'window')} of {length:,} tokens{bos_note};"
            f" the second half of each window is scored ({num_scored:,} tokens), as in llama-perplexity"
        )
        return EvalData(batches, ids, description)

    def _questions(self, path: Path, length: int) -> EvalData:
        """Read multiple choice; each choice is a row. Raises InputError."""
        check_context(self.model.config, length, self.report)
        options = self.settings.skip_bad, self.settings.columns, self.report
        questions = multiple_choice.read_questions(path, self.model.tokenizer(), length, *options)
        samples = multiple_choice.choice_samples(questions)
        rows, time = self.settings.batch_size or CHOICE_ROWS, int(samples.lengths.max()) - 1
        batches = SampleBatches(samples, rows, time, shuffle=False, pack=False)
        description = f"{path}: {plural(len(questions), 'question')} with {len(samples):,} choices"
        return EvalData(batches, samples.ids, description, questions)

    def _samples(self, path: Path, part: str, length: int) -> EvalData:
        """Read documents or conversations in rows, as finetune's validation does."""
        settings = self.settings
        recipe = DatasetRecipe(
            path, self.model.gguf.path, length, everything=settings.all_positions, separator=self._separator,
            val_split=settings.val_split if part else 0.0, skip_bad=settings.skip_bad, columns=settings.columns,
            template=settings.chat_template and load_template(settings.chat_template),
        )  # fmt: skip
        dataset = prepare_dataset(recipe, writable(cache_root() / "tokens"), self.report)
        for note in dataset.notes:
            self.report(note)
        if part == VALID and dataset.valid is None:
            raise InputError(
                f"--split valid: {path} has too few records; --val-split holds out none"
            )
        samples = dataset.train if part != VALID or dataset.valid is None else dataset.valid
        row_tokens = row_length(length, SampleBatches.item_lengths(samples))
        num_windows = SampleBatches(samples, 1, row_tokens, shuffle=False).windows
        rows = self._rows(row_tokens, num_windows)
        batches = SampleBatches(samples, rows, row_tokens, shuffle=False)
        description = (
            f"{path}{f' ({part} split)' if part else ''}: {samples.targets:,} of {samples.ids.size:,} tokens are"
            f" scored, in {len(samples):,} samples of up to {length:,} tokens, as in finetune's validation"
        )
        return EvalData(batches, samples.ids, description)

    def _rows(self, row_tokens: int, windows: int) -> int:
        batch_size = self.settings.batch_size or BATCH_TOKENS // row_tokens
        return max(min(batch_size, windows), 1)


# ---- measuring -----------------------------------------------------------------------------------------------


def _reader(settings: EvaluateSettings, model: ModelFile, data: EvalData, device: Target) -> Losses:
    """Create the function that yields the losses of batches, and load its kernels."""
    batches, cache = data.batches, settings.cache_type or ("f32" if data.questions else None)
    kernels.prepare((*kernels.GENERATION_KERNELS, "loss", *model_kernel_modules(model.config)))
    if cache is None:
        run = loss_executor(model, batches.rows, batches.time, skipped=data.skipped, target=device)
        return partial(counted, run)
    check_cache(model, batches.time, cache)
    return CachedPredictions(model, batches.time, device, cache, swa_full=settings.swa_full).losses


def _measured(
    model_name: str, loss_function: Losses, data: EvalData, is_multiple: bool, events: Events
) -> np.ndarray:
    """Measure the losses (N,) f32 of all scored tokens, and report progress. Raises InputError, Interrupted."""
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
                raise InputError(
                    f"{model_name}: the loss is {loss_sum}; the weights must give finite numbers"
                )
            perplexity = MeanEstimate(loss_sum / max(count, 1), 0.0).exponential.value
            num_windows = min(len(batch_losses) * batches.rows, batches.windows)
            report_progress(num_windows, batches.windows, f"perplexity {perplexity:.4f}")
    events.message(f"{data_label} in {clock(time.monotonic() - start_time)}")
    return np.concatenate(batch_losses)
