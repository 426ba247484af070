"""What must hold of a chain's blocks, for tests and for planted faults."""

from packtrain.engine.optim import AdamW
from packtrain.models.config import Config
from packtrain.planner.checkpointing import Chain
from packtrain.planner.cost_model import Rates
from packtrain.planner.estimate import chain
from packtrain.planner.plan_request import Request
from packtrain.planner.step_shape import StepShape

CONFIG = Config(320, 128, 256, 6, 768, 8, 8)
SHAPE = StepShape(CONFIG, 1, 128, 1, 1.0)
REQUEST = Request(AdamW(), Rates(1e11, 1e10))


def fresh(form: StepShape) -> Chain:
    """A chain that knows nothing yet, whose calls take no memory, for that is more than these tensors take."""
    new_chain = chain(form, REQUEST)
    new_chain.call_nbytes = 0
    return new_chain


def check_alone(form: StepShape) -> None:
    """Ways to run a block that are measured in one chain take what each takes in a chain of its own."""
    together, separate = fresh(form).block, fresh(form).block
    separate.together = 1
    modes = together.ways[::9]
    for block in (together, separate):
        block.measure(modes)
    assert together.options[::9] == separate.options[::9]
