"""Text to token ids and back with the vocabulary of a GGUF file, as llama.cpp does it (src/llama-vocab.cpp).

Takes `GGUF(path).metadata` and text, and returns the same ids as llama.cpp. Tokenizers know no chat templates."""

from packtrain.data.tokenizer.batch_encoding import encode_all
from packtrain.data.tokenizer.token_table import (
    BYTE, CONTROL, END_TEXTS, KEYS, NO_ID, NORMAL, UNKNOWN, USER_DEFINED, TokenizerError,
)  # fmt: skip
from packtrain.data.tokenizer.tokenizer import StreamDecoder, Tokenizer
