"""Short-lived child processes: all their memory goes back to the system when they end.

`run_in_child` calls a function in a child, whose main program this file is, too. Children import the parent's package.
"""

import gc
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
SELDOM = 50_000  # new objects between searches for garbage: a graph becomes garbage as a whole
DELAY_SECONDS = 2.0  # seconds to wait for an answer before `on_delay` is called


def variables() -> dict[str, str]:
    """Return environment variables with which a child process can import this package."""
    paths = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_in_child(
    on_delay: Callable[[], None], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call a function of this package in a child, return its result; calls `on_delay` if it takes DELAY_SECONDS. Raises
    RuntimeError with the last line of the child's stderr if the function raises."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "packtrain.common.child_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=variables(),
    ) as child:  # fmt: skip
        try:
            request = pickle.dumps((function, args, kwargs))
            try:
                response, stderr = child.communicate(request, timeout=DELAY_SECONDS)
            except subprocess.TimeoutExpired:
                on_delay()
                response, stderr = child.communicate()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        lines = stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        name = function.__name__.replace("_", " ")
        fact = f"the child process for {name} failed, exit {child.returncode}: {lines[0]}"
        raise RuntimeError(fact)
    result: R = pickle.loads(response)
    return result


def main() -> None:
    """Child's main program: reads a pickled call from standard input, writes the result to standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    function, args, kwargs = pickle.load(sys.stdin.buffer)
    gc.freeze()  # imported modules are never garbage
    gc.set_threshold(SELDOM)
    result: Any = function(*args, **kwargs)
    sys.stdout.buffer.write(pickle.dumps(result))


if __name__ == "__main__":
    main()
