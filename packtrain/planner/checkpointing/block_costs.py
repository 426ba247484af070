"""Strategies of a block of a chain: which of its forward values are saved, and the bytes and added seconds of that.

BlockCosts returns BlockOptions, given a function that builds the training graph for a number of equal blocks. A
strategy's bytes have a lower bound from a short chain that saves everything, and are measured on request."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property

import numpy as np

from packtrain.engine.backends import CPU, Target, cpu
from packtrain.engine.memory_plan.lifetimes import lifetime_columns, storage_lifetimes
from packtrain.engine.packing import alive_nbytes
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import Call
from packtrain.planner import cost_model
from packtrain.planner.checkpointing import middle_blocks, saved_values
from packtrain.planner.checkpointing.middle_blocks import MiddleBlock, is_free_call, middle
from packtrain.planner.checkpointing.pareto_front import KeptSet, min_added_seconds
from packtrain.planner.checkpointing.saved_values import BlockOption, InnerRanks
from packtrain.planner.cost_model import BackendRates

BuildGraph = Callable[[int, saved_values.RecomputeChoice | None], saved_values.BuiltGraph]


class BlockCosts:
    """Bytes and seconds of a block's strategies (choices of values to save), measured on graphs of a few equal blocks.

    reserved_nbytes  bytes that stay after the backward pass of a block, and of the head: gradients before clipping
    together         how many strategies are measured in one graph, in a block each; 1 if not all blocks are alike
    space            memory space whose bytes count; by default the arena's
    offload_mode     whether a block may, or must, offload saved values to the process's memory
    saves_input      whether the input of the first block is saved, too
    is_two_pass      all blocks run backward twice: saved values stay through the first pass, which is measured
    """

    def __init__(
        self, build: BuildGraph, rates: BackendRates, reserved_nbytes: tuple[int, int] = (0, 0), together: int = 1,
        target: Target = CPU, space: str | None = None, offload_mode: int = saved_values.NEVER_OFFLOAD,
        is_two_pass: bool = False, saves_input: bool = True,
    ) -> None:  # fmt: skip
        self.saves_input, self.is_two_pass = saves_input, is_two_pass
        self.build, self.rates, self.together, self.target = build, rates, together, target
        self.space, self.offload_mode = space or target.space, offload_mode
        self.reserve, self.head_reserve = reserved_nbytes
        self._measured_options: dict[InnerRanks, BlockOption] = {}

    @cached_property
    def _middle(self) -> MiddleBlock:
        """The middle block of a graph of three blocks that saves all values, from which lower bounds are derived."""
        built_graph = self.build(middle_blocks.NUM_CHAIN_BLOCKS, None)
        return middle(built_graph, place(built_graph.graph, self.target), self.space, self.seconds)

    def cleared(self) -> "BlockCosts":
        """Return a copy without measured strategies, so that a search does not depend on what earlier ones measured."""
        clone = copy(self)
        clone._measured_options = {}
        return clone

    # ---- the middle block

    @property
    def num_parts(self) -> int:
        """Number of parts in which a block processes its rows; each has its own values between two blocks."""
        return self._middle.num_parts

    @property
    def stream_nbytes(self) -> int:
        return self.num_parts * self._middle.stream_nbytes

    @property
    def forward_seconds(self) -> float:
        return self.num_parts * self._middle.forward_seconds

    @property
    def forward_calls(self) -> int:
        return self.num_parts * len(self._middle.calls)

    def seconds(self, call: Call) -> float:
        return 0.0 if is_free_call(call) else cost_model.call_seconds(call, self.rates)

    @property
    def value_nbytes(self) -> list[int]:
        """Bytes of each value that a block could save (in the first part of its rows), by index in the block."""
        return self._middle.nbytes

    @property
    def read(self) -> list[int]:
        """Indices of the values that a block's backward pass reads; if these are saved, nothing is recomputed."""
        return self._middle.read_places

    def places(self, seconds: float) -> tuple[int, ...]:
        """Return indices of values to save so that recomputing others, cheapest per byte, takes at most `seconds`."""
        return self._middle.places(seconds / self.num_parts)

    # ---- strategies

    @cached_property
    def strategies(self) -> list[InnerRanks]:
        """All strategies, (place, rank) pairs, on the Pareto front of saved bytes and added seconds, with variants."""
        return [s for point in self._middle.front for s in self._variants(point.places)]

    def _variants(self, kept_places: tuple[int, ...]) -> list[InnerRanks]:
        """Return the strategy that saves the values with these indices, and variants that take fewer bytes at their
        peak: for each cut (value on every path through the block) that is not saved, one recomputes the cut first, then
        each side; and each of these with its saved values offloaded."""
        base = tuple((place, 0) for place in kept_places)
        forms = [base, *((*base, (cut, 1)) for cut in self._middle.cuts if cut not in kept_places)]
        offloaded = map(saved_values.offload_ranks, forms if self.offload_mode else [])
        return [*forms, *offloaded]

    def saved(self, strategy: InnerRanks) -> int:
        """Return the bytes that a strategy saves beside the block's input; if it offloads, minus those of the input."""
        is_offloaded = saved_values.is_offloaded(strategy)
        return -self.stream_nbytes if is_offloaded else self._kept_nbytes(strategy)

    def _kept_nbytes(self, strategy: InnerRanks) -> int:
        return self.num_parts * sum(self.value_nbytes[at] for at in _kept_places(strategy))

    @property
    def full_nbytes(self) -> int:
        """Bytes that a block saves if nothing is recomputed: its input, and all that its backward pass reads."""
        return self.stream_nbytes + self.num_parts * self._read_nbytes

    @cached_property
    def _read_nbytes(self) -> int:
        return sum(self.value_nbytes[place_index] for place_index in self.read)

    def offload_seconds(self, strategy: InnerRanks) -> float:
        """Return the seconds to copy a strategy's values to the process's memory and back; 0 if it offloads none."""
        if not saved_values.is_offloaded(strategy):
            return 0.0
        return self._round_trip_seconds(self.stream_nbytes + self._kept_nbytes(strategy))

    def _round_trip_seconds(self, nbytes: float) -> float:
        names = [backend.name for backend in self.target.every if backend.space == self.space]
        return 2 * cost_model.copy_seconds(nbytes, *map(self.rates.on, (*names[:1], cpu.name)))

    @property
    def options(self) -> list[BlockOption]:
        """Every strategy with its bytes and seconds: those that `measure` measured, or else lower bounds."""
        return [self._measured_options.get(s) or self._lower_bounds[s] for s in self.strategies]

    @property
    def lean_options(self) -> list[BlockOption]:
        """The strategies that save no value within the block (all is recomputed), with measured bytes and seconds."""
        self.measure(self._variants(()))
        return [self._measured_options[strategy] for strategy in self._variants(())]

    def min_added_seconds(self, nbytes: float) -> float:
        """Return the fewest seconds of recomputing by which a block saves `nbytes` less than all; inf if impossible."""
        all_nbytes = self._read_nbytes
        if nbytes > all_nbytes * self.num_parts:
            return np.inf
        points = self._middle.front
        if self.offload_mode:
            moved = ((self.stream_nbytes / self.num_parts + point.saved, point) for point in points)
            times = [p.recompute_seconds + self._round_trip_seconds(n) for n, p in moved]
            points = [*points, *(KeptSet(0, seconds, ()) for seconds in times)]
        return self.num_parts * min_added_seconds(points, all_nbytes - nbytes / self.num_parts)

    # ---- lower bounds

    @cached_property
    def _lower_bounds(self) -> dict[InnerRanks, BlockOption]:
        """Every strategy with lower bounds of its bytes, as if recomputed values lived only while they are read."""
        middle_block, bounds = self._middle, dict[InnerRanks, BlockOption]()
        for point in middle_block.front:
            recompute_seconds = self.num_parts * point.recompute_seconds
            num_calls = self.num_parts * middle_block.num_recomputed_calls(point.places)
            live_nbytes = self._needed + middle_block.kept_nbytes[list(point.places)].sum(axis=0)
            work = int(live_nbytes.max())
            for s in self._variants(point.places):
                total_seconds = recompute_seconds + self.offload_seconds(s)
                bounds[s] = BlockOption(s, self.saved(s), total_seconds, num_calls, work)
        return bounds

    @property
    def min_work_nbytes(self) -> int:
        """Lower bound of the bytes that the backward pass of a block needs at once, whatever is saved."""
        return int(self._needed.max())

    @cached_property
    def _needed(self) -> np.ndarray:
        """Bytes that each step of a block's backward pass needs, int64 (steps,), without other blocks' gradients."""
        later_nbytes = self.head_reserve + (middle_blocks.NUM_CHAIN_BLOCKS - 2) * self.reserve
        return self._middle.needed_nbytes - later_nbytes - self.is_two_pass * self.stream_nbytes

    # ---- measurements

    def measure(self, strategies: Iterable[InnerRanks]) -> bool:
        """Measure the strategies not measured yet, and others that save equal values; return whether there were any."""
        measured = self._measured_options
        sets = {_kept_places(s) for s in strategies if s not in measured}
        unmeasured = [s for s in self.strategies if s not in measured and _kept_places(s) in sets]
        for start in range(0, len(unmeasured), self.together):
            self._measure(unmeasured[start : start + self.together])
        return bool(unmeasured)

    def _measure(self, strategies: Sequence[InnerRanks]) -> None:
        """Build a graph with a block for each strategy, and record the peak bytes and added seconds of its backward
        pass. Bytes that are there for other blocks are subtracted: what earlier blocks save, and gradients of later
        blocks that wait for clipping; if all run backward twice, also what later blocks save. The outermost blocks
        repeat a strategy and do not count, as the model's ends differ."""
        inner = (strategies[0], *strategies, strategies[-1])
        choice = saved_values.RecomputeChoice((0,) * (len(inner) + 1), inner)
        built_graph = self.build(len(inner), choice)
        placed = place(built_graph.graph, self.target)
        live_curve = LiveByteCurve(placed, self.space)
        step_ranges = middle_blocks.backward_steps(placed, built_graph, self.num_parts)
        saved_sizes = list(map(self.saved, inner))
        total_nbytes = sum(saved_sizes) + (len(inner) + self.saves_input) * self.stream_nbytes
        for i, strategy in enumerate(inner):
            earlier_nbytes = sum(saved_sizes[: i + 1]) + (i + self.saves_input) * self.stream_nbytes
            other_nbytes = (total_nbytes if self.is_two_pass else earlier_nbytes) - saved_sizes[i]
            if not 0 < i < len(inner) - 1:
                continue
            first_step, last = step_ranges[i]
            steps = [s for s in placed.steps[first_step : last + 1] if s.op is s.call.op]
            recomputed = [s.call for s in steps if s.call.phase == "recomputed"]
            later_nbytes = self.head_reserve + (len(inner) - 1 - i) * self.reserve
            work = max(live_curve.max_nbytes(first_step, last) - other_nbytes - later_nbytes, 0)
            seconds = sum(map(self.seconds, recomputed)) + self.offload_seconds(strategy)
            option = BlockOption(strategy, saved_sizes[i], seconds, len(recomputed), work)
            self._measured_options[strategy] = option


def _kept_places(strategy: InnerRanks) -> tuple[int, ...]:
    return tuple(at for at, rank in strategy if rank <= 0 and at != saved_values.INPUT_PLACE)


class LiveByteCurve:
    """The number of bytes of a memory space that are alive at each step of a placed graph."""

    def __init__(self, placed: Placed, space: str) -> None:
        stored = storage_lifetimes(placed, space)
        lifetimes = lifetime_columns(stored, saved_values.ALIGNMENT)
        self._step_times, self._nbytes = alive_nbytes(*lifetimes)

    def max_nbytes(self, first_step: int, last: int) -> int:
        """Return the most bytes that are alive at once from step `first_step` to step `last`, inclusive."""
        start_index, end_index = np.searchsorted(self._step_times, (first_step, last), side="right")
        return int(self._nbytes[max(start_index - 1, 0) : end_index].max(initial=0))
