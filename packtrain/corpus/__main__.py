"""python -m packtrain.corpus: the child process of `prepare`."""

from pathlib import Path
from typing import Any

from packtrain.corpus.build import write_corpus
from packtrain.corpus.documents import Text
from packtrain.corpus.report import reading
from packtrain.kept import Say, answer


def _build(request: dict[str, Any], folder: Path, say: Say) -> None:
    vocab, _ = request.pop("vocab"), request.pop("room")
    text = Text(data=Path(request.pop("data")), vocab=Path(vocab) if vocab else None, **request)
    write_corpus(text, folder, say)


if __name__ == "__main__":
    answer(_build, reading)
