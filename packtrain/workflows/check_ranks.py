"""Whether all ranks of a run have been given the same, before step 1."""

from typing import Any

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.options import flag
from packtrain.common.version import __version__
from packtrain.distributed import here
from packtrain.workflows.planned_run import Ready


def check_alike(prepared: Ready) -> None:
    """Raise InputError, which names the rank and what is different there; DoesNotFit if a plan does not fit a rank."""
    every = here().gather((prepared.refusal, _facts(prepared)))
    if prepared.refusal is None:  # otherwise it is reported later, as in one process
        for rank, (refusal, _) in enumerate(every):
            if refusal is not None:
                raise DoesNotFit(f"on rank {rank} {refusal}")
    _, first = every[0]
    for rank, (_, facts) in enumerate(every):
        for name in first:
            if facts[name] != first[name]:
                raise InputError(
                    f"rank {rank} has {_named(name, prepared)} {facts[name]}, rank 0 has {first[name]};"
                    " all must be given the same"
                )


def _facts(prepared: Ready) -> dict[str, Any]:
    """What must be equal: versions, settings, the data, and the checkpoint that the run goes on from."""
    about = {name: value for name, value in prepared.job.about().items() if name != "sources"}
    found = prepared.found
    begun = None if found is None else found.gguf.metadata["packtrain.checkpoint.sha256"]
    patience = {name: getattr(prepared.job.settings, name) for name in CHANGING}
    teacher = getattr(prepared.job.train, "mark", None)
    own = {"version": __version__, "teacher": teacher, "checkpoint": begun}
    return {**about, **patience, **own}


# settings that a resumed run may change, but that decide which steps and validations there are
CHANGING = (
    "steps_per_eval", "val_batches", "patience", "past", "delta", "max_no_improvement", "grad_tol",
    "force_reshuffle", "zero",
)  # fmt: skip


def _named(name: str, prepared: Ready) -> str:
    known = hasattr(prepared.job.settings, name) and name != "data"
    return flag(name) if known else f"the {name}"
