"""The smallest budget that a refusal names, run: two steps of every architecture, watched from outside."""

import re

import pytest

from benchmarks.budget import READING
from benchmarks.watched import run_packtrain
from packtrain.common.memory import parse_size
from packtrain.models.config import ARCHITECTURES
from packtrain.training.monitoring import metrics_file
from tests.architectures import CONFIGS, random_model
from tests.kill import sample_chats

SMALLEST_MEMORY = re.compile(r"the smallest --memory that would do is about (\w+)")
FEED_FORWARD = {"full": 2048, "frozen": 4096, "last": 4096, "lora": 16384, "lora last": 16384}
KIND_FLAGS = {
    "full": ("--full",),
    "frozen": ("--full", "--freeze", "token_embd*", "--freeze", "blk.*.ffn_*"),
    "last": ("--full", "--num-layers", "1"),
    "lora": ("--merge", "plain", "--lora-rank", "128"),
    "lora last": ("--merge", "plain", "--lora-rank", "128", "--num-layers", "1"),
}
BATCHES = 1, 2, 1, 4  # by turns; the search takes longest for four, which can be split in most ways
SINGLE = "llama4", "cohere2"  # whose searches would take longest
ROWS = {
    "llama": "lora",
    "llama experts": "full",
    "mistral3": "frozen",
    "qwen2": "last",
    "qwen3": "lora last",
    "gemma": "lora",
    "gemma2": "full",
    "gemma3": "frozen",
    "gemma3n": "lora",
    "gemma4": "lora",
    "phi3": "lora",
    "smollm3": "last",
    "qwen2moe": "lora",
    "ernie4_5-moe": "full",
    "glm4moe": "frozen",
    "gpt-oss": "lora",
    "olmoe": "last",
    "qwen3moe": "lora last",
    "granite": "full",
    "granitemoe": "full",
    "deepseek2": "lora",
    "llama4": "lora",
    "olmo2": "lora",
    "seed_oss": "last",
    "ernie4_5": "frozen",
    "exaone4": "lora",
    "glm4": "full",
    "hunyuan-dense": "lora last",
    "internlm2": "lora",
    "phi2": "full",
    "gpt2": "full",
    "starcoder2": "lora",
    "stablelm": "last",
    "falcon": "full",
    "nemotron": "full",
    "cohere2": "lora",
    "lfm2": "lora",
    "lfm2moe": "full",
    "granitehybrid": "lora",
    "falcon-h1": "full",
    "qwen3next": "lora",
    "qwen35": "full",
    "qwen35moe": "last",
}


@pytest.fixture(scope="module")
def compiled():
    """A refusal names what compiling needs where kernels are missing; here it shall name what the run needs."""
    assert run_packtrain("compile").code == 0


def test_every_architecture_and_every_way_has_a_row():
    assert {CONFIGS[name].architecture for name in ROWS} == ARCHITECTURES.keys()
    assert set(ROWS.values()) == KIND_FLAGS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_the_smallest_budget_runs_within_itself(name, compiled, tmp_path):
    """Children count, those that search among them; wide models, so that runs need more than their searches."""
    base, data, output = tmp_path / "base.gguf", tmp_path / "chats.jsonl", tmp_path / "m.gguf"
    random_model(base, name, feed_forward=FEED_FORWARD[ROWS[name]])
    data.write_text(sample_chats())
    flags = ["--data", data, "-o", output, "--chat-template", "chatml", "--iters", 2]
    flags += [
        "--val-batches",
        1,
        "--steps-per-eval",
        1,
        "--no-tensorboard",
        "--replay",
        0,
        *KIND_FLAGS[ROWS[name]],
    ]
    batch = 1 if name in SINGLE else BATCHES[[*ROWS].index(name) % len(BATCHES)]
    flags += ["--batch-size", batch]
    refused = run_packtrain("finetune", base, *flags, "--memory", "10MiB")
    reads = READING.search(refused.said)  # first the data must be read, then the run be planned
    if reads:
        read = run_packtrain(
            "finetune", base, *flags, "-o", tmp_path / "r.gguf", "--memory", reads[1]
        )
        assert "to be read" not in read.said, read.said
        refused = run_packtrain("finetune", base, *flags, "--memory", "10MiB")
    budget_match = SMALLEST_MEMORY.search(refused.said)
    assert refused.code == 3 and budget_match, refused.said
    done = run_packtrain("finetune", base, *flags, "--memory", budget_match[1])
    assert done.code == 0, done.said
    limit = parse_size(budget_match[1], "")
    assert 0.9 * limit < done.peak <= limit
    assert metrics_file.read(tmp_path / "m.run/metrics.jsonl")[-1]["step"] == 2
