"""Chooses which forward values a chain of equal blocks saves, for least added seconds within a number of bytes.

BlockChain returns PlannedChoices, given a function that builds the training graph for a number of blocks and a
RecomputeChoice. ChainSolver combines strategies of blocks; those it picks are measured on graphs until the answer
stays. Values that later blocks share (Gemma 4) are always saved: they are narrow, and without them the last block's
backward pass would begin with recomputing their source. Chen et al. 2016, arXiv 1604.06174."""

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from packtrain.engine.backends import CPU, Target
from packtrain.engine.memory_plan.lifetimes import lifetime_columns, storage_lifetimes
from packtrain.engine.packing import lower_bound
from packtrain.engine.placement import Placed, place
from packtrain.planner import cost_model
from packtrain.planner.checkpointing import saved_values
from packtrain.planner.checkpointing.block_costs import BlockCosts, BuildGraph, LiveByteCurve
from packtrain.planner.checkpointing.chain_solver import ChainSolution, ChainSolver
from packtrain.planner.checkpointing.middle_blocks import backward_steps
from packtrain.planner.checkpointing.saved_values import RecomputeChoice, uniform_choice
from packtrain.planner.checkpointing.two_passes import TwoPassSolver
from packtrain.planner.cost_model import BackendRates

HeadSetter = Callable[[Placed], Placed]

PLAN_ROUNDS = 4
NUM_HEAD_BLOCKS = 2  # blocks of the chain on which the head is measured
SLACK = 0.03  # relative error of estimates
CLOSE = 0.01  # relative distance to the limit, within which neighbours of a choice are built
AIM_STEPS = 500  # the aim falls by nbytes / AIM_STEPS until the solver returns another choice
NUM_AIMS = 12  # sizes at which the smallest choice is searched
MIN_STRATEGIES_PER_GRAPH = 4  # strategies measured in one graph, even if the chain has fewer blocks


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """A choice of what to save, with bytes and seconds of the graph of all blocks that was built for it.

    arena    lower bound of the arena's bytes, which the packing nearly always reaches; `nbytes` includes those of calls
    seconds  seconds that recomputation and offloading add to a run of the graph, with `calls` recomputed calls
    """

    choice: RecomputeChoice | None
    arena: int
    nbytes: int
    seconds: float
    calls: int


class BlockChain:
    """Chooses recomputation for a training graph whose `count` equal blocks form a chain; caches measurements.

    reserved_nbytes       bytes that stay after the backward pass of a block, and of the head: gradients before clipping
    call_nbytes           bytes of the process for each call of the graph, outside the arena
    calls                 number of calls of a graph that recomputes nothing
    like                  a measured chain with equal blocks, of which none runs backward twice
    strategies_per_graph  how many strategies are measured in one graph
    target, space         backends on which the graph runs; memory space whose bytes count, by default the arena's
    offload_mode          whether blocks may, or must, offload saved values to the process's memory
    num_two_pass_blocks   number of first blocks that run backward twice; in graphs of `build_two_pass` all do
    head_setters          by chunk: functions that give a placed graph the loss head of a chain that is `like` this one
    head_chunk            the chunk of this chain's loss head
    saves_input           whether the input of the first block is saved; else it is looked up again
    """

    def __init__(
        self, build: BuildGraph, count: int, rates: BackendRates, reserved_nbytes: tuple[int, int] = (0, 0),
        call_nbytes: int = 0, calls: int = 0, like: "BlockChain | None" = None, strategies_per_graph: int = 1,
        target: Target = CPU, space: str | None = None, offload_mode: int = saved_values.NEVER_OFFLOAD,
        num_two_pass_blocks: int = 0, build_two_pass: BuildGraph | None = None,
        head_setters: Mapping[int, HeadSetter] = {}, head_chunk: int = 0, saves_input: bool = True,
    ) -> None:  # fmt: skip
        self.call_nbytes, self.calls, self.target = call_nbytes, calls, target
        self.num_two_pass_blocks = num_two_pass_blocks
        self.space = space or target.space
        self.build, self.count, self.like = build, count, like
        self.head_setters, self.head_chunk = head_setters, head_chunk
        strategies_per_graph = max(min(count - 2, strategies_per_graph), MIN_STRATEGIES_PER_GRAPH)
        cost_options = strategies_per_graph, target, space, offload_mode
        self.block = BlockCosts(
            build, rates, reserved_nbytes, *cost_options, saves_input=saves_input
        )
        self.two_pass_costs = BlockCosts(
            build_two_pass or build, rates, (0, reserved_nbytes[1]), *cost_options, is_two_pass=True
        )
        if like is not None:
            self.block, self.two_pass_costs = like.block, like.two_pass_costs
        self.planned_choices: dict[RecomputeChoice | None, PlannedChoice] = {}

    def cleared(self, like: "BlockChain | None" = None) -> "BlockChain":
        """Return a copy without choices for all blocks; it shares the costs of `like`; None: costs not yet measured."""
        clone = copy(self)
        clone.__dict__.pop("smallest_choice", None)
        clone.planned_choices = {}
        clone.like = like
        if like is not None:
            clone.block, clone.two_pass_costs = like.block, like.two_pass_costs
        else:
            clone.block, clone.two_pass_costs = self.block.cleared(), self.two_pass_costs.cleared()
        return clone

    @property
    def head_work(self) -> int:
        """Peak bytes of the loss head, from the last block's forward to its backward pass, less what blocks save."""
        return (self.like or self).head_nbytes_by_chunk[self.head_chunk]

    @cached_property
    def head_nbytes_by_chunk(self) -> dict[int, int]:
        """`head_work` by chunk size (tokens of the loss head at a time), measured with two blocks."""
        built = self.build(NUM_HEAD_BLOCKS, uniform_choice(NUM_HEAD_BLOCKS, ()))
        placed = place(built.graph, self.target)
        first, _ = backward_steps(placed, built, self.block.num_parts)[NUM_HEAD_BLOCKS - 1]
        stream_nbytes = (NUM_HEAD_BLOCKS + self.block.saves_input) * self.block.stream_nbytes
        return {
            head: LiveByteCurve(headed(placed), self.space).max_nbytes(0, first - 1) - stream_nbytes
            for head, headed in self.head_setters.items()
        }

    def min_seconds(self, nbytes: int) -> float:
        """Return a coarse lower bound of the seconds that recomputation adds if it lowers a run's bytes by `nbytes`."""
        block_nbytes = nbytes / self.count - self.block.stream_nbytes if self.count else 0.0
        return self.count * self.block.min_added_seconds(block_nbytes) if block_nbytes > 0 else 0.0

    # ---- choices

    def plan_choice(self, choice: RecomputeChoice | None) -> PlannedChoice:
        """Build and measure the graph of all blocks that saves by this choice; None saves all that is read."""
        if choice not in self.planned_choices:
            graph = self.build(self.count, choice).graph
            placed = place(graph, self.target)
            stored = storage_lifetimes(placed, self.space)
            arena, _ = lower_bound(*lifetime_columns(stored, saved_values.ALIGNMENT))
            recomputed = [call for call in graph.calls if call.phase == "recomputed"]
            nbytes = arena + self.call_nbytes * len(graph.calls)
            seconds = sum(map(self.block.seconds, recomputed))
            seconds += sum(cost_model.call_seconds(s, self.block.rates) for s in placed.offloads)
            planned = PlannedChoice(choice, arena, nbytes, seconds, len(recomputed))
            self.planned_choices[choice] = planned
        return self.planned_choices[choice]

    @property
    def _input_nbytes(self) -> int:
        """Bytes of the first block's input if it is saved, else 0."""
        is_saved = self.block.saves_input or self.num_two_pass_blocks
        return self.block.stream_nbytes if is_saved else 0

    @property
    def _all_calls_nbytes(self) -> int:
        """Bytes of the process, beside the arena, for the calls of a graph that recomputes nothing (Python objects)."""
        return self.call_nbytes * self.calls

    def seconds_bound(self, nbytes: int) -> float:
        """Return the solver's lower bound of the seconds that recomputing adds within `nbytes`; inf if none fits."""
        solution = self._solve(self._make_solver(nbytes), nbytes)
        return math.inf if solution is None else solution.seconds

    def fastest_within(self, nbytes: int, below: float = math.inf) -> PlannedChoice | None:
        """Return what to save so that recomputation adds the fewest seconds and arena and calls take at most `nbytes`;
        None if no graph that was built fits. Builds graphs until one takes nearly `nbytes`, but none that is estimated
        to add `below` seconds or more."""
        aim_nbytes = nbytes
        for _ in range(PLAN_ROUNDS):
            solution = self._solve_measured(nbytes + nbytes // 16, aim_nbytes, below)
            while solution is not None and self._is_too_large(solution.choice, nbytes):
                aim_nbytes -= nbytes // AIM_STEPS
                solution = self._solve_measured(nbytes + nbytes // 16, aim_nbytes, below)
            if solution is None or solution.seconds >= below:
                break
            excess_nbytes = self.plan_choice(solution.choice).nbytes - nbytes
            if -nbytes // 50 <= excess_nbytes <= 0:
                break
            aim_nbytes -= excess_nbytes if excess_nbytes > 0 else excess_nbytes // 2
        if solution is None and self._may_fit(nbytes, below):
            self._plan_around(self.smallest_choice.choice, nbytes)
        fitting = [c for c in self.planned_choices.values() if c.nbytes <= nbytes]
        return min(fitting, key=lambda choice: (choice.seconds, choice.nbytes), default=None)

    def _is_too_large(self, choice: RecomputeChoice, nbytes: int) -> bool:
        """Whether the choice was already built and takes more than `nbytes`."""
        return choice in self.planned_choices and self.planned_choices[choice].nbytes > nbytes

    def _may_fit(self, nbytes: int, below: float) -> bool:
        """Whether to build the choice of the fewest bytes: it may fit `nbytes` and add less than `below` seconds."""
        max_nbytes = nbytes * (1 + SLACK)
        if self.floor(num_two_pass_blocks=self.num_two_pass_blocks) > max_nbytes:
            return False
        return self.smallest_choice.nbytes <= max_nbytes and self.smallest_choice.seconds < below

    def _solve_measured(self, nbytes: int, aim_nbytes: int, below: float) -> ChainSolution | None:
        """Return the choice that adds the fewest seconds within `aim_nbytes`; None if none fits. Solves again until all
        its strategies are measured, or it adds `below` seconds. The solver's table has `nbytes`."""
        while True:
            solution = self._solve(self._make_solver(nbytes), aim_nbytes)
            if solution is None or solution.seconds >= below:
                return solution
            is_new = self.block.measure(solution.strategies)
            if not (self.two_pass_costs.measure(solution.two_pass_strategies) or is_new):
                return solution

    def _plan_around(self, choice: RecomputeChoice, nbytes: int) -> None:
        """Build the graph that saves by this choice; if it takes about `nbytes`, also graphs whose last block saves a
        little more, as its backward pass comes first and often has bytes to spare."""
        if self.plan_choice(choice).nbytes > nbytes * (1 + CLOSE):
            return
        for strategy in self.block.strategies:
            if 0 < self.block.saved(strategy) <= self.block.stream_nbytes:
                self.plan_choice(replace(choice, inner=(*choice.inner[:-1], strategy)))

    def _solve(self, solver: ChainSolver | TwoPassSolver, nbytes: int) -> ChainSolution | None:
        """Return the solver's fastest choice whose arena and calls take at most `nbytes`; None if none fits."""
        aim_nbytes = nbytes - self._all_calls_nbytes
        while (solution := solver.best_choice(aim_nbytes)) is not None:
            over = aim_nbytes + self._all_calls_nbytes + self.call_nbytes * solution.calls - nbytes
            if over <= 0:
                break
            aim_nbytes -= over
        return solution

    def _make_solver(self, nbytes: int, keep_nothing: bool = False) -> ChainSolver | TwoPassSolver:
        """Return a solver for choices of at most `nbytes`; with `keep_nothing`, blocks save their inputs at most."""

        def of(block: BlockCosts, count: int, head_work: int) -> ChainSolver:
            options = block.lean_options if keep_nothing else block.options
            return ChainSolver(block, count, head_work, options, nbytes, self._input_nbytes)

        later_solver = of(self.block, self.count - self.num_two_pass_blocks, self.head_work)
        if not self.num_two_pass_blocks:
            return later_solver
        return TwoPassSolver(of(self.two_pass_costs, self.num_two_pass_blocks, 0), later_solver)

    def floor(self, gradients_wait: bool = True, num_two_pass_blocks: int = 0) -> int:
        """Return a lower bound of the arena's bytes, whatever is recomputed: what the backward pass needs in the second
        block or in one of num_two_pass_blocks (see two_passes), with later blocks' gradients if gradients_wait."""
        if self.count < 2:
            return 0
        block = self.block
        if not gradients_wait:
            return self.two_pass_costs.min_work_nbytes
        block_position = max(num_two_pass_blocks + 1, 2)
        num_later = self.count - block_position
        candidates = [block.min_work_nbytes + num_later * block.reserve] if num_later >= 0 else []
        if num_two_pass_blocks:
            waiting_nbytes = (self.count - num_two_pass_blocks) * block.reserve
            candidates.append(self.two_pass_costs.min_work_nbytes + waiting_nbytes)
        return self._input_nbytes + block.head_reserve + max(candidates)

    @cached_property
    def smallest_choice(self) -> "SmallestChoice":
        """What to save for the fewest estimated bytes of arena and calls, whatever it costs in seconds."""
        block = self.block
        max_nbytes = 2 * self.head_work + (self.count + 1) * (block.stream_nbytes + block.reserve)
        max_nbytes += block.head_reserve + 2 * max(option.work for option in block.lean_options)
        coarse = self._make_solver(max_nbytes, keep_nothing=True)
        fine = self._make_solver(coarse.min_nbytes + coarse.min_nbytes // 20, keep_nothing=True)
        candidates, aims = [], np.geomspace(fine.max_nbytes, max_nbytes, NUM_AIMS).astype(int)
        for aim in (fine.min_nbytes, *aims.tolist()):
            solution = (fine if aim <= fine.max_nbytes else coarse).best_choice(aim)
            assert solution is not None
            nbytes = aim + self._all_calls_nbytes + self.call_nbytes * solution.calls
            candidates.append(SmallestChoice(nbytes, solution.seconds, solution.choice))
        return min(candidates, key=lambda candidate: candidate.nbytes)


@dataclass(frozen=True, slots=True)
class SmallestChoice:
    """The choice of saved values with the fewest estimated bytes (arena and calls), and the seconds that it adds."""

    nbytes: int
    seconds: float
    choice: RecomputeChoice


def checkpoint_spacing(chain: BlockChain) -> int:
    """Return the number of blocks a from one saved block input to the next that needs the fewest bytes:
    a = sqrt(n v / u) for n blocks with u bytes of values inside each and v between two. Chen et al. 2016."""
    block_costs = chain.block
    block_nbytes = block_costs.num_parts * sum(block_costs.value_nbytes)
    return max(round(math.sqrt(chain.count * block_costs.stream_nbytes / block_nbytes)), 1)
