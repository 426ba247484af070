"""What `pt.fit` and `pt.Trainer` take: natural NumPy data, in planned memory; all else is refused by name."""

import tracemalloc

import numpy as np
import pytest

import packtrain as pt
from packtrain.dtypes import DTYPES
from packtrain.gguf import GGUFError
from packtrain.kernels.quant.quantized_arrays import dequantize

WIDTH, POINTS = 2000, 400


def net(rows: int, dtype: pt.dtypes.Dtype = pt.f32) -> pt.Model:
    x, y = pt.input("x", (rows, WIDTH)), pt.input("y", (rows,), pt.i32)
    hidden = pt.matmul(x, pt.weight("in", (32, WIDTH)))
    return pt.Model.cross_entropy(pt.matmul(hidden, pt.weight("out", (2, 32), dtype)), y)


def data(kind: str = "float32") -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((POINTS, 2 * WIDTH)).round(1)
    x = np.asarray(x > 0 if kind == "bool" else x.clip(0) * 10 if kind == "uint8" else x)
    x = x.astype("float32" if kind in ("strided", "fortran") else kind)[:, ::2]
    x = x if kind == "strided" else np.asfortranarray(x) if kind == "fortran" else x.copy()
    return {"x": x, "y": x[:, 0] > x[:, 1]}


@pytest.mark.parametrize(
    "kind", ["float32", "float64", "float16", ">f4", "uint8", "bool", "strided", "fortran"]
)
def test_batches_of_any_type_and_layout_fit_the_memory_planned_for_them(kind):
    runs, dataset = pt.Trainer(net, pt.AdamW(), batch=200), pt.Dataset(data(kind))
    order = np.random.default_rng(1).permutation(POINTS)
    tracemalloc.start()
    got = [values["x"].copy() for values in runs.batches(dataset, 200, order)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    batch = 200 * WIDTH * 4
    assert np.array_equal(np.concatenate(got), dataset.columns["x"][order].astype(np.float32))
    assert peak < 3 * batch + (1 << 19), peak  # two copies, and the batch that is overwritten


def test_a_step_of_lbfgs_takes_no_more_than_planned():
    runs, dataset = pt.Trainer(net, pt.LBFGS(), batch=POINTS), pt.Dataset(data("float64"))
    tracemalloc.start()
    for _ in range(3):
        pt.epoch(runs, dataset)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= runs.form.loop_nbytes, (peak, runs.form.loop_nbytes)


@pytest.mark.parametrize("kind", [bool, np.int64, np.uint8, np.uint64])
def test_class_ids_may_be_any_whole_numbers(kind):
    columns = data()
    done = pt.fit(net, {**columns, "y": columns["y"].astype(kind)}, batch=200)
    reference = pt.fit(net, {**columns, "y": columns["y"].astype(np.int32)}, batch=200)
    assert done.weights["in"].tobytes() == reference.weights["in"].tobytes()


def test_whole_numbers_that_do_not_fit_are_named():
    dataset, into = pt.Dataset({"n": np.full(POINTS, 1 << 32)}), {"n": np.empty(POINTS, np.int32)}
    with pytest.raises(
        pt.InputError, match="n has values from 4294967296 to 4294967296; int32 ends"
    ):
        next(dataset.batches(POINTS, into=into))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "f16", "bf16"])
def test_values_of_weights_are_packed(name):
    values = np.random.default_rng(0).standard_normal((2, 32))
    runs = pt.Trainer(lambda rows: net(rows, DTYPES[name]), physical=1, values={"out": values})
    got = runs.weights["out"]
    packed = pt.Trainer(lambda rows: net(rows, DTYPES[name]), physical=1, values={"out": got})
    assert packed.weights["out"].tobytes() == got.tobytes()
    restored = dequantize(got).reshape(2, 32)
    assert 0 < np.abs(restored - values).max() < 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch=0 must be a whole number, 1 or more"),
        ({"batch": 2.5}, "batch=2.5 must be a whole number"),
        ({"physical": -1}, "physical=-1 must be a whole number"),
        ({"epochs": -1}, "epochs=-1 must be a whole number, 0 or more"),
        ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0"),
        ({"device": "gpu"}, "device='gpu' must be one of cpu, numpy"),
        ({"memory": 10**9}, "memory: '1000000000' is not a size"),
        ({"val_split": "0.1"}, "val_split='0.1' must be at least 0"),
        ({"val_split": 0.001}, "val_split=0.001 holds out 0 datapoints, fewer than the 200 that"),
        ({"val_split": 0.9}, "batch=200 is more than the 40 datapoints of 400 to train on"),
        ({"val_split": 0.5, "valid": data()}, "give it or valid, not both"),
        ({"valid": {"x": data()["x"]}}, "the validation data has no y"),
        ({"data": [1, 2]}, "a dataset is a dict of arrays by the names of .* not a list"),
        ({"data": {"x": [[1.0], [1.0, 2.0]]}}, "x is no array"),
        ({"optimizer": "adamw"}, "the optimizer is 'adamw'; give one such as"),
        ({"optimizer": pt.SGD}, "the optimizer is <class"),
        ({"optimizer": pt.SGD(lr=float("nan"))}, "optimizer: lr is nan; it must be finite"),
        ({"optimizer": pt.SGD(lr=-1.0)}, "optimizer: lr is -1.0; it must be at least 0"),
        (
            {"optimizer": pt.AdamW(beta1=2.0)},
            "optimizer: beta1 is 2.0; it must be from 0 to 0.9999",
        ),
        ({"optimizer": pt.LBFGS(line_search="goldstein")}, "optimizer: line_search is goldstein"),
        ({"optimizer": pt.LBFGS(history=0)}, "optimizer: history is 0; it must be from 1"),
        ({"optimizer": pt.LBFGS(), "max_norm": 1.0}, "lbfgs finds the length of its steps itself"),
        ({"max_norm": 0.0}, "max_norm=0.0 must be more than 0"),
        ({"schedule": 3}, "schedule=3 must be a function of the step"),
        ({"schedule": lambda step: np.nan}, "step 1: the learning rate is nan; it must be finite"),
        ({"callbacks": print}, "callbacks=.* must be Callbacks"),
        (
            {"evaluated": lambda rows: pt.mean(pt.input("z", (rows,)))},
            "the dataset has no z, an input of the model",
        ),
        ({"model": lambda rows: net(100)}, r"x is f32\[100, 2000\] in a model of 200 datapoints"),
    ],
)
def test_requests_that_cannot_be_met(change, message):
    options = {"model": net, "data": data(), "optimizer": None, "batch": 200} | change
    with pytest.raises(pt.InputError, match=message):
        pt.fit(options.pop("model"), options.pop("data"), options.pop("optimizer"), **options)


@pytest.mark.parametrize(
    ("order", "split"), [([0, POINTS], None), ([-1], None), ([0.5], None), (None, -1), (None, 401)]
)
def test_epochs_stay_within_the_data(order, split):
    runs = pt.Trainer(net, pt.SGD(), batch=1)
    with pytest.raises(pt.InputError, match=r"must be a whole number from 0|whole numbers from 0"):
        pt.epoch(runs, data(), split, order=order)


def test_a_step_takes_its_batch_and_gradients_need_sums():
    runs = pt.Trainer(net, pt.SGD(), batch=4)
    with pytest.raises(pt.InputError, match="a step takes 4 datapoints; x has 5"):
        runs.step({name: values[:5] for name, values in data().items()})
    with pytest.raises(pt.InputError, match="summed only if batch is larger"):
        assert runs.gradients


def test_models_that_are_none_and_names_of_nothing():
    with pytest.raises(pt.GraphError, match="the model is 3; it must be a Model"):
        pt.fit(lambda rows: 3, data(), batch=4)  # type: ignore[arg-type, return-value]
    model = net(4)
    with pytest.raises(
        pt.GraphError, match="frozen='input' is no weight of the loss; it has in, out"
    ):
        pt.Trainer(pt.Model(model.loss, frozen=("input",)), pt.SGD())
    frozen = pt.Trainer(pt.Model(model.loss, frozen="in"), pt.SGD())
    assert [w.name for w in frozen.model.trained] == ["out"]


def test_parts_of_a_step_have_keys_of_their_own():
    """Dropout: the same mask in each physical batch of a step would be drawn once only."""
    numbers = list[int]()

    def inputs(number: int) -> dict[str, np.ndarray]:
        numbers.append(number)
        return {"key": np.array([0, number])}

    def dropped(rows: int) -> pt.Model:
        x = pt.mul(pt.input("x", (rows, 4)), pt.weight("w", (4,)))
        return pt.Model(pt.mean(pt.dropout(x, pt.input("key", (2,), pt.i64), p=0.5, stream=0)))

    pt.fit(dropped, {"x": np.ones((8, 4))}, pt.SGD(), batch=4, physical=2, inputs=inputs, epochs=2)
    assert [n for n in numbers if n] == list(range(1, 9))


@pytest.mark.parametrize("kind", ["bool", "uint8", "complex64", ">f4"])
def test_arrays_that_a_file_cannot_hold(kind, tmp_path):
    with pytest.raises(GGUFError, match="array of 1 axes cannot be a GGUF tensor"):
        pt.save(tmp_path / "a.gguf", {"a": np.zeros(3, kind)})


def test_names_too_long_for_a_checkpoint_are_refused_before_the_run(tmp_path):
    def named(rows: int) -> pt.Model:
        x = pt.input("x", (rows, WIDTH))
        return pt.Model.average(pt.matmul(x, pt.weight("w" * 62, (1, WIDTH))))

    with pytest.raises(pt.InputError, match="a checkpoint cannot hold m/www"):
        pt.fit(named, {"x": data()["x"]}, batch=200, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_datapoint_has_no_error():
    result = pt.Result()
    result.add(1, 0.5, 1, None)
    assert str(result) == "loss 0.5000 acc 100.0%"


def four_label_model(rows: int) -> pt.Model:
    """Four labels for each datapoint."""
    x, w = pt.input("x", (rows, 4, 5)), pt.weight("w", (3, 5))
    logits = pt.matmul(pt.reshape(x, shape=(rows * 4, 5)), w)
    labels = pt.reshape(pt.input("y", (rows, 4), pt.i32), shape=(rows * 4,))
    return pt.Model.cross_entropy(logits, labels)


def test_accuracy_is_a_share_of_labels_where_a_datapoint_has_several() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8, 4, 5)).astype(np.float32)
    y = x @ rng.standard_normal((5, 3))
    data = {"x": x, "y": y.argmax(-1).astype(np.int32)}
    trainer = pt.Trainer(four_label_model, pt.AdamW(lr=0.1), batch=4)
    first, tested = pt.epoch(trainer, data, 4)
    for result in (first, tested):
        assert 0 <= result.accuracy <= 1 and result.labels == 16
        assert 0 <= result.accuracy_error < 0.2 or result.accuracy in (0, 1)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_label_that_is_no_class_is_named(wrong: int) -> None:
    data = {"x": np.zeros((8, 4, 5), np.float32), "y": np.zeros((8, 4), np.int32)}
    data["y"][5, 2] = wrong
    trainer = pt.Trainer(four_label_model, pt.AdamW(lr=0.1), batch=4)
    with pytest.raises(pt.InputError, match=rf"y\[5, 2\] is {wrong}; classes are .* from 0 to 2"):
        pt.epoch(trainer, data)


def test_a_short_run_on_nan_ends_with_an_error() -> None:
    data = {"x": np.full((4, 4, 5), np.nan, np.float32), "y": np.zeros((4, 4), np.int32)}
    trainer = pt.Trainer(four_label_model, pt.AdamW(lr=0.1), batch=4)
    with pytest.raises(ArithmeticError, match="step 1: the loss or gradient is not finite"):
        pt.epoch(trainer, data)


def test_a_short_fit_on_nan_ends_with_an_error() -> None:
    data = {"x": np.full((4, 4, 5), np.nan, np.float32), "y": np.zeros((4, 4), np.int32)}
    with pytest.raises(ArithmeticError, match="step 2: the loss or gradient is not finite"):
        pt.fit(four_label_model, data, pt.AdamW(lr=0.1), batch=2, epochs=1, val_split=0)


def test_masked_values_are_refused():
    columns = data()
    masked = np.ma.masked_where(columns["x"] > 0, columns["x"])
    with pytest.raises(pt.InputError, match="x has masked values; fill them"):
        pt.fit(net, {**columns, "x": masked}, batch=200)
    done = pt.fit(net, {**columns, "x": np.ma.masked_array(columns["x"])}, batch=200)
    assert done.weights["in"].size
