"""Warming up a mixture of experts: its mapped weights are read before the first token, whichever experts are chosen."""

from packtrain.common.errors import Interrupted
from packtrain.common.events import Events
from packtrain.common.memory import total_nbytes
from packtrain.engine.memory_plan import size_text
from packtrain.models.model_file import ModelFile

EXPERTS = "_exps.weight"  # how names of their matrices end
PAGE, PART = 4096, 64 << 20  # bytes; looks between parts whether it is stopped
WARMUP = "read all experts of a mixture from the file before the first token"


def warm(model: ModelFile, events: Events) -> None:
    """Read every page of the experts, if they fit into memory. Raises Interrupted if it is stopped."""
    names = [name for name in model.gguf.entries if name.endswith(EXPERTS)]
    arrays = [model.gguf.array(name) for name in names]
    nbytes, available_nbytes = sum(array.nbytes for array in arrays), total_nbytes()
    if nbytes > available_nbytes:
        events.message(
            f"the experts have {size_text(nbytes)} and the memory"
            f" {size_text(available_nbytes)}; they are read as they are needed"
        )
        return
    with (
        events.counting("reading experts", "matrix") as report_progress,
        events.stopping() as stopped,
    ):
        for done, array in enumerate(arrays, 1):
            flat = array.reshape(-1).view("u1")
            for start in range(0, flat.size, PART):
                if stopped():
                    raise Interrupted("stopped while the experts were read")
                flat[start : start + PART : PAGE].max()
            report_progress(done, len(arrays))
