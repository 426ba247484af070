"""The model and the pairs of answers that TRL's steps are recorded for: see benchmarks.preference_peer."""

import json
from pathlib import Path
from typing import Any

from packtrain.data.conversations.build_samples import DatasetRecipe, SampleBuilder
from packtrain.data.conversations.messages import AnswerPair
from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text.documents import SourceFile
from packtrain.gguf import GGUF
from tests.architectures import random_model

PAIRS = [
    {"prompt": f"what is {topic}", "chosen": f"{topic} is {good_answer}", "rejected": bad_answer}
    for topic, good_answer, bad_answer in (
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
    maker = SampleBuilder(
        DatasetRecipe(path, folder / "base.gguf", 512, pairs=True),
        GGUF(folder / "base.gguf").metadata,
    )
    for record in RecordReader(SourceFile(path)):
        assert isinstance(record, AnswerPair)
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
