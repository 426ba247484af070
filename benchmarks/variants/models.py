"""Small checkpoints of random weights, and what transformers computes with them."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.convert import tiny
from tests.hugging_face import sentencepiece_model

MAX_ERROR = 1e-3  # of the largest logit


@functools.cache
def tiny_checkpoint(name: str) -> tuple[Path, dict[str, Any]]:
    """A folder with a checkpoint of a class, which lasts as long as the process, and its config.json."""
    folder = Path(tempfile.mkdtemp(prefix="variants-"))
    tiny(name)[1].save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    return folder, json.loads((folder / "config.json").read_text())


def load_model(folder: Path) -> Any:
    """The model in a folder, ready to compute."""
    opened = transformers.AutoModelForCausalLM.from_pretrained
    return opened(folder, attn_implementation="eager", dtype=torch.float32).eval()


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Of the last of these tokens by transformers."""
    with torch.no_grad():
        last_logits: np.ndarray = (
            model(torch.tensor(ids)[None], use_cache=False).logits[0, -1].numpy()
        )
    return last_logits


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
