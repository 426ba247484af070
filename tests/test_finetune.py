"""`packtrain finetune` as its users meet it: what it writes, what it leaves alone, resume, refusals; and merge."""

import dataclasses
import json
import math
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli.main import main
from packtrain.data.chat_template import choose_template
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models.adapter_file import read_adapter
from packtrain.models.model_file import ModelFile
from packtrain.training import finetune_job, gradient_probe
from packtrain.training.disk_space import run_files
from packtrain.training.monitoring import metrics_file
from packtrain.training.training_job import HEAD_NBYTES
from packtrain.workflows import merge_after_training
from tests.architectures import random_model
from tests.checks import assert_close
from tests.kill import RUN_KINDS, sample_chats, sample_text, survive_kills, without_times
from tests.room import memory_limit
from tests.test_model_file import CONFIG, save
from tests.test_train import assert_old_order_resumes, said, signal_after, weight_bytes

COMMON_FLAGS = [
    *("--batch-size", "2", "--ctx", "64", "--lr", "0.01", "--val-batches", "2"),
    *("--no-tensorboard", "--val-split", "0.2", "--check-answers", "0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("finetune")
    (root / "chats.jsonl").write_text(sample_chats())
    random_model(root / "f32.gguf", "llama tied")
    for dtype, mix in (("q8_0", "Q8_0"), ("q4_K", "Q4_K_M")):
        assert main(["quantize", str(root / "f32.gguf"), str(root / f"{dtype}.gguf"), mix]) == 0
    return root


def run_finetune(folder: Path, base: str, output: Path, *extra_flags: str) -> int:
    data = str(folder / "chats.jsonl")
    args = [str(folder / f"{base}.gguf"), "--data", data, "-o", str(output), *COMMON_FLAGS]
    rank = [] if "--full" in extra_flags else ["--lora-rank", "4", "--lora-alpha", "32"]
    return main(["finetune", *args, *rank, *extra_flags])


@pytest.mark.parametrize("iters, has_end", [(1, False), (60, True)])
def test_a_model_that_would_not_end_its_answers_is_reported(
    folder, tmp_path, capsys, iters, has_end
):
    flags = ["--iters", str(iters), "--merge", "none", "--ctx", "128", "--replay", "0"]
    code = run_finetune(folder, "f32", tmp_path / "a.gguf", *flags)
    text = "\n".join(said(capsys))
    line = "of 4 validation answers the model would end"
    assert code == 0 and text.count(line) == (not has_end)
    if not has_end:  # a finished run, finished again
        assert main(["finetune", "-o", str(tmp_path / "a.gguf"), "--resume"]) == 0
        assert "\n".join(said(capsys)).count(line) == 1


def test_ends_of_turns_are_not_counted_where_prompts_are_learned(folder, tmp_path, capsys):
    """They end turns of users, too, which no model can foresee."""
    flags = ["--iters", "1", "--merge", "none", "--ctx", "128", "--no-mask-prompt"]
    assert run_finetune(folder, "f32", tmp_path / "a.gguf", *flags) == 0
    assert "the model would end" not in "\n".join(said(capsys))


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "q4_K"])
def test_a_tuned_model_and_its_adapter(folder, tmp_path, capsys, dtype):
    output, base = tmp_path / "tuned.gguf", folder / f"{dtype}.gguf"
    before = base.read_bytes()
    flags = ["--adapter", str(tmp_path / "a.gguf"), "--steps-per-eval", "6"]
    code = run_finetune(folder, dtype, output, "--iters", "12", "--lora-modules", "attn", *flags)
    text = "\n".join(said(capsys))
    assert code == 0, text
    assert text.index("checking that every") < text.index("step 1/") < text.index("merging the ad")
    assert base.read_bytes() == before
    losses = [
        r["val_loss"]
        for r in metrics_file.read(tmp_path / "tuned.run/metrics.jsonl")
        if "val_loss" in r
    ]
    base_loss, with_adapter, merged = map(
        float,
        re.findall(r"base (\d+\.\d+), with the adapter (\d+\.\d+), merged (\d+\.\d+)", text)[0],
    )
    assert with_adapter < base_loss and abs(with_adapter - losses[-1]) < 2e-4
    assert dtype != "f32" or abs(with_adapter - merged) < 2e-4
    old, new, adapter = GGUF(base), GGUF(output), read_adapter(tmp_path / "a.gguf")
    assert new.entries.keys() == old.entries.keys()
    assert len(adapter.lora_pairs) == 8 and all(".attn_" in name for name in adapter.lora_pairs)
    for name, entry in old.entries.items():
        assert new.entries[name].dtype == entry.dtype
        is_unchanged = new.array(name).tobytes() == old.array(name).tobytes()
        assert is_unchanged == (name not in adapter.lora_pairs), name
    changed = {"general.name", "general.base_model.count", "general.base_model.0.name"}
    kept_keys = new.values.keys() - changed - {"tokenizer.chat_template"}
    assert all(str(new.metadata[key]) == str(old.metadata[key]) for key in kept_keys)
    assert "FROM ../tuned.gguf" in (tmp_path / "tuned.run/Modelfile").read_text()
    for part in ("llama-cli -m", "--lora", "ollama create", "mapped from its file"):
        assert part in text
    assert "packtrain chat" in text and "-no-cnv" not in text and "the result is step 12" in text


@pytest.mark.parametrize("flags", [[], ["--no-mask-prompt"]])
def test_what_learnt_from_text_is_for_generate(folder, tmp_path, capsys, flags):
    (tmp_path / "notes.txt").write_text("the cat sat on the mat. " * 200)
    args = [str(folder / "q8_0.gguf"), "--data", str(tmp_path / "notes.txt"), *COMMON_FLAGS, *flags]
    assert main(["finetune", *args, "-o", str(tmp_path / "t.gguf"), "--iters", "1"]) == 0
    text = "\n".join(said(capsys))
    assert "packtrain generate" in text and "-no-cnv" in text and "packtrain chat" not in text


def one_expert_shunned(path: Path, shunned: int) -> None:
    """A model of four experts, and one that no token reaches: all embeddings have in common what its router avoids."""
    random_model(path, "llama experts")
    model = GGUF(path)
    values = {name: np.array(model.array(name)) for name in model.entries}
    values["token_embd.weight"][:, 0] = 2
    for name in (name for name in values if "ffn_gate_inp" in name):
        values[name][:, 0] = 0
        values[name][shunned, 0] = -50
    write_gguf(path, model.values, values)


def test_experts_are_tuned_and_those_without_tokens_are_said(tmp_path, folder, capsys):
    one_expert_shunned(tmp_path / "experts.gguf", 2)
    data = str(folder / "chats.jsonl")
    args = [
        str(tmp_path / "experts.gguf"),
        "--data",
        data,
        "-o",
        str(tmp_path / "m.gguf"),
        *COMMON_FLAGS,
    ]
    lora_flags = ["--lora-modules", "mlp", "--lora-dropout", "0.1"]
    assert main(["finetune", *args, "--iters", "2", *lora_flags]) == 0, said(capsys)
    line = r"(\S+): no token of the first step reaches experts (.*)"
    unreached = {name: ids.split(", ") for name, ids in re.findall(line, "\n".join(said(capsys)))}
    assert len(unreached) == 12 and all("2" in ids for ids in unreached.values())
    pairs = read_adapter(tmp_path / "m.run/adapter.gguf").lora_pairs
    assert {name.split(".")[2] for name in pairs} == {
        "ffn_gate_exps",
        "ffn_up_exps",
        "ffn_down_exps",
    }
    for name, (_, b) in pairs.items():
        assert not b[2].any() and b.any()
        assert all(b[e].any() for e in range(4) if str(e) not in unreached[f"{name}.lora_b"])


def test_full_tuning_changes_what_is_not_frozen(folder, tmp_path):
    output = tmp_path / "full.gguf"
    flags = ["--full", "--freeze", "token_embd*", "--freeze", "blk.0.*", "--iters", "3"]
    assert run_finetune(folder, "q8_0", output, *flags) == 0
    old, new = GGUF(folder / "q8_0.gguf"), GGUF(output)
    for name in old.entries:
        frozen = name.startswith(("token_embd", "blk.0."))
        assert (new.array(name).tobytes() == old.array(name).tobytes()) == frozen, name
        assert new.entries[name].dtype == old.entries[name].dtype


def test_a_run_from_before_samples_were_shuffled_keeps_its_order(folder, tmp_path, capsys):
    def run(output: Path, *flags: str) -> int:
        return run_finetune(folder, "q8_0", output, "--merge", "none", *flags)

    assert_old_order_resumes(run, tmp_path, capsys)


LORA, MASTERS = ["--lora-dropout", "0.2"], ["--full", "--masters", "bf16"]


@pytest.mark.parametrize("mode_flags", [LORA, MASTERS], ids=["lora", "masters"])
def test_resume_is_bit_for_bit(folder, tmp_path, capsys, mode_flags):
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    flags = ["--iters", "9", "--save-every", "2", *mode_flags]
    assert run_finetune(folder, "q8_0", a, *flags) == 0
    with signal_after(5):
        assert run_finetune(folder, "q8_0", b, *flags) == 130
    assert "packtrain finetune -o" in "\n".join(said(capsys))
    assert main(["finetune", "-o", str(b), "--resume", "--no-tensorboard"]) == 0
    assert weight_bytes(a) == weight_bytes(b)
    for name in ("checkpoint.gguf", *(["adapter.gguf"] if mode_flags is LORA else [])):
        assert weight_bytes(tmp_path / "a.run" / name) == weight_bytes(tmp_path / "b.run" / name)
    metrics_a, metrics_b = (without_times(tmp_path / f"{x}.run/metrics.jsonl") for x in "ab")
    assert metrics_a == metrics_b


def test_masters_are_as_planned_and_as_kept(folder, tmp_path, capsys):
    """bf16 of two bytes in the plan, in the checkpoint, and in what validation chose to keep; vectors are f32."""
    for masters in ("f32", "bf16"):
        flags = ["--full", "--iters", "2", "--patience", "5", "--steps-per-eval", "1"]
        assert (
            run_finetune(folder, "q8_0", tmp_path / f"{masters}.gguf", *flags, "--masters", masters)
            == 0
        )
    plans = [json.loads((tmp_path / f"{m}.run/plan.json").read_text()) for m in ("f32", "bf16")]
    base = GGUF(folder / "q8_0.gguf").entries
    sizes = {name: math.prod(e.shape) for name, e in base.items()}
    packed = sum(n for name, n in sizes.items() if len(base[name].shape) > 1)
    assert plans[0]["weights_bytes"] == 4 * sum(sizes.values())
    assert plans[0]["weights_bytes"] - plans[1]["weights_bytes"] == 2 * packed
    assert plans[0]["state_bytes"] == plans[1]["state_bytes"]
    rest = sum(sizes.values()) - packed
    assert f"{packed:,} parameters in bf16, {rest:,} in f32" in "\n".join(said(capsys))
    for name in ("checkpoint.gguf", "best.gguf"):
        entries = GGUF(tmp_path / "bf16.run" / name).entries
        for tensor, e in base.items():
            assert str(entries[tensor].dtype) == ("bf16" if len(e.shape) > 1 else "f32")
    assert "m/token_embd.weight" in GGUF(tmp_path / "bf16.run/checkpoint.gguf").entries
    written = GGUF(tmp_path / "bf16.gguf").entries
    assert {name: e.dtype for name, e in written.items()} == {n: e.dtype for n, e in base.items()}


def test_a_run_with_masters_of_one_type_is_not_resumed_with_another(folder, tmp_path, capsys):
    output = tmp_path / "m.gguf"
    assert run_finetune(folder, "f32", output, "--full", "--iters", "1") == 0
    assert run_finetune(folder, "f32", output, *MASTERS, "--iters", "2", "--resume") == 2
    assert "masters was f32 and is bf16" in said(capsys)[-1]


def test_a_run_that_is_resumed_with_another_rank_says_no_more_than_that(folder, tmp_path, capsys):
    assert run_finetune(folder, "f32", tmp_path / "a.gguf", "--iters", "2") == 0
    assert main(["finetune", "-o", str(tmp_path / "a.gguf"), "--resume", "--lora-rank", "2"]) == 2
    assert "cannot continue: --lora-rank was 4 and is 2; give" in said(capsys)[-1]


def test_killed_runs_resume_bit_for_bit_and_keep_what_was_there(tmp_path):
    assert survive_kills(tmp_path, kills=2, seed=1, run_kind=RUN_KINDS["finetune"]) > 10


def test_micro_batches_are_as_good_as_one_batch(folder, tmp_path):
    at_once, in_parts = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert run_finetune(folder, "q8_0", at_once, "--iters", "3", "--batch-size", "4") == 0
    flags = ["--iters", "3", "--batch-size", "1", "--grad-accumulation-steps", "4"]
    assert run_finetune(folder, "q8_0", in_parts, *flags) == 0
    first, second = (read_adapter(tmp_path / f"{x}.run/adapter.gguf").lora_pairs for x in "ab")
    for name, pair in first.items():
        for expected, actual in zip(pair, second[name], strict=True):
            assert_close(expected, actual, name, 1e-3)


# ---- the probe -----------------------------------------------------------------------------------------------


def test_the_probe_leaves_no_trace(folder, tmp_path, monkeypatch):
    assert run_finetune(folder, "q8_0", tmp_path / "a.gguf", "--iters", "2") == 0
    monkeypatch.setattr("packtrain.workflows.finetuning.check_gradients", lambda *_: None)
    assert run_finetune(folder, "q8_0", tmp_path / "b.gguf", "--iters", "2") == 0
    a, b = (weight_bytes(tmp_path / f"{x}.run/checkpoint.gguf") for x in "ab")
    assert a == b


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_probe_finds_what_gets_no_gradient(folder, tmp_path, capsys, monkeypatch, optimizer):
    monkeypatch.setattr(finetune_job, "_fill_uniform", lambda array, draw: array.fill(0))
    code = run_finetune(
        folder, "f32", tmp_path / "a.gguf", "--iters", "2", "--optimizer", optimizer
    )
    assert code == 1
    assert re.search(
        r"no gradient reaches blk\.0\.attn_q\.weight\.lora_b, .* and 6 others", said(capsys)[-1]
    )


def test_the_probe_finds_what_is_not_finite(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gradient_probe, "_init_small", lambda array, draw: array.fill(np.inf))
    assert run_finetune(folder, "f32", tmp_path / "a.gguf", "--iters", "2") == 1
    assert "before step 1 a gradient is not finite" in said(capsys)[-1]


# ---- the end of a run ----------------------------------------------------------------------------------------


KEPT_GAIN_RE = re.compile(r"merged \d+\.\d+ \((-?\d+)% of the gain\)")
SHORT = ("--lr", "3e-4", "--iters", "4")


def test_a_merge_with_data_keeps_what_a_plain_one_loses(folder, tmp_path, capsys):
    output = tmp_path / "a.gguf"
    assert run_finetune(folder, "q4_K", output, *SHORT, "--merge", "plain", "--replay", "0") == 0
    plain_log = "\n".join(said(capsys))
    assert int(KEPT_GAIN_RE.findall(plain_log)[0]) < 80
    merge_command = plain_log.partition("merge again with: packtrain ")[2].splitlines()[0]
    assert main(shlex.split(merge_command)) == 0
    text = "\n".join(said(capsys))
    assert int(KEPT_GAIN_RE.findall(text)[0]) >= 95 and "warning" not in text


def test_losses_that_were_measured_are_not_measured_again(folder, tmp_path, capsys, monkeypatch):
    measured = []
    loss = merge_after_training.FinishedFinetune._validation_loss
    monkeypatch.setattr(
        merge_after_training.FinishedFinetune,
        "_validation_loss",
        lambda end, model, label: measured.append(label) or loss(end, model, label),
    )
    output = tmp_path / "a.gguf"
    assert run_finetune(folder, "q8_0", output, "--iters", "3") == 0
    first_lines = [line for line in said(capsys) if line.startswith("validation loss")]
    assert measured == ["the result"]
    assert run_finetune(folder, "q8_0", output, "--iters", "3", "--resume") == 0
    assert measured == ["the result"] * 2
    resumed_lines = [line for line in said(capsys) if line.startswith("validation loss")]
    assert resumed_lines == first_lines[-1:]
    with (
        monkeypatch.context() as patch
    ):  # of a run that other batches validated nothing can be taken over
        patch.setattr(merge_after_training, "MIN_KEPT_SHARE", 0.0)
        flags = ["--iters", "3", "--resume", "--val-batches", "1"]
        assert run_finetune(folder, "q8_0", output, *flags) == 0
    assert measured[2:] == ["the adapter", "the result", "the base"]


def test_what_validation_says_is_what_the_files_lose(folder, tmp_path, capsys, monkeypatch):
    """Base and adapter: before step 1 and after the last one, and as the files are measured."""
    end = merge_after_training.FinishedFinetune.merge_and_measure
    seen = []

    def both(self: merge_after_training.FinishedFinetune) -> None:
        adapter = read_adapter(self.settings.folder / "adapter.gguf")
        end(self)
        seen.append(self._measure_merge_losses(adapter))
        fresh = replace(self.progress, base=math.inf, last=math.inf)
        seen.append(replace(self, progress=fresh)._measure_merge_losses(adapter))

    monkeypatch.setattr(merge_after_training.FinishedFinetune, "merge_and_measure", both)
    assert (
        run_finetune(folder, "q4_K", tmp_path / "a.gguf", "--iters", "3", "--lora-dropout", "0.1")
        == 0
    )
    assert dataclasses.astuple(seen[0]) == pytest.approx(dataclasses.astuple(seen[1]), rel=1e-6)


def test_larger_types_are_offered_where_they_keep_more(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(merge_after_training, "MIN_KEPT_SHARE", 2.0)
    monkeypatch.setattr(
        merge_after_training.MergeLosses, "kept_share", property(lambda losses: next(kept_shares))
    )
    kept_shares = iter([0.9, 0.9, 1.9, 2.0, 2.0])
    output = tmp_path / "my.gguf"
    assert run_finetune(folder, "q4_K", output, *SHORT) == 0
    text = "\n".join(said(capsys))
    ((grown, command),) = re.findall(r"the file is (.*) larger: packtrain (.*)", text)
    assert not (tmp_path / "my.run/.trial.part").exists()
    kept_shares, before = iter([2.0, 2.0, 2.0]), output.stat().st_size
    assert main(shlex.split(command)) == 0
    assert f"{(output.stat().st_size - before) / 2**10:.1f} KiB" == grown
    assert "larger: packtrain" not in "\n".join(said(capsys))


def test_a_merge_that_no_types_would_keep_is_said(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(merge_after_training, "MIN_KEPT_SHARE", 9.0)
    assert run_finetune(folder, "q4_K", tmp_path / "a.gguf", *SHORT) == 0
    text = "\n".join(said(capsys))
    assert "warning: no merge keeps 900% of what the adapter gains" in text
    assert text.count("trying ") == 2 and not (tmp_path / "a.run/.trial.part").exists()


@pytest.mark.parametrize("type_flags", [(), ("--tensor-type", "ffn_down=q8_0")])
def test_room_on_the_disk_is_asked_for_trials_and_larger_types(
    folder, tmp_path, capsys, monkeypatch, type_flags
):
    """A merge that keeps too little is tried again beside the result: of these two files none is larger than said."""
    sizes: list[int] = []
    loss = merge_after_training.FinishedFinetune._validation_loss

    def seen(self: merge_after_training.FinishedFinetune, model: ModelFile, label: str) -> float:
        sizes.append(model.gguf.path.stat().st_size)
        return loss(self, model, label)

    space_requests: list[tuple[Path, str, int]] = []
    monkeypatch.setattr(merge_after_training, "MIN_KEPT_SHARE", 9.0)
    monkeypatch.setattr(merge_after_training.FinishedFinetune, "_validation_loss", seen)
    monkeypatch.setattr(
        "packtrain.workflows.run_training.check_space",
        lambda job, plans, extra_files: space_requests.extend(
            [*run_files(job, plans), *extra_files]
        ),
    )
    output = tmp_path / "a.gguf"
    assert run_finetune(folder, "q4_K", output, *SHORT, *type_flags) == 0
    room = {label: nbytes for _, label, nbytes in space_requests}
    result = room["a.gguf"] + room.get("its larger types", 0)
    assert sizes[0] < result < sizes[0] + HEAD_NBYTES
    assert len(sizes) == 3 and max(sizes[1:]) < room["a trial of larger types"]
    assert room["a trial of larger types"] < max(sizes[1:]) + HEAD_NBYTES


@pytest.mark.parametrize("tensor_type", ["q6_K", "ffn_down=q9", "ffn_dwn=q6_K"])
def test_types_of_single_matrices_are_checked_before_step_1(folder, tmp_path, capsys, tensor_type):
    assert (
        run_finetune(folder, "q4_K", tmp_path / "a.gguf", *SHORT, "--tensor-type", tensor_type) == 2
    )
    assert f"--tensor-type {tensor_type}: " in said(capsys)[-1]
    assert not (tmp_path / "a.run/adapter.gguf").exists()


def test_too_little_memory_for_data_is_said_with_the_plan(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("packtrain.conversion.calibration.calibration_inputs.OTHER_NBYTES", 1 << 40)
    output = tmp_path / "a.gguf"
    assert run_finetune(folder, "q4_K", output, *SHORT, "--memory", memory_limit(330)) == 0
    lines = said(capsys)
    (warning_line,) = (i for i, line in enumerate(lines) if "plain rounding will keep less" in line)
    assert warning_line < next(i for i, line in enumerate(lines) if line.startswith("step 1/"))
    assert any("the adapter is merged by plain rounding" in line for line in lines)


def test_no_part_of_a_gain_is_said_where_there_is_none(folder, tmp_path, capsys):
    assert run_finetune(folder, "f32", tmp_path / "a.gguf", "--lr", "1e-30", "--iters", "1") == 0
    text = "\n".join(said(capsys))
    assert "merged" in text and "of the gain" not in text


@pytest.mark.parametrize("mode_flags", [(), ("--full",)])
def test_what_learnt_from_conversations_carries_their_template(folder, tmp_path, mode_flags):
    assert run_finetune(folder, "f32", tmp_path / "a.gguf", "--iters", "1", *mode_flags) == 0
    template = GGUF(tmp_path / "a.gguf").metadata["tokenizer.chat_template"]
    assert (
        template == choose_template(GGUF(folder / "f32.gguf").metadata, None).source
        and "eos_token" in template
    )
    (tmp_path / "text.txt").write_text(sample_text(2000))
    args = [str(folder / "f32.gguf"), "--data", str(tmp_path / "text.txt")]
    output = ["-o", str(tmp_path / "b.gguf"), "--iters", "1"]
    assert main(["finetune", *args, *output, *COMMON_FLAGS, *mode_flags]) == 0
    assert "tokenizer.chat_template" not in GGUF(tmp_path / "b.gguf").metadata


def test_a_run_that_is_stopped_while_it_merges_says_how_to_finish(
    folder, tmp_path, capsys, monkeypatch
):
    output = tmp_path / "my model.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(
            merge_after_training.FinishedFinetune,
            "_write_merged",
            lambda *_: signal.raise_signal(signal.SIGINT),
        )
        assert run_finetune(folder, "f32", output, "--iters", "2") == 130
    command = said(capsys)[-1].partition("which is saved; finish with: packtrain ")[2]
    assert not output.exists() and main(shlex.split(command)) == 0
    lines = said(capsys)
    assert f"2 steps done, none left; finishing {output}" in lines and output.exists()
    assert not any("expected" in line for line in lines)


def test_rows_that_a_type_cannot_hold_are_said(folder, tmp_path, capsys):
    save(tmp_path / "narrow.gguf", replace(CONFIG, context_length=64))
    args = [str(tmp_path / "narrow.gguf"), "--data", str(folder / "chats.jsonl")]
    output = ["-o", str(tmp_path / "a.gguf"), "--iters", "1", "--lora-modules", "attn_q"]
    assert main(["finetune", *args, *output, *COMMON_FLAGS, "--type", "q4_K"]) == 0
    line = "--type q4_K: rows of 2 matrices do not fill blocks of this type; they keep their type"
    assert line in said(capsys)


def test_commands_for_names_with_blanks_and_quotes(folder, tmp_path, capsys):
    output = tmp_path / "Bob's 1.5 model.gguf"
    assert run_finetune(folder, "f32", output, "--iters", "1") == 0
    commands = [shlex.split(line) for line in said(capsys) if line.startswith("  ")]
    assert ["packtrain", "chat", str(output)] in commands
    modelfile = output.with_name("Bob's 1.5 model.run") / "Modelfile"
    assert commands[-1] == ["ollama", "create", "Bob-s-1.5-model", "-f", str(modelfile)]


# ---- merging -------------------------------------------------------------------------------------------------


def test_merging_adapters_with_scales(folder, tmp_path, capsys):
    base = folder / "f32.gguf"
    for seed in ("1", "2"):
        tuned_path = tmp_path / f"{seed}.gguf"
        assert run_finetune(folder, "f32", tuned_path, "--iters", "2", "--seed", seed) == 0
    paths = [str(tmp_path / f"{seed}.run/adapter.gguf") for seed in "12"]
    pair = [f"{paths[0]}:0.5", paths[1]]
    assert main(["merge", str(base), *pair, "-o", str(tmp_path / "m.gguf")]) == 0
    old, new = GGUF(base), GGUF(tmp_path / "m.gguf")
    adapters = [read_adapter(path) for path in paths]
    name = "blk.1.ffn_down.weight"
    expected = old.array(name).astype(np.float64)
    for by, adapter in zip((0.5, 1.0), adapters, strict=True):
        a, b = adapter.lora_pairs[name]
        expected += by * adapter.alpha / len(a) * (b.astype(np.float64) @ a)
    np.testing.assert_allclose(new.array(name), expected, atol=1e-6)
    (tmp_path / "text.txt").write_text(sample_text(2000))
    data = ["--data", str(tmp_path / "text.txt"), "-c", "32"]
    capsys.readouterr()
    losses = []
    for model, lora_flags in (
        (base, [f"--lora={text}" for text in pair]),
        (tmp_path / "m.gguf", []),
    ):
        assert main(["eval", str(model), *data, *lora_flags]) == 0
        losses.append(float(re.findall(r"loss ([\d.]+)", capsys.readouterr().out)[0]))
    assert abs(losses[0] - losses[1]) <= 2e-4
    assert main(["merge", str(base), f"{paths[0]}:0", "-o", str(tmp_path / "same.gguf")]) == 0
    assert weight_bytes(tmp_path / "same.gguf") == weight_bytes(base)
    written = ["--type", "q8_0", "-o", str(tmp_path / "q8.gguf")]
    assert main(["merge", str(base), paths[1], *written]) == 0
    packed = GGUF(tmp_path / "q8.gguf")
    assert (
        str(packed.entries[name].dtype) == "q8_0"
        and str(packed.entries["token_embd.weight"].dtype) == "f32"
    )
    assert_close(dequantize(packed.array(name)), np.asarray(old.array(name)), name, 0.1)


# ---- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_flags", "line"),
    [
        (["--lora-modules", "attn_x"], "--lora-modules: 'attn_x' is not a matrix of the model; choose all, attn"),
        (["--lora-rank", "many"], "--lora-rank many: it must be from 1 to 4096, or NAME=RANK"),
        (["--lora-rank", "8"], "--lora-rank 8: another is for *, too; give one of them"),
        (["--lora-rank", "attn_q=8", "--lora-rank", "attn_q=4"], "another is for attn_q, too"),
        (["--lora-rank", "attn_x=3"], "--lora-rank attn_x=3: it must be for one of attn_q"),
        (["--rslora", "--lora-rank", "attn_q=2"], "--rslora: all ranks must be equal"),
        (["--full", "--freeze", "*"], "--freeze: nothing is left to train"),
        (["--masters", "bf16"], "--masters has no effect without --full"),
        (["--full", "--freeze", "attn*"], "--freeze attn*:"),
        (["--freeze", "token_embd*"], "--freeze has no effect without --full"),
        (["--num-layers", "0"], "--num-layers 0: it must be at least 1, or -1 for all"),
        (["--full", "--adapter", "a.gguf"], "--adapter has no effect with --full"),
        (["--val-split", "1e-9"], "--val-split 1e-09: it must be 0 or at least"),
    ],
)  # fmt: skip
def test_refusals(folder, tmp_path, capsys, monkeypatch, extra_flags, line):
    monkeypatch.chdir(tmp_path)
    assert run_finetune(folder, "f32", tmp_path / "m.gguf", *extra_flags) == 2
    lines = said(capsys)
    assert line in lines[-1] and len(lines) == 1
    assert not list(tmp_path.iterdir())


def test_the_base_is_never_an_output(folder, tmp_path, capsys):
    before = (folder / "f32.gguf").read_bytes()
    for flags in (["--overwrite"], ["--adapter", str(folder / "f32.gguf"), "--overwrite"]):
        output = folder / "f32.gguf" if len(flags) == 1 else tmp_path / "m.gguf"
        assert run_finetune(folder, "f32", output, *flags) == 2
        assert "is one of the files that are read" in said(capsys)[-1]
    assert (folder / "f32.gguf").read_bytes() == before


def test_data_are_never_an_output(folder, tmp_path, capsys):
    (tmp_path / "link.gguf").symlink_to(folder / "chats.jsonl")
    before = (folder / "chats.jsonl").read_bytes()
    assert run_finetune(folder, "f32", tmp_path / "link.gguf", "--overwrite") == 2
    assert "is one of the files that are read" in said(capsys)[-1]
    assert (folder / "chats.jsonl").read_bytes() == before


def test_data_that_teaches_nothing_is_refused(folder, tmp_path, capsys):
    data = tmp_path / "empty.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    args = [str(folder / "f32.gguf"), "--data", str(data), "-o", str(tmp_path / "m.gguf")]
    assert main(["finetune", *args]) == 2
    assert f"{data}" in said(capsys)[-1] and "no turn of the assistant" in said_again(
        data, args, capsys
    )


def said_again(data: Path, arguments: list[str], capsys) -> str:
    main(["finetune", *arguments])
    return said(capsys)[-1]


def test_an_adapter_of_another_base_is_refused(folder, tmp_path, capsys):
    random_model(tmp_path / "other.gguf", "qwen3")
    write_gguf(
        tmp_path / "a.gguf",
        {
            "general.type": MetadataValue("string", "adapter"),
            "general.architecture": MetadataValue("string", "llama"),
            "adapter.type": MetadataValue("string", "lora"),
        },
        {
            "blk.0.attn_q.weight.lora_a": np.ones((2, 64), np.float32),
            "blk.0.attn_q.weight.lora_b": np.ones((64, 2), np.float32),
        },
    )
    for base, line in (("other", "is for 'llama' and"), ("f32", "do not fit [256, 256]")):
        model = tmp_path / "other.gguf" if base == "other" else folder / "f32.gguf"
        for command in (
            ["merge", str(model), str(tmp_path / "a.gguf"), "-o", str(tmp_path / "m.gguf")],
            ["generate", str(model), "-p", "a", "--lora", str(tmp_path / "a.gguf")],
        ):
            assert main(command) == 2
            assert line in said(capsys)[-1]


def test_a_plan_tells_what_is_mapped(folder, tmp_path, capsys):
    path, data = tmp_path / "plan.json", str(folder / "chats.jsonl")
    args = [str(folder / "q8_0.gguf"), "--data", data, *COMMON_FLAGS, "--json", str(path)]
    assert main(["plan", "finetune", *args]) == 0
    plan, entries = json.loads(path.read_text()), GGUF(folder / "q8_0.gguf").entries.values()
    assert plan["mapped_bytes"] == sum(entry.nbytes for entry in entries)
    assert plan["window_bytes"] is None and not list(tmp_path.glob("*.run"))


def test_the_adapter_alone_is_a_result(folder, tmp_path, capsys):
    """Nothing is merged: the output is the adapter, of which each save can have a copy; it can be merged later."""
    output = tmp_path / "alone.gguf"
    saves = ["--iters", "4", "--save-every", "2", "--save-model", "adapter-ITERATION.gguf"]
    assert run_finetune(folder, "q8_0", output, "--merge", "none", *saves) == 0
    text = "\n".join(said(capsys))
    assert "merging" not in text and "validation loss: base" in text
    assert f"packtrain chat {folder / 'q8_0.gguf'} --lora {output}" in text
    adapter_pairs = read_adapter(output).lora_pairs
    saved_pairs = {
        n: read_adapter(tmp_path / f"alone.run/adapter-{n}.gguf").lora_pairs
        for n in (2, 4, "LATEST")
    }
    for name, pair in adapter_pairs.items():
        for final, last_half, latest_half, early_half in zip(
            pair,
            saved_pairs[4][name],
            saved_pairs["LATEST"][name],
            saved_pairs[2][name],
            strict=True,
        ):
            assert (
                (final == last_half).all()
                and (final == latest_half).all()
                and not (final == early_half).all()
            )
    lines = (tmp_path / "alone.run/Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {folder / 'q8_0.gguf'}", "ADAPTER ../alone.gguf"]
    merge_args = ["finetune", "-o", str(output), "--resume", "--merge", "plain"]
    assert main(merge_args) == 0
    assert GGUF(output).entries.keys() == GGUF(folder / "q8_0.gguf").entries.keys()


@pytest.mark.parametrize("mode_flags", [["--merge", "none"], ["--adapter", "a.gguf"], ["--full"]])
def test_no_steps_write_what_the_base_says(folder, tmp_path, capsys, monkeypatch, mode_flags):
    """--iters 0: the adapter changes nothing, a merged model is the base, and steps can follow."""
    monkeypatch.chdir(tmp_path)
    assert run_finetune(folder, "f32", tmp_path / "m.gguf", "--iters", "0", *mode_flags) == 0, said(
        capsys
    )
    assert "the result is untouched: --iters 0 takes no step" in said(capsys)
    if "none" not in mode_flags:
        assert weight_bytes(tmp_path / "m.gguf") == weight_bytes(folder / "f32.gguf")
    if "--full" not in mode_flags:
        adapter = tmp_path / ("m.gguf" if "none" in mode_flags else "a.gguf")
        pairs = GGUF(adapter)
        assert not any(pairs.array(n).any() for n in pairs.entries if n.endswith("lora_b"))
        base = str(folder / "f32.gguf")
        assert main(["generate", base, "--lora", str(adapter), "-p", "a", "-n", "2"]) == 0
    assert main(["finetune", "-o", str(tmp_path / "m.gguf"), "--resume", "--iters", "2"]) == 0
