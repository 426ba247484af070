"""packtrain choose: the smallest file that keeps what tuning gained, with a table and a picture of all tried."""

from packtrain.cli import DONE, print_message
from packtrain.cli.event_output import TerminalEvents
from packtrain.common.files import check_writable, write_text
from packtrain.planner.plan_view.gains import gains_svg
from packtrain.workflows.quantization import MIB
from packtrain.workflows.type_choice import ChooseSettings, choose


def run(settings: ChooseSettings) -> int:
    """Write the file and print a line per try. Raises InputError, DoesNotFit, and Interrupted on a signal."""
    check_writable(settings.svg, "--svg")
    result = choose(settings, TerminalEvents())
    best = result.best
    if not result.enough:
        print_message(
            f"warning: no file keeps {result.keep:.0%} of the gain; the one that keeps most was written"
        )
    print(
        f"{result.output}: {best.name}, {best.how}, {best.nbytes / MIB:.2f} MiB, keeps {best.kept:.1%}"
    )
    if settings.svg is not None:
        points = [(t.how, t.name, t.nbytes, t.kept) for t in result.tries]
        write_text(settings.svg, gains_svg(points, settings.keep))
        print_message(f"the picture is {settings.svg}")
    return DONE
