"""What must hold of a chain's blocks, and of a search, for tests and for planted faults."""

from dataclasses import replace

from packtrain.engine.optim import AdamW
from packtrain.models.config import Config
from packtrain.planner.checkpointing import BlockChain, PlannedChoice, uniform_choice
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.drafts import PlanDraft, chain
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import PlanSearch, find_fastest_shape, smallest
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans

CONFIG = Config(320, 128, 256, 6, 768, 8, 8)
SHAPE = StepShape(CONFIG, 1, 128, 1, 1.0)
LONG = replace(SHAPE, config=replace(CONFIG, block_count=4), seq_len=512, max_norm=None)
REQUEST = PlanRequest(AdamW(), BackendRates(1e11, 1e10))


def fresh_chain(shape: StepShape) -> BlockChain:
    """A chain that knows nothing yet, whose calls take no memory, for that is more than these tensors take."""
    new_chain = chain(shape, REQUEST)
    new_chain.call_nbytes = 0
    return new_chain


def fastest_or_smallest(search: PlanSearch, shape: StepShape, limit: int) -> PlanDraft:
    """The fastest draft of at most `limit` bytes; the smallest draft if none fits."""
    return search.fastest_draft(shape, limit, False) or search.smallest_draft(shape, False)


def smallest_planned(blocks: BlockChain) -> PlannedChoice:
    """Build the smallest choice and the one that recomputes all blocks; return the smallest built choice."""
    blocks.plan_choice(blocks.smallest_choice.choice)
    blocks.plan_choice(uniform_choice(blocks.count, ()))
    return min(blocks.planned_choices.values(), key=lambda c: (c.nbytes, c.seconds))


def check_alone(shape: StepShape) -> None:
    """Ways to run a block that are measured in one chain take what each takes in a chain of its own."""
    together, separate = fresh_chain(shape).block, fresh_chain(shape).block
    separate.together = 1
    modes = together.strategies[::9]
    for block in (together, separate):
        block.measure(modes)
    assert together.options[::9] == separate.options[::9]


def check_smallest(shape: StepShape) -> None:
    """The smallest choice takes what its estimate says, within 1 %."""
    blocks = fresh_chain(shape)
    built, estimated = smallest_planned(blocks).nbytes, blocks.smallest_choice.nbytes
    assert abs(estimated / built - 1) < 0.01, f"{estimated} bytes estimated, {built} built"


def check_suggested_context(shape: StepShape, context: int) -> None:
    """A refusal of what a shorter context needs names one that fits, in tiles of its own or in none."""
    limit = smallest_nbytes(replace(shape, seq_len=context))
    change = find_fastest_shape(shape, REQUEST.with_limit(limit)).suggested_change
    assert smallest(shape, REQUEST).num_row_tiles > 1 and "it would fit with --ctx" in change
    assert smallest_nbytes(replace(shape, seq_len=int(change.split()[-1]))) <= limit


def smallest_nbytes(shape: StepShape) -> int:
    return REQUEST.peak_nbytes(make_plans(smallest(shape, REQUEST), REQUEST.optimizer))
