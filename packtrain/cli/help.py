"""packtrain help: show the help of a command, or a part of the guide: data, memory, resume, …"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packtrain.cli import DONE
from packtrain.cli.main import COMMANDS, main
from packtrain.common.errors import InputError
from packtrain.common.options import positional
from packtrain.common.text import did_you_mean

FOLDERS = [Path(__file__).parents[1] / "docs", Path(__file__).parents[2] / "docs"]  # wheel, clone
TOPICS = {  # topic: a heading of docs/guide.md, and a word, where only paragraphs with it are shown
    "base": ("Choose a base", ""), "data": ("Prepare the data", ""), "memory": ("Memory", ""),
    "resume": ("Train", "--resume"), "settings": ("Settings that matter", ""), "learning": ("It did not learn", ""),
    "serving": ("Serve it", ""),
}  # fmt: skip


@dataclass(frozen=True)
class HelpSettings:
    """A command or a topic of the guide."""

    topic: tuple[str, ...] = positional("a command, or data, memory, resume, …; none: all", ())


def run(settings: HelpSettings) -> int:
    """Print the help of a command, or a part of the guide; returns 0. Raises InputError for an unknown topic."""
    topic, commands = " ".join(settings.topic), {name.partition(" ")[0] for name in COMMANDS}
    if settings.topic[:1] and settings.topic[0] not in commands and topic not in TOPICS:
        names = [*TOPICS, *COMMANDS]
        suggestion = did_you_mean(topic, names) or f"; there are {', '.join(names)}"
        raise InputError(f"there is no topic {topic}{suggestion}")
    if topic in TOPICS:
        print(topic_text(topic), end="\n\n" if topic in commands else "\n")
    if topic not in TOPICS or topic in commands:
        with suppress(SystemExit):
            main([*settings.topic, "--help"])
    if not topic:
        print(f"\npacktrain help TOPIC: a command, or {', '.join(TOPICS)}")
    return DONE


def topic_text(topic: str) -> str:
    """Return the guide's paragraphs on a topic of TOPICS. Raises InputError if the guide is not installed."""
    path = next((f / "guide.md" for f in FOLDERS if (f / "guide.md").exists()), None)
    if path is None:
        raise InputError("docs/guide.md is not installed; a clone of the repository has it")
    (heading, word) = TOPICS[topic]
    pattern = rf"^## [\d. ]*{re.escape(heading)}\n(.*?)(?=^##? |\Z)"
    section = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    paragraphs = section[1].strip().split("\n\n") if section else []
    return "\n\n".join(p for p in paragraphs if word in p)
