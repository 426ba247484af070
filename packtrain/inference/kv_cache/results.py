"""What leaves the device of the rows that a call wants: all logits, or what their chains of samplers still need.

Settings of samplers are inputs by row, so that the plans of a context serve any chains.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from packtrain.common.text import plural
from packtrain.dtypes import f64, i64
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input
from packtrain.inference.kv_cache.cell_pools import ContextError
from packtrain.inference.sampling import (
    CANDIDATES,
    LOGITS,
    MOST,
    TOKEN,
    Candidates,
    Chain,
    Cut,
    Given,
)

OUTPUTS = {LOGITS: ("result",), CANDIDATES: ("ids", "values"), TOKEN: ("token",)}
NUMBERS, COUNTS = "sampling.numbers", "sampling.counts"


def outputs(logits: Tensor) -> dict[str, Tensor]:
    """Those of a run: its result (N, V), and behind it the candidates (N, k) and the token (N,) of each row."""
    n, v = logits.shape
    ids, values = ops.candidates(logits, k=min(MOST, v))
    numbers, counts = input(NUMBERS, (n, 3), f64), input(COUNTS, (n, 3), i64)
    token = ops.draw(ids, values, numbers, counts)
    return {"result": logits, "ids": ids, "values": values, "token": token}


def wanted_rows(sets: Sequence[tuple[int, ...]], requested_rows: Sequence[int] | None) -> list[int]:
    """Places of the tokens whose results are wanted; None: the last of each sequence. Raises ContextError."""
    last = {seqs[0]: i for i, seqs in enumerate(sets)}
    rows = sorted(last.values()) if requested_rows is None else [*requested_rows]
    all_integers = all(isinstance(row, int | np.integer) for row in rows)
    if not all_integers or any(a >= b for a, b in pairwise((-1, *rows, len(sets)))):
        raise ContextError(
            f"wanted places must ascend, from 0 to {len(sets) - 1}; these are {rows}"
        )
    return rows


@dataclass(slots=True)
class Results:
    """Cuts of the wanted rows of a call, in order, and what has left the device of the first of them."""

    cuts: Sequence[Cut]
    found: list[Given] = field(default_factory=list)

    @classmethod
    def of(cls, rows: int, chains: Sequence[Chain] | None) -> "Results":
        """Of rows with these chains; those of one chain are consecutive tokens of its text. None: logits."""
        if chains is None:
            return cls([Cut()] * rows)
        if len(chains) != rows:
            raise ContextError(
                f"{plural(rows, 'result')} wanted, {plural(len(chains), 'chain')} given; each result needs one"
            )
        before = Counter[int]()
        cuts = list[Cut]()
        for chain in chains:
            cuts.append(chain.cut(before[id(chain)]))
            before[id(chain)] += 1
        return cls(cuts)

    def inputs(self, rows: Sequence[int], size: int, *, chosen: bool) -> dict[str, np.ndarray]:
        """Of a run that gives `size` rows, of which the next ones are `rows`; chosen: with settings of samplers."""
        padded_rows = np.full(size, -1, np.int32)
        padded_rows[: len(rows)] = rows
        if not chosen:
            return {"rows": padded_rows}
        numbers, counts = np.zeros((size, 3)), np.zeros((size, 3), np.int64)
        for row, cut in enumerate(self._next(len(rows))):
            numbers[row], counts[row] = cut.numbers, cut.counts
        return {"rows": padded_rows, NUMBERS: numbers, COUNTS: counts}

    def names(self, count: int) -> set[str]:
        """The outputs that the next `count` rows need."""
        return {name for cut in self._next(count) for name in OUTPUTS[cut.leaves]}

    def add(self, count: int, outputs: Mapping[str, np.ndarray]) -> None:
        """Take the outputs of a run for the next `count` rows."""
        for row, cut in enumerate(self._next(count)):
            if cut.leaves == TOKEN:
                self.found.append(int(outputs["token"][row]))
            elif cut.leaves == CANDIDATES:
                ids, values = outputs["ids"][row], outputs["values"][row]
                self.found.append(Candidates(ids.astype(np.int64), values.astype(float), True))
            else:
                self.found.append(outputs["result"][row])

    def _next(self, count: int) -> Sequence[Cut]:
        return self.cuts[len(self.found) : len(self.found) + count]
