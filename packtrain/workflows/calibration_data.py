"""The data that merging and quantizing with data read, and how much memory is left for it."""

from collections.abc import Iterable
from pathlib import Path

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.events import Events
from packtrain.common.files import existing
from packtrain.common.memory import parse_size, private_nbytes, settle
from packtrain.conversion.calibration.calibration_inputs import Reading
from packtrain.data.conversations import Recipe, prepare
from packtrain.kernels.runtime import cache_root, writable
from packtrain.models.model_file import ModelFile
from packtrain.planner.budget import SPARE_NBYTES, mib
from packtrain.training.sample_batches import SampleBatches

CONTEXT = 2048  # most tokens of a row
LEAST = 1024  # tokens that say what a model is for


def calibration(
    data: Path,
    model: ModelFile,
    events: Events,
    field: str = "--calibrate",
    longest: int = CONTEXT,
    columns: str | None = None,
    memory: str | None = None,
) -> SampleBatches:
    """Rows of the data, the same ones each time it runs. Raises InputError for data that cannot be used."""
    existing(data, field)
    max_length = min(model.config.context_length, longest)
    recipe = Recipe(data, model.gguf.path, max_length, pairs=None, columns=columns)
    cache = writable(cache_root() / "tokens")
    samples = prepare(recipe, cache, events.message, memory).train
    return SampleBatches(samples, 1, max(2, int(samples.lengths.max()) - 1))


def enough(data: Path, rows: SampleBatches) -> SampleBatches:
    """The rows, if there are enough of them to quantize by. Raises InputError."""
    tokens = int((rows.samples.lengths - 1).sum())
    if tokens < LEAST:
        raise InputError(
            f"{data} has {tokens:,} tokens, too few to say what a model is for; {LEAST:,} are needed"
        )
    return rows


def within(memory: str | None, readings: Iterable[Reading], work: str) -> Reading:
    """The first of these that --memory has room for. Raises DoesNotFit, which names the least that would do.

    work  what is done with the data, in words
    """
    settle()
    used, nbytes = private_nbytes(), 0
    for reading in readings:
        nbytes = used + reading.nbytes
        if memory is None or nbytes <= parse_size(memory, "--memory"):
            return reading
    raise DoesNotFit(
        f"--memory: {memory} is too small to {work}; the smallest that would do is {mib(nbytes + SPARE_NBYTES)}"
    )
