"""packtrain choose: the smallest file that keeps what tuning gained, with a table and a picture of all tried."""

from packtrain.cli import DONE, say
from packtrain.cli.event_output import Shown
from packtrain.common.files import check_writable, write_text
from packtrain.planner.plan_view.gains import gains
from packtrain.workflows.quantization import MIB
from packtrain.workflows.type_choice import Choose, choose


def run(settings: Choose) -> int:
    """Write the file and print a line per try. Raises InputError, DoesNotFit, and Interrupted on a signal."""
    if settings.svg is not None:
        check_writable(settings.svg, "--svg")
    found = choose(settings, Shown())
    best = found.best
    if not found.enough:
        say(
            f"warning: no file keeps {found.keep:.0%} of the gain; the one that keeps most was written"
        )
    print(
        f"{found.output}: {best.name}, {best.how}, {best.nbytes / MIB:.2f} MiB, keeps {best.kept:.1%}"
    )
    if settings.svg is not None:
        points = [(one.how, one.name, one.nbytes, one.kept) for one in found.tries]
        write_text(settings.svg, gains(points, settings.keep))
        say(f"the picture is {settings.svg}")
    return DONE
