"""Training on pairs of answers: the losses and their gradients, the data, runs, resuming, refusals."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.data.conversations import TokenizedSamples
from packtrain.data.conversations.messages import AnswerPair
from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text.documents import SourceFile
from packtrain.devtools.check.check_cases import run_graph
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.gguf import GGUF
from packtrain.models.preference_loss import KINDS, PreferenceLoss, make_preference
from packtrain.training import precomputed
from packtrain.training.monitoring import metrics_file
from packtrain.training.pair_batches import PairBatches
from packtrain.training.reference_logprobs import FILE
from tests.architectures import CONFIGS, random_model
from tests.preferred import PAIRS, preference_base
from tests.room import memory_limit
from tests.test_train import said, signal_after, weight_bytes

LOSSES = {
    **KINDS,
    "smooth": make_preference("dpo", smoothing=0.2),
    "mean": make_preference("dpo", measure="mean", beta=2.0),
    "free": make_preference("dpo", reference=False),
    "margin": make_preference("dpo", gamma=0.3),
    "sft": make_preference("dpo", nll=0.7),
}
CHOSEN = np.array([2, 1, 1])  # tokens of the chosen answers below


def as_in_the_papers(name: str, c: float, r: float, c0: float, r0: float, tokens: int) -> float:
    """The loss of one pair, from log-probabilities of the chosen and rejected answer, and the reference's.

    tokens  of the chosen answer
    """
    if name == "ipo":
        return ((c - c0) - (r - r0) - 1 / 0.2) ** 2
    if name == "simpo":
        return math.log1p(math.exp(-(2.0 * (c - r) - 0.5)))
    if name == "orpo":
        log_odds = (c - r) - (math.log1p(-math.exp(c)) - math.log1p(-math.exp(r)))
        return -c + 0.1 * math.log1p(math.exp(-log_odds))
    beta = 2.0 if name == "mean" else 0.1
    ratio = beta * ((c - r) - (0.0 if name == "free" else c0 - r0)) - (0.3 * (name == "margin"))
    right, wrong = math.log1p(math.exp(-ratio)), math.log1p(math.exp(ratio))
    if name == "sft":
        return right - 0.7 * c / tokens
    return 0.8 * right + 0.2 * wrong if name == "smooth" else right


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_the_papers(name: str) -> None:
    """Two rows of up to two pairs; the second row has one."""
    preference, rng, time = LOSSES[name], np.random.default_rng(0), 9
    losses = rng.uniform(0.1, 3, (2, time)).astype(np.float32)
    owner = np.array([[0, 0, 2, 2, 2, 1, 3, 3, 3], [0, 2, 2, 2, -1, -1, -1, -1, -1]])
    sides = np.stack([owner == side for side in range(4)], 1).astype(np.float32)
    if preference.uses_mean:
        sides /= np.maximum(sides.sum(-1, keepdims=True), 1)
    ref_logps = rng.uniform(-3, -1, (2, 4)).astype(np.float32)
    share = np.array([[1 / 3, 1 / 3], [1 / 3, 0]], np.float32)
    logps = -(sides.astype(np.float64) * losses[:, None]).sum(-1)
    expected_losses = [
        as_in_the_papers(
            name, logps[i, p], logps[i, 2 + p], ref_logps[i, p], ref_logps[i, 2 + p], tokens
        )
        for (i, p), tokens in zip(((0, 0), (0, 1), (1, 0)), CHOSEN, strict=True)
    ]
    inputs = {"losses": losses, "sides": sides, "pairs": share}
    inputs |= {"reference": ref_logps} if preference.reference else {}
    inputs |= {"shares": np.float32([[1 / 2, 1], [1, 0]])} if preference.needs_shares else {}
    leaf = pt.weight("losses", losses.shape)
    loss, said = preference.loss(leaf, 2)
    got = run_graph(Graph({"loss": loss, "logps": said}), inputs)
    assert float(got["loss"]) == pytest.approx(np.mean(expected_losses), rel=1e-5)
    np.testing.assert_allclose(got["logps"], logps, rtol=1e-5)
    pairs = np.array([[logps[i, p], logps[i, 2 + p]] for i, p in ((0, 0), (0, 1), (1, 0))])
    refs = np.array([[ref_logps[i, p], ref_logps[i, 2 + p]] for i, p in ((0, 0), (0, 1), (1, 0))])
    metrics = preference.loss_and_rewards(
        pairs, refs, 1 / CHOSEN if preference.needs_shares else 1.0
    )
    np.testing.assert_allclose(metrics["loss"], expected_losses, rtol=1e-6)


@pytest.mark.parametrize("trained", [False, True], ids=["head frozen", "head trained"])
@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "sft"])
def test_gradients_through_the_head_equal_differences(name: str, trained: bool) -> None:
    """Of a frozen head one pass is enough; of a trained one logits are computed twice."""
    preference, rng = LOSSES[name], np.random.default_rng(1)
    x = rng.standard_normal((2, 6, 8)).astype(np.float32)
    w = rng.standard_normal((11, 8)).astype(np.float16 if not trained else np.float32)
    targets = rng.integers(0, 11, (2, 6)).astype(np.int32)
    targets[:, 0] = -1
    owner = np.array([[-1, 0, 0, 1, 1, 1], [-1, 0, 0, 0, 1, 1]])
    sides = np.stack([owner == side for side in range(2)], 1).astype(np.float32)
    if preference.uses_mean:
        sides /= sides.sum(-1, keepdims=True)
    ref_logps = np.full((2, 2), -4, np.float32)
    share = np.full((2, 1), 0.5, np.float32)
    leaf = pt.weight("x", x.shape)
    head = pt.weight("w", w.shape) if trained else pt.constant("w", w, pt.f16)
    ones = pt.constant("ones", np.ones((2, 6), np.float32))
    losses = ops.linear_cross_entropy(
        leaf, head, pt.input("targets", (2, 6), pt.i32), ones, chunk=4
    )[1]
    loss, _ = preference.loss(losses, 1)
    leaves = [leaf, head] if trained else [leaf]
    grads = differentiate(loss, leaves)
    outputs = {t.label: g for t, g in grads.items()}
    inputs = {"x": x, "w": w, "targets": targets, "sides": sides, "pairs": share}
    inputs |= {"reference": ref_logps} if preference.reference else {}
    inputs |= {"shares": np.float32([[1 / 2], [1 / 3]])} if preference.needs_shares else {}
    if not trained:
        inputs.pop("w")
    graph = Graph(outputs)
    heads = sum(step.op.name == "linear_cross_entropy" for step in graph.calls)
    assert heads == (2 if trained else 1)
    got = run_graph(graph, inputs)

    def value(x: np.ndarray, w: np.ndarray) -> float:
        logits = x @ w.astype(np.float64).T
        top = logits.max(-1, keepdims=True)
        logps = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        at = np.maximum(targets, 0)[..., None]
        token = np.take_along_axis(logps, at, -1)[..., 0] * (targets >= 0)
        s = (sides * token[:, None]).sum(-1)
        shares = np.array([1 / 2, 1 / 3]) if preference.needs_shares else 1.0
        return float(
            preference.loss_and_rewards(s, ref_logps.astype(np.float64), shares)["loss"].mean()
        )

    for name, array in (("x", x), ("w", w)) if trained else (("x", x),):
        for at in [*np.ndindex(array.shape)][:: 5 if name == "x" else 7]:
            up, down = (array.astype(np.float64) for _ in range(2))
            up[at] += 1e-5
            down[at] -= 1e-5
            both = [(up, w), (down, w)] if name == "x" else [(x, up), (x, down)]
            slope = (value(*both[0]) - value(*both[1])) / 2e-5
            assert got[name][at] == pytest.approx(slope, abs=2e-6), (name, at)


# ---- data


def read_pairs(tmp_path: Path, *lines: object) -> list[AnswerPair]:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return [*RecordReader(SourceFile(path))]  # type: ignore[list-item]


USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "Hi"), ("assistant", "Hello!"), ("assistant", "What?"))
)
SYSTEM = {"role": "system", "content": "Be kind."}
MEANT = {
    "texts": {"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"},
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "prompt within": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "prompt twice": {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "one message": {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Hello!"},
        "rejected": {"from": "gpt", "value": "What?"},
    },
}


@pytest.mark.parametrize("form", MEANT)
def test_pairs_in_every_form_that_trl_reads(form: str, tmp_path: Path) -> None:
    (pair,) = read_pairs(tmp_path, MEANT[form])
    assert pair.chosen.messages == [USER, GOOD] and pair.rejected.messages == [USER, BAD]
    assert pair.chosen.num_answer_messages == pair.rejected.num_answer_messages == 1


def test_a_pair_keeps_the_turns_before_it_out_of_the_loss(tmp_path: Path) -> None:
    before = [SYSTEM, USER, GOOD, {"role": "user", "content": "And?"}]
    (pair,) = read_pairs(tmp_path, {"chosen": [*before, GOOD], "rejected": [*before, BAD]})
    assert pair.chosen.messages == [*before, GOOD] and pair.chosen.num_answer_messages == 1


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"chosen": "a", "rejected": "b"}, "chosen is a text"),
        ({"prompt": "Hi", "chosen": "a", "rejected": ""}, "content is empty"),
        ({"prompt": "Hi", "chosen": "a", "rejected": 3}, "rejected"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [USER]}, "rejected must end with"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no answer of the assistant"),
    ],
)
def test_bad_pairs_are_refused_by_place(record: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        read_pairs(tmp_path, record)
    assert "pairs.jsonl" in str(refusal.value) and "line 1" in str(refusal.value)


@pytest.mark.parametrize("measure, nll", [("mean", 0.0), ("sum", 0.5)])
def test_rows_hold_whole_pairs_and_say_which_targets_are_whose(measure: str, nll: float) -> None:
    rng, lengths = np.random.default_rng(2), [5, 7, 4, 4, 9, 3, 6, 6]
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    ids = rng.integers(0, 50, sum(lengths)).astype(np.uint16)
    token_weights = (rng.random(ids.size) < 0.6).astype(np.uint8)
    token_weights[starts + 2] = 1
    preference = replace(KINDS["simpo"], nll=nll, measure=measure)
    batches = PairBatches(TokenizedSamples(ids, token_weights, starts), 2, 24, preference, seed=1)
    batches.known_logps[:] = np.arange(8)
    seen = []
    for index in range(len(batches)):
        batch, rows = batches[index], batches.row_samples(index)
        for at, row in enumerate(rows):
            max_pairs = batches.max_pairs
            assert batch["pairs"][at].sum() * 2 == len(row)
            for number, sample in enumerate(row):
                seen.append(sample)
                pair, side = divmod(number, 2)
                assert sample % 2 == side and (side == 0 or row[number - 1] == sample - 1)
                sides = batch["sides"][at, side * max_pairs + pair]
                sample_ids, sample_weights = TokenizedSamples(ids, token_weights, starts)[sample]
                columns = np.flatnonzero(sides)
                assert sides.sum() == pytest.approx(1 if preference.uses_mean else columns.size)
                if preference.needs_shares and not side:
                    assert batch["shares"][at, pair] == pytest.approx(1 / columns.size)
                expected = sample_ids[1:][sample_weights[1:] > 0]
                assert batch["targets"][at, columns].tolist() == expected.tolist()
    assert sorted(seen) == [*range(8)]


# ---- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("preference")
    rng = random.Random(1)
    lines = []
    for _ in range(60):
        words = [rng.choice(("sun", "ice", "sea", "sky")) for _ in range(3)]
        # the preferred answer is short
        short, long = words[0], " ".join(words * 3)
        lines.append({"prompt": f"say {words[0]}", "chosen": short, "rejected": long})
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    random_model(root / "f32.gguf", "llama tied")
    assert main(["quantize", str(root / "f32.gguf"), str(root / "q4.gguf"), "Q4_K_M"]) == 0
    return root


def run_finetune(folder: Path, output: Path, *flags: str, base: str = "f32") -> int:
    paths = [str(folder / f"{base}.gguf"), "--data", str(folder / "pairs.jsonl"), "-o", str(output)]
    defaults = ["--batch-size", "2", "--lr", "0.003", "--val-split", "0.2", "--no-tensorboard"]
    loss = () if "--loss" in flags else ("--loss", "dpo")
    return main(["finetune", *paths, *defaults, *loss, "--lora-rank", "4", *flags])


@pytest.mark.parametrize("loss", KINDS)
def test_a_run_learns_the_preference_on_pairs_it_has_not_seen(folder, tmp_path, capsys, loss):
    output = tmp_path / "tuned.gguf"
    assert run_finetune(folder, output, "--loss", loss, "--iters", "30", base="q4") == 0, said(
        capsys
    )
    records = [*metrics_file.read(tmp_path / "tuned.run/metrics.jsonl")]
    first, last = records[0], next(r for r in reversed(records) if "val_loss" in r)
    assert last["val_accuracy"] == 1 and last["rewards_margin"] > first["rewards_margin"] + 0.05
    margin = last["rewards_chosen"] - last["rewards_rejected"]
    assert margin == pytest.approx(last["rewards_margin"], abs=1e-6)
    if loss == "dpo":  # nothing is learned yet
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_the_loss_does_not_depend_on_micro_batches_packing_or_memory(folder, tmp_path, capsys):
    results = []
    for number, extra_args in enumerate(
        (["--batch-size", "4"], ["--batch-size", "2", "--grad-accumulation-steps", "2"])
    ):
        output = tmp_path / f"{number}.gguf"
        assert run_finetune(folder, output, "--iters", "4", *extra_args) == 0, said(capsys)
        records = metrics_file.read(tmp_path / f"{number}.run/metrics.jsonl")
        results.append([(r["loss"], r["rewards_margin"]) for r in records if "loss" in r])
    np.testing.assert_allclose(results[0], results[1], rtol=2e-5, atol=2e-6)


def test_a_stopped_run_resumes_bit_for_bit_and_reads_the_reference_once(folder, tmp_path, capsys):
    full_model, resumed_model = tmp_path / "whole.gguf", tmp_path / "parted.gguf"
    assert run_finetune(folder, full_model, "--iters", "8") == 0
    with signal_after(4):
        assert run_finetune(folder, resumed_model, "--iters", "8") == 130
    capsys.readouterr()
    assert run_finetune(folder, resumed_model, "--iters", "8", "--resume") == 0
    assert "reference model" not in "\n".join(said(capsys))
    assert weight_bytes(full_model) == weight_bytes(resumed_model)
    # a lost or damaged file is made again, from the base's values
    (tmp_path / "parted.run" / FILE).write_bytes(b"damaged")
    assert run_finetune(folder, resumed_model, "--iters", "10", "--resume") == 0
    assert run_finetune(folder, full_model, "--iters", "10", "--resume") == 0
    assert weight_bytes(full_model) == weight_bytes(resumed_model)


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_what_was_kept_is_read_whole_or_not_at_all(damage: str, tmp_path: Path) -> None:
    path, arrays = tmp_path / "known.npz", {"a": np.arange(99.0), "b": np.arange(50)}
    precomputed.write_arrays(path, "mark", arrays)
    got = {name: np.zeros_like(array) for name, array in arrays.items()}
    precomputed.read_arrays(path, "another", got)
    assert not got["a"].any()
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        del raw[-30:]
    else:
        raw[raw.index(arrays["b"].tobytes()) + 3] ^= 1
    (tmp_path / "damaged.npz").write_bytes(raw)
    precomputed.read_arrays(tmp_path / "damaged.npz", "mark", got)
    assert not got["a"].any() and not got["b"].any()
    precomputed.read_arrays(path, "mark", got)
    assert all(np.array_equal(got[name], array) for name, array in arrays.items())


def test_learned_positions_are_enough_for_both_answers_and_padding(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(CONFIGS, "gpt2", replace(CONFIGS["gpt2"], context_length=128))
    random_model(tmp_path / "gpt2.gguf", "gpt2")
    args = [str(tmp_path / "gpt2.gguf"), "--data", str(folder / "pairs.jsonl"), "--loss", "dpo"]
    extra_args = ["--iters", "2", "--no-tensorboard", "-o", str(tmp_path / "tuned.gguf")]
    assert main(["finetune", *args, *extra_args]) == 0, said(capsys)


def test_weights_themselves_can_be_trained(folder, tmp_path, capsys):
    output = tmp_path / "tuned.gguf"
    args = [str(folder / "f32.gguf"), "--data", str(folder / "pairs.jsonl"), "-o", str(output)]
    extra_args = ["--full", "--loss", "dpo", "--iters", "6", "--batch-size", "2", "--lr", "1e-3"]
    assert main(["finetune", *args, *extra_args, "--no-tensorboard"]) == 0, said(capsys)
    records = [r for r in metrics_file.read(tmp_path / "tuned.run/metrics.jsonl") if "loss" in r]
    assert records[-1]["rewards_margin"] > records[0]["rewards_margin"] + 0.05


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--loss", "next-token"], "is a pair of answers"),
        (
            ["--loss", "simpo", "--reference-free"],
            "--reference-free has no effect without --loss dpo;",
        ),
        (
            ["--loss", "ipo", "--label-smoothing", "0.1"],
            "--label-smoothing has no effect without --loss",
        ),
        (
            ["--loss", "next-token", "--beta", "0.1"],
            "--beta has no effect without --loss dpo or ipo",
        ),
        (["--loss", "next-token", "--sft-weight", "1"], "--sft-weight has no effect without"),
        (["--loss", "ipo", "--gamma", "0"], "--gamma has no effect without --loss dpo or simpo"),
        (["--loss", "dpo", "--truncate", "split"], "needs whole answers"),
        (["--loss", "dpo", "--beta", "0"], "--beta"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, tmp_path, capsys, flags, message):
    assert run_finetune(folder, tmp_path / "tuned.gguf", *flags) == 2
    (line,) = [line for line in said(capsys) if "error" in line or message in line][-1:]
    assert message in line


def test_other_data_is_refused_for_such_a_loss(folder, tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"prompt": "Hi", "completion": "Hello"}))
    output = str(tmp_path / "tuned.gguf")
    args = [str(folder / "f32.gguf"), "--data", str(data), "-o", output, "--loss", "dpo"]
    assert main(["finetune", *args]) == 2
    assert "it must have prompt, chosen and rejected" in said(capsys)[-1]


def test_a_budget_is_kept_or_refused(folder, tmp_path, capsys):
    assert (
        run_finetune(folder, tmp_path / "tuned.gguf", "--iters", "2", "--memory", memory_limit(600))
        == 0
    )
    assert run_finetune(folder, tmp_path / "small.gguf", "--iters", "2", "--memory", "40MiB") == 3


def test_judged_rewards_of_an_untrained_model_are_ties() -> None:
    preference = PreferenceLoss("dpo")
    logps = np.array([[-3.0, -5.0]])
    metrics = preference.loss_and_rewards(logps, logps)
    assert metrics["chosen"] == metrics["rejected"] == 0 and metrics["loss"] == pytest.approx(
        math.log(2)
    )


# ---- against TRL


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_losses_margins_and_gradients_are_trls(tmp_path: Path, loss: str) -> None:
    """Three steps of plain SGD on the same pairs, as benchmarks.preference_peer has recorded them.

    Weights that have moved alike have had the same gradients.
    """
    golden = json.loads((Path(__file__).parent / "goldens/preference.json").read_text())[loss]
    base, output = tmp_path / "base.gguf", tmp_path / "tuned.gguf"
    preference_base(base)
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, PAIRS)))
    steps = golden["steps"]
    args = [
        "--full",
        "--loss",
        loss,
        "--optimizer",
        "sgd",
        "--momentum",
        "0",
        "--max-grad-norm",
        "0",
    ]
    args += ["--lr", str(golden["rate"]), "--lr-scheduler", "constant", "--warmup-ratio", "0"]
    args += ["--weight-decay", "0", "--no-pack", "--batch-size", "6", "--iters", str(len(steps))]
    args += ["--val-split", "0", "--no-tensorboard"]
    assert main(["finetune", str(base), "--data", str(data), "-o", str(output), *args]) == 0
    logged = [r for r in metrics_file.read(tmp_path / "tuned.run/metrics.jsonl") if "loss" in r]
    for ours, theirs in zip(logged, steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        for name in ("chosen", "rejected") if loss == "dpo" else ():  # TRL shows sums for ipo, too
            expected = theirs[f"rewards/{name}"]
            assert ours[f"rewards_{name}"] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    before, after = GGUF(base), GGUF(output)
    moved = golden["moved"]
    assert len(moved) == len(before.entries)
    for name, theirs in moved.items():
        ours = TENSOR_NAMES.sub(lambda match: NAMES[match[0]], name).replace("model.layers", "blk")
        change = after.array(ours).astype(np.float64) - before.array(ours)
        assert np.square(change).sum() == pytest.approx(theirs, rel=1e-4), name


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}
TENSOR_NAMES = re.compile("|".join(map(re.escape, NAMES)))
