"""`train --from`: new runs from checkpoints of llama.cpp's former train-text-from-scratch."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.models import transformer
from packtrain.models.llama_cpp_checkpoint import open_start
from packtrain.models.model_file import open_model
from packtrain.training.train_settings import TrainSettings
from tests.architectures import LLAMA, TOKENS, vocabulary
from tests.kill import sample_text

CONFIG = replace(
    LLAMA, context_length=32, embedding_length=32, block_count=1, feed_forward_length=48, head_count=2,
    head_count_kv=2, tied=False, rope_freq_base=10_000.0, rms_eps=1e-5,
)  # fmt: skip
SIZES = {
    "context_length": CONFIG.context_length, "embedding_length": CONFIG.embedding_length,
    "feed_forward_length": CONFIG.feed_forward_length, "attention.head_count": CONFIG.head_count,
    "block_count": CONFIG.block_count, "rope.dimension_count": CONFIG.embedding_length // CONFIG.head_count,
}  # fmt: skip
REALS = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4, "rope.scale_linear": 1.0}
BLOCK = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_down ffn_up"
NO_TOKEN = 2**32 - 1  # as the program writes -1


def weights() -> dict[str, np.ndarray]:
    """All weights in the order in which the program adds them."""
    rng = np.random.default_rng(0)
    names = ["token_embd", "output_norm", "output", *(f"blk.0.{name}" for name in BLOCK.split())]
    shapes = {name: leaf.shape for name, leaf in transformer.weights(CONFIG).items()}
    assert {f"{name}.weight" for name in names} == shapes.keys()
    labels = [f"{name}.weight" for name in names]
    return {name: rng.normal(0, 0.1, shapes[name]).astype(np.float32) for name in labels}


def model_metadata() -> dict[str, MetadataValue]:
    """The keys of save_llama_model_gguf in its order."""
    return {
        "general.architecture": MetadataValue("string", "llama"),
        "general.file_type": MetadataValue("u32", 0),
        **{f"llama.{key}": MetadataValue("u32", size) for key, size in SIZES.items()},
        **{f"llama.{key}": MetadataValue("f32", real) for key, real in REALS.items()},
        **vocabulary(TOKENS),
        "tokenizer.ggml.seperator_token_id": MetadataValue("u32", NO_TOKEN),
        "tokenizer.ggml.padding_token_id": MetadataValue("u32", NO_TOKEN),
    }


def training_metadata(num_parameters: int, version: int = 1) -> dict[str, MetadataValue]:
    """The keys of save_train_state_gguf and save_opt_context_gguf in their order."""
    counts = {"iteration_count": 40, "sample_count": 640, "token_count": 20_480, "epoch_count": 2}
    shuffled = {"samples_hash": 17, "sample_count": 900, "next_sample": 640}
    return {
        "training.file_version": MetadataValue("u32", version),
        **{f"training.{key}": MetadataValue("u64", count) for key, count in counts.items()},
        **{f"training.shuffle.{key}": MetadataValue("u64", n) for key, n in shuffled.items()},
        "training.shuffle.rng_state": MetadataValue("string", "5489 1 2 3"),
        "optimizer.file_version": MetadataValue("u32", 0),
        "optimizer.convergence_past_count": MetadataValue("u32", 0),
        "optimizer.parameter_count": MetadataValue("u64", num_parameters),
        "optimizer.iteration_count": MetadataValue("u32", 40),
        "optimizer.just_initialized": MetadataValue("bool", False),
        "optimizer.type": MetadataValue("string", "adam"),
        "optimizer.adam.best_loss": MetadataValue("f32", 3.5),
        "optimizer.adam.previous_loss": MetadataValue("f32", 3.6),
        "optimizer.adam.no_improvement_count": MetadataValue("u32", 0),
    }


def write_checkpoint(
    path: Path,
    left_out: str = "none",
    version: int = 1,
    changed_keys: dict[str, MetadataValue] | None = None,
) -> Path:
    """Write a checkpoint as the program does, but the `left_out` keys and tensors that begin with this."""
    tensors = weights()
    num_parameters = sum(array.size for array in tensors.values())
    moments = np.full(num_parameters, 0.5, np.float32)
    tensors |= {f"optimizer.adam.{moment}_moments": moments for moment in ("first", "second")}
    metadata = model_metadata() | training_metadata(num_parameters, version) | (changed_keys or {})
    kept_keys = {key: value for key, value in metadata.items() if not key.startswith(left_out)}
    write_gguf(path, kept_keys, {n: t for n, t in tensors.items() if not n.startswith(left_out)})
    return path


def train(folder: Path, checkpoint: Path, *flags: str, iters: int = 0) -> int:
    data = folder / "text.txt"
    data.write_text(sample_text())
    arguments = [
        "train",
        "--from",
        checkpoint,
        "--data",
        data,
        "-o",
        folder / "new.gguf",
        "--iters",
        iters,
    ]
    return main([*map(str, arguments), "--batch-size", "2", "--no-tensorboard", *flags])


def test_a_run_begins_with_the_weights_of_the_checkpoint(tmp_path, capsys):
    """Without a step, weights and sizes are its own, bit for bit, and the vocabulary is."""
    checkpoint = write_checkpoint(tmp_path / "old.gguf")
    assert train(tmp_path, checkpoint) == 0
    said = capsys.readouterr().err
    assert (
        f"the weights are those of {checkpoint} after 40 iterations; the optimizer begins with zero"
        in said
    )
    model = open_model(tmp_path / "new.gguf")
    assert model.config == CONFIG
    for name, weight in weights().items():
        assert np.array_equal(model.gguf.array(name), weight), name
    assert model.gguf.metadata["tokenizer.ggml.tokens"] == [text.encode() for text in TOKENS]


def test_a_step_trains_these_weights_and_the_run_resumes(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "old.gguf")
    assert train(tmp_path, checkpoint, iters=1) == 0
    stepped = GGUF(tmp_path / "new.gguf").array("blk.0.attn_q.weight").copy()
    change = np.abs(stepped - weights()["blk.0.attn_q.weight"])
    assert 0 < change.max() < 0.01  # AdamW moves a weight by at most about --lr
    assert main(["train", "-o", str(tmp_path / "new.gguf"), "--resume", "--iters", "2"]) == 0
    assert not np.array_equal(GGUF(tmp_path / "new.gguf").array("blk.0.attn_q.weight"), stepped)


def test_a_converted_checkpoint_takes_vocabulary_and_context_from_flags(tmp_path, capsys):
    """convert-train-checkpoint-to-gguf.py writes version 0 without either."""
    vocab_file = write_checkpoint(tmp_path / "vocab.gguf")
    old = write_checkpoint(tmp_path / "old.gguf", "tokenizer.", version=0)
    assert train(tmp_path, old) == 2
    assert f"--vocab must be given: {old} holds no vocabulary" in capsys.readouterr().err
    assert train(tmp_path, old, "--vocab", str(vocab_file), "--ctx", "16") == 0
    assert open_model(tmp_path / "new.gguf").config == replace(CONFIG, context_length=16)
    short = write_checkpoint(tmp_path / "short.gguf", "llama.context_length")
    with pytest.raises(
        InputError, match=r"--ctx must be given: .*short\.gguf does not say its context"
    ):
        open_start(TrainSettings(from_checkpoint=short))
    larger_vocab = tmp_path / "larger.gguf"
    write_gguf(larger_vocab, {"general.architecture": MetadataValue("string", "llama"),
                     **vocabulary({**TOKENS, "more": 1})}, {})  # fmt: skip
    assert train(tmp_path, old, "--vocab", str(larger_vocab), "--overwrite") == 2
    assert f"its vocabulary has {len(TOKENS) + 1} tokens, and token_embd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "training.file_version is 2; 0 and 1 can be read"),
        ({"left_out": "training."}, "this is not a checkpoint of train-text-from-scratch"),
        ({"changed_keys": {"training.type": MetadataValue("string", "finetune_lora")}}, "whole weights"),
        ({"left_out": "training.iteration_count"}, "training.iteration_count must be a whole number"),
        ({"left_out": "blk.0.ffn_up"}, "tensor blk.0.ffn_up.weight is missing"),
        ({"changed_keys": {"llama.feed_forward_length": MetadataValue("u32", 64)}}, "by the metadata it must"),
    ],
)  # fmt: skip
def test_files_that_are_no_such_checkpoints_are_refused(tmp_path, changes, message):
    path = write_checkpoint(tmp_path / "old.gguf", **changes)
    with pytest.raises(InputError, match=message):
        open_start(TrainSettings(from_checkpoint=path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dim", "64"], "--dim 64: .* has 32; leave it out"),
        (["--kv-heads", "1"], "--kv-heads 1: .* has 2; leave it out"),
        (["--norm-rms-eps", "1e-6"], "--norm-rms-eps 1e-06: .* has 1e-05; leave it out"),
        (["--rope-freq-scale", "0.5"], "--rope-freq-scale 0.5: .* has 1; leave it out"),
        (["--preset", "15m"], "--preset has no effect with --from-checkpoint, whose file has its own sizes"),
        (["--vocab", "other.gguf"], "--vocab has no effect with .*old.gguf, which holds a vocabulary"),
    ],
)  # fmt: skip
def test_settings_that_the_checkpoint_contradicts_are_refused(tmp_path, capsys, flags, message):
    checkpoint = write_checkpoint(tmp_path / "old.gguf")
    assert train(tmp_path, checkpoint, *flags) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "new.gguf").exists()


def test_other_commands_name_the_flag_that_takes_a_checkpoint(tmp_path):
    with pytest.raises(
        InputError, match="a training checkpoint, not a model; packtrain train --from"
    ):
        open_model(write_checkpoint(tmp_path / "old.gguf"))


def test_sizes_that_agree_are_taken(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "old.gguf")
    assert train(tmp_path, checkpoint, "--dim", "32", "--heads", "2", "--ffn", "48") == 0
