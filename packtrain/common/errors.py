"""Errors meant for users, not programmers: one sentence, and an exit code.

Sentences name flags, as the command line shows them; callers from Python get keywords, see `in_keywords`.
"""

import codecs
import functools
import re
import traceback
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

codecs.lookup("unicode_escape")  # now, not inside a plan's memory
LONGEST = 1200  # characters of a message
AGAIN = re.compile(r"packtrain (train|finetune) -o .+? --resume")
# shell commands, which stay as they are, and flags
SHELL_OR_FLAG = re.compile(
    r"`[^`]*`|\b(?:hf|packtrain|llama-[a-z]+) [a-z]+ [^`;,]*|llama-imatrix converts: .*"
    r"|(?<![\w./-])--(?P<no>no-)?(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
)
T = TypeVar("T")


def printable(text: str) -> str:
    """The text with control characters and line ends escaped, so that it is safe to print to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def keyworded(text: str) -> str:
    """A sentence of the command line with keywords for flags: `--lora-rank` is lora_rank, `--no-pack` pack=False."""

    def keyword(match: re.Match[str]) -> str:
        name = (match["name"] or "").replace("-", "_")
        if match["no"]:
            return f"{name}=False"
        return "resume=True" if name == "resume" else name or match[0]

    return SHELL_OR_FLAG.sub(keyword, AGAIN.sub(r"the same call of \1 and resume=True", text))


def in_keywords(public: T) -> T:
    """Decorate a function, or all public methods of a class, so that errors name keywords; `flags` has the flags."""
    if isinstance(public, type):
        for name, member in [*vars(public).items()]:
            if isinstance(member, property):
                setattr(public, name, property(in_keywords(member.fget), doc=member.__doc__))
            elif isinstance(member, FunctionType) and (name[0] != "_" or name == "__init__"):
                setattr(public, name, in_keywords(member))
        return public
    function: Any = public

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except Foreseen as error:
            error.flags = error.flags or str(error)
            error.args = (keyworded(str(error)), *error.args[1:])
            raise

    return call  # type: ignore[return-value]


class Foreseen(Exception):
    """An error whose message says all that its user needs; `flags` is the message with flags, if it has keywords."""

    flags = ""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the line that called packtrain, and the message."""
        package = str(Path(__file__).parents[1])
        frames = traceback.extract_tb(self.__traceback__)
        calls = [frame for frame in frames if not frame.filename.startswith(package)]
        return [*traceback.format_list(calls[-1:]), f"{type(self).__name__}: {self}"]


class InputError(Foreseen, ValueError):
    """Bad input. The message names the file, the field and what is expected. Exit code 2.

    fact    what is wrong, and where
    advice  what is expected, or what to do; the message has both
    It may quote untrusted text of a file: control characters and line ends are escaped, and the middle of a very
    long message is cut out.
    """

    def __init__(self, fact: str, advice: str = "") -> None:
        self.fact, self.advice = printable(fact), advice
        text = printable(f"{fact}; {advice}" if advice else fact)
        super().__init__(
            text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-200:]}"
        )


class DoesNotFit(Foreseen, RuntimeError):
    """The plan needs more memory than --memory allows. Exit code 3."""


class DiskFull(Foreseen, RuntimeError):
    """A disk is full, or would be. Exit code 1."""


class RankLost(Foreseen, RuntimeError):
    """Another process of the run has ended, or cannot be reached. Exit code 1."""


class Interrupted(Foreseen, RuntimeError):
    """Stopped by a signal, after saving what there was to save. Exit code 130."""
