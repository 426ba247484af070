"""packtrain plan: print what a run would need and how long it would take, without running it."""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from packtrain.cli import print_message
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.files import check_not_read, check_writable, write_text
from packtrain.common.options import OUTPUT
from packtrain.common.text import speed_text, use_colour
from packtrain.data.text.text_streams import data_files
from packtrain.distributed import assume_world
from packtrain.planner.plan_view import chart_svg, page_html, terminal_text, trace_json
from packtrain.planner.rank_exchange import ExchangeTimes
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.monitoring.metrics_file import read
from packtrain.training.train_settings import TrainSettings
from packtrain.workflows import finetuning, training_run
from packtrain.workflows.planned_run import PlannedRun, facts

MAP_WIDTH = 100

# share of messages in what a link carries: TCP's bytes of a whole Ethernet frame with the gap after it
PAYLOAD = 1448 / 1538


@dataclass(frozen=True)
class PlanOutputs:
    """Outputs of a plan in addition to the printed table."""

    json: Path | None = OUTPUT(None, "write the plan as JSON, with every buffer")
    html: Path | None = OUTPUT(None, "write an HTML page that shows every byte over time, op by op")
    svg: Path | None = OUTPUT(None, "write the same as SVG")
    trace: Path | None = OUTPUT(None, "write a trace for ui.perfetto.dev")
    map: bool = OUTPUT(False, "draw the arena in the terminal")
    ranks: int = OUTPUT(
        0, "plan for one of N processes, each on a machine like this one; 0: as many as --nproc", min_value=0,
        max_value=1024,
    )  # fmt: skip
    link: str = OUTPUT("10Gbit", "the rate at which each of them can send", metavar="RATE")


@dataclass(frozen=True)
class PlanTrain(PlanOutputs, TrainSettings):
    COMMON = (
        "data preset vocab_size memory iters epochs batch_size ctx recompute nproc html json map"
    )


@dataclass(frozen=True)
class PlanTune(PlanOutputs, TuneSettings):
    COMMON = (
        "data memory iters epochs batch_size ctx lora_rank full merge recompute nproc html json map"
    )


def run(settings: PlanTrain | PlanTune) -> int:
    """Print the plan and write the requested files. Raises InputError. If no plan fits, uses the smallest one and
    raises DoesNotFit."""
    output_paths = {name: getattr(settings, name) for name in ("json", "html", "svg", "trace")}
    for name, path in output_paths.items():
        if path is not None:
            check_writable(path, f"--{name}")
            input_paths = settings.output, getattr(settings, "model", None)
            check_not_read(path, f"--{name}", [*input_paths, *data_files(settings.data)])
    num_ranks, link_rate = settings.ranks or settings.nproc, parse_link_rate(settings.link)
    if num_ranks == 1 and settings.link != PlanOutputs.link:
        raise InputError("--link is for several processes; give --ranks, or leave it out")
    with assume_world(num_ranks):
        if isinstance(settings, TuneSettings):
            run_plan = finetuning.prepare(settings, print_message, runs=False)
        else:
            run_plan = training_run.prepare(settings, print_message, runs=False)
    if run_plan.plans.refusal is None:
        print("\n".join([str(run_plan), *run_plan.notes]))
        if num_ranks > 1:
            print(_rank_summary(run_plan, run_plan.shared(link_rate), num_ranks, settings.link))
    about, plan = facts(run_plan, _measured_peak(settings.folder)), run_plan.plans.largest_plan
    if settings.map:
        width = min(shutil.get_terminal_size().columns, MAP_WIDTH)
        print(terminal_text(plan, width, color=use_colour(sys.stdout), **about))
    output_makers = {
        "json": lambda: run_plan.json(run_plan.minimum()), "html": lambda: page_html(plan, **about),
        "svg": lambda: chart_svg(plan, **about), "trace": lambda: trace_json(plan, run_plan.plans.op_names(plan)),
    }  # fmt: skip
    for name, path in output_paths.items():
        if path is not None:
            write_text(path, output_makers[name]())
            print_message(f"wrote {path}")
    if run_plan.plans.refusal is not None:
        raise DoesNotFit(run_plan.plans.refusal)
    return 0


def parse_link_rate(text: str) -> float:
    """Convert a link's rate in bits, such as 10Gbit, to bytes of messages per second. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)bit", text)
    if match is None or not float(match[1]):
        raise InputError(f"--link {text}: it must be a rate such as 10Gbit or 100Mbit")
    unit_bits: int = 1000 ** " KMGT".index(match[2] or " ")
    return PAYLOAD * float(match[1]) * unit_bits / 8


def _rank_summary(run_plan: PlannedRun, step: ExchangeTimes, ranks: int, link: str) -> str:
    speed = ranks * run_plan.plans.shape.num_positions / step.seconds
    overlapped_share = max(1 - step.waiting / step.exchange_seconds, 0.0)
    return (
        f"each of {ranks} processes: {step.seconds:.3g} s a step, of which {step.waiting:.3g} s wait for its link of"
        f" {link}; it is busy {step.exchange_seconds:.3g} s, {overlapped_share:.0%} of them while the process computes;"
        f" together {speed_text(speed)}"
    )


def _measured_peak(folder: Path) -> int | None:
    """Return the peak of private memory, in bytes, of a finished run in the folder; None if there is none."""
    metrics = folder / "metrics.jsonl"
    end_records = [r for r in read(metrics) if r.get("event") == "end"] if metrics.exists() else []
    return int(end_records[-1]["peak_bytes"]) if end_records else None
