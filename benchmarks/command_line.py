"""The command line of a benchmark whose flags are those of a settings class."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peer_process import PeerError
from packtrain.common.errors import InputError
from packtrain.common.options import add_flags, from_flags


def run_command(
    name: str, doc: str, settings_class: type, run: Callable[[Any], int], arguments: Sequence[str] | None
) -> int:  # fmt: skip
    """Call `run` with the settings that the arguments say; returns its exit code, 2 for bad input, 1 if a peer fails.

    name, doc  module of the benchmark, and its docstring, whose first line opens the help
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=doc.partition("\n")[0], allow_abbrev=False
    )
    add_flags(parser, settings_class)
    try:
        return run(from_flags(settings_class, parser.parse_args(arguments)))
    except (InputError, PeerError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
