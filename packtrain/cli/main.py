"""The command line: `packtrain COMMAND …`. Errors are one line on standard error.

Exit codes: 0 done, 1 failed (disk, non-finite), 2 bad input, 3 does not fit, 130 interrupted after saving.
"""

import argparse
import gc
import io
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from pkgutil import get_data
from typing import Any, NoReturn

from packtrain.cli import drop_output, print_message
from packtrain.common import errors
from packtrain.common.debug import flags as debug_flags
from packtrain.common.errors import DiskFull, DoesNotFit, InputError, Interrupted, printable
from packtrain.common.familiar_names import COMMAND_NAMES, advice, canonical_option
from packtrain.common.gc_control import gc_paused
from packtrain.common.options import (
    VARIABLE_PREFIX,
    add_flags,
    add_variables,
    from_flags,
    positionals,
    variables,
)
from packtrain.common.text import did_you_mean
from packtrain.common.version import __version__

# command -> its module in cli/, loaded when the command is given, the class of its settings, an example
COMMANDS = {
    "demo": ("demo", "DemoSettings", "demo"),
    "train": ("train", "TrainSettings", "train --data notes.txt --preset 15m -o notes.gguf"),
    "finetune": ("finetune", "TuneSettings", "finetune base.gguf --data chats.jsonl --memory 1GiB"),
    "plan train": ("plan", "PlanTrain", "plan train --data notes.txt --memory 1500MiB"),
    "plan finetune": ("plan", "PlanTune", "plan finetune base.gguf --data chats.jsonl"),
    "merge": ("merge", "MergeSettings", "merge base.gguf adapter.gguf -o merged.gguf"),
    "generate": ("generate", "GenerateSettings", "generate notes.gguf -p 'Dear diary' -n 200"),
    "chat": ("chat", "ChatSettings", "chat tuned.gguf"),
    "embed": ("embed", "EmbedOutputSettings", "embed base.gguf -p 'a text'"),
    "serve": ("serve", "ServeSettings", "serve base.gguf --lora adapter.gguf"),
    "runs": ("runs", "RunsSettings", "runs . --html runs.html"),
    "eval": ("evaluate", "EvaluateSettings", "eval base.gguf tuned.gguf --data test.csv"),
    "compare": ("compare", "CompareSettings", "compare base.gguf tuned.gguf --data test.csv"),
    "choose": ("choose", "ChooseSettings", "choose base.gguf adapter.gguf --data test.csv -o small.gguf"),
    "data": ("data", "DataSettings", "data chats.csv --model base.gguf --show 2"),
    "inspect": ("inspect", "InspectSettings", "inspect base.gguf --tensors"),
    "quantize": ("quantize", "QuantizeSettings", "quantize notes.gguf notes-q4.gguf Q4_K_M"),
    "imatrix": ("imatrix", "ImatrixSettings", "imatrix base.gguf --data text.txt"),
    "check": ("check", "CheckSettings", "check rms_norm"), "bench": ("bench", "BenchSettings", "bench"),
    "convert": ("convert", "ConvertSettings", "convert FOLDER -o model.gguf"),
    "compile": ("compile", "CompileSettings", "compile --memory 1GiB"),
    "doctor": ("doctor", "DoctorSettings", "doctor --json"), "help": ("help", "HelpSettings", "help memory"),
    "completion": ("completion", "CompletionSettings", "completion bash >> ~/.bashrc"),
}  # fmt: skip
RANK_COMMANDS = "train", "finetune"  # commands that several processes carry out together
# environment variables that are no flags
OTHER_VARIABLES = {"PACKTRAIN_CONFIG", "PACKTRAIN_CPU", "PACKTRAIN_DEBUG", "PACKTRAIN_PARENT"}
EXPECTED_ERRORS = InputError, DoesNotFit, DiskFull, errors.RankLost, Interrupted, ArithmeticError
BAD_INPUT, FAILED, NO_FIT, STOPPED = 2, 1, 3, 130
VARIABLES_HELP = "every option is an environment variable, too: PACKTRAIN_SEED=7 is --seed 7"
MAX_HELP_WIDTH = 100  # most columns of a help


def command() -> int:
    """Run `main` as the whole process; no garbage collection of modules and at the end, which would take 25 ms."""
    try:
        return main(owns_process=True)
    finally:
        gc.freeze()


def main(arguments: Sequence[str] | None = None, *, owns_process: bool = False) -> int:
    """Run one command and return its exit code; `owns_process`: the process does nothing else."""
    try:
        return _run_command(arguments, owns_process)
    except KeyboardInterrupt:  # also while the modules of the command are loaded
        print("packtrain: stopped at once, without saving", file=sys.stderr)
        return STOPPED


def _run_command(arguments: Sequence[str] | None, owns_process: bool) -> int:
    # more threads are never used, and take time to start
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _open_streams()
    with gc_paused(freeze=owns_process), _defer_ctrl_c():
        options = _parse_arguments(_build_parser(_requested_commands(arguments)), arguments)
        if options is None:
            return BAD_INPUT
        # not at the top, so that --version answers at once
        environment = import_module("packtrain.kernels.runtime.environment")
        module = _command_module(options.command)
        settings_class = settings_class_of(options.command)
    old_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    variable_by_flag = dict[str, str]()
    try:
        _warn_of_unread_variables(settings_class)
        variable_by_flag |= add_variables(options, settings_class)
        debug_flags(), environment.chosen_cpu()  # report what is misspelt before any work
        parsed_settings = from_flags(settings_class, _resume_options(options, settings_class))
        if options.command in RANK_COMMANDS and getattr(parsed_settings, "nproc", 1) > 1:
            distributed = import_module("packtrain.distributed")
            if not distributed.is_distributed():
                child_arguments = sys.argv[1:] if arguments is None else arguments
                return int(distributed.launch(child_arguments, parsed_settings.nproc))
        exit_code: int = module.run(parsed_settings)
        sys.stdout.flush()
        return exit_code
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        return FAILED
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        # the variable of a setting in place of its flag
        line = re.sub(r"^-[\w-]+", lambda m: variable_by_flag.get(m[0], m[0]), _error_line(error))
        print(f"packtrain: error: {line}", file=sys.stderr)
        exit_codes = {InputError: BAD_INPUT, DoesNotFit: NO_FIT, Interrupted: STOPPED}
        return next((code for kind, code in exit_codes.items() if isinstance(error, kind)), FAILED)
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        _flush_output()


def _warn_of_unread_variables(settings_class: type) -> None:
    """Name PACKTRAIN_ variables that no command reads. Ranks of --nproc leave that to the process that starts them."""
    names = {name for name in os.environ if name.startswith(VARIABLE_PREFIX)}
    unread_names = names - OTHER_VARIABLES - variables(settings_class).keys()
    if unread_names and "PACKTRAIN_PARENT" not in names:
        # only now load the other commands: it takes a second
        variables_of_commands = [variables(settings_class_of(name)) for name in COMMANDS]
        all_names = OTHER_VARIABLES.union(*variables_of_commands)
        stems = [name.removeprefix(VARIABLE_PREFIX) for name in all_names]
        for name in sorted(unread_names - all_names):
            suggestion = did_you_mean(name.removeprefix(VARIABLE_PREFIX), stems)
            suggestion = suggestion.replace("mean ", f"mean {VARIABLE_PREFIX}")
            print_message(f"{name} is set, but no command reads it{suggestion}")


@contextmanager
def _defer_ctrl_c() -> Iterator[None]:
    """Delay Ctrl-C to the end of a block that loads modules: NumPy would turn Ctrl-C into an error of its own."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    interrupts = list[int]()
    old_handler = signal.signal(signal.SIGINT, lambda signum, frame: interrupts.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old_handler)
    for signum in interrupts:
        signal.raise_signal(signum)


def _command_module(command: str) -> Any:
    return import_module(f"packtrain.cli.{COMMANDS[command][0]}")


def settings_class_of(command: str) -> Any:
    return getattr(_command_module(command), COMMANDS[command][1])


def _requested_commands(arguments: Sequence[str] | None) -> Collection[str]:
    """Return the commands that begin with the first word of the arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    command_word = next((argument for argument in words if not argument.startswith("-")), "")
    return [name for name in COMMANDS if name.partition(" ")[0] == command_word]


def command_summary(command: str) -> str:
    """Return a command's summary, the first line of its module, without loading the module: all would take a second."""
    try:
        source_text = (get_data("packtrain.cli", f"{COMMANDS[command][0]}.py") or b"").decode()
    except OSError:  # only its compiled file is there
        source_text = _command_module(command).__doc__ or ""
    return source_text.partition("\n")[0].partition(": ")[2].strip().strip('"')


def _parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> Any:
    """Parse the command line; without a command, prints the help and returns None."""
    options, unknown_arguments = parser.parse_known_args(arguments)
    if not hasattr(options, "command"):
        parser.print_help()
        return None
    if unknown_arguments:
        word, settings_class = unknown_arguments[0], settings_class_of(options.command)
        names = [name for name in ("data", "prompt") if hasattr(settings_class, name)]
        advice = f"; should it be --{names[0]} {shlex.quote(word)}?" if names else ""
        options.parser.error(f"unexpected argument {word}{advice}")
    return options


def _open_streams() -> None:
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


def _flush_output() -> None:
    """Flush standard output, and drop text that it cannot take: Python would complain at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            drop_output()


def _error_line(error: Exception) -> str:
    """Format an error in one line; an unexpected error also names its type."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, (str(error.filename or ""), error.strerror.lower())))
    if isinstance(error, DoesNotFit):  # may have several lines, see planner.budget
        return error.flags or str(error)
    text = " ".join((getattr(error, "flags", "") or str(error)).split())
    is_expected = isinstance(error, EXPECTED_ERRORS)
    return text if is_expected else f"{type(error).__name__}: {text} (--debug shows where)"


def _resume_options(options: argparse.Namespace, settings: Any) -> argparse.Namespace:
    """Return the options; for --resume without --config, set config to the folder's run.yaml. Raises InputError."""
    if getattr(options, "resume", False) and not options.config:
        run_folder = import_module("packtrain.training.run_settings").run_folder
        run_file = run_folder(Path(getattr(options, "output", settings.output))) / "run.yaml"
        if run_file.exists():
            options.config = run_file
        elif not hasattr(options, "data"):
            fact = f"--resume: {run_file.parent} holds no run to continue"
            raise InputError(f"{fact}; -o names its model")
    return options


class _OptionHelpFormatter(argparse.HelpFormatter):
    """Formats help in at most MAX_HELP_WIDTH columns, options with one value, as `-c, --ctx N` or `--[no-]pack`."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH)
        super().__init__(prog, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction):
            on = [name for name in names if not name.startswith("--no-")]
            names = [f"--[no-]{name[2:]}" if f"--no-{name[2:]}" in names else name for name in on]
        if not names or action.nargs == 0:
            return ", ".join(names) or super()._format_action_invocation(action)
        return f"{', '.join(names)} {self._format_args(action, action.dest.upper())}"


class _HelpAllAction(argparse.Action):
    """Prints every option by group."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        print(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


class _CommandParser(argparse.ArgumentParser):
    """Accepts only full option names, so that a new option never changes what an old script means. An error is one line
    and suggests the closest name. Where `common` names settings, --help shows these alone."""

    common: Sequence[str] = ()
    groups: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"allow_abbrev": False, "formatter_class": _OptionHelpFormatter}
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        if not self.common:
            return super().format_help()
        formatter, actions_by_name = self._get_formatter(), {a.dest: a for a in self._actions}
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        formatter.start_section(None)
        formatter.add_arguments(self._get_positional_actions())
        formatter.add_arguments([actions_by_name[name] for name in self.common])
        formatter.end_section()
        groups_text = f" by group: {', '.join(self.groups)}" if self.groups else ""
        formatter.add_text(f"--help-all shows every option{groups_text}")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        for i, word in enumerate(words.copy()):
            if word == "--" or (self._subparsers and not word.startswith("-")):
                break  # what follows are no options of this parser
            if re.match(r"--|-[^\d.-]", word):  # not a number
                words[i] = self._canonical_word(word)
        return super().parse_known_args(words, namespace)

    def _canonical_word(self, word: str) -> str:
        """Return a word with its option by this parser's name, also for names of other tools; exits if the option is
        unknown. -opt is never the value pt of -o."""
        (name, equals, value), names = word.partition("="), self._option_string_actions
        if option := canonical_option(name, names):
            return f"{option}{equals}{value}"
        has_value = name[:2] in names and not name[2:3].isalpha()  # -t4
        if " " not in name and not has_value:  # argparse would take -n for -ngl
            suggestion = advice(name, names) or did_you_mean(name, names) * bool(name[2:])
            self.error(f"there is no option {name}{suggestion}")
        return word

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            commands = [*action.choices]
            meant = did_you_mean(COMMAND_NAMES.get(value, value), commands)
            suggestion = meant or f"; there are {', '.join(commands)}"
            words = [*self.prog.split()[1:], value]
            self.error(f"there is no command {' '.join(words)}{suggestion}")

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument (?:\S+/)?", "", printable(message))
        self.exit(BAD_INPUT, f"packtrain: error: {text}; see {self.prog} --help\n")


def _build_parser(selected: Collection[str] = COMMANDS) -> argparse.ArgumentParser:
    """Build the parser of the `selected` commands; of others it knows only names and summaries."""
    parser = _CommandParser(
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
                commands.add_parser(name.partition(" ")[0], help=command_summary(name))
            continue
        summary, example = command_summary(name), "".join(COMMANDS[name][2:])
        texts: dict[str, Any] = {"help": summary, "description": summary}
        epilog = f"example: packtrain {example or name}; {VARIABLES_HELP}"
        if group not in groups:  # the task comes second, as in `packtrain plan train …`
            subparser = commands.add_parser(group, **texts)
            groups[group] = subparser.add_subparsers(metavar="COMMAND", required=True)
        subparser = groups[group].add_parser(subcommand, **texts, epilog=epilog)
        settings_class = settings_class_of(name)
        subparser.set_defaults(command=name, parser=subparser)
        subparser.common = getattr(settings_class, "COMMON", "").split()
        options: dict[str, Any] = {"dest": "help", "nargs": 0, "default": argparse.SUPPRESS}
        help_all = "show every option"
        subparser.add_argument("--help-all", action=_HelpAllAction, **options, help=help_all)
        subparser.add_argument("--debug", action="store_true", help="show where an error arose")
        subparser.groups = add_flags(subparser, settings_class)
        subparser.usage = " ".join([subparser.prog, "[options]", *positionals(settings_class)])
    return parser


if __name__ == "__main__":
    sys.exit(main())
