"""What a run has written so far, read again and again while it goes on: its curves, samples, settings and figures.

Input: the run's folder. Damaged lines are counted and passed over; what is missing or damaged is left out.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packtrain.common.options import yaml
from packtrain.training.monitoring import METRICS, SAMPLES
from packtrain.training.monitoring.line_reader import Lines
from packtrain.training.monitoring.metric_series import Series, last, least, mean, most, total
from packtrain.training.monitoring.metrics_file import parsed

ABOUT, SETTINGS = "run.json", "run.yaml"
LARGE = 1 << 20  # bytes of a file of settings; none is larger
KEPT = 50  # the newest samples
LONGEST = 4_000  # characters of a sample, and of a setting
QUIET = 60.0  # seconds without a record, or the time of so many steps, after which a run counts as stopped
QUIET_STEPS = 30
QUIET_MERGE = 1800.0  # seconds after which a run whose merge has written nothing counts as unmerged
MODELFILE = "Modelfile"  # in the run folder
HIDDEN = {"resume", "overwrite", "force_reshuffle", "watch"}  # settings that say nothing of a run
TRAIN = {
    "step": last, "tokens": last, "seconds": last, "loss": mean, "low": least, "high": most, "bad": total,
    "lr": mean, "grad_norm": mean, "tokens_per_second": mean, "positions_per_second": mean,
}  # fmt: skip
VALID = {
    "step": last, "tokens": last, "seconds": last, "val_loss": mean, "val_error": mean, "val_accuracy": mean,
}  # fmt: skip


class History:
    """A run in a folder: `refresh` reads what is new. Every change is marked with the version given then.

    train, valid  the curves
    now           the last value of each number
    computed      tokens, with prompts and padding
    best          the lowest loss and its step; best_valid: the same of validation
    end           the record of the end, once there is one
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._metrics = Lines(folder / METRICS, self._forget)
        self._samples = Lines(folder / SAMPLES, self._forget_samples)
        self.about, self.settings = dict[str, Any](), dict[str, Any]()
        self._seen, self.settings_version, self._reading = (0, 0), 0, 0
        self._forget_samples()
        self._forget()

    def _forget(self) -> None:
        self.train, self.valid = Series(TRAIN), Series(VALID)
        self.step = self.damaged = 0
        self.now = dict[str, float]()
        self.computed = 0.0
        self.best, self.best_valid = (math.nan, 0), (math.nan, 0)  # loss and its step
        self.end: dict[str, float] | None = None

    def _forget_samples(self) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.samples_version = self._reading

    def refresh(self, version: int) -> None:
        self._reading = version
        for line in self._metrics.new():
            self._add(parsed(line), version)
        for line in self._samples.new():
            record = parsed(line)
            if record is not None and isinstance(record.get("text"), str):
                step = numbers(record).get("step", math.nan)
                text = printed(record["text"])
                self.samples.append({"step": step if math.isfinite(step) else None, "text": text})
                self.samples_version = version
        seen = modified(self.folder / ABOUT), modified(self.folder / SETTINGS)
        if seen != self._seen:
            self._seen, self.settings_version = seen, version
            self.about = about(self.folder / ABOUT)
            self.settings = settings(self.folder / SETTINGS)

    def _add(self, record: Mapping[str, Any] | None, version: int) -> None:
        if record is None:
            self.damaged += 1
            return
        values = numbers(record)
        if record.get("event") == "end":
            self.end = values
            return
        step = values.get("step", math.nan)
        if not math.isfinite(step):
            self.damaged += 1
            return
        self.step, self.end = int(step), None
        if "loss" in values:
            loss = values["loss"]
            values |= {"low": loss, "high": loss, "bad": 0.0 if math.isfinite(loss) else 1.0}
            self.train.add(values, version)
            self.best = lower(self.best, loss, self.step)
            speed = values.get("positions_per_second", 0.0)  # 0 in a fit of datapoints
            self.computed += speed * (values.get("seconds", 0.0) - self.now.get("seconds", 0.0))
        if "val_loss" in values:
            self.valid.add(values, version)
            self.best_valid = lower(self.best_valid, values["val_loss"], self.step)
        self.now = self.now | values

    # ---- figures

    @property
    def changed(self) -> float:
        """When the run last wrote a record or began, in seconds since 1970; 0: unknown."""
        return max(modified(self.folder / name) for name in (METRICS, SETTINGS, ABOUT)) / 1e9

    def state(self) -> str:
        """running, done, unmerged, failed or stopped: what a reader of the files can know."""
        quiet = time.time() - self.changed
        if self.end is not None:
            # after its last step, finetune merges, and then writes the Modelfile
            started_at, merged_at = (modified(self.folder / name) for name in (SETTINGS, MODELFILE))
            if "merge" not in self.settings or merged_at >= started_at:
                return "done"
            return "unmerged" if quiet > QUIET_MERGE else "running"
        if not math.isfinite(self.now.get("loss", 0.0)):
            return "failed"
        each = self.now.get("seconds", 0.0) / max(self.step, 1)
        return "running" if quiet < max(QUIET, QUIET_STEPS * each) else "stopped"

    def figures(self) -> dict[str, Any]:
        """The row of a table: plain data, None where unknown."""
        now, end, lookup = self.now, self.end or {}, self.about.get
        seconds, steps = now.get("seconds"), lookup("steps")
        tokens = self.computed or now.get("tokens")
        row = {
            "name": self.name,
            "state": self.state(),
            "step": self.step,
            "steps": steps,
            "tokens": now.get("tokens"),
            "loss": now.get("loss"),
            "best_loss": self.best[0],
            "best_step": self.best[1],
            "val_loss": now.get("val_loss"),
            "best_val_loss": self.best_valid[0],
            "best_val_step": self.best_valid[1],
            "tokens_per_second": tokens / seconds if seconds and tokens else None,
            "seconds": seconds,
            "left": seconds / self.step * (steps - self.step) if seconds and steps and self.step else None,
            "changed": self.changed,
            "planned_bytes": end.get("planned_bytes", lookup("planned_bytes")),
            "peak_bytes": end.get("peak_bytes"),
            "damaged": self.damaged,
        }  # fmt: skip
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }


def lower(best: tuple[float, int], loss: float, step: int) -> tuple[float, int]:
    """The lower of two losses with its step; one that is not finite does not count."""
    return best if not math.isfinite(loss) or best[0] <= loss else (loss, step)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record. A fit counts datapoints where others count tokens."""
    values = {
        key.replace("datapoints", "tokens"): float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and not (isinstance(value, int) and abs(value) >> 62)
    }
    step = values.get("step", math.nan)
    if not 0 <= step < 1 << 62:
        values.pop("step", None)
    return values


def modified(path: Path) -> int:
    """When a file was last changed, in nanoseconds; 0: it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def about(path: Path) -> dict[str, Any]:
    """What a run wrote of itself when it began; empty if it is missing or damaged."""
    try:
        record = parsed(text_of(path).encode() + b"\n") or {}
    except OSError:
        return {}
    int_fields = ("steps", "planned_bytes", "budget_bytes")
    int_values = {name: record[name] for name in int_fields if isinstance(record.get(name), int)}
    rows = record.get("rows")
    listed = [
        [printed(str(row[0])), int(row[1]), printed(str(row[2]))]
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, list) and len(row) == 3 and isinstance(row[1], int)
    ]
    return {**int_values, "title": printed(str(record.get("title", ""))), "rows": listed}


def settings(path: Path) -> dict[str, str]:
    """The settings of a run by name, as text; empty if they are missing or damaged."""
    try:
        loaded = yaml().safe_load(text_of(path))
    except (OSError, ValueError, RecursionError, yaml().YAMLError):
        return {}
    if not isinstance(loaded, dict):
        return {}
    return {printed(str(k)): shown(v) for k, v in loaded.items() if k not in HIDDEN}


def text_of(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(LARGE).decode(errors="replace")


def shown(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return (
        ""
        if value is None
        else printed(value if isinstance(value, str) else json.dumps(value, default=str))
    )


def printed(text: str) -> str:
    """Text of a limited length that any encoding takes."""
    return text[:LONGEST].encode(errors="replace").decode()
