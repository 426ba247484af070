"""Measure how much each input of a model's matrices matters on a text, as a file that quantizing reads."""

import time
from dataclasses import dataclass
from pathlib import Path

from packtrain.common.events import Events
from packtrain.common.files import check_output
from packtrain.common.option_rules import check_rules
from packtrain.common.options import BOTH_LIMITS, COLUMNS, PAGES, option, positional, required
from packtrain.conversion.calibration.calibration_inputs import reading_plans
from packtrain.conversion.calibration.importance_matrix import measure_importance, save_importance
from packtrain.data.text.text_streams import data_files
from packtrain.models.model_file import open_model
from packtrain.workflows.calibration_data import CONTEXT, calibration, enough, limited_reading

AT_ONCE = 1 << 13  # tokens whose activations are saved at a time
MIN_ROW_TOKENS = 64  # tokens that a row may have even if --tokens is less


@dataclass(frozen=True)
class ImatrixSettings:
    """Write an importance matrix of a model, for `quantize --imatrix` and llama-quantize."""

    model: Path = positional("the model, a GGUF file")
    data: Path = required("text or conversations like those the model is for")
    output: Path = required("the GGUF file to write", flags="-o")
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    tokens: int | None = option(None, "most tokens to read (default: all)", min_value=1)
    memory: str | None = option(None, "limit of private memory, such as 2GiB")
    resident: str | None = option(None, PAGES, metavar="SIZE", conflicts=BOTH_LIMITS)
    overwrite: bool = option(False, "replace the output if it exists")


@dataclass(frozen=True, slots=True)
class ImatrixResult:
    """A written importance matrix: its number of matrices, and of the tokens that were read."""

    output: Path
    matrices: int
    tokens: int
    seconds: float


def imatrix(settings: ImatrixSettings, events: Events) -> ImatrixResult:
    """Measure an importance matrix and write its file; returns its counts. Raises InputError, DoesNotFit."""
    check_rules(settings)
    start_time = time.perf_counter()
    model = open_model(settings.model)
    input_paths = [*model.gguf.paths, *data_files(settings.data)]
    check_output(settings.output, "-o", input_paths, settings.overwrite)
    longest = min(CONTEXT, max(settings.tokens or CONTEXT, MIN_ROW_TOKENS))  # a row is read whole
    data = enough(settings.data, calibration(settings, model, events, longest))
    block_types = {
        name: dtype for name, dtype in model.matrix_dtypes().items() if name.startswith("blk.")
    }
    candidates = reading_plans(model, block_types, data.time, data.windows, max_tokens=AT_ONCE)
    limited = limited_reading(settings, candidates, "read any of the data")
    with limited as reading, events.counting("reading", "block") as report_progress:
        batches = reading.all_batches(data, settings.tokens)
        starts = range(0, len(batches), reading.batches)
        groups = [batches[at : at + reading.batches] for at in starts]
        importance = measure_importance(model, groups, settings.data.name, report_progress)
    save_importance(settings.output, importance)
    num_tokens = int(max(matrix_counts.max() for matrix_counts in importance.counts.values()))
    seconds = time.perf_counter() - start_time
    return ImatrixResult(settings.output, len(importance.sums), num_tokens, seconds)
