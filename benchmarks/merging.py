"""What merging keeps of an adapter's gain: python -m benchmarks.merging BASE ADAPTER --data FILE

The data is split as finetune splits it; losses are of validation data, calibration reads training data.
"""

import argparse
import tempfile
import time
from pathlib import Path

from packtrain.common.memory import Peak, settle
from packtrain.conversion.calibration.calibration_inputs import reading
from packtrain.conversion.calibration.merge_writer import Merge
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import read_scaled
from packtrain.training.finetune_job import build_job
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.model_loss import losses_of
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_engine import evaluate
from packtrain.training.training_job import Job

MIB = 1 << 20


def loss(job: Job, model: ModelFile) -> float:
    run = losses_of(model, job.shape.rows, job.shape.time, job.shape.chunk)
    return evaluate(run, job.validation()).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--val-batches", type=int, default=4)
    given = parser.parse_args()
    settings = TuneSettings(model=given.base, data=given.data, val_batches=given.val_batches)
    job = build_job(settings, print)
    base = open_model(given.base)
    merge = Merge(base, read_scaled([given.adapter], base.gguf))
    before, beside = loss(job, base), loss(job, merge.adapted)
    print(f"base {before:.4f}, with the adapter {beside:.4f}")
    assert isinstance(job.train, SampleBatches)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "merged.gguf"
        for name in ("plain", "calibrated"):
            found = reading(merge.adapted, merge.calibrated, job.train.time, job.train.windows)
            settle()
            began = time.perf_counter()
            with Peak() as peak:
                merge.write(output, "merged", found if name == "calibrated" else None, job.train)
            seconds, took = time.perf_counter() - began, peak.nbytes - peak.baseline
            planned = "" if name == "plain" or found is None else f" of {found.nbytes / MIB:.0f}"
            after = loss(job, open_model(output))
            kept = (before - after) / (before - beside)
            print(
                f"{name:>10} {after:.4f}  {kept:6.1%} of the gain  {seconds:5.1f} s  "
                f"{took / MIB:.0f}{planned} MiB  {output.stat().st_size - base.gguf.nbytes:+} bytes"
            )


if __name__ == "__main__":
    main()
