"""Perplexity through windows: a ring of cells gives what all cells give, bit for bit."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from packtrain.inference.kv_cache import Context
from packtrain.models.model_file import open_model, save_model
from tests.architectures import CONFIGS, random_model, random_weights, vocabulary
from tests.real import BASE


def token_losses(
    path: Path, text: np.ndarray, chunk: int, *, swa_full: bool
) -> tuple[np.ndarray, int]:
    """−log p of each token after the first, and the cells of the ring."""
    ctx = Context(path, cells=len(text), rows=chunk, swa_full=swa_full)
    neg_logprobs = list[float]()
    for at in range(0, len(text), chunk):
        chunk_tokens = text[at : at + chunk].tolist()
        logits = ctx.decode(chunk_tokens, wanted=range(len(chunk_tokens))).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        next = text[at + 1 : at + 1 + len(chunk_tokens)]
        neg_logprobs += (-logits[np.arange(len(next)), next]).tolist()
    return np.array(neg_logprobs), ctx.cache.ring


@pytest.mark.parametrize("chunk", [1, 8, 32])
@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gemma4", "gemma3n"])
def test_small_models(tmp_path: Path, name: str, chunk: int) -> None:
    config = random_model(tmp_path / "m.gguf", name)
    text = np.random.default_rng(1).integers(3, config.vocab_size, 300 if chunk == 1 else 900)
    ring, cells = token_losses(tmp_path / "m.gguf", text, chunk, swa_full=False)
    full, none = token_losses(tmp_path / "m.gguf", text, chunk, swa_full=True)
    assert 0 < cells < len(text) and not none
    assert np.array_equal(ring, full) and len(ring) == len(text) - 1


@pytest.mark.real
def test_the_real_base() -> None:
    """1,500 tokens and a window of 512."""
    tokenizer = open_model(BASE).tokenizer()
    source = Path(__file__).with_name("test_context.py").read_text()
    text = np.array(tokenizer.encode(source)[:1500])
    ring, cells = token_losses(BASE, text, 64, swa_full=False)
    full, none = token_losses(BASE, text, 64, swa_full=True)
    assert 0 < cells < len(text) and not none
    assert np.array_equal(ring, full) and ring.mean() < 4


PATTERNS = [pattern for blocks in (1, 2, 3) for pattern in product((True, False), repeat=blocks)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_blocks_with_windows_and_without_in_every_order(tmp_path: Path, pattern: tuple) -> None:
    """Contexts of several lengths and numbers of sequences write, share, move, save and take back tokens alike."""
    config = replace(CONFIGS["olmo2"], block_count=len(pattern), window=4, window_pattern=pattern)
    values = random_weights(config, 0)
    save_model(tmp_path / "m.gguf", config, vocabulary(), values.__getitem__, name="random")
    text = np.random.default_rng(1).integers(3, 300, 96).tolist()
    for cells, sequences in product((40, 80, 256), (1, 3)):
        logits = []
        for swa_full in (False, True):
            context = Context(
                tmp_path / "m.gguf",
                cells=cells,
                sequences=sequences,
                prompts=(8,),
                swa_full=swa_full,
            )
            at = context.decode(text[:20], 0)
            if sequences > 1:
                context.copy(0, 1)
                at = np.concatenate((at, context.decode(text[20:24] * 2, [0] * 4 + [1] * 4)))
            context.shift(0, 2, 10)
            context.restore(context.save())
            context.remove(0, 22)
            at = np.concatenate((at, context.decode(text[40:44], 0)))
            num_reused = context.reuse(0, text[:12])
            logits.append(np.concatenate((at, context.decode(text[num_reused:12], 0))))
        assert np.array_equal(*logits), (cells, sequences)
