"""Warming up a mixture of experts: its mapped weights are read before the first token, whichever experts are chosen."""

from packtrain.common.errors import Interrupted
from packtrain.common.events import Events
from packtrain.common.memory import total_nbytes
from packtrain.engine.memory_plan import size_text
from packtrain.models.model_file import ModelFile

EXPERT_SUFFIX = "_exps.weight"  # ending of the names of experts' matrices
PAGE_NBYTES, PART_NBYTES = 4096, 64 << 20  # bytes; a stop takes effect between parts
WARMUP_HELP = "read all experts of a mixture from the file before the first token"


def warm(model: ModelFile, events: Events) -> None:
    """Read every page of the experts' weights, if they fit into memory. Raises Interrupted if it is stopped."""
    expert_names = [name for name in model.gguf.entries if name.endswith(EXPERT_SUFFIX)]
    expert_arrays = [model.gguf.array(name) for name in expert_names]
    expert_nbytes, available_nbytes = sum(array.nbytes for array in expert_arrays), total_nbytes()
    if expert_nbytes > available_nbytes:
        events.message(
            f"the experts have {size_text(expert_nbytes)} and the memory"
            f" {size_text(available_nbytes)}; they are read as they are needed"
        )
        return
    with (
        events.counting("reading experts", "matrix") as report_progress,
        events.stopping() as stopped,
    ):
        for num_done, array in enumerate(expert_arrays, 1):
            flat_bytes = array.reshape(-1).view("u1")
            for part_start in range(0, flat_bytes.size, PART_NBYTES):
                if stopped():
                    raise Interrupted("stopped while the experts were read")
                flat_bytes[part_start : part_start + PART_NBYTES : PAGE_NBYTES].max()
            report_progress(num_done, len(expert_arrays))
