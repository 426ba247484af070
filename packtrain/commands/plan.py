"""packtrain plan: what a run would need and how long it would take, without running it."""

import json
from dataclasses import dataclass
from pathlib import Path

from packtrain.commands.train import ready
from packtrain.files import check_writable, write_text
from packtrain.settings import option
from packtrain.train.settings import TrainSettings


@dataclass(frozen=True)
class PlanSettings(TrainSettings):
    json: Path | None = option(None, "write the plan with all its buffers to this file")


def run(settings: PlanSettings) -> int:
    """Print the plan. Raises InputError."""
    if settings.json:
        check_writable(settings.json, "--json")
    made = ready(settings)
    print(made.text)
    if settings.json:
        write_text(settings.json, json.dumps(made.plans.to_dict(made.baseline, made.seconds)))
    return 0
