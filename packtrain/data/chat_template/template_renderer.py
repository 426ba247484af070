"""The child process of ChatTemplate: reads a template, then messages, one JSON line each; answers with JSON lines.

This file runs by itself and imports nothing of packtrain, so that the child starts in a tenth of a second."""

import json
import mmap
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Windows has no limits
resource: Any = import_module("resource") if find_spec("resource") else None

MAX_TEXT_LENGTH = 4 << 20
MAX_REASON_LENGTH = 1000  # most characters of an error message for the parent


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` encloses the assistant's text.

    The variables generation_start and generation_end surround the text, so that a caller can mark it; empty by default.
    """

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = (jinja2.nodes.Name(f"generation_{at}", "load") for at in ("start", "end"))
        start, end = (jinja2.nodes.Output([mark]) for mark in marks)
        return [start, *body, end]


class TemplateRefusal(Exception):
    """The template itself rejected these messages."""


def raise_refusal(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Write JSON as Hugging Face's `tojson` does: without the HTML escapes of Jinja's own."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ConversationList(list[Any]):
    """A list of the conversation, which templates must not change."""


def wrap_lists(variables: dict[str, Any]) -> dict[str, Any]:
    """Replace all lists in the variables, however deep, by ConversationLists."""
    pending: list[Any] = [variables]
    for outer in pending:
        for key, value in outer.items() if isinstance(outer, dict) else enumerate(outer):
            if isinstance(value, list):
                outer[key] = value = ConversationList(value)
            if isinstance(value, list | dict):
                pending.append(value)
    return variables


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Sandbox in which templates may change lists of their own, as Kimi K2's do, but not those of the conversation."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_allowed = type(obj) is list and attr in ("append", "pop")
        return is_allowed or super().is_safe_attribute(obj, attr, value)


def compile_template(source: str) -> jinja2.Template:
    environment = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_refusal
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(source)


def rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render a template. Raises TemplateRefusal once the text has more than MAX_TEXT_LENGTH characters."""
    chunks, length = [], 0
    for chunk in template.generate(**variables):
        chunks.append(chunk)
        length += len(chunk)
        if length > MAX_TEXT_LENGTH:
            raise TemplateRefusal(f"its text is longer than {MAX_TEXT_LENGTH} characters")
    return "".join(chunks)


def answer(task: Callable[[], Any]) -> Any:
    """Run a task and return the reply to send: [result] or ["", error message]."""
    try:
        return [task()]
    except TemplateRefusal as error:
        return ["", str(error)[:MAX_REASON_LENGTH]]
    except MemoryError:
        return ["", "it needs too much memory"]
    except jinja2.TemplateSyntaxError as error:
        return ["", f"line {error.lineno}: {error.message}"[:MAX_REASON_LENGTH]]
    except Exception as error:  # an untrusted template can raise anything
        return ["", f"{type(error).__name__}: {error}"[:MAX_REASON_LENGTH]]


def address_space_nbytes() -> int:
    """Return the bytes of this process's address space, where the system tells, else 0."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0


def main() -> None:
    """Child's main program: answers JSON lines; the first argument is the bytes that rendering may take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent
    if resource:
        limit_nbytes = address_space_nbytes() + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit_nbytes, limit_nbytes))
    template: list[jinja2.Template] = []
    source = json.loads(sys.stdin.readline())
    reply = answer(lambda: template.append(compile_template(source)))
    for line in sys.stdin:
        if template:
            reply = answer(lambda line=line: rendered(template[0], wrap_lists(json.loads(line))))  # type: ignore[misc]
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
