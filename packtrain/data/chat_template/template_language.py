"""The parent's side of chat templates: finds a file's template, and renders it in a child process."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.chat_template.template_families import TEMPLATE_KEY

SECONDS, MEMORY_NBYTES = 10.0, 512 << 20


class TemplateError(InputError):
    """A chat template that cannot be used, or messages that it rejects."""


def template_source(metadata: Mapping[str, Any], tools: bool = False) -> str | None:
    """Return a GGUF file's chat template, with `tools` preferably the one for tools, or None. Raises TemplateError."""
    names = [TEMPLATE_KEY, f"{TEMPLATE_KEY}.default"]
    if tools:
        names.insert(0, f"{TEMPLATE_KEY}.tool_use")
    template = next((metadata[name] for name in names if name in metadata), None)
    if template is not None and not isinstance(template, str):
        raise TemplateError(f"{TEMPLATE_KEY} is not a text; it must be a Jinja template")
    return template


class ChatTemplate:
    """Renders a chat template with the texts of the BOS and EOS tokens.

    seconds  time limit of rendering, including the start of the child
    memory   bytes that rendering may take
    """

    def __init__(
        self, source: str, bos: str = "", eos: str = "", seconds: float = SECONDS, memory: int = MEMORY_NBYTES
    ) -> None:  # fmt: skip
        self._source, self._seconds, self._memory_nbytes = source, seconds, memory
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._child: subprocess.Popen[bytes] | None = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False, extra_variables: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Render a conversation; `extra_variables` are passed on. Raises TemplateError, whatever the template does."""
        now = f"{datetime.now():%b %d %Y}"  # firefunction's templates need both
        variables = {"datetime": now, "functions": json.dumps(tools or [], indent=4)}
        variables |= {**(extra_variables or {}), **self._tokens} | {
            "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        if self._child is None:
            self._child = _start_child(self._source, self._memory_nbytes)
            weakref.finalize(self, _stop_child, self._child)
        reply = self._exchange_lines(self._child, json.dumps(variables).encode())
        if len(reply) > 1:
            raise TemplateError(f"the chat template: {' '.join(reply[1].split())}")
        text: str = reply[0]
        return text

    def _exchange_lines(self, child: subprocess.Popen[bytes], line: bytes) -> list[str]:
        """Send a line to the child, return its JSON answer. Kills the child if that takes too long: TemplateError."""
        assert child.stdin and child.stdout
        timed_out = threading.Event()

        def kill_child() -> None:
            timed_out.set()
            child.kill()

        timer = threading.Timer(self._seconds, kill_child)
        timer.start()
        try:
            child.stdin.write(line + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if answer:
            reply: list[str] = json.loads(answer)
            return reply
        _stop_child(child)
        self._child = None
        too_long = f"took longer than {self._seconds:g} s"
        failure = too_long if timed_out.is_set() else "ended its process"
        raise TemplateError(f"the chat template {failure}")


def answer_variables(thinks: bool = True) -> dict[str, Any]:
    """Return a template's variables for an answer, llama.cpp's: whether the model thinks, and today's date."""
    return {"enable_thinking": thinks, "date_string": f"{datetime.now():%d %b %Y}"}


def _start_child(source: str, memory: int) -> subprocess.Popen[bytes]:
    # -P: do not import from the folder of the file
    child = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("template_renderer.py")), str(memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert child.stdin
    child.stdin.write(json.dumps(source).encode() + b"\n")
    return child


def _stop_child(child: subprocess.Popen[bytes]) -> None:
    """Kill the process and close its pipes."""
    with suppress(BrokenPipeError), child:
        child.kill()
