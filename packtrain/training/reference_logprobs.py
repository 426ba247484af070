"""Log-probabilities of answers by the reference model: the base as training finds it, before step 1.

An adapter adds nothing then, so that the evaluation plan of the run computes them and no second model is needed. Each
answer is read once, by one of the ranks; rank 0 keeps the numbers in the run folder, where a resumed run reads them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from packtrain.common.events import Events
from packtrain.models.preference_loss import Preference
from packtrain.planner.training_plans import EVALUATE
from packtrain.training import precomputed
from packtrain.training.pair_batches import PairBatches
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_engine import Engine, with_targets
from packtrain.training.training_job import Job

FILE = "reference.npz"  # in the run folder


def refers(preference: Preference | None) -> bool:
    return preference is not None and preference.reference


def refer(
    job: Job, engine: Engine, folder: Path, events: Events, stopped: Callable[[], bool]
) -> None:
    """Fill in what the reference model says of the pairs that the run will see. Leaves get their initial values.

    Raises Interrupted if `stopped()`.
    """
    if not refers(job.shape.preference):
        return
    parts = {"train": job.train, "valid": job.valid}
    pair_parts = {name: part for name, part in parts.items() if isinstance(part, PairBatches)}
    mark, path = f"{job.fingerprint} {job.shape.base} {job.shape.config.precision}", folder / FILE
    arrays = {name: part.known for name, part in pair_parts.items()}
    precomputed.recall(path, mark, arrays)
    missing_samples = {
        name: precomputed.missing(job, part, np.isnan(part.known))
        for name, part in pair_parts.items()
    }
    count = sum(map(len, missing_samples.values()))
    if not count:
        return
    job.subject.begin(engine.session)
    counts = chain.from_iterable(
        _fill(job, engine, part, missing_samples[n]) for n, part in pair_parts.items()
    )
    save = partial(precomputed.write, path, mark, arrays)
    precomputed.follow(
        accumulate(counts), count, events, "reference model", "answer", stopped, save
    )


def _fill(job: Job, engine: Engine, part: PairBatches, sample_ids: list[int]) -> Iterator[int]:
    """Compute them, a batch on each rank at a time; yields how many."""
    if not sample_ids:
        return
    subset, run = precomputed.Some(part.samples, sample_ids), engine.run[EVALUATE]
    batches = SampleBatches(subset, job.shape.rows, part.time, shuffle=False)  # type: ignore[arg-type]

    def read(index: int) -> list[tuple[int, float]]:
        batch, results = batches[index], list[tuple[int, float]]()
        losses = run({**batch, **with_targets(batch)})["losses"].astype(np.float64)
        for at, row in enumerate(batches.chosen(index)):
            for number, i in enumerate(row):
                sample_weights = batch["weights"][at] * (batch["seq"][at] == number)
                logp = -(losses[at] @ sample_weights) / (
                    sample_weights.sum() if part.how.divides else 1
                )
                results.append((sample_ids[i], logp))
        return results

    for batch_results in precomputed.in_turn(len(batches), read):
        for i, logp in batch_results:
            part.known[i] = logp
        yield len(batch_results)
