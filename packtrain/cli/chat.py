"""packtrain chat: chat with a model, in a terminal or one message per line; /help lists its commands."""

import sys
from collections.abc import Iterator

from packtrain.cli import DONE, INTERRUPTED, say
from packtrain.cli.event_output import Shown, write
from packtrain.common.errors import InputError
from packtrain.workflows.chat_session import Chat, Talk, TooLong

try:
    import readline  # gives input() line editing and history
except ImportError:  # not on every system
    readline = None  # type: ignore[assignment]

HELP = """/clear  start a new conversation
/regen  generate another answer to the last message
/exit   quit, as Ctrl-D does
Ctrl-C ends an answer; a second one quits"""
CLEAR = "; /clear starts a new conversation"
ENDS = {
    "context": f"the context of {{cells:,}} tokens is full{CLEAR}",
    "count": "the answer was cut at {most:,} tokens; -n sets another limit, -1 none",
    "loop": "the answer was stopped, since it repeats itself; /regen tries again (--no-stop-loops lets answers go on)",
}


def run(settings: Chat) -> int:
    """Chat until the input ends; returns 130 if a signal ended it. Raises InputError, DoesNotFit."""
    talk, terminal = Talk(settings, Shown()), sys.stdin.isatty()
    if terminal:
        say(f"a context of {talk.cells:,} tokens; /help lists the commands")
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
    """Lines that are typed or piped in, without empty ones."""
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
    """Handle one line; False if a signal ended the answer and no terminal is there to continue."""
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
        end_reason = talk.answer(text).ended
        write("\n")
    except InputError as error:
        if not terminal:
            raise
        say(f"{error.flags or error}{CLEAR if isinstance(error, TooLong) else ''}")
        return True
    if end_reason in ENDS:
        say(ENDS[end_reason].format(cells=talk.cells, most=talk.max_tokens))
    return terminal or end_reason != "interrupted"
