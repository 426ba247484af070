"""packtrain eval: perplexity on a text, or loss on conversations, of one model or of several side by side."""

from collections.abc import Iterator

from packtrain.cli.event_output import TerminalEvents
from packtrain.training.model_loss import MeanEstimate
from packtrain.workflows.eval_data import EvaluateSettings
from packtrain.workflows.evaluation import EvalResult, evaluate
from packtrain.workflows.kl_divergence import Divergence


def run(settings: EvaluateSettings) -> int:
    """Print losses and perplexities, divergences or accuracies; returns 0. Raises InputError, Interrupted."""
    result = evaluate(settings, TerminalEvents())
    if result.choices or len(result.losses) > 1:
        print(*(_choice_lines if result.choices else _table_lines)(result), sep="\n")
    else:
        print(f"loss {result.loss()} nats per token, perplexity {result.loss().exponential}")
    for name, divergence in result.divergences.items():
        for line in _divergence_lines(divergence):
            print(line if len(result.divergences) == 1 else f"{name}: {line}")
    print(result.method)
    if not result.same and not result.choices:
        print("these models tokenize the data differently: losses and perplexities do not compare")
    return 0


def _choice_lines(result: EvalResult) -> Iterator[str]:
    for name, scores in result.choices.items():
        label = f"{name}: " if len(result.choices) > 1 else ""
        yield f"{label}acc {scores.acc}, acc_norm {scores.acc_norm}"


def _divergence_lines(divergence: Divergence) -> Iterator[str]:
    median, high, highest = (f"{value:.6f}" for value in divergence.quantiles.values())
    kl, top = divergence.mean_kl.text(6), divergence.same_top
    yield f"KL divergence {kl} nats; median {median}, 99 % {high}, 99.9 % {highest}"
    ratio = divergence.perplexity_ratio
    yield f"same likeliest token {100 * top.value:.2f} ± {100 * top.error:.2f} %; perplexity × {ratio} of the base's"


def _table_lines(result: EvalResult) -> Iterator[str]:
    """Yield a line per model, with its difference from the first model if they can be compared."""
    first, width = next(iter(result.losses.values())), max(map(len, result.losses))
    diff_heading = "  difference of loss" if result.same else ""
    yield f"{'':<{width}}  {'loss':<20}  {'perplexity':<20}{diff_heading}"
    for name, losses in result.losses.items():
        loss = result.loss(name)
        line = f"{name:<{width}}  {loss!s:<20}  {loss.exponential!s:<20}"
        is_comparable = result.same and losses is not first
        yield f"{line}  {MeanEstimate.of(losses - first)}" if is_comparable else line.rstrip()
