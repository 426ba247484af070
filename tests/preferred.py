"""The model and the pairs of answers that TRL's steps are recorded for: see benchmarks.preference_peer."""

import json
from pathlib import Path
from typing import Any

from packtrain.data.conversations.build_samples import Maker, Recipe
from packtrain.data.conversations.messages import Pair
from packtrain.data.conversations.record_formats import Reader
from packtrain.data.text.documents import Source
from packtrain.gguf import GGUF
from tests.architectures import random_model

PAIRS = [
    {"prompt": f"what is {what}", "chosen": f"{what} is {good}", "rejected": bad}
    for what, good, bad in (
        ("ice", "cold", "it may be many things, warm or cold"),
        ("the sun", "hot", "cold"),
        ("a dog", "an animal that barks", "a cat"),
        ("night", "dark", "the time of the day at which nobody sees anything"),
        ("bread", "food", "no idea"),
        ("a song", "music", "noise"),
    )
]


def preference_base(path: Path) -> None:
    random_model(path, "llama tied")


def preference_samples(folder: Path) -> list[dict[str, Any]]:
    """The pairs as TRL's collator takes them; the tokens after an answer are left out."""
    samples, path = [], folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    maker = Maker(
        Recipe(path, folder / "base.gguf", 512, pairs=True), GGUF(folder / "base.gguf").metadata
    )
    for record in Reader(Source(path)):
        assert isinstance(record, Pair)
        chosen, rejected = (_parted(sample.ids, sample.weights) for sample in maker.samples(record))
        assert chosen[0] == rejected[0]
        samples.append(
            {"prompt_ids": chosen[0], "chosen_ids": chosen[1], "rejected_ids": rejected[1]}
        )
    return samples


def _parted(ids: list[int], weights: list[int]) -> tuple[list[int], list[int]]:
    """Prompt and answer."""
    begin = weights.index(1)
    end = len(weights) - weights[::-1].index(1)
    assert all(weights[begin:end])
    return ids[:begin], ids[begin:end]
