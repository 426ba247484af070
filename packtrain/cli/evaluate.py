"""packtrain eval: perplexity on a text, or loss on conversations, of one model or of several side by side."""

from collections.abc import Iterator

from packtrain.cli.event_output import Shown
from packtrain.training.model_loss import Mean
from packtrain.workflows.evaluation import Evaluate, Measured, evaluate


def run(settings: Evaluate) -> int:
    """Print losses and perplexities. Raises InputError, and Interrupted on a signal."""
    found = evaluate(settings, Shown())
    for line in _table(found) if len(found.losses) > 1 else _single(found):
        print(line)
    print(found.method)
    if not found.same:
        print(
            "these models tokenize the data differently: their losses and perplexities cannot be compared"
        )
    return 0


def _single(found: Measured) -> Iterator[str]:
    loss = found.loss()
    yield f"loss {loss} nats per token, perplexity {loss.exponential}"


def _table(found: Measured) -> Iterator[str]:
    """A line for each model, with its difference from the first if they can be compared."""
    first, width = next(iter(found.losses.values())), max(map(len, found.losses))
    beside = "  difference of loss" if found.same else ""
    yield f"{'':<{width}}  {'loss':<20}  {'perplexity':<20}{beside}"
    for name, losses in found.losses.items():
        loss = found.loss(name)
        line = f"{name:<{width}}  {loss!s:<20}  {loss.exponential!s:<20}"
        compared = found.same and losses is not first
        yield f"{line}  {Mean.of(losses - first)}" if compared else line.rstrip()
