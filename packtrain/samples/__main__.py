"""python -m packtrain.samples: the child process of `prepare`."""

from pathlib import Path
from typing import Any

from packtrain.corpus.report import reading
from packtrain.kept import Say, answer
from packtrain.samples.build import RENDERER_NBYTES, RENDERING, Recipe, write_dataset


def _build(request: dict[str, Any], folder: Path, say: Say) -> None:
    data, model, room = Path(request.pop("data")), Path(request.pop("model")), request.pop("room")
    write_dataset(Recipe(data=data, model=model, **request), folder, say, room)


if __name__ == "__main__":
    answer(_build, reading, lambda room: RENDERER_NBYTES + room // RENDERING)
