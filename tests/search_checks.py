"""What must hold of a chain's blocks, for tests and for planted faults."""

from packtrain.engine.optim import AdamW
from packtrain.models.config import Config
from packtrain.planner.checkpointing import BlockChain
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.estimate import chain
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.step_shape import StepShape

CONFIG = Config(320, 128, 256, 6, 768, 8, 8)
SHAPE = StepShape(CONFIG, 1, 128, 1, 1.0)
REQUEST = PlanRequest(AdamW(), BackendRates(1e11, 1e10))


def fresh_chain(shape: StepShape) -> BlockChain:
    """A chain that knows nothing yet, whose calls take no memory, for that is more than these tensors take."""
    new_chain = chain(shape, REQUEST)
    new_chain.call_nbytes = 0
    return new_chain


def check_alone(shape: StepShape) -> None:
    """Ways to run a block that are measured in one chain take what each takes in a chain of its own."""
    together, separate = fresh_chain(shape).block, fresh_chain(shape).block
    separate.together = 1
    modes = together.strategies[::9]
    for block in (together, separate):
        block.measure(modes)
    assert together.options[::9] == separate.options[::9]
