"""python -m packtrain.data.conversations: the child process of `prepare`."""

from pathlib import Path
from typing import Any

from packtrain.data.conversations.build_samples import (
    RENDERER_NBYTES,
    RENDERING,
    Recipe,
    write_dataset,
)
from packtrain.data.text.reading_report import reading
from packtrain.data.token_cache import Say, answer


def _build(request: dict[str, Any], folder: Path, report: Say) -> None:
    data, model, room = Path(request.pop("data")), Path(request.pop("model")), request.pop("room")
    write_dataset(Recipe(data=data, model=model, **request), folder, report, room)


if __name__ == "__main__":
    answer(_build, reading, lambda room: RENDERER_NBYTES + room // RENDERING)
