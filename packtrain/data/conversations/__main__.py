"""python -m packtrain.data.conversations: the child process of `prepare_dataset`."""

from packtrain.data.conversations.build_samples import (
    RENDERER_DIVISOR,
    RENDERER_NBYTES,
    DatasetRecipe,
    write_dataset,
)
from packtrain.data.text.reading_report import reading_position
from packtrain.data.token_cache import serve_request

if __name__ == "__main__":
    serve_request(
        DatasetRecipe, write_dataset, reading_position, lambda room: RENDERER_NBYTES + room // RENDERER_DIVISOR,
    )  # fmt: skip
