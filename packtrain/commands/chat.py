"""packtrain chat: talk with a model, in a terminal or one message per line; /help lists its commands.

The conversation is rendered by the file's chat template each time, and only what is new goes through the model.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from packtrain.commands import say
from packtrain.commands.speak import CONTEXT, MOST_SEED, Speaking, cells, opened, ready, write
from packtrain.errors import InputError
from packtrain.generate import Limits, Reply
from packtrain.models.file import ModelFile
from packtrain.settings import option
from packtrain.stop import stop_on_signals
from packtrain.template import ChatTemplate, chosen, named, template_source
from packtrain.train.settings import CHAT_TEMPLATE

try:
    import readline  # input() then edits lines and knows those before
except ImportError:  # not on every system
    readline = None  # type: ignore[assignment]

DONE, INTERRUPTED = 0, 130
HELP = """/clear  start a new conversation
/regen  another answer to the last message
/exit   leave, as Ctrl-D does
Ctrl-C ends an answer; a second one leaves"""


@dataclass(frozen=True)
class Chat(Speaking):
    """Talk with a model."""

    system: str | None = option(None, "system message, before the conversation", flags="-sys")
    n_predict: int = option(-1, "tokens of an answer at most; -1: no limit", flags="-n", least=-1)
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE")


class Talk:
    """A conversation: its messages, and the model that answers."""

    def __init__(self, settings: Chat, model: ModelFile) -> None:
        self._settings, self._tokenizer = settings, model.tokenizer()
        metadata = model.gguf.metadata
        asked = settings.chat_template and named(settings.chat_template)
        taken = chosen(metadata, template_source(metadata), asked)
        if taken.why:
            say(taken.note)
        self._bos = self._text(self._tokenizer.bos)
        self._template = ChatTemplate(taken.source, self._bos, self._text(self._tokenizer.eos))
        self.cells = cells(settings, model.config.context_length, CONTEXT)
        self._generator = ready(settings, model, self.cells)
        self._seed, self._answers = settings.drawn_seed(), 0
        self.messages: list[dict[str, str]] = []
        self.clear()

    def _text(self, id: int | None) -> str:
        return "" if id is None else self._tokenizer.tokens[id].decode(errors="replace")

    def clear(self) -> None:
        """Begin anew, with nothing but the system message."""
        system = self._settings.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def retract(self) -> str | None:
        """Take the last message of the user back, with all after it."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def answer(self, text: str) -> str:
        """Write the model's answer to a message; gives why it ended. A message that cannot be taken is left out."""
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._ids()
            with stop_on_signals() as stopped:
                reply = self._reply(
                    ids, Limits(self._settings.n_predict, self._settings.stop, stopped)
                )
                parts = []
                for part in reply:
                    parts.append(part)
                    write(part)
        except InputError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(parts).strip()})
        write("\n")
        return reply.ended

    def _ids(self) -> list[int]:
        """The conversation up to where the model goes on, with one BOS at most."""
        text = self._template.render(self.messages, add_generation_prompt=True)
        begun = bool(self._bos) and text.startswith(self._bos)
        ids = self._tokenizer.encode(text, bos=False if begun else None, eos=False)
        if len(ids) >= self.cells:
            raise InputError(
                f"the conversation has {len(ids):,} tokens and the context {self.cells:,};"
                " /clear begins a new one, --ctx makes room for more"
            )
        return ids

    def _reply(self, ids: list[int], limits: Limits) -> Reply:
        seed = (self._seed + self._answers) % (MOST_SEED + 1)
        self._answers += 1
        return Reply(self._generator, self._tokenizer, ids, self._settings.sampling, seed, limits)


def run(settings: Chat) -> int:
    """Talk until the input ends; 130 when a signal ended it. Raises InputError, DoesNotFit."""
    settings.check()
    talk, terminal = Talk(settings, opened(settings)), sys.stdin.isatty()
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
        ended = talk.answer(text)
    except InputError as error:
        if not terminal:
            raise
        say(str(error))
        return True
    if ended == "context":
        say(f"the context of {talk.cells:,} tokens is full; /clear begins a new conversation")
    return terminal or ended != "interrupted"
