"""`pt.fit`, epochs and datasets: the numbers of ggml's own optimizer tests, budgets, resuming, files, errors."""

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.common.memory import private_nbytes
from packtrain.engine.optim import OPTIMIZERS as OPTIMIZER_KINDS
from packtrain.engine.optim import Optimizer
from packtrain.kernels.runtime import kernel_cache
from packtrain.training.generic import Batch
from packtrain.training.training_engine import NotFinite

EXACT = 1e-10
ADAMW = pt.AdamW(lr=1.0, beta1=0.0, beta2=0.0, eps=1e-16, weight_decay=0.0)
SGD = pt.SGD(lr=1.0)
OPTIMIZERS = pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
START = {"w": np.array([3.0])}


def plus_weight(rows: int) -> pt.Model:
    """Outputs are inputs plus one weight, the loss is their sum: every datapoint has the gradient 1."""
    return pt.Model.total(pt.add(pt.input("x", (rows, 1)), pt.weight("w", (1,))))


def mean_plus_weight(rows: int) -> pt.Model:
    return pt.Model.average(pt.add(pt.input("x", (rows, 1)), pt.weight("w", (1,))))


def six_samples(shard: int = 1) -> pt.Dataset:
    return pt.Dataset({"x": np.arange(6.0)[:, None]}, shard=shard)


def trainer(optimizer: Optimizer, **options: object) -> pt.Trainer:
    return pt.Trainer(plus_weight, optimizer, **{"batch": 1, "values": START, **options})  # type: ignore[arg-type]


def weight_value(runs: pt.Trainer) -> float:
    return float(runs.weights["w"][0])


def assert_near(got: float, expected: float, tolerance: float = EXACT) -> None:
    assert abs(got - expected) <= tolerance, f"{got} instead of {expected}"


# ---- ggml's test-opt -----------------------------------------------------------------------------------------


def test_a_result_before_any_batch():
    result = pt.Result(mean=False)
    assert (result.ndata, result.loss) == (0, 0)
    for value in (result.loss_error, result.accuracy, result.accuracy_error):
        assert math.isnan(value)


@OPTIMIZERS
def test_an_epoch_without_training(optimizer):
    runs = trainer(optimizer)
    _, result = pt.epoch(runs, six_samples(), 0)
    assert (weight_value(runs), result.ndata) == (3.0, 6)
    assert_near(result.loss, 33.0)
    assert_near(result.loss_error, math.sqrt(3.5))
    assert math.isnan(result.accuracy) and math.isnan(result.accuracy_error)


@OPTIMIZERS
@pytest.mark.parametrize("by_step", [False, True], ids=["epoch", "steps"])
def test_an_epoch_of_training(optimizer, by_step):
    runs, result = trainer(optimizer), pt.Result(mean=False)
    if by_step:
        for at in range(6):
            (outputs,) = runs.step({"x": np.array([[float(at)]])}).outputs
            result.add(1, float(outputs["loss"]), None, None)
    else:
        result, _ = pt.epoch(runs, six_samples())
    assert_near(weight_value(runs), -3.0)
    assert result.ndata == 6
    assert_near(result.loss, 18.0)
    assert_near(result.loss_error, 0.0)


def test_gradients_without_an_update():
    runs = trainer(ADAMW, batch=6, physical=1)
    for at in range(6):
        runs.add_gradients({"x": np.array([[float(at)]])}, fresh=at == 0)
        assert_near(float(runs.gradients["w"][0]), at + 1)
    assert weight_value(runs) == 3.0


@OPTIMIZERS
@pytest.mark.parametrize("by_step", [False, True], ids=["epoch", "steps"])
def test_some_datapoints_train_and_the_others_evaluate(optimizer, by_step):
    runs, data = trainer(optimizer), six_samples()
    for e in (1, 2, 3, 4):
        train_result, eval_result = pt.Result(mean=False), pt.Result(mean=False)
        if by_step:
            for at in range(6):
                batch = {"x": np.array([[float(at)]])}
                outputs = runs.step(batch).outputs[0] if at < 4 else runs.forward(batch)
                (train_result if at < 4 else eval_result).add(1, float(outputs["loss"]), None, None)
        else:
            train_result, eval_result = pt.epoch(runs, data, 4)
        assert_near(weight_value(runs), 3 - 4 * e)
        assert_near(train_result.loss, 28 - 16 * e)
        assert_near(train_result.loss_error, 0)
        assert_near(eval_result.loss, 15 - 8 * e)
        assert_near(eval_result.loss_error, math.sqrt(0.5))


@OPTIMIZERS
def test_epochs_and_fit_agree(optimizer):
    runs, data = trainer(optimizer), six_samples()
    for _ in range(3):
        pt.epoch(runs, data)
    done = pt.fit(plus_weight, data, optimizer, epochs=3, batch=1, shuffle=False, values=START)
    assert done.weights["w"].tobytes() == runs.weights["w"].tobytes()


@pytest.mark.parametrize("shard", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_hold_each_datapoint_once(shard, size, shuffle):
    data = pt.Dataset({"x": np.arange(6.0)[:, None], "y": 10 * np.arange(6)}, shard=shard)
    order = np.arange(6)
    if shuffle:
        order = data.shuffled(order, 0, 1)
    seen = [(b["x"][:, 0].tolist(), b["y"].tolist()) for b in data.batches(size, order)]
    points, labels = ([p for pair in seen for p in pair[k]] for k in (0, 1))
    assert sorted(points) == [0, 1, 2, 3, 4, 5] and labels == [10 * p for p in points]
    starts = points[::shard]
    assert points == [s + k for s in starts for k in range(shard)]
    assert all(s % shard == 0 for s in starts)
    if not shuffle:
        assert points == sorted(points)


def test_shards_move_as_a_whole_and_epochs_differ():
    data = pt.Dataset({"x": np.arange(60)}, shard=3)
    orders = [data.shuffled(np.arange(60), 0, epoch).tolist() for epoch in (1, 2, 1)]
    assert orders[0] != orders[1] and orders[0] == orders[2] and orders[0] != sorted(orders[0])


@OPTIMIZERS
@pytest.mark.parametrize("physical", [1, 2])
@pytest.mark.parametrize("model", [plus_weight, mean_plus_weight], ids=["sum", "mean"])
def test_accumulation(optimizer, physical, model):
    runs = pt.Trainer(model, optimizer, batch=6, physical=physical, values=START)
    divisor, data = (6 if runs.model.mean else 1), six_samples()
    # SGD moves by the gradient, 6 for a sum
    pace = 1 if optimizer is ADAMW or runs.model.mean else 6
    for e in (1, 2, 3, 4):
        for count, batch in enumerate(data.batches(physical), 1):
            runs.add_gradients(batch, fresh=count == 1)
            assert_near(float(runs.gradients["w"][0]), count * physical / divisor, 1e-6)
        result, _ = pt.epoch(runs, data)
        assert_near(weight_value(runs), 3 - pace * e, 1e-5)
        start = 3 - pace * (e - 1)
        assert_near(result.loss, (6 * start + 15) / divisor, 1e-5)


POINTS = np.linspace(-100, 100, 201, dtype=np.float32)


def line(rows: int) -> pt.Model:
    """y = a x + b, as mean squared error."""
    x, y = pt.input("x", (rows, 1)), pt.input("y", (rows, 1))
    return pt.Model.mean_squared_error(
        pt.add(pt.mul(x, pt.weight("a", (1,))), pt.weight("b", (1,))), y
    )


def noisy() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(2).normal(0, 0.1, POINTS.shape)
    y = 1.2 * POINTS + 3.4 + noise
    return {"x": POINTS[:, None], "y": y[:, None].astype(np.float32)}


def test_regression_by_adamw():
    start = {"a": np.array([1.0]), "b": np.array([3.0])}
    optimizer = pt.AdamW(lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0)
    done = pt.fit(line, noisy(), optimizer, epochs=1000, batch=201, values=start)
    assert_near(float(done.weights["a"][0]), 1.2, 0.01)
    assert_near(float(done.weights["b"][0]), 3.4, 0.01)


def test_regression_by_sgd():
    start = {"a": np.array([1.0]), "b": np.array([3.0])}
    done = pt.fit(
        line, noisy(), pt.SGD(lr=1e-4), epochs=900, batch=201, values=start,
        schedule=lambda step: 1e-4 * 0.99 ** (1000 * step / 900),
    )  # fmt: skip
    assert_near(float(done.weights["a"][0]), 1.2, 0.01)
    assert_near(float(done.weights["b"][0]), 3.4, 0.41)


def test_regression_by_lbfgs_needs_few_steps():
    start = {"a": np.array([1.0]), "b": np.array([3.0])}
    done = pt.fit(line, noisy(), pt.LBFGS(), epochs=10, batch=201, values=start)
    assert_near(float(done.weights["a"][0]), 1.2, 0.01)
    assert_near(float(done.weights["b"][0]), 3.4, 0.01)


def test_lbfgs_sees_that_the_next_batch_is_another():
    data = pt.Dataset(noisy())
    start = {"a": np.array([1.0]), "b": np.array([3.0])}
    by_epoch, by_step = (pt.Trainer(line, pt.LBFGS(), batch=67, values=start) for _ in range(2))
    pt.epoch(by_epoch, data)
    for at in (0, 67, 134):
        by_step.step({name: values[at : at + 67].copy() for name, values in data.columns.items()})
    for name in start:
        assert by_epoch.weights[name].tobytes() == by_step.weights[name].tobytes()


# ---- classification ------------------------------------------------------------------------------------------


def net(rows: int) -> pt.Model:
    x, y = pt.input("x", (rows, 8)), pt.input("y", (rows,), pt.i32)
    hidden = pt.tanh(pt.add(pt.matmul(x, pt.weight("in", (16, 8))), pt.weight("in.bias", (16,))))
    hidden = pt.tanh(pt.matmul(hidden, pt.weight("mid", (16, 16))))
    return pt.Model.cross_entropy(pt.matmul(hidden, pt.weight("out", (3, 16))), y)


def blobs(count: int = 240) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, count)
    return {
        "x": (rng.normal(0, 1, (count, 8)) + 2 * np.eye(8)[y]).astype(np.float32),
        "y": y.astype(np.int32),
    }


def test_accuracy_predictions_and_loss_are_those_of_numpy():
    done = pt.fit(net, blobs(), pt.AdamW(lr=1e-2), epochs=5, batch=60)
    data = pt.Dataset(blobs())
    _, result = pt.epoch(done.trainer, data, 0, keep=True)
    right = result.predictions.argmax(-1) == data.columns["y"]
    assert result.accuracy == right.mean() > 0.6
    assert_near(result.accuracy_error, math.sqrt(right.mean() * (1 - right.mean()) / 239), 1e-9)
    z = result.predictions.astype(np.float64)
    rows = np.log(np.exp(z).sum(-1)) - z[np.arange(240), data.columns["y"]]
    assert_near(result.loss, rows.mean(), 1e-6)
    batches = rows.reshape(4, 60).mean(-1)
    assert_near(result.loss_error, batches.std(ddof=1) / 2, 1e-6)


def test_soft_labels_equal_ids():
    def soft(rows: int) -> pt.Model:
        hard = net(rows)
        return pt.Model.cross_entropy(hard.predictions, pt.input("y", (rows, 3)))

    ids = blobs()
    both = [
        pt.fit(model, data, pt.AdamW(lr=1e-2), epochs=3, batch=60)
        for model, data in ((net, ids), (soft, ids | {"y": np.eye(3, dtype=np.float32)[ids["y"]]}))
    ]
    for name, value in both[0].weights.items():
        np.testing.assert_allclose(both[1].weights[name], value, atol=2e-5)
    assert both[0].epochs[-1].trained.accuracy == both[1].epochs[-1].trained.accuracy


@pytest.mark.parametrize("physical", [6, 20])
def test_the_physical_batch_changes_rounding_only(physical):
    full, parts = (
        pt.fit(net, blobs(), pt.AdamW(lr=1e-2), epochs=3, batch=60, physical=rows)
        for rows in (60, physical)
    )
    for name, value in full.weights.items():
        np.testing.assert_allclose(parts.weights[name], value, atol=1e-4)


def test_callbacks_come_before_and_after_every_batch_and_may_change_numbers():
    seen = []

    def halve(batch: Batch) -> None:
        seen.append(("before", batch.train, batch.number, batch.count, batch.result.ndata))
        batch.trainer.lr /= 2

    def note(batch: Batch) -> None:
        seen.append(("after", batch.train, batch.number, batch.count, batch.result.ndata))

    called = pt.Callbacks(halve, note, note, note)
    runs = trainer(SGD)
    plans = dict(runs.form.plans)
    pt.epoch(runs, six_samples(), 4, callbacks=called)
    assert_near(weight_value(runs), 3 - (1 / 2 + 1 / 4 + 1 / 8 + 1 / 16))
    assert seen[:2] == [("before", True, 1, 4, 0), ("after", True, 1, 4, 1)]
    assert seen[-2:] == [("after", False, 2, 2, 1), ("after", False, 2, 2, 2)]
    assert runs.form.plans == plans


def test_schedules_by_name_and_by_function():
    rates = []
    note = pt.Callbacks(after=lambda batch: rates.append(batch.trainer.lr))
    options = {"epochs": 10, "batch": 60, "callbacks": note}
    pt.fit(net, blobs(), pt.SGD(lr=0.1), schedule="linear", **options)
    assert rates[:2] == [0.05, 0.1] and rates[-1] == pytest.approx(0.001) and len(rates) == 40
    assert rates[1:] == sorted(rates[1:], reverse=True)
    rates.clear()
    pt.fit(net, blobs(), pt.SGD(lr=0.1), schedule=lambda step: 1 / step, **options)
    assert rates == [1 / step for step in range(1, 41)]


def test_the_numbers_of_an_optimizer_can_change_but_not_its_plan():
    runs = trainer(pt.SGD(lr=1.0))
    runs.change(pt.SGD(lr=0.5))
    pt.epoch(runs, six_samples())
    assert_near(weight_value(runs), 0.0)
    with pytest.raises(pt.InputError, match="needs another plan"):
        runs.change(pt.AdamW())


def test_a_loss_of_ones_own_frozen_weights_and_inputs_that_are_not_data():
    def scaled_model(rows: int) -> pt.Model:
        x, factor = pt.input("x", (rows, 1)), pt.input("factor", ())
        y = pt.mul(pt.add(pt.mul(x, pt.weight("a", (1,))), pt.weight("b", (1,))), factor)
        return pt.Model(pt.mean(pt.abs(y)), frozen=("b",))

    values = {"a": np.array([1.0]), "b": np.array([2.0])}
    done = pt.fit(
        scaled_model,
        six_samples(),
        pt.SGD(lr=0.1),
        batch=6,
        values=values,
        inputs=lambda step: {"factor": np.array(2.0)},
    )
    assert done.weights["b"][0] == 2.0
    assert_near(float(done.weights["a"][0]), 1 - 0.1 * 2 * 2.5, 1e-6)


# ---- memory --------------------------------------------------------------------------------------------------


def wide(rows: int) -> pt.Model:
    x = h = pt.input("x", (rows, 256))
    for k in range(6):
        h = pt.tanh(pt.silu(pt.matmul(h, pt.weight(f"w{k}", (256, 256)))))
    return pt.Model.mean_squared_error(h, x)


def test_a_budget_makes_parts_smaller_and_is_refused_by_name():
    free = pt.Trainer(wide, pt.SGD(lr=1e-3), batch=4096)
    assert free.rows == 4096
    limit = (private_nbytes() >> 20) + 40  # now, with what this process holds of other tests
    tight = pt.Trainer(wide, pt.SGD(lr=1e-3), batch=4096, memory=f"{limit}MiB")
    assert tight.planned_nbytes <= limit << 20 and tight.batch == 4096
    assert tight.rows < 4096 or tight.form.recomputed
    with pytest.raises(pt.DoesNotFit, match="smallest memory that would do is") as error:
        pt.Trainer(wide, pt.SGD(lr=1e-3), batch=4096, memory="60MiB")
    min_mib = int(str(error.value).split(" is ")[1].split("MiB")[0])
    assert pt.Trainer(wide, pt.SGD(lr=1e-3), batch=4096, memory=f"{min_mib + 2}MiB").batch == 4096


def test_all_kernels_of_ops_and_optimizers_are_loaded_before_a_plan():
    """Their memory is then part of the baseline. Those that write quantized files are not: no model calls them."""
    optimizers = (name for kind in OPTIMIZER_KINDS.values() for name in kind.kernels)
    named = {*kernels.TRAINING_KERNELS, *kernels.OP_KERNELS, *optimizers}
    loaded = frozenset().union(*map(kernel_cache.needed, named))
    writing = frozenset().union(
        *map(kernel_cache.needed, (*kernels.QUANTIZE_KERNELS, *kernels.WEIGHTED_QUANTIZE_KERNELS))
    )
    of_children = {"splitting", "tokens", "peak"}  # which tokenize, and of `packtrain bench`
    assert set(kernel_cache.module_imports()) - loaded - of_children <= writing


def test_the_order_with_the_fewest_bytes():
    """Eight branches that are written one after the other and joined late: one at a time needs less."""

    def branches(rows: int) -> pt.Model:
        x = pt.input("x", (rows, 256))
        wide = [pt.matmul(x, pt.weight(f"w{k}", (256, 256))) for k in range(8)]
        parts = [pt.mean(pt.tanh(h)) for h in wide]
        total = parts[0]
        for part in parts[1:]:
            total = pt.add(total, part)
        return pt.Model(total)

    runs = {
        order: pt.Trainer(branches, None, physical=256, order=order)
        for order in ("written", "least")
    }
    written_nbytes, smallest_nbytes = (run.form.arena_nbytes for run in runs.values())
    assert smallest_nbytes < written_nbytes / 2
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    losses = [run.forward({"x": x})["loss"].tobytes() for run in runs.values()]
    assert losses[0] == losses[1]
    with pytest.raises(pt.InputError, match="order='best' must be one of written, least"):
        pt.Trainer(branches, None, physical=256, order="best")


def test_recomputation_changes_no_bit():
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    forms = {}
    runs = pt.Trainer(wide, pt.SGD(lr=1e-2), batch=64, physical=64)
    for recomputed in ("", "all but products", "all but some products"):
        from_form(runs, recomputed)
        runs.session.set({n: np.ascontiguousarray(v) for n, v in values_of(wide(64)).items()})
        runs.step({"x": x})
        forms[recomputed] = {n: v.tobytes() for n, v in runs.weights.items()}
    assert forms[""] == forms["all but products"] == forms["all but some products"]


def from_form(runs: pt.Trainer, recomputed: str) -> None:
    """Give a trainer the executors of another form."""
    from packtrain.engine.backends import CPU
    from packtrain.training.generic import fit_variants

    request = fit_variants.FitRequest(wide, None, 64, 64)
    form = fit_variants.build_variant(request, 64, recomputed, runs.optimizer, CPU)
    assert form is not None
    runs.form = form
    runs.run = {n: runs.session.executor(p, form.plans[n]) for n, p in form.placed.items()}


def values_of(model: pt.Model) -> dict[str, np.ndarray]:
    from packtrain.training.generic.fit_model import initial_weight

    return {leaf.label: initial_weight(leaf, 1) for leaf in model.trained}


# ---- files ---------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    done = pt.fit(net, blobs(), epochs=1, batch=60)
    pt.save(tmp_path / "net.gguf", done.weights, {"general.name": "net", "net.classes": 3})
    loaded = pt.load(tmp_path / "net.gguf")
    assert (
        loaded.metadata["general.architecture"] == "packtrain-model"
        and loaded.metadata["net.classes"] == 3
    )
    assert loaded.keys() == done.weights.keys()
    trainer = pt.Trainer(net, physical=60, values=loaded)
    batch = {name: values[:60] for name, values in blobs().items()}
    assert trainer.forward(batch)["loss"] == done.trainer.forward(batch)["loss"]


def stopping(after: int) -> Iterator[bool]:
    """False, and True from the step `after` on."""
    return iter([False] * (after - 1) + [True] * 1000)


def test_a_stopped_run_continues_bit_for_bit(tmp_path):
    options = {"epochs": 3, "batch": 60, "val_split": 0.25, "optimizer": pt.AdamW(lr=1e-2)}
    full_run = pt.fit(net, blobs(), folder=tmp_path / "whole", **options)
    asks = stopping(5)
    stopped_run = pt.fit(net, blobs(), folder=tmp_path / "run", stop=lambda: next(asks), **options)
    assert (
        stopped_run.stopped
        and not full_run.stopped
        and stopped_run.trainer.done < full_run.trainer.done == 9
    )
    resumed_run = pt.fit(net, blobs(), folder=tmp_path / "run", resume=True, **options)
    for name, value in full_run.weights.items():
        assert value.tobytes() == resumed_run.weights[name].tobytes(), name
    records = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    ]
    losses = [[(r["step"], r["loss"], r.get("val_loss")) for r in run] for run in records]
    assert losses[0] == losses[1] and len(losses[0]) == 9
    assert {"loss.svg", "plan.html", "checkpoint.gguf"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    with pytest.raises(pt.InputError, match="has a run already"):
        pt.fit(net, blobs(), folder=tmp_path / "run", **options)
    with pytest.raises(pt.InputError, match="batch 60, not 30"):
        pt.fit(net, blobs(), folder=tmp_path / "run", resume=True, **(options | {"batch": 30}))


# ---- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "shard", "message"),
    [
        ({}, 1, "no columns"),
        ({"x": np.zeros((0, 8), np.float32)}, 1, "the dataset is empty"),
        ({"x": np.zeros((4, 8)), "y": np.zeros(5)}, 1, "x has 4, y has 5"),
        ({"x": np.zeros((5, 8))}, 2, "shard=2 must be 1 or more and divide 5 datapoints"),
        ({"x": np.float32(1)}, 1, "a single number as x"),
    ],
)
def test_bad_datasets(columns, shard, message):
    with pytest.raises(pt.InputError, match=message):
        pt.Dataset(columns, shard=shard)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"batch": 500}, "a batch of 500 is more than the 240 datapoints"),
        ({}, {"batch": 60, "physical": 7}, "batch=60 must be a multiple of the physical batch, 7"),
        ({}, {}, "batch must be given"),
        ({}, {"batch": 60, "val_split": 1.5}, "val_split=1.5 must be at least 0 and less than 1"),
        (
            {"z": np.zeros(240)},
            {"batch": 60},
            "the dataset has z, which is no input of the model; it has x, y",
        ),
        ({"x": np.zeros((240, 9), np.float32)}, {"batch": 60}, r"x is f32\[60, 8\] in the model"),
        (
            {"y": np.zeros(240)},
            {"batch": 60},
            r"y is i32\[60\] in the model and float64 in the data",
        ),
        (
            {},
            {"batch": 60, "values": {"nothing": np.zeros(1)}},
            "values has nothing, which is no weight",
        ),
        ({}, {"batch": 60, "resume": True}, "resume needs the folder"),
        (
            {},
            {"batch": 60, "schedule": "steps"},
            "schedule='steps' must be a function of the step, or one of",
        ),
    ],
)
def test_bad_requests(change, options, message):
    with pytest.raises(pt.InputError, match=message):
        pt.fit(net, blobs() | change, **options)


def test_a_missing_column_is_named():
    with pytest.raises(pt.InputError, match="the dataset has no y, an input of the model"):
        pt.fit(net, {"x": blobs()["x"]}, batch=60)


def test_a_label_out_of_range_is_named():
    data = blobs()
    data["y"][17] = 3
    with pytest.raises(pt.InputError, match=r"y\[17\] is 3; classes are whole numbers from 0 to 2"):
        pt.fit(net, data, batch=60)


def test_not_a_number_names_op_tensor_and_step():
    def bad(rows: int) -> pt.Model:
        x = pt.input("x", (rows, 1))
        return pt.Model.average(pt.log(pt.mul(x, pt.weight("w", (1,)))))

    with pytest.raises(NotFinite, match=r"step 3: 3 steps in a row without .* log: .* is nan"):
        pt.fit(
            bad,
            {"x": np.ones((6, 1))},
            pt.SGD(lr=1.0),
            epochs=9,
            batch=6,
            values={"w": np.array([-1.0])},
        )


def test_a_loss_without_weights_is_refused():
    with pytest.raises(pt.GraphError, match="depends on no weight that can be trained"):
        pt.fit(lambda rows: pt.sum(pt.input("x", (rows, 1))), six_samples(), batch=6)
