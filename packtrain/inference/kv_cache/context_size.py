"""Whether a context fits a memory limit, and the largest one that does."""

from collections.abc import Callable, Mapping

import numpy as np

from packtrain.common.errors import DoesNotFit
from packtrain.common.memory import parse_size, private_nbytes, settle
from packtrain.engine.memory_plan import make_plan, size_text
from packtrain.engine.placement import Placed
from packtrain.inference.kv_cache.cell_pools import SPARE
from packtrain.inference.kv_cache.decode_plans import Name
from packtrain.models.cached_transformer import STATES, Cache
from packtrain.models.config import Config
from packtrain.models.model_file import ModelFile

STEP = 32  # cells of a suggested context are a multiple of this
PER_CALL = 4096  # bytes of an executor for each call
REST = 24 << 20  # of compiled kernels, and what runs allocate for moments
SLACK = 4 << 20  # by which another attempt may need more


def needed(placed: Mapping[Name, Placed], shared: Mapping[str, np.ndarray]) -> int:
    """Private bytes of the session and executors of these graphs; `shared` leaves are mapped from a file."""
    plans = {name: make_plan(p) for name, p in placed.items()}
    arena = max((a.nbytes for plan in plans.values() for a in plan.arenas), default=0)
    private_leaves = {
        leaf.label: leaf for p in placed.values() for leaf in p.graph.leaves if leaf.kind != "input"
    }
    leaves: int = sum(
        leaf.spec.nbytes for name, leaf in private_leaves.items() if name not in shared
    )
    vectors = sum(value.nbytes for value in shared.values() if not is_mapped(value))
    return arena + leaves + vectors + PER_CALL * sum(len(p.steps) for p in placed.values())


def is_mapped(value: np.ndarray) -> bool:
    """Whether an array is a view of a file."""
    base: object = value
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return base is not None


def windows_nbytes(config: Config, cache: Cache, count: int) -> int:
    """Bytes of so many checkpoints, while another one is made."""
    if not count:
        return 0
    states = sum(leaf.spec.nbytes for leaf in cache.states(config).values())
    states = (count + 1) * (states // (STATES * cache.sequences))
    if not cache.ring:
        return states
    blocks = [i for i in range(config.block_count) if cache.pool(config, i) == "ring_"]
    ring_nbytes = sum(leaf.spec.nbytes for i in blocks for leaf in cache.leaves(config, i).values())
    window = max(config.reach_of(i) for i in blocks) - 1 + SPARE
    return states + (count + 1) * window * (ring_nbytes // cache.ring)


def check_room(
    cells: int,
    memory: int | str,
    build: Callable[[int], tuple[Cache, Mapping[Name, Placed]]],
    model: ModelFile,
    checkpoints: int,
    reserved_nbytes: int = 0,
) -> None:
    """Raise DoesNotFit, which names the largest number of cells that fits, if `cells` need more than `memory`.

    reserved_nbytes  bytes that others will need
    """

    def own(cells: int) -> int:
        layout, placed = build(cells)
        return needed(placed, model.stored()) + windows_nbytes(model.config, layout, checkpoints)

    limit = parse_size(memory, "memory") if isinstance(memory, str) else memory
    settle()
    used = private_nbytes() + REST + reserved_nbytes
    total = used + own(cells)
    if total <= limit:
        return
    used += SLACK
    total += SLACK  # so that a size that is told is enough for the next process, too
    min_nbytes = used + own(STEP)
    per_cell_nbytes = max((total - min_nbytes) / max(cells - STEP, 1), 1.0)
    max_cells = min(STEP + int((limit - min_nbytes) / per_cell_nbytes) // STEP * STEP, cells)
    while max_cells > 0 and used + own(max_cells) > limit:
        max_cells -= STEP
    advice = (
        f"the largest that fits is {max_cells:,}"
        if max_cells > 0
        else f"{size_text(min_nbytes)} is the least"
    )
    raise DoesNotFit(
        f"a context of {cells:,} tokens needs {size_text(total)}, and {size_text(limit)} are allowed; {advice}"
    )
