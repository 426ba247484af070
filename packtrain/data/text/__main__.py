"""python -m packtrain.data.text: the child process of `prepare`."""

from pathlib import Path
from typing import Any

from packtrain.data.text.build_corpus import write_corpus
from packtrain.data.text.documents import Text
from packtrain.data.text.reading_report import reading
from packtrain.data.token_cache import Say, answer


def _build(request: dict[str, Any], folder: Path, report: Say) -> None:
    vocab, _ = request.pop("vocab"), request.pop("room")
    text = Text(data=Path(request.pop("data")), vocab=Path(vocab) if vocab else None, **request)
    write_corpus(text, folder, report)


if __name__ == "__main__":
    answer(_build, reading)
