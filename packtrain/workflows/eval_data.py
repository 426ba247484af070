"""What `eval`, `compare` and `choose` measure: settings, the file of a folder and its split, windows and samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import require_existing
from packtrain.common.options import COLUMNS, option, positional, unescape
from packtrain.common.text import plural
from packtrain.data.chat_template import load_template
from packtrain.data.conversations import DatasetRecipe, prepare_dataset
from packtrain.data.text.documents import END_OF_TEXT, TRAIN, VALID, find_file, has_valid_file
from packtrain.data.text.text_streams import RECORDS, suffix_of
from packtrain.dtypes import PRECISIONS
from packtrain.engine.backends import DEVICES, target
from packtrain.inference.kv_cache.decode_plans import CACHE_TYPES
from packtrain.kernels.runtime.environment import cache_root, writable
from packtrain.models.activation_rounding import ACTIVATIONS_HELP, F32, PRECISION_HELP, Q8
from packtrain.models.attention_choice import AUTO, FLASH_HELP, FLASH_MODES
from packtrain.models.config import check_context
from packtrain.models.model_file import ModelFile
from packtrain.planner.budget import ReportFunction
from packtrain.training.model_loss import loss_plan
from packtrain.training.perplexity_windows import PerplexityWindows, read_single_text
from packtrain.training.run_settings import CHAT_TEMPLATE, DEVICE_HELP, SKIP_BAD_HELP, VALID_FILE
from packtrain.training.sample_batches import SampleBatches, row_length
from packtrain.workflows import multiple_choice
from packtrain.workflows.calibration_data import fitting_reading
from packtrain.workflows.generation_settings import SWA_FULL_HELP
from packtrain.workflows.saved_logits import Batches

TEST = "test"
SPLITS = {TEST: (TEST,), VALID: (VALID, "val"), TRAIN: (TRAIN,)}  # split -> names of its files
TEXT_CONTEXT, SAMPLE_CONTEXT = 512, 2048  # most tokens of a window without --ctx
UNPLANNED = dict.fromkeys(
    ["cache_type", "choices", "kl_base", "save_logits"], "whose memory is not planned"
)
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
        False, "score every token: also the first half of each window of a text, and the prompts of conversations",
    )  # fmt: skip
    lora: tuple[str, ...] = option(
        (), "an adapter for the first model, FILE or FILE:SCALE; several are added together"
    )
    kl_base: Path | None = option(
        None,
        "a model of the same vocabulary, such as the unquantized one, or its --save-logits: print KL"
        " divergences from its predictions", metavar="FILE",
    )  # fmt: skip
    save_logits: Path | None = option(
        None, "write the model's predictions, for --kl-base and for llama-perplexity, which reads the same format",
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
        None, f"text between documents; {END_OF_TEXT} on its own line is recognized; '' for one text",
    )  # fmt: skip
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
    memory: str | None = option(
        None, "limit of private memory, such as 2GiB; if it is tight, fewer windows are read at a time",
        conflicts=UNPLANNED,
    )  # fmt: skip
    resident: str | None = option(
        None, "limit on private memory and pages of the model in memory, together, such as 3GiB", metavar="SIZE",
        requires="device=cpu", conflicts=UNPLANNED | {"compare": "which measures several models"},
    )  # fmt: skip

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


class ReadingRows(NamedTuple):
    """A plan of reading the data: rows of a batch, and the bytes of the arena that computes their losses."""

    rows: int
    nbytes: int


def find_eval_file(data: Path, split: str | None) -> tuple[Path, str]:
    """Return (file or folder to measure, split to take of it as finetune splits; "": all). Raises InputError."""
    require_existing(data, "--data")
    if not data.is_dir():
        if split == TEST:
            fact = f"--split test: {data} is one file"
            raise InputError(f"{fact}; give a folder with a test file, or no --split")
        return data, split or ""
    path_by_split = {name: find_file(data, *names) for name, names in SPLITS.items()}
    split_files = {name: path for name, path in path_by_split.items() if path is not None}
    if split is None:
        return next(iter(split_files.values()), data), ""
    if TRAIN in split_files and VALID not in split_files and split != TEST:  # finetune splits it
        return split_files[TRAIN], split
    if split in split_files:
        return split_files[split], ""
    raise InputError(f"--split {split}: {data} has no {split}.jsonl, {split}.txt or the like")


@dataclass(frozen=True, slots=True)
class EvalDataLoader:
    """Loads the data as one of the models reads it, and reports what is noteworthy."""

    settings: EvaluateSettings
    model: ModelFile
    report: ReportFunction

    def load(self, max_context: int) -> EvalData:
        """Load windows, samples or questions in rows of --ctx tokens, else `max_context`. Raises InputError."""
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
            token_ids = read_single_text(path, self._separator, tokenizer, settings.memory)
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
        """Return text `ids` of a file in windows of `length` tokens, cut and scored as llama-perplexity does; a
        `bos_id` replaces each window's first token."""
        if len(ids) < 3:
            raise InputError(f"--data: {path} has {len(ids)} tokens; there must be 3 or more")
        if len(ids) < length:
            self.report(
                f"{path} has {len(ids):,} tokens, fewer than a window of {length:,}; it is one window"
            )
        length = min(length, len(ids))
        rows = self._rows(length, len(ids) // length, length // 2)
        batches = PerplexityWindows(ids, bos_id, rows, length)
        bos_note = "" if bos_id is None else ", each starting with BOS"
        num_scored = batches.windows * (batches.time - batches.skipped)
        description = (
            f"{path}: {plural(batches.windows, 'window')} of {length:,} tokens{bos_note};"
            f" the second half of each window is scored ({num_scored:,} tokens), as in llama-perplexity"
        )
        return EvalData(batches, ids, description)

    def _questions(self, path: Path, length: int) -> EvalData:
        """Return questions with choices, each choice as a row of up to `length` tokens. Raises InputError."""
        check_context(self.model.config, length, self.report)
        options = self.settings.skip_bad, self.settings.columns, self.report
        questions = multiple_choice.read_questions(path, self.model.tokenizer(), length, *options)
        samples = multiple_choice.choice_samples(questions)
        rows, time = self.settings.batch_size or CHOICE_ROWS, int(samples.lengths.max()) - 1
        batches = SampleBatches(samples, rows, time, shuffle=False, pack=False)
        description = f"{path}: {plural(len(questions), 'question')} with {len(samples):,} choices"
        return EvalData(batches, samples.ids, description, questions)

    def _samples(self, path: Path, part: str, length: int) -> EvalData:
        """Return documents or conversations (`part`: a split, "": all) in rows, as finetune's validation reads them."""
        settings = self.settings
        recipe = DatasetRecipe(
            path, self.model.gguf.path, length, everything=settings.all_positions, separator=self._separator,
            val_split=settings.val_split if part else 0.0, skip_bad=settings.skip_bad, columns=settings.columns,
            template=settings.chat_template and load_template(settings.chat_template),
        )  # fmt: skip
        cache_path = writable(cache_root() / "tokens")
        dataset = prepare_dataset(recipe, cache_path, self.report, settings.memory)
        for note in dataset.notes:
            self.report(note)
        if part == VALID and dataset.valid is None:
            fact = f"--split valid: {path} has too few records; --val-split holds out none"
            raise InputError(fact)
        samples = dataset.train if part != VALID or dataset.valid is None else dataset.valid
        row_tokens = row_length(length, SampleBatches.item_lengths(samples))
        rows = self._rows(row_tokens, SampleBatches(samples, 1, row_tokens, shuffle=False).windows)
        batches = SampleBatches(samples, rows, row_tokens, shuffle=False)
        description = (
            f"{path}{f' ({part} split)' if part else ''}: {samples.targets:,} of {samples.ids.size:,} tokens are"
            f" scored, in {len(samples):,} samples of up to {length:,} tokens, as in finetune's validation"
        )
        return EvalData(batches, samples.ids, description)

    def _rows(self, row_tokens: int, windows: int, skipped: int = 0) -> int:
        """Return how many of all `windows` rows are read at a time: --batch-size, or fewer to fit --memory. A row has
        `row_tokens` tokens; the first `skipped` need no score, and so no logits. Raises DoesNotFit."""
        settings = self.settings
        rows = max(min(settings.batch_size or BATCH_TOKENS // row_tokens, windows), 1)
        if settings.memory is None:
            return rows
        plan_rows = partial(
            loss_plan, self.model, time=row_tokens, skipped=skipped, target=target(settings.device)
        )
        row_counts = [rows >> i for i in range(rows.bit_length())]
        readings = (ReadingRows(n, plan_rows(n)[1].arena().nbytes) for n in row_counts)
        return fitting_reading(settings.memory, readings, "measure the loss").rows
