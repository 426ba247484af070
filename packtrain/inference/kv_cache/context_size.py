"""Check that a context fits a memory limit, and find the largest one that does."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from packtrain.common.errors import DoesNotFit
from packtrain.common.mapped_file import OVERHEAD_NBYTES, SLACK_NBYTES, mapped_file
from packtrain.common.memory import parse_size, private_nbytes, release_memory
from packtrain.engine.backends import CPU, Target
from packtrain.engine.memory_plan import make_plan, size_text
from packtrain.engine.placement import Placed
from packtrain.inference.kv_cache.cell_pools import RING_MARGIN
from packtrain.inference.kv_cache.decode_plans import RunKey, RunSizes, make_cache, place_runs
from packtrain.models.cached_transformer import STATES, CacheLayout
from packtrain.models.config import Config
from packtrain.models.model_file import ModelFile

STEP = 32  # cells of a suggested context are a multiple of this
CALL_NBYTES = 4096  # bytes of an executor for each call


def graphs_nbytes(placed_graphs: Mapping[RunKey, Placed], shared: Mapping[str, np.ndarray]) -> int:
    """Return the private bytes of a session with executors of graphs; leaves in `shared` that files map cost none."""
    plans = {name: make_plan(placed_graph) for name, placed_graph in placed_graphs.items()}
    arena_nbytes = max((a.nbytes for plan in plans.values() for a in plan.arenas), default=0)
    leaves = (leaf for placed in placed_graphs.values() for leaf in placed.graph.leaves)
    private_leaves = {leaf.label: leaf for leaf in leaves if leaf.kind != "input"}
    leaf_nbytes: int = sum(
        leaf.spec.nbytes for name, leaf in private_leaves.items() if name not in shared
    )
    vectors = sum(value.nbytes for value in shared.values() if not mapped_file(value))
    num_steps = sum(len(placed.steps) for placed in placed_graphs.values())
    return arena_nbytes + leaf_nbytes + vectors + CALL_NBYTES * num_steps


def windows_nbytes(config: Config, cache: CacheLayout, num_checkpoints: int) -> int:
    """Return the bytes of `num_checkpoints` saved windows and scan states, and of one more in the making."""
    if not num_checkpoints:
        return 0
    state_nbytes = sum(leaf.spec.nbytes for leaf in cache.scan_states(config).values())
    state_nbytes = (num_checkpoints + 1) * (state_nbytes // (STATES * cache.max_sequences))
    if not cache.ring:
        return state_nbytes
    blocks = [i for i in range(config.block_count) if cache.pool(config, i) == "ring_"]
    ring_nbytes = sum(leaf.spec.nbytes for i in blocks for leaf in cache.leaves(config, i).values())
    window_cells = max(config.visible_tokens_of(i) for i in blocks) - 1 + RING_MARGIN
    return state_nbytes + (num_checkpoints + 1) * window_cells * (ring_nbytes // cache.ring)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The graphs of a context with any number of cells, and their bytes; the fields are `Context`'s settings."""

    model: ModelFile
    run_sizes: RunSizes
    sequences: int
    cache: str
    swa_full: bool = False
    parts: bool = False
    longest: int = 0
    checkpoints: int = 0
    hidden: bool = False
    target: Target = CPU
    has_hidden_states: bool = False

    def graphs(self, num_cells: int) -> tuple[CacheLayout, dict[RunKey, Placed]]:
        """Return the layout of a cache of `num_cells` cells and the placed graphs of its runs. Raises ContextError."""
        config, sizes = self.model.config, self.run_sizes
        max_seq_cells = self.longest or (num_cells // self.sequences if self.parts else num_cells)
        kind = self.sequences, self.cache, sizes.token_counts[0], self.swa_full
        layout = make_cache(config, num_cells, *kind, longest=max_seq_cells)
        graph_args = config, layout, sizes, self.model.matrix_dtypes(), self.target
        return layout, place_runs(
            *graph_args, hidden=self.hidden, has_moves=True, has_hidden_states=self.has_hidden_states,
        )  # fmt: skip

    def nbytes(self, num_cells: int) -> int:
        """Return the private bytes of a context of `num_cells` cells and of its checkpoints."""
        layout, placed_graphs = self.graphs(num_cells)
        nbytes = windows_nbytes(self.model.config, layout, self.checkpoints * self.sequences)
        return graphs_nbytes(placed_graphs, self.model.stored()) + nbytes


def check_room(num_cells: int, memory: int | str, needed_nbytes: Callable[[int], int]) -> None:
    """Raise DoesNotFit, which names the largest number of cells that fits, if `num_cells` need more than `memory`.

    needed_nbytes  returns the private bytes that a number of cells, and what stands beside the context, will need
    """
    limit = parse_size(memory, "memory") if isinstance(memory, str) else memory
    release_memory()
    used_nbytes = private_nbytes() + OVERHEAD_NBYTES
    total = used_nbytes + needed_nbytes(num_cells)
    if total <= limit:
        return
    used_nbytes += SLACK_NBYTES
    total += SLACK_NBYTES  # so that the named size is enough for the next process, too
    min_cells = min(STEP, num_cells)
    min_nbytes = used_nbytes + needed_nbytes(min_cells)
    per_cell_nbytes = max((total - min_nbytes) / max(num_cells - min_cells, 1), 1.0)
    max_cells = min(STEP + int((limit - min_nbytes) / per_cell_nbytes) // STEP * STEP, num_cells)
    while max_cells > 0 and used_nbytes + needed_nbytes(max_cells) > limit:
        max_cells -= STEP
    advice = f"{_sufficient_size(min_nbytes)} is the least, for a context of {min_cells}"
    if max_cells > 0:
        advice = f"the largest that fits is {max_cells:,}"
    raise DoesNotFit(
        f"a context of {num_cells:,} tokens needs {_sufficient_size(total)}, and {size_text(limit)} are allowed;"
        f" {advice}"
    )


def _sufficient_size(nbytes: int) -> str:
    """Format bytes as `size_text` does, but rounded up, so that a limit of the printed size is enough."""
    tenth = 1024 ** (max(nbytes.bit_length() - 1, 0) // 10) / 10
    return size_text(math.ceil(math.ceil(nbytes / tenth) * tenth))
