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
SCORE_WORDS = {"true": 1.0, "false": 0.0}


def parse_command(command_text: str) -> list[str]:
    """Split a command into words; no shell reads it. Raises InputError if there is no such program."""
    try:
        words = shlex.split(command_text)
    except ValueError as error:
        raise InputError(f"--judge {command_text}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise InputError(f"--judge {command_text}: there is no such command; give its path")
    return words


def judge_answers(command: Sequence[str], answers: Sequence[Mapping[str, str]]) -> list[float]:
    """Run the command and return its score of each answer. Raises InputError unless it prints a score for each."""
    name, timeout_seconds = f"--judge {shlex.join(command)}", SECONDS_PER_ANSWER * len(answers)
    request_text = "".join(f"{json.dumps(answer, ensure_ascii=False)}\n" for answer in answers)
    try:
        done = subprocess.run(
            command, input=request_text.encode(errors="replace"), capture_output=True, timeout=timeout_seconds,
            check=False,
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{name} has not ended after {timeout_seconds} s") from None
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
    return [_score(name, line_number, line.strip()) for line_number, line in enumerate(lines, 1)]


def _score(name: str, number: int, line: str) -> float:
    """Return the score in a line of the judge's output, its line `number`. Raises InputError."""
    try:
        score = SCORE_WORDS[line.casefold()] if line.casefold() in SCORE_WORDS else float(line)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        advice = "a score is a number, true or false"
        raise InputError(f"{name}: line {number} of its output is {line!r}", advice)
    return score
