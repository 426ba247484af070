"""Adapters beside llama.cpp, two tables of benchmarks.conformance.

Random ones of rank 4, and ones that `packtrain finetune` has tuned, beside their bases and merged into them: the same
likeliest token wherever llama.cpp is sure of it, and nearly the same logarithms of probabilities of the tokens that
follow.
"""

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.beside import log_softmax, logits, peer_logprobs, run_silently
from packtrain.models.adapter_file import write_adapter
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, read_scaled
from tests.adapters import RANK, random_adapter
from tests.architectures import CONFIGS, random_model
from tests.kill import sample_chats

IN_ALL_TYPES = (  # others in F32
    "llama",
    "qwen2",
    "gemma2",
    "phi3",
    "llama experts",
    "gpt2",
    "falcon",
    "lfm2",
    "falcon-h1",
    "qwen35",
    "gemma3n",
    "qwen3moe",
    "gpt-oss",
    "deepseek2",
    "granitehybrid",
    "gemma4 experts",
)
LIMITS = {"F32": 0.02, "F16": 0.02, "Q8_0": 0.05, "Q4_K_M": 0.05}
POSITIONS, SURE, SCALE = 256, 0.1, 0.75  # tokens, nats between the two likeliest, of the adapter
HEADING = f"""
Random adapters of rank {RANK} for every matrix of the blocks, experts and routers included, and for embeddings that are
not the head, scale {SCALE}, beside the base and merged into it. The difference is the mean over {POSITIONS} positions
of that of the logarithm of the probability of the token that follows; without the adapter it is as in the column after
the limit. The same token must come out first wherever llama.cpp's two likeliest are more than {SURE} nats apart; where
it does not, or where a quantized model with experts or scans is beyond the limit, llama.cpp must find ours, too, in a
file of the same weights as F32, for which it rounds no activations. Beside the base llama.cpp leaves out adapters of
DeepSeek's attention: there they are merged only.

| architecture | type | adapter | mean difference | limit | without it | other likeliest token where sure |
|---|---|---|---|---|---|---|"""


STEPS, LENGTH = 6, 128  # of tuning, and of the text that is compared
TUNED = f"""
Adapters of rank {RANK} for every matrix of the blocks, experts included, that `packtrain finetune` tunes in {STEPS}
steps on conversations, beside the base and merged as finetune writes it, on the first {LENGTH} tokens of what was
learnt, otherwise as above.

| architecture | type | adapter | mean difference | limit | without it | other likeliest token where sure |
|---|---|---|---|---|---|---|"""
FLAGS = (
    *("--chat-template", "chatml", "--iters", STEPS, "--lr", "1e-2", "--merge", "plain", "--batch-size", 2),
    *("--lora-rank", RANK, "--ctx", LENGTH, "--no-tensorboard"),
)  # fmt: skip
Row = tuple[bool, str]  # whether it is good


def adapter_rows(python: str) -> Iterator[Row]:
    """A row for each architecture, type, and way to use an adapter."""
    kinds = {name: LIMITS if name in IN_ALL_TYPES else ("F32",) for name in CONFIGS}
    for name, kind in ((n, k) for n, of in kinds.items() for k in of):
        with tempfile.TemporaryDirectory() as tmp_folder:
            base = Path(tmp_folder) / "base.gguf"
            random_model(Path(tmp_folder) / "f32.gguf", name)
            run_silently("quantize", Path(tmp_folder) / "f32.gguf", base, kind)
            model = open_model(base)
            path = random_adapter(Path(tmp_folder) / "adapter.gguf", model)
            left_out = model.config.traits.merge_only_weights
            unmerged_path = random_adapter(
                Path(tmp_folder) / "beside.gguf", model, excluded_names=left_out
            )
            rng = random.Random(1)
            tokens = [1, *(rng.randrange(3, model.config.vocab_size) for _ in range(POSITIONS))]
            paths = f"{unmerged_path}:{SCALE}", f"{path}:{SCALE}"
            yield from both_ways(python, f"| {name} | {kind}", base, paths, tokens)


def tuned_rows(python: str) -> Iterator[Row]:
    """A row for each architecture and way to use an adapter that was tuned."""
    for name in CONFIGS:
        for kind in ("F32", "Q4_K_M") if name in IN_ALL_TYPES else ("F32",):
            with tempfile.TemporaryDirectory() as tmp_folder:
                folder, base = Path(tmp_folder), Path(tmp_folder) / "base.gguf"
                random_model(folder / "f32.gguf", name)
                run_silently("quantize", folder / "f32.gguf", base, kind)
                yield from tuned_both_ways(python, f"| {name} | {kind}", base)


def tuned_both_ways(python: str, title: str, base: Path) -> Iterator[Row]:
    data, merged = base.with_name("chats.jsonl"), base.with_name("merged.gguf")
    data.write_text(sample_chats())
    run_silently("finetune", base, "--data", data, "-o", merged, *FLAGS)
    said = "\n".join(" ".join(json.loads(line).values()) for line in sample_chats().splitlines())
    tokens = open_model(base).tokenizer().encode(said)[: LENGTH + 1]
    adapter, partial_path = (
        str(merged.with_suffix(".run") / "adapter.gguf"),
        base.with_name("alone.gguf"),
    )
    model = open_model(base)
    (full_adapter, _), *_ = read_scaled([adapter], model.gguf)
    left_out = model.config.traits.merge_only_weights
    pairs = {
        n: pair for n, pair in full_adapter.lora_pairs.items() if n.split(".")[-2] not in left_out
    }
    write_adapter(partial_path, replace(full_adapter, lora_pairs=pairs), "tuned", model.gguf)
    applied_path = str(partial_path) if left_out else adapter
    yield from both_ways(python, title, base, (applied_path, adapter), tokens, merged)


def of_ones_own(python: str, base: Path, kind: str, adapter: Path, text: str) -> Iterator[Row]:
    """The rows of an adapter for a model, at the first tokens of a text."""
    tokens = open_model(base).tokenizer().encode(text)[: POSITIONS + 1]
    yield from both_ways(python, f"| {base.stem} | {kind}", base, (str(adapter),) * 2, tokens)


def both_ways(
    python: str,
    title: str,
    base: Path,
    adapters: tuple[str, str],
    tokens: Sequence[int],
    merged: Path | None = None,
) -> Iterator[Row]:
    """The rows of an adapter beside the base, and of one that is merged into it, here if there is no such file."""
    with tempfile.TemporaryDirectory() as tmp_folder:
        if merged is None:
            merged = Path(tmp_folder) / "merged.gguf"
            run_silently("merge", base, adapters[1], "-o", merged)
        model = open_model(base)
        (loaded, scale), *_ = read_scaled(adapters[:1], model.gguf)
        adapted_model = adapted(model, [(loaded, scale)])
        lora = {"model": str(base), "lora": [adapters[0].removesuffix(f":{scale}"), scale]}
        for mode, our_model, question in (("beside", adapted_model, lora),
                                    ("merged", open_model(merged), {"model": str(merged)})):  # fmt: skip
            yield adapter_row(python, f"{title} | {mode}", our_model, model, question, tokens)


def adapter_row(
    python: str,
    title: str,
    our_model: ModelFile,
    base: ModelFile,
    question: dict[str, Any],
    tokens: Sequence[int],
) -> Row:
    their_scores = peer_logprobs(python, tokens[:-1], question)
    adapted_scores, base_scores = (
        log_softmax(logits(model, tokens[:-1])) for model in (our_model, base)
    )
    second_best, top_score = np.sort(their_scores, -1)[:, -2:].T
    is_decided = top_score - second_best > SURE
    differing = is_decided & (adapted_scores.argmax(-1) != their_scores.argmax(-1))
    at = np.arange(len(tokens) - 1), np.array(tokens[1:])
    mean_difference, base_difference = (
        float(np.abs(x[at] - their_scores[at]).mean()) for x in (adapted_scores, base_scores)
    )
    limit = LIMITS[title.split(" | ")[1]]
    count, is_same_argmax, is_close, said = (
        f"{differing.sum()} of {is_decided.sum()}",
        True,
        mean_difference <= limit,
        "",
    )
    config = base.config
    spreads = config.expert_count or config.conv_width or config.scan
    needs_unpacked = bool(limit > LIMITS["F32"] and spreads and not is_close)
    if (
        differing.any() or needs_unpacked
    ):  # then where llama.cpp need not round activations to 8 bits
        with tempfile.TemporaryDirectory() as tmp_folder:
            unpacked = Path(tmp_folder) / "unpacked.gguf"
            run_silently("quantize", question["model"], unpacked, "F32", "--allow-requantize")
            unpacked_scores = peer_logprobs(
                python, tokens[:-1], question | {"model": str(unpacked)}
            )
        is_same_argmax = bool(
            (adapted_scores.argmax(-1) == unpacked_scores.argmax(-1))[differing].all()
        )
        count += (
            ", as in llama.cpp with the weights unpacked"
            if is_same_argmax and differing.any()
            else ""
        )
        if needs_unpacked:
            unpacked_mean = float(np.abs(adapted_scores[at] - unpacked_scores[at]).mean())
            is_close = unpacked_mean <= LIMITS["F32"]
            said = f"; unpacked {unpacked_mean:.1e} of {LIMITS['F32']}"
    good = is_close and limit < base_difference and is_same_argmax
    said += "" if good else " **no**"
    return (
        good,
        f"{title} | {mean_difference:.1e} | {limit}{said} | {base_difference:.2g} | {count} |",
    )
