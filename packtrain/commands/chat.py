"""packtrain chat: talk with a model, in a terminal or one message per line; /help lists its commands."""

import sys
from collections.abc import Iterator

from packtrain.commands import DONE, INTERRUPTED, say
from packtrain.commands.shown import Shown, write
from packtrain.errors import InputError
from packtrain.tasks.chat import Chat, Talk

try:
    import readline  # input() then edits lines and knows those before
except ImportError:  # not on every system
    readline = None  # type: ignore[assignment]

HELP = """/clear  start a new conversation
/regen  another answer to the last message
/exit   leave, as Ctrl-D does
Ctrl-C ends an answer; a second one leaves"""


def run(settings: Chat) -> int:
    """Talk until the input ends; 130 when a signal ended it. Raises InputError, DoesNotFit."""
    talk, terminal = Talk(settings, Shown()), sys.stdin.isatty()
    if terminal:
        say(f"a context of {talk.cells:,} tokens; /help says more")
    try:
        for line in _lines(terminal):
            if line == "/exit":
                break
            if not _take(talk, line, terminal):
                return INTERRUPTED
    except KeyboardInterrupt:
        write("\n")
        return INTERRUPTED
    return DONE


def _lines(terminal: bool) -> Iterator[str]:
    """What is typed, or the lines of a script, without those that are empty."""
    while True:
        try:
            if terminal:
                write("\n")
            line = input("> " if terminal else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text: {error}") from None
        if line:
            yield line


def _take(talk: Talk, line: str, terminal: bool) -> bool:
    """Do what a line says; False if a signal ended it and nobody is there to go on."""
    text: str | None = line
    if line == "/clear":
        talk.clear()
        return True
    if line == "/regen":
        text = talk.retract()
    elif line.startswith("/"):
        say(HELP if line == "/help" else f"{line.split()[0]} is not a command; /help lists them")
        return True
    if text is None:
        say("there is no message to answer yet")
        return True
    try:
        ended = talk.answer(text).ended
        write("\n")
    except InputError as error:
        if not terminal:
            raise
        say(str(error))
        return True
    if ended == "context":
        say(f"the context of {talk.cells:,} tokens is full; /clear begins a new conversation")
    return terminal or ended != "interrupted"
