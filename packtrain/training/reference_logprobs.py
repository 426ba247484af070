"""Log-probabilities of answers by the reference model: the base as training finds it, before step 1.

An adapter adds nothing then, so that the evaluation plan of the run computes them and no second model is needed. Each
answer is read once, by one of the ranks; rank 0 saves the numbers in the run folder, where a resumed run reads them."""

from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from packtrain.common.events import Events
from packtrain.models.preference_loss import PreferenceLoss
from packtrain.planner.training_plans import EVALUATE
from packtrain.training import precomputed
from packtrain.training.pair_batches import PairBatches
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_engine import TrainingEngine, with_targets
from packtrain.training.training_job import TrainingJob

FILE = "reference.npz"  # in the run folder


def uses_reference(preference: PreferenceLoss | None) -> bool:
    return preference is not None and preference.reference


def compute_reference_logps(
    job: TrainingJob, engine: TrainingEngine, folder: Path, events: Events, stopped: Callable[[], bool],
) -> None:  # fmt: skip
    """Compute on all ranks the reference model's log-probabilities of the answers that the run will see, unless they
    are saved in `folder`; weights then get initial values. Raises Interrupted, after saving, if `stopped()`."""
    if not uses_reference(job.shape.preference):
        return
    parts = {"train": job.train, "valid": job.valid}
    pair_batches = {name: part for name, part in parts.items() if isinstance(part, PairBatches)}
    base = job.shape.base
    mark = f"{job.fingerprint} {base and base.mark} {job.shape.config.precision}"
    arrays = {name: batches.known_logps for name, batches in pair_batches.items()}
    saved_arrays = folder / FILE, mark, arrays
    precomputed.restore_arrays(*saved_arrays)
    missing_samples = {
        name: precomputed.missing_samples(job, batches, np.isnan(batches.known_logps))
        for name, batches in pair_batches.items()
    }
    num_missing = sum(map(len, missing_samples.values()))
    if not num_missing:
        return
    job.model.init_weights(engine.session)
    done_counts = chain.from_iterable(
        _compute(job, engine, batches, missing_samples[n]) for n, batches in pair_batches.items()
    )
    labels, progress = ("reference model", "answer"), accumulate(done_counts)
    precomputed.run_saved(progress, num_missing, events, *labels, stopped, saved_arrays)


def _compute(
    job: TrainingJob, engine: TrainingEngine, part: PairBatches, sample_ids: list[int]
) -> Iterator[int]:
    """Store samples' log-probabilities in `part`, a batch per rank and round; yield each round's number of samples."""
    if not sample_ids:
        return
    subset, executor = precomputed.SampleSubset(part.samples, sample_ids), engine.run[EVALUATE]
    batches = SampleBatches(subset, job.shape.micro_batch_size, part.time, shuffle=False)  # type: ignore[arg-type]

    def read(index: int) -> list[tuple[int, float]]:
        batch, sample_logps = batches[index], list[tuple[int, float]]()
        losses = executor({**batch, **with_targets(batch)})["losses"].astype(np.float64)
        for row_index, row_items in enumerate(batches.row_items(index)):
            for number, i in enumerate(row_items):
                sample_weights = batch["weights"][row_index] * (batch["seq"][row_index] == number)
                logp = -(losses[row_index] @ sample_weights) / (
                    sample_weights.sum() if part.loss_settings.uses_mean else 1
                )
                sample_logps.append((sample_ids[i], logp))
        return sample_logps

    for batch_results in precomputed.in_rank_order(len(batches), read):
        for i, logp in batch_results:
            part.known_logps[i] = logp
        yield len(batch_results)
