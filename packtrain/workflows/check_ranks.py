"""Whether all ranks of a run have been given the same, before step 1."""

from typing import Any

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.options import flag
from packtrain.common.version import __version__
from packtrain.distributed import here
from packtrain.workflows.planned_run import Ready


def check_alike(run_plan: Ready) -> None:
    """Raise InputError, which names the rank and what is different there; DoesNotFit if a plan does not fit a rank."""
    gathered = here().gather((run_plan.refusal, _facts(run_plan)))
    if run_plan.refusal is None:  # otherwise it is reported later, as in one process
        for rank, (refusal, _) in enumerate(gathered):
            if refusal is not None:
                raise DoesNotFit(f"on rank {rank} {refusal}")
    _, first = gathered[0]
    for rank, (_, facts) in enumerate(gathered):
        for name in first:
            if facts[name] != first[name]:
                raise InputError(
                    f"rank {rank} has {_named(name, run_plan)} {facts[name]}, rank 0 has {first[name]};"
                    " all must be given the same"
                )


def _facts(run_plan: Ready) -> dict[str, Any]:
    """What must be equal: versions, settings, the data, and the checkpoint that the run goes on from."""
    about = {name: value for name, value in run_plan.job.about().items() if name != "sources"}
    checkpoint = run_plan.found
    checkpoint_hash = (
        None if checkpoint is None else checkpoint.gguf.metadata["packtrain.checkpoint.sha256"]
    )
    patience = {name: getattr(run_plan.job.settings, name) for name in CHANGING}
    teacher = getattr(run_plan.job.train, "mark", None)
    extra = {"version": __version__, "teacher": teacher, "checkpoint": checkpoint_hash}
    return {**about, **patience, **extra}


# settings that a resumed run may change, but that decide which steps and validations there are
CHANGING = (
    "steps_per_eval", "val_batches", "patience", "past", "delta", "max_no_improvement", "grad_tol",
    "force_reshuffle", "zero",
)  # fmt: skip


def _named(name: str, run_plan: Ready) -> str:
    is_setting = hasattr(run_plan.job.settings, name) and name != "data"
    return flag(name) if is_setting else f"the {name}"
