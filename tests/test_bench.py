"""packtrain bench and benchmarks.bench: floors and ratios are computed as they say, with and without peers. Nothing is
timed."""

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from benchmarks import bench as peer_bench
from benchmarks import llama, peer_process, torch_products, torch_steps
from packtrain import kernels
from packtrain.cli.bench import BenchSettings
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.devtools.bench import (
    bench_ops,
    bench_table,
    machine_rates,
    products,
    step_timing,
    timing,
    training,
)
from packtrain.devtools.bench.bench_ops import BACK, FORWARD, WEIGHT, MatrixProduct, OpGroup
from packtrain.dtypes import DTYPES
from packtrain.engine import ops
from packtrain.engine.step import KernelStep
from packtrain.models.config import PRESETS
from packtrain.planner.cost_model import CACHE_NBYTES
from packtrain.planner.speed_probe import DEFAULT_RATES
from tests import checks
from tests.models import initial_weights

RATES = machine_rates.MachineRates(fma_one=5e8, fma=1e9, product=8e8, cache_bandwidth=1e9, far=1e8)
SETTINGS = ["--rounds", "1", "--preset", "1m"]


def clock() -> Callable[[], float]:
    """A clock that is one second later whenever it is read."""
    return itertools.count(0.0, 1.0).__next__


def column(table: bench_table.BenchTable, name: str) -> list[bench_table.CellValue]:
    """The values of a table's column."""
    column_index = [*table.columns].index(name)
    return [row[column_index] for row in table.rows]


def steps_of(*tensors: pt.Tensor) -> list[KernelStep]:
    return list(pt.place(pt.Graph(list(tensors))).steps)


def test_the_floor_is_arithmetic_or_bytes_whichever_takes_longer() -> None:
    x, w = pt.input("x", (200, 300)), pt.weight("w", (100, 300))
    (product,) = steps_of(ops.matmul(x, w))
    assert bench_ops.call_floor(product, RATES) == 2 * 200 * 100 * 300 / 1e9
    for size, rate in ((1000, RATES.cache_bandwidth), (CACHE_NBYTES, RATES.far)):
        (add,) = steps_of(ops.add(pt.input("a", (size,)), pt.input("b", (size,))))
        assert bench_ops.call_floor(add, RATES) == 3 * 4 * size / rate
    q = k = v = pt.input("q", (1, 64, 2, 16))
    (attention,) = steps_of(ops.attention(q, k, v, scale=1.0)[0])
    assert bench_ops.call_floor(attention, RATES) >= 2 * 2 * 16 * 2 * 64 * 64 / 1e9


def test_a_table_row_is_known_to_move_rows_not_tables() -> None:
    ids = pt.input("ids", (2,), pt.i32)
    (rows,) = steps_of(ops.get_rows(pt.weight("w", (32_000, 256)), ids))
    back = steps_of(
        ops.get_rows_back(pt.input("dy", (2, 4)), ids, pt.input("dw", (900, 4)), shape=(900, 4))
    )
    assert bench_ops.call_floor(rows, RATES) < 1e-5 and bench_ops.call_floor(back[-1], RATES) < 1e-6


def test_the_three_forms_of_a_product_have_one_shape() -> None:
    x, dy, w = pt.input("x", (2, 3, 5)), pt.input("dy", (2, 3, 7)), pt.weight("w", (7, 5))
    q = pt.weight("q", (64, 256), DTYPES["q4_K"])
    forms = [
        (ops.matmul(x, w), MatrixProduct(FORWARD, 6, 7, 5)),
        (ops.matmul(dy, ops.transpose(w)), MatrixProduct(BACK, 6, 7, 5)),
        (ops.out_prod(dy, x), MatrixProduct(WEIGHT, 6, 7, 5)),
        (ops.matmul(pt.input("x", (3, 256)), q), MatrixProduct(FORWARD, 3, 64, 256)),
        (ops.matmul_back(pt.input("dy", (3, 64)), q), MatrixProduct(BACK, 3, 64, 256)),
        (ops.add(x, x), None),
    ]
    for output, product in forms:
        assert bench_ops.product_of(steps_of(output)[-1]) == product
    assert bench_ops.op_group_of(steps_of(forms[3][0])[0]) == OpGroup(
        "product q4_K", FORWARD, "3 × 64 × 256"
    )
    for form in (FORWARD, BACK, WEIGHT):
        for dtype in ("f32", "q8_0") if form != WEIGHT else ("f32",):
            product_shape = MatrixProduct(form, 9, 64, 32)
            output, _ = products.product_graph(product_shape, DTYPES[dtype])
            assert bench_ops.product_of(steps_of(output)[-1]) == product_shape


def test_ours_computes_the_product_that_it_times() -> None:
    for form in products.PRODUCT_FORMS:
        work = products.bind_product(MatrixProduct(form, 5, 8, 6))
        (out, *inputs) = work.args  # type: ignore[attr-defined]  # of the kernel, whose w, or dy for the weight, is transposed
        left, right = (np.asarray(a) for a in inputs[:2])
        expected = left @ right
        assert out.shape == {FORWARD: (5, 8), BACK: (5, 6), WEIGHT: (8, 6)}[form]
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_ops_of_a_step_by_an_injected_clock() -> None:
    step = training.of_preset("1m")
    assert step.tokens == 1024
    table, step_seconds = bench_ops.measure_ops(step, RATES, 3, clock())
    calls = len(step.run.calls)
    assert step_seconds == 2 * calls + 1  # each call reads the clock twice, and the step once more
    assert sum(column(table, "calls")[:-1]) == column(table, "calls")[-1] == calls  # type: ignore[arg-type]
    assert column(table, "ms")[-1] == 1e3 * calls
    lost = column(table, "lost ms")[:-1]
    assert lost == sorted(lost, reverse=True)  # type: ignore[type-var]
    for *_, count, ms, share, floor, ratio, left in table.rows:
        assert ms == 1e3 * count and share == pytest.approx(count / calls)  # type: ignore[operator]
        assert left == pytest.approx(ms - floor)  # type: ignore[operator]
        assert ratio is None or ratio == pytest.approx(ms / floor)  # type: ignore[operator]
    assert f"A step takes {step_seconds * 1e3:.1f} ms" in table.notes[0]
    names = column(table, "op")
    assert {"product", "attention", "attention_back", "rms_norm", "linear_cross_entropy"} <= {
        *names
    }


def test_a_ratio_is_the_median_of_pairs() -> None:
    assert timing.paired([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == 1.0
    timed = products.TimedProduct(
        "a", MatrixProduct(FORWARD, 10, 10, 5), [1e-6, 2e-6, 2e-6], [1e-6, 1e-6, 4e-6]
    )
    assert timed.ratio == 1.0 and timed.rate(timed.ours) == 1000 / 2e-6 / 1e9
    assert (
        products.ratio_summary([0.5, 2.0, 1.5], "theirs")
        == "As fast as theirs: 1.50 × (median), 0.50 × (least)."
    )
    assert timing.burst_seconds(lambda: None, clock()) == 1.0


def test_rates_by_an_injected_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    small_sizes = {
        "FMA_LOOPS": 10,
        "FMA_ROUNDS": 2,
        "CACHE_VALUES": 1 << 8,
        "MEMORY_VALUES": 1 << 10,
        "PRODUCT_SHAPE": (8, 16, 8),
    }
    for name, value in small_sizes.items():
        monkeypatch.setattr(machine_rates, name, value)
    kernels.load_all(("peak", "matmul_f32"))
    rates = machine_rates.measure_rates(clock(), rounds=1)
    m, n, k = machine_rates.PRODUCT_SHAPE
    assert rates.product == 2 * m * n * k and rates.far == 8 * machine_rates.MEMORY_VALUES
    lanes, chains = machine_rates.LANES, kernels.peak.CHAINS
    assert rates.fma_one == 2 * machine_rates.FMA_LOOPS * chains * lanes
    assert rates.fma == kernels.threads() * rates.fma_one


def test_the_kernels_of_the_rates_do_what_they_say() -> None:
    y, x = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    kernels.peak.copy_on_threads(y, x, 3)
    np.testing.assert_array_equal(y, x)
    kernels.peak.multiply_adds(y, 2.0, 3)  # v = 2 v + 2, three times, from 0, 1, …
    chains = kernels.peak.CHAINS
    np.testing.assert_array_equal(y, sum(8.0 * i + 14.0 for i in range(chains)))


def test_tables_as_text_markdown_and_json() -> None:
    columns = {"op": "", "× floor": ".2f", "GFLOP/s": ".1f"}
    table = bench_table.BenchTable(
        "t", "Title", columns, [["a|b", 1.234, None], ["c", 10.0, 5.0]], ["Note."]
    )
    assert (
        table.text() == "Title\nop   × floor  GFLOP/s\na|b     1.23\nc      10.00      5.0\nNote."
    )
    assert (
        "| op | × floor | GFLOP/s |\n| --- | ---: | ---: |\n| a\\|b | 1.23 |  |" in table.markdown()
    )
    assert table.to_json()["rows"][0] == {"op": "a|b", "times_floor": 1.234, "gflop_per_s": None}


def test_without_peers_it_measures_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SHORT_SHAPES", {"tiny": ((8, 16, 24),)})
    monkeypatch.setattr(products, "SHORT_PACKED_SHAPES", {"tiny": ((8, 16, 256),)})
    monkeypatch.setattr(machine_rates, "measure_rates", lambda: RATES)
    files = [tmp_path / "b.json", tmp_path / "b.md"]
    args = ["bench", "--short", *SETTINGS, "--json", str(files[0]), "--markdown", str(files[1])]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "PyTorch" not in shown and "The machine was" in shown
    report = json.loads(files[0].read_text())
    assert (
        report["threads"] == kernels.threads() and report["versions"]["packtrain"] == pt.__version__
    )
    assert [t["name"] for t in report["tables"]] == ["machine", "ops", "products", "packed"]
    rows = report["tables"][2]["rows"]
    assert len(rows) == 3 and {*rows[0]} == {"model", "m_times_n_times_k", "form", "gflop_per_s"}
    page = files[1].read_text()
    assert page.startswith("# Speed") and report["cpu"] in page and "## Products in f32" in page


def test_a_peer_that_fails_ends_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> Iterator[bench_table.BenchTable]:
        raise peer_process.PeerError("packtrain failed: it ended with -9")

    monkeypatch.setattr(peer_bench, "has_torch", lambda: True)
    monkeypatch.setattr(torch_steps, "tables", broken)
    assert peer_bench.main(["--part", "steps"]) == 1
    message = "benchmarks.bench: error: packtrain failed: it ended with -9\n"
    assert capsys.readouterr().err == message


def test_without_pytorch_the_comparison_measures_ours_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SHORT_SHAPES", {"tiny": ((8, 16, 24),)})
    monkeypatch.setattr(products, "SHORT_PACKED_SHAPES", {"tiny": ((8, 16, 256),)})
    monkeypatch.setattr(peer_bench, "find_spec", lambda name: None)
    assert peer_bench.main(["--part", "products", "--short", *SETTINGS]) == 0
    f32_lines, packed_lines = capsys.readouterr().out.split("Products with packed weights")
    assert f32_lines.count(peer_bench.NO_TORCH_NOTE) == 1
    assert "PyTorch" not in packed_lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "op"], "--part is op; it must be one of machine, ops, products, steps"),
        (["--part", "llama"], "--part is llama; it must be one of"),
        ([__file__], "test_bench.py: "),
        (["--preset", "1b"], "--preset is 1b; it must be one of 1m, 15m, 110m"),
        (["--rounds", "0"], "--rounds is 0; it must be 1 or more"),
        (["none.gguf"], "BASE: none.gguf does not exist"),
        (["--json", "no/where.json"], "--json: no/where.json cannot be written"),
        (["--markdown", "."], "--markdown: . is a folder"),
        (["--memory", "much"], "--memory: "),
        (["--memory", "2GiB", "--part", "ops"], "--memory is for whole steps: add --part steps"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "op"], "--part is op; it must be one of machine, ops, products, steps, llama"),
        (["--llama-bench", "none"], "--llama-bench: none does not exist"),
        (["--llama-bench", __file__], "is not llama.cpp's llama-bench"),
        ([__file__], "test_bench.py: "),
    ],
)
def test_beside_llama_cpp_too(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peer_bench.main(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_the_comparison_has_every_flag_of_the_command_and_adds_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {field.name for field in fields(BenchSettings)}
    assert {field.name for field in fields(peer_bench.PeerBenchSettings)} == {*flags, "llama_bench"}
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--llama-bench", "none"])
    assert "there is no option --llama-bench" in capsys.readouterr().err
    table = bench_table.BenchTable("llama", "Reading", {"model": ""}, [["tiny"]])
    monkeypatch.setattr(llama, "tables", lambda base, program, rounds, counting: iter([table]))
    assert peer_bench.main(["--part", "llama"]) == 0
    shown = capsys.readouterr().out
    assert "Reading\nmodel\ntiny" in shown and "The machine was" in shown


# ---- whole steps ---------------------------------------------------------------------------------------------


class Fake:
    """A peer whose steps take given seconds; the first fails if there are none."""

    def __init__(self, seconds: list[float], nbytes: int) -> None:
        self.left, self.nbytes = iter(seconds), nbytes

    def __enter__(self) -> "Fake":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, watched: bool) -> timing.TimedStep:
        seconds = next(self.left, None)
        if seconds is None:
            raise peer_process.PeerError("no compiler")
        assert not watched or seconds == WARM, "memory is watched while time counts"
        return timing.TimedStep(seconds, self.nbytes * watched, 10.0, 1.0, 5.0)


WARM = 9.0  # seconds of steps that do not count
TIMES = {
    (torch_steps.OURS, torch_steps.F32): [WARM, WARM, 1.0, 2.0, 4.0],
    (torch_steps.OURS, "bf16x3"): [WARM, WARM, 1.0, 1.0, 1.0],
    (torch_steps.OURS, "bf16"): [WARM, WARM, 0.5, 1.0, 2.0],
    (torch_steps.EAGER, torch_steps.F32): [WARM, WARM, 3.0, 2.0, 2.0],
    (torch_steps.EAGER, torch_steps.BF16): [WARM, WARM, 6.0, 6.0, 6.0],
    (torch_steps.COMPILED, torch_steps.BF16): [WARM, WARM, 0.5, 0.5, 0.5],
}


def test_steps_beside_pytorch_and_a_peer_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(side: torch_steps.TrainingProgram, preset: str) -> Fake:
        nbytes = (1 if side.name == torch_steps.OURS else 2) << 20
        return Fake(TIMES.get((side.name, side.precision), []), nbytes)

    monkeypatch.setattr(torch_steps.TrainingProgram, "peer", fake)
    monkeypatch.setattr(torch_steps, "supports_precision", lambda precision: True)
    (with_bf16,) = torch_steps.tables(["15m"], 3, counting)
    assert column(with_bf16, "precision")[2:6] == [
        "bf16x3",
        torch_steps.F32,
        "bf16",
        torch_steps.BF16,
    ]
    assert column(with_bf16, "ours × as fast") == [None, 1.0, None, 2.0, None, 6.0, 0.5]
    assert with_bf16.notes[-1].startswith("packtrain in bf16 is 0.50 ×")
    monkeypatch.setattr(torch_steps, "supports_precision", lambda precision: False)
    (without_bf16,) = torch_steps.tables(["15m"], 3, counting)
    assert column(without_bf16, "program") == [
        torch_steps.OURS,
        torch_steps.EAGER,
        torch_steps.OURS,
        torch_steps.EAGER,
        torch_steps.COMPILED,
    ]
    assert column(without_bf16, "ms") == [2000, 2000, 2000, 6000, 500]
    assert column(without_bf16, "tokens/s") == [512, 512, 512, 1024 / 6, 2048]
    assert column(without_bf16, "ours × as fast") == [None, 1.0, None, 3.0, 0.25]
    assert (
        column(without_bf16, "peak MiB") == [1, 2, 1, 2, 2]
        and column(without_bf16, "ours × memory")[1] == 0.5
    )
    assert [*without_bf16.notes] == [
        "PyTorch compiled in f32 failed: no compiler",
        "packtrain in f32 is 1.00 × as fast as the better of PyTorch's in f32 (eager), with 0.50 of its private"
        " memory.",
        "packtrain in f32 is 0.25 × as fast as the better of PyTorch's in bf16 autocast (compiled), with 0.50 of"
        " its private memory.",
    ]
    assert without_bf16.waited_share == 0.1
    (limited,) = torch_steps.tables(["15m"], 3, counting, 1640 << 20)
    assert limited.title.endswith("included; ours planned for 1,640 MiB")


@contextmanager
def counting(label: str, unit: str) -> Iterator[Callable[..., None]]:
    yield lambda *args: None


def test_steps_of_ours_alone_run_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peak memory is that of the child, and a step that does not fit is refused in one sentence."""
    (table,) = step_timing.tables(["1m"], 2, counting, 1 << 30)
    assert table.name == "steps" and table.title.endswith("included; ours planned for 1,024 MiB")
    ((name, ms, rate, peak_mib, loss, waited),) = table.rows
    assert name == "1m, 4 × 256 tokens" and rate == pytest.approx(1024 / (ms / 1e3))  # type: ignore[operator]
    steps = step_timing.measure_steps(kernels.threads(), "1m", 2, 1 << 30)
    assert isinstance(steps, list) and len(steps) == step_timing.WARM + 2
    assert loss == steps[-1].loss and table.waited_share == waited
    assert [step.nbytes > 0 for step in steps] == [False, True, False, False]
    ballast = np.ones(1 << 27, np.uint8)  # of this process, not of the child
    (second_table,) = step_timing.tables(["1m"], 1, counting, 1 << 30)
    assert column(second_table, "peak MiB")[0] == pytest.approx(
        peak_mib, abs=ballast.nbytes / 2**21
    )
    with pytest.raises(InputError, match=r"^a step does not fit 1 MiB$"):
        [*step_timing.tables(["1m"], 1, counting, 1 << 20)]


def test_our_side_of_a_comparison_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch_steps.TrainingProgram(name=torch_steps.OURS).peer("1m") as ours:
        timings = [ours(watched) for watched in (False, True, False)]
    assert all(timing.seconds > 0 and timing.wall_seconds > 0 for timing in timings)
    assert timings[1].nbytes > 1 << 20 and timings[0].nbytes == timings[2].nbytes == 0
    assert timings[0].loss > timings[2].loss  # the same batch again and again


def test_a_step_on_a_base_keeps_to_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "PRESET", "1m")
    monkeypatch.setattr(training, "private_nbytes", lambda: 0)
    monkeypatch.setattr(training, "measure_rates_in_children", lambda *_, **__: DEFAULT_RATES)
    base = llama.write_random_preset(tmp_path, "F16")
    unlimited = training.of_base(base, 4, 256)
    limit = unlimited.engine.plans.nbytes // 2
    parted = training.of_base(base, 4, 256, memory=limit)
    assert parted.engine.plans.nbytes <= limit
    assert len(unlimited.batches) == 1 and len(parted.batches) == 4
    assert unlimited.tokens == parted.tokens == 1024
    losses = [
        np.array([trainer.step() for _ in range(3)], np.float32) for trainer in (unlimited, parted)
    ]
    checks.assert_close(*losses, "losses")
    with pytest.raises(InputError, match="a step does not fit 1 MiB"):
        training.of_base(base, 4, 256, memory=1 << 20)


def test_a_step_of_a_preset_keeps_to_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "private_nbytes", lambda: 0)
    monkeypatch.setattr(training, "measure_rates_in_children", lambda *_, **__: DEFAULT_RATES)
    unlimited = training.of_preset("1m")
    limit = int(0.75 * unlimited.engine.plans.nbytes)
    limited = training.of_preset("1m", memory=limit)
    assert limited.engine.plans.nbytes <= limit and unlimited.tokens == limited.tokens == 1024
    losses = [
        np.array([trainer.step() for _ in range(3)], np.float32) for trainer in (unlimited, limited)
    ]
    checks.assert_close(*losses, "losses")
    with pytest.raises(InputError, match="a step does not fit 1 MiB"):
        training.of_preset("1m", memory=1 << 20)


@pytest.mark.torch
def test_both_sides_take_the_same_step() -> None:
    pytest.importorskip("torch")
    losses = list[list[float]]()
    for program in (torch_steps.OURS, torch_steps.EAGER):
        with torch_steps.TrainingProgram(name=program).peer("1m") as peer:
            losses.append([peer().loss for _ in range(3)])
    checks.assert_close(*(np.array(side_losses, np.float32) for side_losses in losses), "losses")


@pytest.mark.torch
def test_rope_in_real_numbers_is_rope() -> None:
    llama = pytest.importorskip("benchmarks.torch_llama")
    config = PRESETS["1m"]
    batch = training.batch_of(config, 2, 16)
    ids = [llama.torch.from_numpy(batch[name]).long() for name in ("tokens", "targets")]
    pos_inputs = None, llama.torch.from_numpy(batch["pos"]).long(), llama.torch.zeros(2, 16)
    models = [llama.Llama(config, initial_weights(config), real) for real in (False, True)]
    for args in (ids, [*ids, *pos_inputs]):
        complex_loss, real_loss = (model(*args).item() for model in models)
        assert complex_loss == pytest.approx(real_loss, rel=1e-6)


# ---- llama.cpp -----------------------------------------------------------------------------------------------

LLAMA_BENCH = """#!{python}
import json, sys
if "--help" in sys.argv:
    print("-n, --n-gen <n>")
    raise SystemExit
assert sys.argv[sys.argv.index("-m") + 1].endswith(".gguf") and "-t" in sys.argv
about = {{"build_commit": "abc", "build_number": 7}}
print(json.dumps([about | {{"n_gen": 0, "avg_ts": 512.0}}, about | {{"n_gen": 64, "avg_ts": 32.0}}]))
"""


def test_reading_and_writing_beside_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "PRESET", "1m")
    monkeypatch.setattr(llama, "TYPES", ("Q8_0",))
    bench = tmp_path / "llama-bench"
    bench.write_text(LLAMA_BENCH.format(python=sys.executable))
    bench.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PACKTRAIN_CPU", raising=False)
    assert llama.find_llama_bench(None) == llama.find_llama_bench(bench) == bench
    monkeypatch.setattr(llama, "has_cpu_feature", lambda feature: True)
    half = "1m Q8_0", "reading 512, --precision bf16", 512.0, 512.0, 1.0
    original_init = llama.Ours.__init__
    monkeypatch.setattr(
        llama.Ours,
        "__init__",
        lambda self, path, activations="f32", precision="f32": original_init(
            self, path, activations
        ),
    )
    (table,) = llama.tables(None, bench, 2, counting, clock())
    assert table.rows == [
        ["1m Q8_0", "reading 512", 512.0, 512.0, 1.0],  # ours takes a second by that clock
        [*half],
        ["1m Q8_0", "reading 512, --activations q8", 512.0, 512.0, 1.0],
        ["1m Q8_0", "writing 64", 64.0, 32.0, 2.0],
        ["1m Q8_0", "writing 64, --activations q8", 64.0, 32.0, 2.0],
    ]
    assert [*table.notes] == ["llama.cpp 7 (abc). The KV cache is f16 in both."]
    monkeypatch.setenv("PATH", "")
    assert llama.find_llama_bench(None) is None
    base = llama.write_random_preset(tmp_path, "F16")
    (ours_only,) = llama.tables(base, None, 1, counting, clock())
    assert ours_only.rows == [
        ["F16", "reading 512", 512.0],
        ["F16", "reading 512, --precision bf16", 512.0],
        ["F16", "writing 64", 64.0],
    ]
    assert [*ours_only.notes] == [llama.NO_PEER_NOTE]


def test_another_program_is_refused(tmp_path: Path) -> None:
    wrong_program = tmp_path / "other"
    wrong_program.write_text("#!/bin/sh\necho hello\n")
    for mode in (0o755, 0o644):
        wrong_program.chmod(mode)
        with pytest.raises(
            InputError, match=r"--llama-bench: .*other is not llama.cpp's llama-bench"
        ):
            llama.find_llama_bench(wrong_program)


def test_llama_bench_that_fails_says_why(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    for line, said in (("echo no such model >&2; exit 3", "no such model"), ("echo [1]", "answer")):
        bad.write_text(f"#!/bin/sh\n{line}\n")
        bad.chmod(0o755)
        with pytest.raises(peer_process.PeerError, match=said):
            llama.run_llama_bench(bad, tmp_path / "model.gguf")


# ---- peers ---------------------------------------------------------------------------------------------------


def doubling(by: int) -> Callable[[int], int]:
    """A peer of these tests."""

    def turn(x: int) -> int:
        print("this is not an answer")
        if x < 0:
            raise ValueError("x is negative\nand more")
        return by * x

    if by < 0:
        raise ValueError("by is negative")
    return turn


def test_a_peer_answers_from_a_process_of_its_own() -> None:
    with peer_process.PeerProcess("tests.test_bench", "doubling", 2) as peer:
        assert [peer(3), peer(4)] == [6, 8]
        with pytest.raises(peer_process.PeerError, match=r"^ValueError: x is negative$"):
            peer(-1)
        assert peer(5) == 10
    assert peer.process.poll() is not None


def test_a_peer_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(peer_process.PeerError, match=r"^ValueError: by is negative$"),
        peer_process.PeerProcess("tests.test_bench", "doubling", -1),
    ):
        pass
    with (
        pytest.raises(peer_process.PeerError, match="No module named 'no_such_peer'"),
        peer_process.PeerProcess("no_such_peer", "doubling"),
    ):
        pass


def test_avx2_alone_is_asked_of_the_peer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CPU", "")
    assert "ATEN_CPU_CAPABILITY" not in peer_process.peer_environment()
    monkeypatch.setenv("PACKTRAIN_CPU", "avx2")
    assert peer_process.peer_environment().items() >= peer_process.AVX2.items()


@pytest.mark.torch
def test_products_beside_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    calls, original = list[list[products.TimedProduct]](), torch_products.time_beside_torch

    def recorded(*args: object) -> list[products.TimedProduct]:
        calls.append(original(*args))  # type: ignore[arg-type]
        return calls[-1]

    monkeypatch.setattr(torch_products, "time_beside_torch", recorded)
    table = torch_products.f32_table({"tiny": ((8, 16, 24),)}, 3, lambda *args: None)
    (timings,) = calls
    assert (
        [len(timing.ours) for timing in timings]
        == [len(timing.peer_seconds) for timing in timings]
        == [3, 3, 3]
    )
    assert [*table.columns][-1] == "× PyTorch"
    expected = statistics.median(
        b / a for a, b in zip(timings[0].ours, timings[0].peer_seconds, strict=True)
    )
    assert table.rows[0][-1] == expected
