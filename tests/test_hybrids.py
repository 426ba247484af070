"""Models whose blocks have states beside keys and values: packed rows, contexts that go back, and tuning."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.inference.generator import GenerationLimits, Generator, Reply
from packtrain.inference.kv_cache import Context, ContextError
from packtrain.inference.sampling import Sampling
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.models.lora import Lora
from packtrain.models.model_file import open_model
from tests.architectures import CONFIGS, random_model, random_weights
from tests.models import seeded_batch

HYBRIDS = [name for name, config in CONFIGS.items() if config.attending or config.scan]
HYBRIDS += [
    name for name, config in CONFIGS.items() if config.own_kv
]  # keys that several blocks have


def gradients(config: Config, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The losses and their gradients, in float64."""
    rows, time = inputs["tokens"].shape
    leaves = transformer.weights(config)
    outputs = transformer.loss(config, leaves, rows, time, chunk=16)
    trained = [leaf for leaf in leaves.values() if leaf.role != "table"]
    grads = differentiate(outputs.loss, trained, outputs.block_outputs)
    graph = Graph({"losses": outputs.losses, **{f"d/{t.label}": d for t, d in grads.items()}})
    weights = random_weights(config)
    leaf_names = {leaf.label for leaf in graph.leaves}
    return interpret(graph, {n: v for n, v in (weights | inputs).items() if n in leaf_names})


@pytest.mark.parametrize("name", HYBRIDS)
def test_samples_in_one_row_do_not_see_each_other(name: str) -> None:
    """Lengths below the width of a convolution among them; nor do their gradients."""
    config, lengths = CONFIGS[name], (5, 1, 2, 9, 7)
    time = sum(lengths)
    row = seeded_batch(config, 1, time)
    row["weights"] = np.full((1, time), 1 / time, np.float32)
    row["pos"][0] = np.concatenate([np.arange(n) for n in lengths])
    row["seq"][0] = np.repeat(np.arange(len(lengths)), lengths)
    outputs, at, parts = gradients(config, row), 0, []
    for n in lengths:
        parts.append(gradients(config, {k: v[:, at : at + n] for k, v in row.items()}))
        at += n
    losses = np.concatenate([part.pop("losses") for part in parts], axis=1)
    np.testing.assert_allclose(outputs.pop("losses"), losses, atol=1e-9)
    for label, d in outputs.items():
        np.testing.assert_allclose(d, sum(part[label] for part in parts), atol=1e-9, err_msg=label)


def fresh_logits(path: Path, text: list[int]) -> np.ndarray:
    return Context(path, cells=256, cache="f32").decode(text)[0]


def check_next_tokens(
    path: Path, context: Context, seq: int, text: list[int], new_tokens: list[int]
) -> None:
    """The context gives, one token at a time, what reading the text anew gives."""
    for token in new_tokens:
        text.append(token)
        got = context.decode([token], seq)[0]
    assert context.tokens(seq) == text
    np.testing.assert_allclose(got, fresh_logits(path, text), atol=2e-4)


@pytest.mark.parametrize("full", [True, False], ids=["cells", "ring"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_sequences_that_are_copied_taken_back_saved_and_put_back(
    tmp_path: Path, name: str, full: bool
) -> None:
    path = tmp_path / "m.gguf"
    config = random_model(path, name)
    rng = np.random.default_rng(1)
    text = rng.integers(3, config.vocab_size, 200).tolist()
    options = {"cells": 300, "cache": "f32", "sequences": 4, "prompts": (32,), "spacing": 16}
    context = Context(path, **options, swa_full=full)
    assert bool(context.cache.ring) == (not full and config.conv_width + config.window > 0)
    first, second = text[:70], text[90:101]
    # two sequences in one run, of unlike lengths
    context.decode([*first, *second], [0] * len(first) + [1] * len(second))
    check_next_tokens(path, context, 0, [*first], text[70:72])
    check_next_tokens(path, context, 1, [*second], text[101:103])
    # a copy, and tokens that both have
    context.copy(0, 2)
    shared_text = text[:72]
    context.decode([5, 6], [(0, 2), (0, 2)])
    check_next_tokens(path, context, 2, [*shared_text, 5, 6], [7, 8])
    check_next_tokens(path, context, 0, [*shared_text, 5, 6], [9])
    # back to what another text begins with, near and far
    for common in (72, 40, 20):
        new_text = [*text[:common], 11, 12, 13, 14]
        num_reused = context.reuse(0, new_text)
        assert num_reused <= common
        context.decode(new_text[num_reused:-1], 0)
        check_next_tokens(path, context, 0, new_text[:-1], new_text[-1:])
    # saved, and put back as another sequence
    state = context.save([0, 1])
    before = context.tokens(0)
    context.remove(0)
    context.restore(state, [3, 0])
    check_next_tokens(path, context, 3, before, [21, 22])
    check_next_tokens(path, context, 0, [*second, *text[101:103]], [23])
    check_next_tokens(path, context, 2, [*shared_text, 5, 6, 7, 8], [24])


def test_a_prompt_that_is_read_again_is_taken_back_to_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = random_model(path, "falcon-h1")
    text = np.random.default_rng(1).integers(3, config.vocab_size, 90).tolist()
    context = Context(path, cells=256, cache="f32")
    for prompt in (text, text, [*text[:88], 5, 6, 7]):
        num_reused = context.reuse(0, prompt)
        assert num_reused == (86 if context.tokens(0) else 0)
        got = context.decode(prompt[num_reused:])[0]
        np.testing.assert_allclose(got, fresh_logits(path, prompt), atol=2e-4)


@pytest.mark.parametrize("name", HYBRIDS)
def test_guesses_change_nothing(tmp_path: Path, name: str) -> None:
    """Rejected ones take a state back to what the run began with, whose tokens are read again."""
    path = tmp_path / "m.gguf"
    config = random_model(path, name)
    prompt = np.random.default_rng(2).integers(3, config.vocab_size, 30).tolist()

    class ScriptedDrafter:
        """The first guesses are right, the others not."""

        def propose(self, text: Sequence[int], count: int) -> list[int]:
            at = len(text) - len(prompt)
            return [*expected[at : at + 2], *(3 + (t - 2) % 5 for t in expected[at + 2 : at + 4])][
                :count
            ]

    def generate_ids(drafter: ScriptedDrafter | None) -> list[int]:
        model = open_model(path)
        answer = Reply(
            Generator.from_model(model, 200), model.tokenizer(), prompt, Sampling(temp=0.0), 0, GenerationLimits(24),
            drafter,
        )  # fmt: skip
        list(answer)
        return answer.ids

    expected = generate_ids(None)
    assert generate_ids(ScriptedDrafter()) == expected


@pytest.mark.parametrize("name", HYBRIDS)
def test_positions_that_are_shifted_but_not_divided(tmp_path: Path, name: str) -> None:
    """The states at the end stay what they are when tokens before them go."""
    path = tmp_path / "m.gguf"
    config = random_model(path, name)
    text = np.random.default_rng(1).integers(3, config.vocab_size, 60).tolist()
    options = {"cells": 256, "cache": "f32", "prompts": (32,)}
    context, full_context = (Context(path, **options, swa_full=full) for full in (False, True))
    for ctx in (context, full_context):
        ctx.decode(text)
        ctx.remove(0, 4, 24)
        ctx.shift(0, -20, 24)
        assert ctx.next(0) == 40
    np.testing.assert_array_equal(context.decode([7]), full_context.decode([7]))
    if config.conv_width:
        with pytest.raises(ContextError, match="order"):
            context.divide(0, 2)


def test_adapters_are_of_matrices_only(tmp_path: Path) -> None:
    config = random_model(tmp_path / "m.gguf", "lfm2", dtype="f16")
    types = open_model(tmp_path / "m.gguf").matrix_dtypes()
    assert {str(types[n]) for n in types if n.endswith("shortconv.conv.weight")} == {"f32"}
    shapes = transformer.weight_shapes(config)
    low = {n for n, _ in Lora((("blk.*", 2),)).adapter_shapes(shapes, config.block_count)}
    assert any("shortconv.in_proj" in n for n in low)
    assert not any("shortconv.conv." in n for n in low)
