"""Criteria that end a run before its last step, from its settings and its progress alone."""

from packtrain.common.text import plural
from packtrain.training.checkpoints import TrainingProgress
from packtrain.training.run_settings import RunSettings


def stop_reason(settings: RunSettings, progress: TrainingProgress) -> str | None:
    """Return the criterion that ends the run, as a sentence; None if the run goes on."""
    s, recent_losses = settings, progress.recent
    if s.patience and progress.stale >= s.patience:
        return f"no better validation loss than {progress.best:.4f} in {plural(s.patience, 'validation')}"
    if s.past and len(recent_losses) > s.past:
        earlier_loss, latest_loss = recent_losses[-1 - s.past], recent_losses[-1]
        if abs(earlier_loss - latest_loss) < s.delta * abs(latest_loss):
            return f"in {plural(s.past, 'step')} the loss changed by less than {s.delta:g} of its value (--delta)"
    if s.max_no_improvement and progress.unimproved >= s.max_no_improvement:
        steps_text = plural(s.max_no_improvement, "step")
        return f"no better training loss than {progress.lowest:.4f} in {steps_text}"
    if s.grad_tol and progress.norm <= s.grad_tol:
        return (
            f"the norm of the gradients is {progress.norm:.3g}, at most --grad-tol {s.grad_tol:g}"
        )
    return None
