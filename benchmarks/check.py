"""`packtrain check` with PyTorch beside it: python -m benchmarks.check [OP …] [FLAG …]

python -m benchmarks.check --markdown docs/ops.md     writes the page of all ops
python -m benchmarks.check --help                     every flag; the others are those of `packtrain check`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.command_line import run_command
from benchmarks.ops_page import ops_page
from packtrain.cli import check
from packtrain.common.files import check_writable, write_text
from packtrain.common.options import option
from packtrain.devtools.check.check_cases import check_op, checkable_names


@dataclass(frozen=True)
class PeerCheckSettings(check.CheckSettings):
    """Check values and gradients of ops, also beside PyTorch's."""

    markdown: Path | None = option(
        None, "write a page about all ops to this file",
        conflicts={"ops": "{flag} writes a page about all ops; give no names"},
    )  # fmt: skip


def run(settings: PeerCheckSettings) -> int:
    """Check ops, print a table, and say what is beyond tolerance. Raises InputError, OSError."""
    check_writable(settings.markdown, "--markdown")
    check_function, ops_without_peer = check_op, list[str]()
    if find_spec("torch") is None:
        print("Nothing is compared with PyTorch, which is not installed.")
    else:
        from benchmarks.check_peers import check_op_and_peer  # loads PyTorch
        from benchmarks.torch_ops import PEERS

        check_function = check_op_and_peer
        ops_without_peer = [op for op in settings.ops or checkable_names() if op not in PEERS]
    results, seconds = check.run_checks(settings, check_function)
    exit_code = check.report(settings, results, seconds)
    if ops_without_peer:
        print(f"no peer in PyTorch: {', '.join(ops_without_peer)}")
    if settings.markdown:
        write_text(settings.markdown, ops_page(results))
    return exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("benchmarks.check", __doc__, PeerCheckSettings, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
