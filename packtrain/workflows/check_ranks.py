"""Check before step 1 that all ranks of a run have equal settings, data and checkpoints."""

from typing import Any

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.options import ON_ALL_RANKS, flag, resumable_names
from packtrain.common.version import __version__
from packtrain.distributed import current_world
from packtrain.workflows.planned_run import PlannedRun


def check_ranks_agree(run_plan: PlannedRun) -> None:
    """Raise InputError, which names a rank that differs from rank 0; DoesNotFit if a plan does not fit a rank."""
    facts_by_rank = current_world().gather((run_plan.refusal, _rank_facts(run_plan)))
    if run_plan.refusal is None:  # otherwise it is reported later, as in one process
        for rank, (refusal, _) in enumerate(facts_by_rank):
            if refusal is not None:
                raise DoesNotFit(f"on rank {rank} {refusal}")
    _, first = facts_by_rank[0]
    for rank, (_, facts) in enumerate(facts_by_rank):
        for fact_name in first:
            if facts[fact_name] != first[fact_name]:
                is_setting = hasattr(run_plan.job.settings, fact_name) and fact_name != "data"
                label = flag(fact_name) if is_setting else f"the {fact_name}"
                raise InputError(
                    f"rank {rank} has {label} {facts[fact_name]}, rank 0 has {first[fact_name]};"
                    " all must be given the same"
                )


def _rank_facts(run_plan: PlannedRun) -> dict[str, Any]:
    """Return what must be equal on all ranks: version, settings, data, and the checkpoint to resume from."""
    job_facts = {name: value for name, value in run_plan.job.about().items() if name != "sources"}
    checkpoint = run_plan.found
    checkpoint_hash = (
        None if checkpoint is None else checkpoint.gguf.metadata["packtrain.checkpoint.sha256"]
    )
    settings = run_plan.job.settings
    names = sorted(resumable_names(type(settings), ON_ALL_RANKS))
    setting_values = {name: getattr(settings, name) for name in names}
    teacher_mark = getattr(run_plan.job.train, "mark", None)
    run_facts = {"version": __version__, "teacher": teacher_mark, "checkpoint": checkpoint_hash}
    return {**job_facts, **setting_values, **run_facts}
