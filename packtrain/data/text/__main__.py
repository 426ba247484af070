"""python -m packtrain.data.text: the child process of `prepare_corpus`."""

from packtrain.data.text.build_corpus import write_corpus
from packtrain.data.text.documents import CorpusRecipe
from packtrain.data.text.reading_report import reading_position
from packtrain.data.token_cache import serve_request

if __name__ == "__main__":
    serve_request(CorpusRecipe, lambda *request: write_corpus(*request[:3]), reading_position)
