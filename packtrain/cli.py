"""The command line: `packtrain COMMAND …`. Errors are one line on standard error; exit codes tell the kind.

0 done, 1 failed (disk, non-finite), 2 bad input, 3 does not fit, 130 interrupted after saving.
"""

import argparse
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from packtrain.commands import (
    chat,
    convert,
    data,
    demo,
    evaluate,
    finetune,
    generate,
    inspect,
    merge,
    plan,
    quantize,
    train,
)
from packtrain.errors import DoesNotFit, InputError, Interrupted
from packtrain.settings import add_flags, from_flags
from packtrain.train.settings import TrainSettings, TuneSettings, run_folder
from packtrain.version import __version__

COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "demo": (demo.DemoSettings, demo.run),
    "train": (TrainSettings, train.run),
    "finetune": (TuneSettings, finetune.run),
    "plan train": (plan.PlanTrain, plan.run),
    "plan finetune": (plan.PlanTune, plan.run),
    "merge": (merge.Merge, merge.run),
    "generate": (generate.Generate, generate.run),
    "chat": (chat.Chat, chat.run),
    "eval": (evaluate.Evaluate, evaluate.run),
    "data": (data.Data, data.run),
    "inspect": (inspect.Inspect, inspect.run),
    "quantize": (quantize.Quantize, quantize.run),
    "convert": (convert.Convert, convert.run),
}
INPUT, FAILED, NO_FIT, STOPPED = 2, 1, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _streams()
    parser = _parser()
    given = parser.parse_args(arguments)
    if not hasattr(given, "command"):
        parser.print_help()
        return INPUT
    settings, run = COMMANDS[given.command]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        return run(from_flags(settings, _resumed(given, settings)))
    except BrokenPipeError:  # the reader of a pipe has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if given.debug:
            traceback.print_exc()
        print(f"packtrain: error: {_line(error)}", file=sys.stderr)
        return _code(error)
    except KeyboardInterrupt:
        print("packtrain: stopped at once, without saving", file=sys.stderr)
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)


def _streams() -> None:
    """Standard streams that are there and take any character, whatever the shell has made of them."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  open to the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # in some locales Python lets through what is no UTF-8
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")


def _code(error: Exception) -> int:
    for kind, code in ((InputError, INPUT), (DoesNotFit, NO_FIT), (Interrupted, STOPPED)):
        if isinstance(error, kind):
            return code
    return FAILED


def _line(error: Exception) -> str:
    """What went wrong in one line; an error nobody foresaw says its kind, too."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, (str(error.filename or ""), error.strerror.lower())))
    if isinstance(error, DoesNotFit):  # as much as fits on a screen, see train.budget
        return str(error)
    text = " ".join(str(error).split())
    foreseen = isinstance(error, InputError | DoesNotFit | Interrupted | ArithmeticError)
    return text if foreseen else f"{type(error).__name__}: {text} (--debug shows where)"


def _resumed(given: argparse.Namespace, settings: Any) -> argparse.Namespace:
    """A run that goes on has the settings it began with, where no others are given."""
    if getattr(given, "resume", False) and not given.config:
        begun = run_folder(getattr(given, "output", settings.output)) / "run.yaml"
        given.config = begun if begun.exists() else None
    return given


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error is said."""

    def error(self, message: str) -> NoReturn:
        self.exit(INPUT, f"packtrain: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="packtrain",
        description="Train language models that live in GGUF files, in the memory you have.",
    )
    parser.add_argument("--version", action="version", version=f"packtrain {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    groups: dict[str, Any] = {"": commands}
    for name, (settings, run) in COMMANDS.items():
        about = (sys.modules[run.__module__].__doc__ or "").partition(": ")[2].splitlines()[0]
        group, _, own = name.rpartition(" ")
        if group not in groups:  # what is planned comes second, as in `packtrain plan train …`
            into = commands.add_parser(group, help=about, description=about)
            groups[group] = into.add_subparsers(metavar="COMMAND", required=True)
        into = groups[group].add_parser(own, help=about, description=about)
        into.set_defaults(command=name)
        into.add_argument("--debug", action="store_true", help="show where an error was raised")
        add_flags(into, settings)
    return parser


if __name__ == "__main__":
    sys.exit(main())
