"""Short-lived processes: what they take is given back to the system whole when they end.

`ask` calls a function there, and this file is also what runs there. Children find this package wherever it was
imported from.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
PATIENCE = 2.0  # seconds without an answer that nobody needs to hear of


def variables() -> dict[str, str]:
    """The variables of a child that imports this package."""
    paths = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def ask(late: Callable[[], None], function: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
    """What the function of a module of this package returns, called in a child; `late` is called if that takes long.

    Raises RuntimeError, with the last line that the child said, if the function raises.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "packtrain.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables(),
    ) as child:
        try:
            request = pickle.dumps((function, given, named))
            try:
                answer, errors = child.communicate(request, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                late()
                answer, errors = child.communicate()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        said = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        name = function.__name__.replace("_", " ")
        raise RuntimeError(
            f"the child process for {name} failed, exit {child.returncode}: {said[0]}"
        )
    found: R = pickle.loads(answer)
    return found


def main() -> None:
    """The child: a call on standard input, pickled, its result on standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked ends this process
    function, given, named = pickle.load(sys.stdin.buffer)
    result: Any = function(*given, **named)
    sys.stdout.buffer.write(pickle.dumps(result))


if __name__ == "__main__":
    main()
