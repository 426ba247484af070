"""packtrain quantize: quantize the weights of a GGUF file, with the types that llama-quantize chooses."""

from importlib import import_module

from packtrain.cli import DONE, print_row
from packtrain.common.events import Events
from packtrain.common.text import plural
from packtrain.workflows.quantization import MIB, Quantize, quantize


class Printed(Events):
    """Prints the rows. `event_output.Shown` does all that a long task needs, which takes time to load."""

    def row(self, text: str) -> None:
        print_row(text)


def run(settings: Quantize) -> int:
    """Write the file and print a line per tensor. Raises InputError, for values only after writing began."""
    long = settings.calibrate is not None or settings.imatrix is not None
    events = import_module("packtrain.cli.event_output").Shown() if long else Printed()
    done = quantize(settings, events)
    print(
        f"{done.output}: {settings.type.upper()}, {plural(done.count, 'tensor')}, "
        f"{done.before_nbytes / MIB:.2f} -> {done.nbytes / MIB:.2f} MiB, "
        f"{8 * done.nbytes / max(done.weights, 1):.2f} bits a weight, {done.seconds:.1f} s"
    )
    return DONE
