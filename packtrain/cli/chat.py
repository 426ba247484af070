"""packtrain chat: chat with a model, in a terminal or one message per line; /help lists its commands."""

import sys
from collections.abc import Iterator

from packtrain.cli import DONE, INTERRUPTED, print_message
from packtrain.cli.event_output import TerminalEvents, write
from packtrain.common.errors import InputError
from packtrain.workflows.chat_session import ChatSession, ChatSettings, ConversationTooLong

try:
    import readline  # gives input() line editing and history
except ImportError:  # not on every system
    readline = None  # type: ignore[assignment]

HELP = """/clear  start a new conversation
/regen  generate another answer to the last message
/exit   quit, as /quit, /bye and Ctrl-D do
Ctrl-C ends an answer; a second one quits"""
CLEAR_HINT = "; /clear starts a new conversation"
END_MESSAGES = {
    "context": f"the context of {{cells:,}} tokens is full{CLEAR_HINT}",
    "count": "the answer was cut at {max_tokens:,} tokens; -n sets another limit, -1 none",
    "loop": "the answer was stopped, since it repeats itself; /regen tries again (--no-stop-loops lets answers go on)",
}


def run(settings: ChatSettings) -> int:
    """Chat until the input ends; returns 0, or 130 if a signal ended it. Raises InputError, DoesNotFit."""
    talk, is_terminal = ChatSession(settings, TerminalEvents()), sys.stdin.isatty()
    if is_terminal:
        print_message(f"a context of {talk.cells:,} tokens; /help lists the commands")
    try:
        for line in _input_lines(is_terminal):
            if line in ("/exit", "/quit", "/bye"):
                break
            if not _handle_line(talk, line, is_terminal):
                return INTERRUPTED
    except KeyboardInterrupt:
        write("\n")
        return INTERRUPTED
    return DONE


def _input_lines(is_terminal: bool) -> Iterator[str]:
    """Yield lines that are typed (`is_terminal`) or piped in, without empty ones."""
    while True:
        try:
            if is_terminal:
                write("\n")
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text: {error}") from None
        if line:
            yield line


def _handle_line(talk: ChatSession, line: str, is_terminal: bool) -> bool:
    """Handle one line; returns False if a signal ended the answer and no terminal is there to continue."""
    text: str | None = line
    if line == "/clear":
        talk.clear()
        return True
    if line == "/regen":
        text = talk.retract()
    elif line.startswith("/"):
        print_message(
            HELP if line == "/help" else f"{line.split()[0]} is not a command; /help lists them"
        )
        return True
    if text is None:
        print_message("there is no message to answer yet")
        return True
    try:
        end_reason = talk.answer(text).ended
        write("\n")
    except InputError as error:
        if not is_terminal:
            raise
        print_message(
            f"{error.flags or error}{CLEAR_HINT if isinstance(error, ConversationTooLong) else ''}"
        )
        return True
    if end_reason in END_MESSAGES:
        print_message(END_MESSAGES[end_reason].format(cells=talk.cells, max_tokens=talk.max_tokens))
    return is_terminal or end_reason != "interrupted"
