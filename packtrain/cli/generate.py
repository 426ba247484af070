"""packtrain generate: continue a prompt; text goes to standard output, seed and speed to standard error."""

from packtrain.cli import DONE, INTERRUPTED, say
from packtrain.cli.event_output import Shown, write
from packtrain.common.text import plural
from packtrain.workflows.text_generation import Generate, generate

ENDS = {
    "end": "an end token",
    "stop": "a stop text",
    "count": "the number of tokens",
    "context": "a full context",
    "loop": "a loop: the text repeats itself (--no-stop-loops goes on)",
    "interrupted": "an interruption",
}


def run(settings: Generate) -> int:
    """Generate; returns 130 if a signal ended it. Raises InputError, DoesNotFit."""
    done = generate(settings, Shown())
    write("\n")
    say(f"prompt {done.reading}; generation {done.writing}")
    if done.drafted:
        share = done.accepted / done.drafted
        say(
            f"{plural(done.drafted, 'token')} guessed, {done.accepted:,} of them right ({share:.0%})"
        )
    for answer in (done, *done.others):
        label = f"seed {answer.seed}" if answer.score is None else f"score {answer.score:.4f}"
        say(f"{label}; ended by {ENDS[answer.ended]}")
    return INTERRUPTED if done.ended == "interrupted" else DONE
