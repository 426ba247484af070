"""Declared costs follow the kernels; rates solve for the times that were seen, and are kept with care."""

import inspect
import json
import math
import re
from dataclasses import replace

import pytest

import packtrain.engine.ops
from packtrain import kernels
from packtrain.dtypes import BLOCK_TYPES, f32
from packtrain.engine import ops
from packtrain.engine.graph import Graph
from packtrain.engine.ops import costs
from packtrain.engine.placement import place
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import OPS, Tensor, input, weight
from packtrain.kernels.runtime.environment import supports_precision
from packtrain.planner import cost_model, speed_probe
from packtrain.planner import machine_speed as kept_rates
from packtrain.planner.cost_model import BackendRates, call_cost, call_seconds, traffic_nbytes
from packtrain.planner.machine_speed import fastest_rates, load_rates, rates_path
from packtrain.planner.speed_probe import ProbeTimings, measure_rates, probe_layers, probes

Q8_0 = BLOCK_TYPES["q8_0"]
MULTIPLY = {
    "matmul", "matmul_back", "out_prod", "matmul_id", "matmul_id_back", "out_prod_id", "attention",
    "attention_back", "attention_back_sums", "linear_cross_entropy",
}  # fmt: skip
KNOWN_RATES = BackendRates(
    1e11,
    2e10,
    cache_nbytes=1e11,
    kinds={"multiply": 5e10, "pack": 4e9, "exp": 3e9, "attend": 4e10, "attend back": 3e10}
    | {"score": 3e9, "score back": 2e9, "unpack q8_0": 2e9},
    threads=2,
    call=2e-6,
    region=4e-6,
)


def step_of(y: Tensor) -> KernelStep:
    return place(Graph([y])).steps[-1]


@pytest.mark.parametrize("name", sorted(OPS))
def test_samples_cost_something(name):
    op = OPS[name]
    assert op.sample_rule is not None
    for y in op.sample_rule():
        for step in place(Graph([y])).steps:
            cost = call_cost(step, step.results)
            assert all(math.isfinite(n) and n >= 0 for n in cost.work.values()), cost
            assert cost.num_tasks >= 1 and traffic_nbytes(step, cost) > 0
            took = call_seconds(step, KNOWN_RATES, step.results)
            assert math.isfinite(took) and took > KNOWN_RATES.call


def test_equal_calls_take_the_seconds_of_one():
    """What is computed once for equal calls is what each call takes: of all samples, read and not."""
    samples = [list(op.sample_rule()) for op in OPS.values() if op.sample_rule is not None]
    steps = [step for outputs in samples for y in outputs for step in place(Graph([y])).steps]
    for read in (set(), {t for step in steps for t in step.results}):
        each = [call_seconds(step, KNOWN_RATES, read) for step in steps]
        assert cost_model.step_seconds([*steps, *steps], KNOWN_RATES, read) == each + each


@pytest.mark.parametrize("name", ["ssm_scan_cells", "delta_rule_cells", "short_conv_cells"])
def test_scans_of_cells_cost_by_token(name):
    costs_by_token = set()
    for y in OPS[name].sample_rule():
        step = step_of(y)
        work = call_cost(step, step.results).work
        leaf, x = step.call.inputs[:2]
        unit = math.prod(leaf.shape[1:]) if "attend" in work else x.shape[1]
        costs_by_token.add(sum(work.values()) / x.shape[0] / unit)
    assert len(costs_by_token) == 1, costs_by_token


@pytest.mark.parametrize("name", sorted(MULTIPLY))
def test_what_multiplies_declares_it(name):
    assert OPS[name].sample_rule is not None
    for y in OPS[name].sample_rule():
        step = next(step for step in place(Graph([y])).steps[::-1] if step.op.name == name)
        work = call_cost(step, step.results).work
        assert sum(n for kind, n in work.items() if kind in ("multiply", "attend", "attend back"))


def test_every_op_that_calls_a_kernel_of_products_is_among_them():
    products = re.compile(
        r"kernels\.(matmul_f32|packed|flash_attention|attention_back|loss\.linear\w+|fused_head|experts\.(packed_)?(matmul|out_prod)\w+)\b"
    )
    sources = {
        name: inspect.getsource(op.kernels["cpu"].run)
        for name, op in OPS.items()
        if "cpu" in op.kernels
    }
    assert {name for name, source in sources.items() if products.search(source)} == MULTIPLY


def test_constants_are_those_of_the_kernels():
    gemm, matmul, packed = kernels.gemm, kernels.matmul_f32, kernels.packed
    assert costs.TILE_DEPTH >= gemm.DEEP and costs.VECTOR_COLUMNS == kernels.simd_f32.LANES
    assert costs.BROAD <= gemm.BROAD and costs.UNPACKED_COLUMNS == packed.COLUMNS
    assert (matmul.FEW_ROWS, matmul.SMALL) == (costs.MAX_DOT_ROWS, costs.MIN_PARALLEL_WORK)
    assert (packed.UNPACKING, packed.SMALL) == (costs.UNPACK_ROWS, costs.MIN_PARALLEL_UNPACK_WORK)
    assert kernels.loss.MOST_COLUMNS == costs.LOGIT_COLUMNS
    head = kernels.fused_head
    assert (head.MOST_COLUMNS, head.MOST_ROWS) == (costs.MAX_TILED_COLUMNS, costs.MOST_ROWS)
    assert (kernels.flash_attention.KEYS, kernels.experts.WIDE) == (
        costs.KEYS,
        costs.EXPERT_TASK_COLUMNS,
    )
    for width in (8, 64, 65, 256, 257):
        assert costs.queries_per_block(width) == kernels.flash_attention.queries_in_block(width)


def test_a_task_alone_gets_one_thread():
    small = step_of(ops.matmul(input("x", (64, 64)), input("w", (64, 64))))
    two = replace(KNOWN_RATES, call=0.0, region=0.0, cache_nbytes=0.0, nbytes=1e18)
    assert call_seconds(small, two) == pytest.approx(
        2 * call_seconds(small, replace(two, threads=1))
    )


def test_work_that_nobody_reads_costs_nothing():
    x, w = input("x", (64, 32)), input("w", (100, 32))
    targets, weights = input("targets", (64,), packtrain.dtypes.i32), input("weights", (64,))
    outputs = ops.linear_cross_entropy(x, w, targets, weights)
    step = step_of(outputs[0])
    loss, dx, both = (
        call_cost(step, read).work["multiply"] for read in (outputs[:1], outputs[:4], outputs[:5])
    )
    assert loss < dx < both and dx == pytest.approx(2 * loss, rel=0.5)


@pytest.mark.parametrize("dtype", [f32, Q8_0])
def test_smaller_chunks_of_the_head_cost_more(dtype):
    x, w = input("x", (512, 64)), weight("w", (4096, 64), dtype)
    targets, weights = input("targets", (512,), packtrain.dtypes.i32), input("weights", (512,))
    took = []
    for chunk in (256, 64, 16, 1):
        step = step_of(ops.linear_cross_entropy(x, w, targets, weights, chunk=chunk)[0])
        took.append(call_seconds(step, KNOWN_RATES, step.results))
    assert took == sorted(took) and took[-1] > 2 * took[0]


# ---- rates ---------------------------------------------------------------------------------------------------


def test_rates_solve_for_the_times_that_were_seen():
    timing = ProbeTimings()
    extra_kinds = {
        costs.multiply_kind(p): rate
        for p, rate in (("bf16", 1.5e11), ("bf16x3", 8e10))
        if supports_precision(p)
    }
    true_rates = replace(KNOWN_RATES, kinds=KNOWN_RATES.kinds | extra_kinds)
    for kind, y in probes([Q8_0]):
        step = step_of(y)
        timing.timed_calls.append((kind, step, call_seconds(step, true_rates, step.results)))
    solved_rates = timing.solve_rates(2)
    assert solved_rates.kinds == pytest.approx(true_rates.kinds, rel=0.05)
    for name in ("flops", "nbytes", "cache_nbytes", "call", "region"):
        assert getattr(solved_rates, name) == pytest.approx(getattr(KNOWN_RATES, name), rel=0.1), (
            name
        )


def test_a_busy_machine_is_noticed():
    timing = ProbeTimings(wall_seconds=1.0, waited=0.5)
    assert not timing.is_quiet and ProbeTimings(wall_seconds=1.0, waited=0.05).is_quiet


def test_measuring_takes_few_bytes_and_little_time():
    machine_rates, _ = measure_rates([Q8_0])
    assert (
        machine_rates.flops > 1e8
        and machine_rates.rate_of("unpack q8_0") > 1e6
        and machine_rates.threads >= 1
    )
    for _, y in probes([Q8_0]):
        step = step_of(y)
        assert traffic_nbytes(step, costs.Cost()) <= 48 << 20


def test_work_that_was_not_measured_has_a_typical_rate():
    assert 0 < BackendRates(1e11, 1e10).rate_of("unpack iq4_xs") < 1e11


@pytest.fixture
def said(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_rates, "cache_root", lambda: tmp_path)
    return list[str]()


def quiet(monkeypatch, *states: bool):
    """Let measuring find a machine of ever more work a second, quiet or not."""
    remaining = list(states)

    def fake_measured(types, fallback=None, target=None):
        n = len(states) - len(remaining) + 1
        kinds = {costs.pack_kind(t): float(n) for t in types}
        return replace(KNOWN_RATES, flops=n * 1e9, kinds=kinds), remaining.pop(0)

    monkeypatch.setattr(kept_rates, "measure_rates", fake_measured)


def test_rates_are_measured_once(said, monkeypatch):
    quiet(monkeypatch, True, True, True)
    first = load_rates(False, said.append)
    assert load_rates(False, said.append) == first and len(said) == 1 and first.flops == 1e9
    assert load_rates(True, said.append).flops == 2e9
    for damaged in ("{", '{"format": 1}', '{"flops": 1.0, "nbytes": 2.0}'):
        before = rates_path(kernels.threads()).read_text()
        rates_path(kernels.threads()).write_text(damaged)
        assert kept_rates.read_rates(rates_path(kernels.threads())) is None
        rates_path(kernels.threads()).write_text(before)
    assert load_rates(False, said.append).flops == 2e9 and len(said) == 2


def test_another_type_is_measured_when_it_comes(said, monkeypatch):
    quiet(monkeypatch, True, True)
    load_rates(False, said.append)
    measured_rates = load_rates(False, said.append, {Q8_0})
    assert measured_rates.kinds == {"unpack q8_0": 2.0}
    assert load_rates(False, said.append, {Q8_0}) == measured_rates and len(said) == 2


def test_a_busy_machine_is_measured_again(said, monkeypatch):
    quiet(monkeypatch, False, False, True)
    assert load_rates(False, said.append).flops == 1e9 and "it is busy" in said[-1]
    assert load_rates(False, said.append).flops == 2e9
    assert load_rates(False, said.append).flops == 3e9 and "it is busy" not in said[-1]
    assert load_rates(False, said.append).flops == 3e9 and len(said) == 3
    assert json.loads(rates_path(kernels.threads()).read_text())["quiet"]


def test_a_run_that_was_off_corrects_the_next(said, monkeypatch):
    quiet(monkeypatch, True, True, True)
    kept_rates.correct_step_times(2.0)  # nothing is kept yet: nothing to correct
    first = load_rates(False, said.append)
    kept_rates.correct_step_times(1.5)
    assert load_rates(False, said.append) == first.slower(1.5) and len(said) == 1
    kept_rates.correct_step_times(2.0)
    assert load_rates(False, said.append).flops == pytest.approx(first.flops / 3)
    assert load_rates(False, said.append, {Q8_0}).flops == pytest.approx(2 * first.flops / 3)
    assert load_rates(True, said.append).flops == 3e9 and len(said) == 3


def test_slower_rates_make_every_call_slower():
    for _, y in probes([Q8_0]):
        step = step_of(y)
        slower_seconds = call_seconds(step, KNOWN_RATES.slower(2.0), step.results)
        assert slower_seconds == pytest.approx(2 * call_seconds(step, KNOWN_RATES, step.results))


def test_what_layers_take_longer_than_their_calls_lowers_all_rates():
    timing = ProbeTimings()
    for kind, y in probes([]):
        step = step_of(y)
        timing.timed_calls.append((kind, step, call_seconds(step, KNOWN_RATES, step.results)))
    call_rates = timing.solve_rates(2)
    placed = place(Graph([probe_layers()]))
    timing.step = placed, 1.5 * cost_model.graph_seconds(placed, call_rates)
    assert cost_model.graph_seconds(placed, timing.solve_rates(2)) == pytest.approx(timing.step[1])
    timing.step = placed, 0.5 * cost_model.graph_seconds(placed, call_rates)
    assert timing.solve_rates(2) == call_rates


def test_a_cache_that_cannot_be_written_is_read(said, monkeypatch):
    quiet(monkeypatch, True, True)
    first = load_rates(False, said.append)
    monkeypatch.setattr(kept_rates, "write_error", lambda root: "read-only")
    assert load_rates(False, said.append) == first and len(said) == 1
    kept_rates.correct_step_times(2.0)
    rates_path(kernels.threads()).unlink()
    assert load_rates(False, said.append).flops == 2e9 and said[-1].endswith(", not kept")
    assert not rates_path(kernels.threads()).exists()


def test_data_that_hides_keys_makes_attention_cheaper_and_nothing_else():
    q = input("q", (1, 256, 4, 32))
    attention = step_of(ops.attention(q, q, q, scale=1.0)[0])
    product = step_of(ops.matmul(input("x", (256, 64)), input("w", (64, 64))))
    half = replace(KNOWN_RATES, attended_share=0.5)
    assert call_seconds(attention, half) < 0.6 * call_seconds(attention, KNOWN_RATES)
    assert call_seconds(product, half) == call_seconds(product, KNOWN_RATES)


def test_of_two_busy_moments_the_faster_counts():
    slow = replace(KNOWN_RATES, flops=1e10, call=1e-5, kinds={"pack": 1.0})
    assert fastest_rates(slow, KNOWN_RATES) == replace(KNOWN_RATES)
    assert speed_probe.DEFAULT_RATES.rate_of("pack") > 0
