"""What a training run will do, before it does it: its graphs, their plans, and where every byte goes.

Sizes and settings go in; nothing is allocated. All plans share the leaves, by name, and one arena.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from packtrain import cost
from packtrain.graph import Graph
from packtrain.models import llama
from packtrain.place import Placed, place
from packtrain.plan import Plan, make_plan
from packtrain.plan.plan import size_text
from packtrain.train.optim import AdamW, accumulating, training, updating
from packtrain.watch.progress import clock

LOOP_NBYTES = 3 << 20  # progress line, metrics and files of the loop; measured up to 2.6 MiB
STEP, MICRO, UPDATE, EVALUATE = "step", "micro", "update", "evaluate"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the plans depend on: rows × time tokens in each of `micros` micro-batches of a step."""

    config: llama.Config
    rows: int
    time: int
    micros: int = 1
    max_norm: float | None = None
    recompute: str = "none"
    evaluate: bool = True


@dataclass(frozen=True)
class Plans:
    """A placed graph and a plan for each thing that a run does, by name."""

    shape: Shape
    placed: Mapping[str, Placed]
    plans: Mapping[str, Plan]

    @cached_property
    def leaves(self) -> dict[str, int]:
        """Bytes of every weight and state by name, over all graphs."""
        return {
            leaf.label: leaf.spec.nbytes
            for placed in self.placed.values()
            for leaf in placed.graph.leaves
            if leaf.kind in ("weight", "state")
        }

    @property
    def largest(self) -> Plan:
        """The plan that needs the largest arena, which all share."""
        return max(self.plans.values(), key=lambda plan: plan.arena().nbytes)

    def _nbytes(self, *prefixes: str) -> int:
        return sum(n for name, n in self.leaves.items() if name.startswith(prefixes))

    @property
    def state_nbytes(self) -> int:
        """Moments of the optimizer and cache of generation."""
        return self._nbytes("m/", "v/", "cache.")

    @property
    def gradient_nbytes(self) -> int:
        """Running sums over micro-batches. Gradients of a single batch live in the arena."""
        return self._nbytes("g/")

    @property
    def weight_nbytes(self) -> int:
        return sum(self.leaves.values()) - self.state_nbytes - self.gradient_nbytes

    @property
    def arena_nbytes(self) -> int:
        return self.largest.arena().nbytes

    @property
    def loop_nbytes(self) -> int:
        """What the training loop holds beside the session: a step's batches, twice, and its files."""
        shape = self.shape
        batch = 5 * 4 * shape.rows * shape.time  # tokens, targets, weights, pos, seq
        return LOOP_NBYTES + 2 * batch * shape.micros

    @property
    def nbytes(self) -> int:
        """All that a run takes on top of the process before it."""
        return sum(self.leaves.values()) + self.arena_nbytes + self.loop_nbytes

    def seconds(self, rates: cost.Rates) -> float:
        """Expected time of one training step."""
        runs = {STEP: 1, MICRO: self.shape.micros, UPDATE: 1}
        return sum(
            count * cost.seconds(self.placed[name], rates)
            for name, count in runs.items()
            if name in self.placed
        )

    def to_dict(self, baseline: int, seconds: float) -> dict[str, Any]:
        """The plan as plain data for JSON; sizes in bytes."""
        arena = self.largest.arena()
        return {
            "weights_bytes": self.weight_nbytes,
            "state_bytes": self.state_nbytes,
            "gradient_bytes": self.gradient_nbytes,
            "arena_bytes": arena.nbytes,
            "lower_bound_bytes": arena.lower_bound,
            "loop_bytes": self.loop_nbytes,
            "baseline_bytes": baseline,
            "total_bytes": baseline + self.nbytes,
            "seconds_per_step": seconds,
            "buffers": [asdict(buffer) for buffer in self.largest.buffers],
        }

    def text(self, baseline: int, seconds: float, steps: int) -> str:
        """The plan as a table for people."""
        arena, shape = self.largest.arena(), self.shape
        parameters = self.weight_nbytes // 4
        tokens = shape.rows * shape.time * shape.micros
        bound = "at its lower bound" if arena.gap == 0 else f"{arena.gap:.1%} over its lower bound"
        times = f" × {shape.micros}" if shape.micros > 1 else ""
        rows = [
            ("weights", self.weight_nbytes, f"{parameters:,} parameters in f32"),
            ("optimizer", self.state_nbytes, "two moments a parameter"),
            ("gradients", self.gradient_nbytes, "sums over micro-batches"),
            ("arena", arena.nbytes, f"activations, gradients, workspaces; {bound}"),
            ("loop", self.loop_nbytes, "batches, files, progress"),
            ("process", baseline, "interpreter, kernels, threads, as measured"),
            ("total", baseline + self.nbytes, ""),
        ]
        lines = [f"a step is {shape.rows} × {shape.time}{times} = {tokens:,} tokens"]
        lines += [f"  {name:<10}{size_text(n):>10}  {why}".rstrip() for name, n, why in rows if n]
        lines.append(
            f"  expected  {seconds:>7.3f} s a step, {tokens / seconds:,.0f} tokens/s, "
            f"{clock(seconds * steps)} for {steps:,} steps"
        )
        return "\n".join(lines)


def make_plans(shape: Shape, optimizer: AdamW, others: Mapping[str, Placed] | None = None) -> Plans:
    """Plans of training, of evaluation if wanted, and of other graphs on the same leaves."""
    graphs = _training(shape, optimizer)
    if shape.evaluate:
        made = llama.loss(shape.config, llama.weights(shape.config), shape.rows, shape.time)
        graphs[EVALUATE] = Graph({"loss": made.loss, "losses": made.losses})
    placed = {name: place(graph) for name, graph in graphs.items()} | dict(others or {})
    return Plans(shape, placed, {name: make_plan(p) for name, p in placed.items()})


def _training(shape: Shape, optimizer: AdamW) -> dict[str, Graph]:
    weights = llama.weights(shape.config)
    made = llama.loss(shape.config, weights, shape.rows, shape.time)
    keep = made.blocks if shape.recompute == "blocks" else None
    trained, outputs = list(weights.values()), {"loss": made.loss}
    if shape.micros == 1:
        graph = training(outputs, trained, optimizer, keep=keep, max_norm=shape.max_norm)
        return {STEP: graph}
    return {
        MICRO: accumulating(outputs, trained, keep=keep),
        UPDATE: updating(trained, optimizer, max_norm=shape.max_norm),
    }
