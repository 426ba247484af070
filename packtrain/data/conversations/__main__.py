"""python -m packtrain.data.conversations: the child process of `prepare_dataset`."""

from packtrain.data.conversations import build_samples
from packtrain.data.text.reading_report import reading_position
from packtrain.data.token_cache import serve_request

if __name__ == "__main__":
    serve_request(
        build_samples.DatasetRecipe, build_samples.write_dataset, reading_position,
        lambda room: build_samples.RENDERER_NBYTES + room // build_samples.RENDERER_DIVISOR,
    )  # fmt: skip
