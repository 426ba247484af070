"""What PyTorch gives for small llamas: `python -m tests.golden` records it into tests/goldens, `load` reads it.

A record holds, for f32 and f64: `<dtype>/loss`, `<dtype>/d/<name>` for every weight, and for 20 AdamW steps
`<dtype>/plain/losses` and `norms`, the same under `<dtype>/clipped`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packtrain.engine.optim import AdamW
from packtrain.models.config import Config
from tests.models import CONFIG, seeded_batch, seeded_weights

FOLDER = Path(__file__).parent / "goldens"
OPTIMIZER = AdamW(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
STEPS = 20
RATES = [OPTIMIZER.lr * min(1.0, t / 5) for t in range(1, STEPS + 1)]
MAX_NORM = {"plain": None, "clipped": 1.0}

Record = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the shape of its batches."""

    config: Config
    rows: int
    time: int

    @property
    def batches(self) -> list[dict[str, np.ndarray]]:
        return [seeded_batch(self.config, self.rows, self.time, seed) for seed in range(STEPS)]


CASES = {
    "tied": Case(CONFIG, 2, 21),
    "untied": Case(replace(CONFIG, tied=False, rope_freq_base=500.0), 3, 16),
}
WIDE = Case(Config(130, 80, 64, 2, 96, 4, 2), 2, 70)  # compared live only: too large to keep


def record_torch(case: Case) -> Record:
    """Run the PyTorch twin of a case. Needs torch."""
    import torch

    from tests import torch_llama

    # as fast for models this small, and quiet beside the kernels' own threads
    torch.set_num_threads(1)
    weights, entries = seeded_weights(case.config), Record()
    for name, dtype in (("f32", torch.float32), ("f64", torch.float64)):
        grads = torch_llama.gradients(case.config, weights, case.batches[0], dtype)
        entries |= {f"{name}/{key}": value for key, value in grads.items()}
        for kind, max_norm in MAX_NORM.items():
            settings = case.batches, OPTIMIZER, RATES, max_norm, dtype
            run = torch_llama.training(case.config, weights, *settings)
            entries |= {f"{name}/{kind}/{key}": value for key, value in run.items()}
    return entries


def load_record(name: str) -> Record:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        np.savez_compressed(FOLDER / f"{name}.npz", **record_torch(case))
        print(f"{name}.npz: {(FOLDER / f'{name}.npz').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
