"""python -m packtrain.data.conversations: the child process of `prepare_dataset`."""

from pathlib import Path
from typing import Any

from packtrain.data.conversations.build_samples import (
    RENDERER_DIVISOR,
    RENDERER_NBYTES,
    DatasetRecipe,
    write_dataset,
)
from packtrain.data.text.reading_report import reading_position
from packtrain.data.token_cache import ReportProgress, serve_request


def _build(request: dict[str, Any], folder: Path, report: ReportProgress) -> None:
    data, model, room = Path(request.pop("data")), Path(request.pop("model")), request.pop("room")
    write_dataset(DatasetRecipe(data=data, model=model, **request), folder, report, room)


if __name__ == "__main__":
    serve_request(_build, reading_position, lambda room: RENDERER_NBYTES + room // RENDERER_DIVISOR)
