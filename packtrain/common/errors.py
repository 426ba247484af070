"""Errors meant for users, not programmers: one sentence, and an exit code.

Sentences name flags, as the command line shows them; callers from Python get keywords, see `with_keywords`.
"""

import codecs
import functools
import re
import traceback
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

codecs.lookup("unicode_escape")  # load it now, not inside a plan's memory
LONGEST = 1200  # characters of a message
RESUME_COMMAND = re.compile(r"packtrain (train|finetune) -o .+? --resume")
# shell commands, which stay as they are, and flags
SHELL_OR_FLAG = re.compile(
    r"`[^`]*`|\b(?:hf|packtrain|llama-[a-z]+) [a-z]+ [^`;,]*|llama-imatrix converts: .*"
    r"|(?<![\w./-])--(?P<no>no-)?(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
)
T = TypeVar("T")


def printable(text: str) -> str:
    """Return the text with control characters and line ends escaped, so that it is safe to print to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def with_keywords(text: str) -> str:
    """Return a message with keywords in place of flags: `--lora-rank` becomes lora_rank, `--no-pack` pack=False."""

    def to_keyword(match: re.Match[str]) -> str:
        name = (match["name"] or "").replace("-", "_")
        if match["no"]:
            return f"{name}=False"
        return "resume=True" if name == "resume" else name or match[0]

    return SHELL_OR_FLAG.sub(
        to_keyword, RESUME_COMMAND.sub(r"the same call of \1 and resume=True", text)
    )


def name_keywords(target: T) -> T:
    """Decorate a function, or a class's public methods, for use from Python: errors name keywords, not flags."""
    if isinstance(target, type):
        for name, member in [*vars(target).items()]:
            if isinstance(member, property):
                setattr(target, name, property(name_keywords(member.fget), doc=member.__doc__))
            elif isinstance(member, FunctionType) and (name[0] != "_" or name == "__init__"):
                setattr(target, name, name_keywords(member))
        return target
    function: Any = target

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            error.flags = error.flags or str(error)
            error.args = (with_keywords(str(error)), *error.args[1:])
            raise

    return call  # type: ignore[return-value]


class UserError(Exception):
    """An error whose message is all that users need; `flags`: the message with flags, where it names keywords."""

    flags = ""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints: the line that called packtrain, and the message."""
        package = str(Path(__file__).parents[1])
        frames = traceback.extract_tb(self.__traceback__)
        caller_frames = [frame for frame in frames if not frame.filename.startswith(package)]
        return [*traceback.format_list(caller_frames[-1:]), f"{type(self).__name__}: {self}"]


class InputError(UserError, ValueError):
    """Bad input. The message names the file, the field and what is expected. Exit code 2.

    fact    what is wrong, and where
    advice  what is expected, or what to do; the message joins both
    The message may quote untrusted text of a file: control characters and line ends are escaped, and the middle of a
    very long message is cut out.
    """

    def __init__(self, fact: str, advice: str = "") -> None:
        self.fact, self.advice = printable(fact), advice
        message = printable(f"{fact}; {advice}" if advice else fact)
        super().__init__(
            message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} … {message[-200:]}"
        )


class DoesNotFit(UserError, RuntimeError):
    """The plan needs more memory than --memory allows. Exit code 3."""


class DiskFull(UserError, RuntimeError):
    """A disk is full, or would become full. Exit code 1."""


class RankLost(UserError, RuntimeError):
    """Another process of the run has ended, or cannot be reached. Exit code 1."""


class Interrupted(UserError, RuntimeError):
    """A signal stopped the task, which first saved its progress. Exit code 130."""
