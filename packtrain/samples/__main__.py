"""python -m packtrain.samples: the child process of `prepare`."""

from pathlib import Path
from typing import Any

from packtrain.kept import Say, answer
from packtrain.samples.build import Recipe, write_dataset


def _build(request: dict[str, Any], folder: Path, say: Say) -> None:
    data, model = Path(request.pop("data")), Path(request.pop("model"))
    write_dataset(Recipe(data=data, model=model, **request), folder, say)


if __name__ == "__main__":
    answer(_build)
