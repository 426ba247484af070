"""Scores of answers by a command of the user: it reads a JSON object a line, and prints a score a line."""

import json
import math
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from packtrain.common.errors import InputError
from packtrain.common.text import plural

SECONDS_PER_ANSWER = 60  # a judge may be a large model
SCORES = {"true": 1.0, "false": 0.0}


def command_of(text: str) -> list[str]:
    """The words of a command, which no shell reads. Raises InputError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"--judge {text}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise InputError(f"--judge {text}: there is no such command; give its path")
    return words


def judged(command: Sequence[str], answers: Sequence[Mapping[str, str]]) -> list[float]:
    """The score of each answer. Raises InputError if the command fails, or prints anything else."""
    name, limit = f"--judge {shlex.join(command)}", SECONDS_PER_ANSWER * len(answers)
    request = "".join(f"{json.dumps(answer, ensure_ascii=False)}\n" for answer in answers)
    try:
        done = subprocess.run(
            command,
            input=request.encode(errors="replace"),
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{name} has not ended after {limit} s") from None
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InputError(": ".join([f"{name} failed with exit code {done.returncode}", *errors]))
    lines = done.stdout.decode(errors="replace").split("\n")
    lines = lines[:-1] if not lines[-1] else lines
    if len(lines) != len(answers):
        raise InputError(
            f"{name} printed {plural(len(lines), 'line')} for {plural(len(answers), 'answer')}",
            "it must print one score for each line that it reads",
        )
    return [_score(name, number, line.strip()) for number, line in enumerate(lines, 1)]


def _score(name: str, number: int, line: str) -> float:
    try:
        score = SCORES[line.casefold()] if line.casefold() in SCORES else float(line)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise InputError(
            f"{name}: line {number} of its output is {line!r}", "a score is a number, true or false"
        )
    return score
