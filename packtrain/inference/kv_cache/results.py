"""What leaves the device for a call's wanted rows: all logits, or only what their sampler chains still need.

Settings of samplers are inputs by row, so that the plans of a context serve any chains."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from packtrain.common.text import plural
from packtrain.dtypes import f64, i64
from packtrain.engine import ops
from packtrain.engine.executor import Executor
from packtrain.engine.tensor import Tensor, input
from packtrain.inference import sampling
from packtrain.inference.kv_cache.cell_pools import ContextError

OUTPUT_NAMES = {
    sampling.LOGITS: ("result",), sampling.CANDIDATES: ("ids", "values"), sampling.TOKEN: ("token",),
}  # fmt: skip
HIDDEN_STATES = "hidden_states"  # values before the last norm, an output of runs
SAMPLER_FLOATS, SAMPLER_INTS = "sampling.numbers", "sampling.counts"


def sampler_outputs(logits: Tensor) -> dict[str, Tensor]:
    """Return a run's outputs: logits (N, V), and from them each row's candidates (N, k) and sampled token (N,)."""
    n, vocab_size = logits.shape
    candidate_ids, candidate_logits = ops.candidates(
        logits, k=min(sampling.MAX_CANDIDATES, vocab_size)
    )
    numbers, int_settings = input(SAMPLER_FLOATS, (n, 3), f64), input(SAMPLER_INTS, (n, 3), i64)
    token = ops.draw(candidate_ids, candidate_logits, numbers, int_settings)
    return {"result": logits, "ids": candidate_ids, "values": candidate_logits, "token": token}


def result_rows(sets: Sequence[tuple[int, ...]], requested_rows: Sequence[int] | None) -> list[int]:
    """Return indices of tokens with results; None: each sequence's last. sets: each token's sequences. ContextError."""
    last_rows = {seqs[0]: i for i, seqs in enumerate(sets)}
    rows = sorted(last_rows.values()) if requested_rows is None else [*requested_rows]
    all_integers = all(isinstance(row, int | np.integer) for row in rows)
    if not all_integers or any(a >= b for a, b in pairwise((-1, *rows, len(sets)))):
        fact = f"wanted places must ascend, from 0 to {len(sets) - 1}; these are {rows}"
        raise ContextError(fact)
    return rows


def head_logits(head: Executor, hidden_states: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the logits (V,) of each hidden state (C,); `head` is the executor of `decode_plans.head_graph`."""
    num_rows, width = head.inputs[HIDDEN_STATES][2].shape
    for start in range(0, len(hidden_states), num_rows):
        chunk, rows = hidden_states[start : start + num_rows], np.zeros((num_rows, width), "f4")
        rows[: len(chunk)] = chunk
        yield from head({HIDDEN_STATES: rows})["result"][: len(chunk)]


@dataclass(slots=True)
class RowResults:
    """The results of a call's wanted rows so far, and the sampler cut of each row: how far the graph samples.

    hidden_states  values before the last norm of the tokens at its keys, filled in
    """

    sampler_cuts: Sequence[sampling.SamplerCut]
    row_results: list[sampling.SamplerInput] = field(default_factory=list)
    hidden_states: dict[int, np.ndarray] = field(default_factory=dict)
    num_tokens: int = 0

    @classmethod
    def for_chains(cls, num_rows: int, chains: Sequence[sampling.Chain] | None) -> "RowResults":
        """Create results for rows, none yet; chains: the sampler chain of each row; None: rows give logits."""
        if chains is None:
            return cls([sampling.SamplerCut()] * num_rows)
        if len(chains) != num_rows:
            fact = f"{plural(num_rows, 'result')} wanted, {plural(len(chains), 'chain')} given"
            raise ContextError(f"{fact}; each result needs one")
        tokens_before = Counter[int]()
        sampler_cuts = list[sampling.SamplerCut]()
        for chain in chains:
            sampler_cuts.append(chain.cut(tokens_before[id(chain)]))
            tokens_before[id(chain)] += 1
        return cls(sampler_cuts)

    def inputs(self, rows: Sequence[int], num_rows: int, *, draws: bool) -> dict[str, np.ndarray]:
        """Return inputs of a run with room for `num_rows` results: `rows`, indices of tokens with results, and if the
        graph `draws`, the samplers' settings."""
        padded_rows = np.full(num_rows, -1, np.int32)
        padded_rows[: len(rows)] = rows
        if not draws:
            return {"rows": padded_rows}
        float_settings, int_settings = np.zeros((num_rows, 3)), np.zeros((num_rows, 3), np.int64)
        for row_index, cut in enumerate(self._next_cuts(len(rows))):
            float_settings[row_index], int_settings[row_index] = cut.numbers, cut.int_settings
        return {"rows": padded_rows, SAMPLER_FLOATS: float_settings, SAMPLER_INTS: int_settings}

    def output_names(self, num_rows: int) -> set[str]:
        """Return the names of the graph's outputs that the next `num_rows` rows need."""
        names = {name for cut in self._next_cuts(num_rows) for name in OUTPUT_NAMES[cut.leaves]}
        return names | ({HIDDEN_STATES} if self.hidden_states else set())

    def add(self, num_rows: int, num_tokens: int, outputs: Mapping[str, np.ndarray]) -> None:
        """Add the outputs of a run of the next `num_tokens` tokens as results of the next `num_rows` rows."""
        for position in range(self.num_tokens, self.num_tokens + num_tokens):
            if position in self.hidden_states:
                self.hidden_states[position] = outputs[HIDDEN_STATES][position - self.num_tokens]
        self.num_tokens += num_tokens
        for row_index, sampler_cut in enumerate(self._next_cuts(num_rows)):
            if sampler_cut.leaves == sampling.TOKEN:
                self.row_results.append(int(outputs["token"][row_index]))
            elif sampler_cut.leaves == sampling.CANDIDATES:
                ids, candidate_logits = outputs["ids"][row_index], outputs["values"][row_index]
                self.row_results.append(
                    sampling.Candidates(ids.astype(np.int64), candidate_logits.astype(float), True)
                )
            else:
                self.row_results.append(outputs["result"][row_index])

    def _next_cuts(self, num_rows: int) -> Sequence[sampling.SamplerCut]:
        """Return where the sampler chains of the next num_rows results pass from the graph to the host."""
        return self.sampler_cuts[len(self.row_results) : len(self.row_results) + num_rows]
