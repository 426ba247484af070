"""The data that merging and quantizing with data read, and how much memory is left for it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from packtrain import kernels
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.events import Events
from packtrain.common.files import require_existing
from packtrain.common.mapped_file import limited_pages
from packtrain.common.memory import parse_size, private_nbytes, release_memory
from packtrain.common.options import flag
from packtrain.conversion.calibration.calibration_inputs import ReadingPlan
from packtrain.data.conversations import DatasetRecipe, prepare_dataset
from packtrain.kernels.runtime import kernel_cache
from packtrain.kernels.runtime.environment import cache_root, writable
from packtrain.models.model_file import ModelFile
from packtrain.planner.budget import mib
from packtrain.training.sample_batches import SampleBatches

CONTEXT = 2048  # most tokens of a row
MIN_TOKENS = 1024  # tokens that say what a model is for
SPARE_NBYTES = 4 << 20  # by how much equal processes differ


def calibration(
    settings: Any, model: ModelFile, events: Events, max_row_tokens: int = CONTEXT
) -> SampleBatches:
    """Return the data of --calibrate, or --data, in rows that are the same in each run; compiles missing kernels first.
    `settings` are of a command with --memory and --columns. Raises InputError, DoesNotFit."""
    name = "calibrate" if hasattr(settings, "calibrate") else "data"
    data = require_existing(getattr(settings, name), flag(name))
    memory = settings.memory or getattr(settings, "resident", None)
    compile_kernels(memory)
    max_length = min(model.config.context_length, max_row_tokens)
    recipe = DatasetRecipe(data, model.gguf.path, max_length, pairs=None, columns=settings.columns)
    cache_path = writable(cache_root() / "tokens")
    samples = prepare_dataset(recipe, cache_path, events.message, memory).train
    return SampleBatches(samples, 1, max(2, int(samples.lengths.max()) - 1))


def enough(data: Path, rows: SampleBatches) -> SampleBatches:
    """Return `rows`, read from `data`. Raises InputError if they have fewer tokens than quantizing by them needs."""
    num_tokens = int((rows.samples.lengths - 1).sum())
    if num_tokens < MIN_TOKENS:
        fact = f"{data} has {num_tokens:,} tokens, too few to say what a model is for"
        raise InputError(f"{fact}; {MIN_TOKENS:,} are needed")
    return rows


def compile_kernels(memory: str | None) -> None:
    """Compile missing kernels within `memory` (--memory), while this process is small. Raises DoesNotFit."""
    if memory is not None:
        limit = parse_size(memory, "--memory")
        kernels.prepare(kernel_cache.kernel_modules(), limit, private_nbytes())


class _SizedReading(Protocol):
    @property
    def nbytes(self) -> int: ...


Reading = TypeVar("Reading", bound=_SizedReading)


def fitting_reading(
    memory: str | None, readings: Iterable[Reading], work: str, flag_name: str = "--memory"
) -> Reading:
    """Return the first of `readings`, plans of reading data in parts, most memory first, that fits `memory`, such as
    2GiB; None: no limit. Raises DoesNotFit: `flag_name` is too small to `work` ("read the data"), and what would do."""
    release_memory()
    used_nbytes, needed_nbytes = private_nbytes(), 0
    for reading in readings:
        needed_nbytes = used_nbytes + reading.nbytes
        if memory is None or needed_nbytes <= parse_size(memory, "--memory"):
            return reading
    fact = f"{flag_name}: {memory} is too small to {work}"
    raise DoesNotFit(f"{fact}; the smallest that would do is {mib(needed_nbytes + SPARE_NBYTES)}")


@contextmanager
def limited_reading(
    settings: Any, readings: Iterable[ReadingPlan], work: str
) -> Iterator[ReadingPlan]:
    """Yield the first of `readings` that fits --memory, or --resident with the block's pages. Raises DoesNotFit."""
    if settings.resident is None:
        yield fitting_reading(settings.memory, readings, work)
        return
    with_pages = (replace(r, nbytes=r.nbytes + r.window_nbytes) for r in readings)
    reading = fitting_reading(settings.resident, with_pages, work, "--resident")
    room = parse_size(settings.resident, "--resident") - private_nbytes() - reading.nbytes
    with limited_pages(reading.window_nbytes + max(room, 0)):
        yield reading
