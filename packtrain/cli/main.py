"""The command line: `packtrain COMMAND …`. Errors are one line on standard error.

Exit codes: 0 done, 1 failed (disk, non-finite), 2 bad input, 3 does not fit, 130 interrupted after saving.
"""

import argparse
import gc
import io
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from pkgutil import get_data
from typing import Any, NoReturn

from packtrain.cli import drop_output
from packtrain.common.debug import flags as debug_flags
from packtrain.common.errors import (
    DiskFull,
    DoesNotFit,
    InputError,
    Interrupted,
    RankLost,
    printable,
)
from packtrain.common.gc_control import not_collecting
from packtrain.common.options import add_flags, from_flags, positionals
from packtrain.common.text import did_you_mean
from packtrain.common.version import __version__

# command -> its module in cli/, loaded when the command is given, and the class of its settings
COMMANDS = {
    "demo": ("demo", "DemoSettings"),
    "train": ("train", "TrainSettings"),
    "finetune": ("finetune", "TuneSettings"),
    "plan train": ("plan", "PlanTrain"),
    "plan finetune": ("plan", "PlanTune"),
    "merge": ("merge", "Merge"),
    "generate": ("generate", "Generate"),
    "chat": ("chat", "Chat"),
    "embed": ("embed", "Embedding"),
    "serve": ("serve", "Serve"),
    "runs": ("runs", "Runs"),
    "eval": ("evaluate", "Evaluate"),
    "compare": ("compare", "Compare"),
    "choose": ("choose", "Choose"),
    "data": ("data", "Data"),
    "inspect": ("inspect", "Inspect"),
    "quantize": ("quantize", "Quantize"),
    "imatrix": ("imatrix", "Imatrix"),
    "check": ("check", "Check"),
    "bench": ("bench", "Bench"),
    "convert": ("convert", "Convert"),
    "compile": ("compile", "Compile"),
}
RANKS = "train", "finetune"  # commands that several processes carry out together
FORESEEN = InputError, DoesNotFit, DiskFull, RankLost, Interrupted, ArithmeticError
INPUT, FAILED, NO_FIT, STOPPED = 2, 1, 3, 130
WIDTH = 100  # most columns of a help


def command() -> int:
    """`main` for a process that ends with it: no garbage is looked for in modules and at the end, which takes 25 ms."""
    try:
        return main(own=True)
    finally:
        gc.freeze()


def main(arguments: Sequence[str] | None = None, *, own: bool = False) -> int:
    """Run one command and return its exit code. own: the process does nothing else."""
    try:
        return _ran(arguments, own)
    except KeyboardInterrupt:  # also while the modules of the command are loaded
        print("packtrain: stopped at once, without saving", file=sys.stderr)
        return STOPPED


def _ran(arguments: Sequence[str] | None, is_process: bool) -> int:
    # more are never used, and take time to start
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _streams()
    with not_collecting(freeze=is_process), _ctrl_c_waits():
        options = _given(_parser(_asked(arguments)), arguments)
        if options is None:
            return INPUT
        # not at the top: a version is there at once
        runtime = import_module("packtrain.kernels.runtime")
        module, settings = _module(options.command), _settings(options.command)
    old_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        debug_flags(), runtime.chosen_cpu()  # report what is misspelt before any work
        requested = from_flags(settings, _resumed(options, settings))
        if options.command in RANKS and getattr(requested, "nproc", 1) > 1:
            ranks = import_module("packtrain.distributed")
            if not ranks.several():
                started = sys.argv[1:] if arguments is None else arguments
                return int(ranks.launch(started, requested.nproc))
        code: int = module.run(requested)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        return FAILED
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        print(f"packtrain: error: {_line(error)}", file=sys.stderr)
        return _code(error)
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        _flush()


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C counts at the end of the block, in which modules load: NumPy would turn it into an error of its own."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    interrupts = list[int]()
    old_handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
    for number in interrupts:
        signal.raise_signal(number)


def _module(command: str) -> Any:
    return import_module(f"packtrain.cli.{COMMANDS[command][0]}")


def _settings(command: str) -> Any:
    return getattr(_module(command), COMMANDS[command][1])


def _asked(arguments: Sequence[str] | None) -> Collection[str]:
    """The commands that begin with the first word."""
    texts = sys.argv[1:] if arguments is None else arguments
    word = next((text for text in texts if not text.startswith("-")), "")
    return [name for name in COMMANDS if name.partition(" ")[0] == word]


def _about(command: str) -> str:
    """What a command does, from the first line of its module, which is not loaded: all would take a second."""
    try:
        text = (get_data("packtrain.cli", f"{COMMANDS[command][0]}.py") or b"").decode()
    except OSError:  # only its compiled file is there
        text = _module(command).__doc__ or ""
    return text.partition("\n")[0].partition(": ")[2].strip().strip('"')


def _given(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> Any:
    """The parsed command line; without a command, prints the help and returns None."""
    options, left = parser.parse_known_args(arguments)
    if not hasattr(options, "command"):
        if left:
            parser.error(f"there is no option {left[0]}")
        parser.print_help()
        return None
    if left:
        problem = (
            f"there is no option {left[0]}"
            if left[0].startswith("-")
            else f"unexpected argument {left[0]}"
        )
        options.parser.error(problem)
    return options


def _streams() -> None:
    """Make sure the standard streams are open and accept any character, whatever the shell did to them."""
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115  first: it takes the free number, which is its own
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  open to the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # in some locales Python accepts invalid UTF-8
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")


def _flush() -> None:
    """Drop what standard output cannot take; otherwise Python complains at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            drop_output()


def _code(error: Exception) -> int:
    for kind, code in ((InputError, INPUT), (DoesNotFit, NO_FIT), (Interrupted, STOPPED)):
        if isinstance(error, kind):
            return code
    return FAILED


def _line(error: Exception) -> str:
    """The error in one line; an unexpected one also names its type."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, (str(error.filename or ""), error.strerror.lower())))
    if isinstance(error, DoesNotFit):  # may have several lines, see planner.budget
        return error.flags or str(error)
    text = " ".join((getattr(error, "flags", "") or str(error)).split())
    foreseen = isinstance(error, FORESEEN)
    return text if foreseen else f"{type(error).__name__}: {text} (--debug shows where)"


def _resumed(options: argparse.Namespace, settings: Any) -> argparse.Namespace:
    """Settings of a resumed run: those it began with, unless new ones are given."""
    if getattr(options, "resume", False) and not options.config:
        run_folder = import_module("packtrain.training.train_settings").run_folder
        run_file = run_folder(Path(getattr(options, "output", settings.output))) / "run.yaml"
        options.config = run_file if run_file.exists() else None
    return options


class _Lines(argparse.HelpFormatter):
    """Lines of at most WIDTH columns, each option with its value once, as `-c, --ctx N` or `--[no-]pack`."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDTH)
        super().__init__(prog, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction):
            on = [name for name in names if not name.startswith("--no-")]
            names = [f"--[no-]{name[2:]}" if f"--no-{name[2:]}" in names else name for name in on]
        if not names or action.nargs == 0:
            return ", ".join(names) or super()._format_action_invocation(action)
        return f"{', '.join(names)} {self._format_args(action, action.dest.upper())}"


class _HelpAll(argparse.Action):
    """Prints every option by group."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Accepts only full option names, so that a new option never changes what an old script means.

    An error is one line and suggests the closest name. Where `common` names settings, --help shows these alone.
    """

    common: Sequence[str] = ()
    groups: Sequence[str] = ()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **(named | {"allow_abbrev": False, "formatter_class": _Lines}))

    def format_help(self) -> str:
        if not self.common:
            return super().format_help()
        lines, options = self._get_formatter(), {a.dest: a for a in self._actions}
        lines.add_usage(self.usage, self._actions, [])
        lines.add_text(self.description)
        lines.start_section(None)
        lines.add_arguments(self._get_positional_actions())
        lines.add_arguments([options[name] for name in self.common])
        lines.end_section()
        groups = f" by group: {', '.join(self.groups)}" if self.groups else ""
        lines.add_text(f"--help-all shows every option{groups}")
        return lines.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        texts = sys.argv[1:] if args is None else list(args)
        for text in takewhile(self._is_own, texts):
            name, option_names = text.partition("=")[0], self._option_string_actions
            if name.startswith("--") and " " not in name and name not in option_names:
                self.error(f"there is no option {name}{did_you_mean(name, option_names)}")
        return super().parse_known_args(texts, namespace)

    def _is_own(self, text: str) -> bool:
        """Whether an argument may be an option of this parser, not of a subcommand's."""
        return text != "--" and (self._subparsers is None or text.startswith("-"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            commands = [*action.choices]
            suggestion = did_you_mean(value, commands) or f"; there are {', '.join(commands)}"
            self.error(
                f"there is no command {self.prog.partition(' ')[2]} {value}{suggestion}".replace(
                    "  ", " "
                )
            )

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument (?:\S+/)?", "", printable(message))
        self.exit(INPUT, f"packtrain: error: {text}; see {self.prog} --help\n")


def _parser(selected: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of these commands; of others it knows the names, and what they do."""
    parser = _Parser(
        prog="packtrain",
        description="Train language models that live in GGUF files, in the memory you have.",
    )
    parser.add_argument("--version", action="version", version=f"packtrain {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    groups: dict[str, Any] = {"": commands}
    for name in COMMANDS:
        group, _, subcommand = name.rpartition(" ")
        if name not in selected:
            if name.partition(" ")[0] not in commands.choices:
                commands.add_parser(name.partition(" ")[0], help=_about(name))
            continue
        about = _about(name)
        if group not in groups:  # the task comes second, as in `packtrain plan train …`
            subparser = commands.add_parser(group, help=about, description=about)
            groups[group] = subparser.add_subparsers(metavar="COMMAND", required=True)
        subparser = groups[group].add_parser(subcommand, help=about, description=about)
        settings = _settings(name)
        subparser.set_defaults(command=name, parser=subparser)
        subparser.common = getattr(settings, "COMMON", "").split()
        silent = {"dest": "help", "nargs": 0, "default": argparse.SUPPRESS}
        subparser.add_argument("--help-all", action=_HelpAll, **silent, help="show every option")
        subparser.add_argument(
            "--debug", action="store_true", help="show where an error was raised"
        )
        subparser.groups = add_flags(subparser, settings)
        subparser.usage = " ".join([subparser.prog, "[options]", *positionals(settings)])
    return parser


if __name__ == "__main__":
    sys.exit(main())
