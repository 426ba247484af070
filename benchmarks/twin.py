"""Whole training runs: packtrain beside PyTorch on the same tokens, batches, schedule and number of steps.

    python -m benchmarks.twin --data FILE [--preset 1m] [--iters 1000] [--seeds 0 1 2] [--side both]

Each run draws initial values of its own from one distribution, so that losses differ by luck. The table has the loss
on the whole validation part by seed and side; below it the difference of the means with its standard error.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from packtrain import kernels
from packtrain.cli.event_output import TerminalEvents
from packtrain.common.memory import private_nbytes
from packtrain.engine.optim import AdamW
from packtrain.models.config import PRESETS
from packtrain.planner.training_plans import make_plans
from packtrain.training.monitoring import METRICS_FILE, RunMonitor
from packtrain.training.monitoring.metrics_file import read
from packtrain.training.train_settings import TrainSettings
from packtrain.training.training_engine import TrainingEngine
from packtrain.training.training_job import TrainingJob, build_job
from packtrain.training.training_loop import TrainingLoop
from tests.models import initial_weights

REPORT_EVERY = 100
OTHER = 1_000_003  # between the seeds of the two sides' initial values


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ours(job: TrainingJob) -> float:
    """Validation loss after the last step of `packtrain train`."""
    plans = make_plans(job.shape, job.optimizer)
    kernels.load_all()  # not part of what is planned
    with tempfile.TemporaryDirectory() as name:
        folder, planned = Path(name), private_nbytes() + plans.nbytes
        display = TerminalEvents()
        fit = TrainingLoop(job, TrainingEngine(plans, job.optimizer), folder, events=display)
        fit.init_weights(None)
        with (
            display.training(job.steps, planned, REPORT_EVERY),
            RunMonitor(folder, display, tensorboard=False) as watch,
        ):
            fit.train(watch, lambda: False)
        return float(read(folder / METRICS_FILE)[-1]["val_loss"])


def theirs(job: TrainingJob) -> float:
    """Validation loss after the last step of the twin."""
    from benchmarks.torch_llama import Llama, Trained, optimizer

    s = job.settings
    model = Llama(job.config, initial_weights(job.config, s.seed + OTHER))
    o = job.optimizer
    assert isinstance(o, AdamW)
    update = optimizer(model, o.lr, (o.beta1, o.beta2), o.weight_decay)
    trained = Trained(model, update, s.max_grad_norm)
    start_time = time.perf_counter()
    for step in range(1, job.steps + 1):
        loss = trained.step(job.batches(step), job.schedule.rate(step))
        if step % REPORT_EVERY == 0 or step in (1, job.steps):
            seconds = (time.perf_counter() - start_time) / step
            print_progress(
                f"torch: step {step}/{job.steps}  loss {loss:.4f}  {seconds:.3f} s a step"
            )
    return trained.evaluate(list(job.validation_batches()))


SIDES = {"packtrain": ours, "torch": theirs}


def loss_of(side: str, settings: TrainSettings) -> float:
    return SIDES[side](build_job(settings, print_progress))


def run_in_process(work: Callable[..., float], *args: object) -> float:
    """The result of work in a process of its own, so that no side meets the other's threads."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *args).result()


def difference(losses: dict[str, list[float]]) -> str:
    """packtrain's mean less torch's, and its standard error if there are several seeds."""
    our_losses, their_losses = (np.array(losses[side]) for side in SIDES)
    mean_text = f"difference of means {our_losses.mean() - their_losses.mean():+.4f}"
    if len(our_losses) < 2:
        return mean_text
    variance = (our_losses.var(ddof=1) + their_losses.var(ddof=1)) / len(our_losses)
    return f"{mean_text} ± {variance**0.5:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--preset", default="1m", choices=PRESETS)
    parser.add_argument("--iters", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--side", default="both", choices=[*SIDES, "both"])
    args = parser.parse_args()
    sides = list(SIDES) if args.side == "both" else [args.side]
    losses: dict[str, list[float]] = {side: [] for side in sides}
    print("".join(f"{title:>11}" for title in ("seed", *sides)), flush=True)
    for seed in args.seeds:
        settings = TrainSettings(
            data=args.data,
            preset=args.preset,
            iters=args.iters,
            seed=seed,
            steps_per_eval=0,
            val_batches=0,
            save_every=0,
        )
        for side in sides:
            losses[side].append(run_in_process(loss_of, side, settings))
        row = "".join(f"{side_losses[-1]:>11.4f}" for side_losses in losses.values())
        print(f"{seed:>11}{row}", flush=True)
    print(
        f"{'mean':>11}"
        + "".join(f"{np.mean(side_losses):>11.4f}" for side_losses in losses.values())
    )
    if len(sides) == 2:
        print(difference(losses))


if __name__ == "__main__":
    main()
