"""What merging keeps of an adapter's gain: python -m benchmarks.merging BASE ADAPTER --data FILE

The data is split as finetune splits it; losses are of validation data, calibration reads training data.
"""

import argparse
import tempfile
import time
from pathlib import Path

from packtrain.common.memory import MemoryPeak, release_memory
from packtrain.conversion.calibration.calibration_inputs import reading
from packtrain.conversion.calibration.merge_writer import AdapterMerge
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import read_scaled
from packtrain.training.finetune_job import build_job
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.model_loss import loss_executor
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_engine import evaluate
from packtrain.training.training_job import TrainingJob

MIB = 1 << 20


def loss(job: TrainingJob, model: ModelFile) -> float:
    run = loss_executor(model, job.shape.micro_batch_size, job.shape.seq_len, job.shape.chunk)
    return evaluate(run, job.validation_batches()).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--val-batches", type=int, default=4)
    args = parser.parse_args()
    settings = TuneSettings(model=args.base, data=args.data, val_batches=args.val_batches)
    job = build_job(settings, print)
    base = open_model(args.base)
    merge = AdapterMerge(base, read_scaled([args.adapter], base.gguf))
    base_loss, adapter_loss = loss(job, base), loss(job, merge.adapted)
    print(f"base {base_loss:.4f}, with the adapter {adapter_loss:.4f}")
    assert isinstance(job.train, SampleBatches)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "merged.gguf"
        for name in ("plain", "calibrated"):
            calibration = reading(
                merge.adapted, merge.calibrated, job.train.time, job.train.windows
            )
            release_memory()
            start_time = time.perf_counter()
            with MemoryPeak() as peak:
                merge.write_file(
                    output, "merged", calibration if name == "calibrated" else None, job.train
                )
            seconds, used_nbytes = time.perf_counter() - start_time, peak.nbytes - peak.baseline
            planned = (
                ""
                if name == "plain" or calibration is None
                else f" of {calibration.nbytes / MIB:.0f}"
            )
            merged_loss = loss(job, open_model(output))
            gain_share = (base_loss - merged_loss) / (base_loss - adapter_loss)
            print(
                f"{name:>10} {merged_loss:.4f}  {gain_share:6.1%} of the gain  {seconds:5.1f} s  "
                f"{used_nbytes / MIB:.0f}{planned} MiB  {output.stat().st_size - base.gguf.nbytes:+} bytes"
            )


if __name__ == "__main__":
    main()
