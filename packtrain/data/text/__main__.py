"""python -m packtrain.data.text: the child process of `prepare_corpus`."""

from pathlib import Path
from typing import Any

from packtrain.data.text.build_corpus import write_corpus
from packtrain.data.text.documents import CorpusRecipe
from packtrain.data.text.reading_report import reading_position
from packtrain.data.token_cache import ReportProgress, serve_request


def _build(request: dict[str, Any], folder: Path, report: ReportProgress) -> None:
    vocab, _ = request.pop("vocab"), request.pop("room")
    recipe = CorpusRecipe(
        data=Path(request.pop("data")), vocab=Path(vocab) if vocab else None, **request
    )
    write_corpus(recipe, folder, report)


if __name__ == "__main__":
    serve_request(_build, reading_position)
