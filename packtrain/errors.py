"""Errors meant for users, not programmers: one sentence, and an exit code."""

import codecs
import traceback
from pathlib import Path

codecs.lookup("unicode_escape")  # now, not inside a plan's memory
LONGEST = 1200  # characters of a message


def printable(text: str) -> str:
    """The text with control characters and line ends escaped, so that it is safe to print to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Foreseen(Exception):
    """An error whose message says all that its user needs."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the line that called packtrain, and the message."""
        package = str(Path(__file__).parent)
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
