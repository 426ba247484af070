"""packtrain quantize: quantize the weights of a GGUF file, with the types that llama-quantize chooses."""

from importlib import import_module

from packtrain.cli import DONE, print_row
from packtrain.common.events import Events
from packtrain.common.text import plural
from packtrain.workflows.quantization import MIB, QuantizeSettings, quantize


class RowEvents(Events):
    """Prints rows only; `event_output.TerminalEvents`, for long tasks, takes time to load."""

    def row(self, text: str) -> None:
        print_row(text)


def run(settings: QuantizeSettings) -> int:
    """Write the file, print a line per tensor; returns 0. Raises InputError, for values only after writing began."""
    is_long_task = settings.calibrate is not None or settings.imatrix is not None
    events = RowEvents()
    if is_long_task:
        events = import_module("packtrain.cli.event_output").TerminalEvents()
    result = quantize(settings, events)
    print(
        f"{result.output}: {settings.type.upper()}, {plural(result.count, 'tensor')}, "
        f"{result.before_nbytes / MIB:.2f} -> {result.nbytes / MIB:.2f} MiB, "
        f"{8 * result.nbytes / max(result.weights, 1):.2f} bits a weight, {result.seconds:.1f} s"
    )
    return DONE
