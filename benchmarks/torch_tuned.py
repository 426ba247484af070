"""The peer of `benchmarks.torch_llama` in low-rank tuning. Importing this loads PyTorch."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.torch_llama import Array, Llama
from packtrain import kernels
from packtrain.models.config import Config

torch: Any = kernels.torch()
F = torch.nn.functional


class Tuned(Llama):
    """The model frozen, with low-rank additions to the matrices of its blocks, as PEFT computes them."""

    def __init__(
        self,
        config: Config,
        values: Mapping[str, np.ndarray],
        rank: int,
        scale: float,
        real: bool = False,
    ) -> None:
        super().__init__(config, values, real)
        self.scale = scale
        self.w.requires_grad_(False)
        matrices = {
            name: w for name, w in self.w.items() if name.startswith("blk") and w.dim() == 2
        }
        halves = {
            half: {
                name: torch.nn.Parameter(1e-3 * torch.randn(shape(w)))
                for name, w in matrices.items()
            }
            for half, shape in (
                ("a", lambda w: (rank, w.shape[1])),
                ("b", lambda w: (w.shape[0], rank)),
            )
        }
        self.a, self.b = (torch.nn.ParameterDict(halves[half]) for half in "ab")

    def linear(self, x: Array, name: str) -> Array:
        key = f"{name}.weight".replace(".", "/")
        low = F.linear(F.linear(x, self.a[key]), self.b[key])
        return super().linear(x, name) + self.scale * low
