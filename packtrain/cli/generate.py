"""packtrain generate: continue a prompt; text goes to standard output, seed and speed to standard error."""

from packtrain.cli import DONE, INTERRUPTED, print_message
from packtrain.cli.event_output import TerminalEvents, write
from packtrain.common.text import plural
from packtrain.workflows.text_generation import GenerateSettings, generate

END_REASONS = {
    "end": "an end token", "stop": "a stop text", "count": "the number of tokens", "context": "a full context",
    "loop": "a loop: the text repeats itself (--no-stop-loops goes on)", "interrupted": "an interruption",
}  # fmt: skip


def run(settings: GenerateSettings) -> int:
    """Generate text; returns 0, or 130 if a signal ended it. Raises InputError, DoesNotFit, Interrupted."""
    result = generate(settings, TerminalEvents())
    write("\n")
    print_message(f"prompt {result.reading}; generation {result.writing}")
    if result.drafted:
        accepted_share = result.accepted / result.drafted
        print_message(
            f"{plural(result.drafted, 'token')} guessed, {result.accepted:,} of them right ({accepted_share:.0%})"
        )
    for answer in (result, *result.others):
        label = f"seed {answer.seed}" if answer.score is None else f"score {answer.score:.4f}"
        print_message(f"{label}; ended by {END_REASONS[answer.ended]}")
    return INTERRUPTED if result.ended == "interrupted" else DONE
