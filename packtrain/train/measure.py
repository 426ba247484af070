"""The loss of a model in a file, measured where its weights are: what eval prints, and the end of a tuning run."""

from packtrain.errors import DoesNotFit
from packtrain.graph import Graph
from packtrain.memory import total_nbytes
from packtrain.models import transformer
from packtrain.models.file import ModelFile
from packtrain.place import place
from packtrain.plan import make_plan, size_text
from packtrain.run import Executor, Session


def losses_of(model: ModelFile, rows: int, time: int, chunk: int = 256) -> Executor:
    """An executor that gives `losses` (rows, time) of batches, in a session with the mapped weights."""
    leaves, session = transformer.weights(model.config, model.types()), Session()
    session.share(model.stored())
    made = transformer.loss(model.config, leaves, rows, time, chunk=chunk)
    placed = place(Graph({"losses": made.losses}))
    plan, there = make_plan(placed), total_nbytes()
    if plan.arena().nbytes > there:
        raise DoesNotFit(
            f"windows of {rows} × {time} tokens need {size_text(plan.arena().nbytes)}, and there "
            f"are {size_text(there)}; a smaller --ctx or --batch-size needs less"
        )
    return session.executor(placed, plan)
