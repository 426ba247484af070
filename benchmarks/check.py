"""`packtrain check` with PyTorch beside it: python -m benchmarks.check [OP …] [FLAG …]

python -m benchmarks.check --markdown docs/ops.md     writes the page of all ops
python -m benchmarks.check --help                     every flag; they are those of `packtrain check`
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from packtrain.cli import check
from packtrain.common.errors import InputError
from packtrain.common.options import add_flags, from_flags
from packtrain.devtools.check.check_cases import checkable_names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check",
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
    )
    add_flags(parser, check.CheckSettings)
    try:
        settings = from_flags(check.CheckSettings, parser.parse_args(arguments))
        if find_spec("torch") is None:
            print("Nothing is compared with PyTorch, which is not installed.")
            return check.run(settings)
        from benchmarks.check_peers import check_op_and_peer  # loads PyTorch
        from benchmarks.torch_ops import PEERS

        exit_code = check.report(settings, check_op_and_peer)
        names = settings.ops or checkable_names()
        if names_without_peer := [name for name in names if name not in PEERS]:
            print(f"no peer in PyTorch: {', '.join(names_without_peer)}")
        return exit_code
    except InputError as error:
        print(f"benchmarks.check: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
