"""What every placed, planned and run graph must satisfy, as functions that raise AssertionError."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import packtrain as pt
from packtrain.engine import backends, ops
from packtrain.engine.backends import Host, Target
from packtrain.engine.memory_plan.memory_order import call_dependencies
from packtrain.engine.memory_plan.memory_plan import Packer, Plan
from packtrain.engine.packing import lower_bound, packing_height
from packtrain.engine.placement import BARRIER
from packtrain.engine.tensor import Tensor
from tests import checks
from tests.online import best_fit
from tests.random_graphs import Case, random_case

Change = Callable[[Plan], Plan]

FAR = Host("cpu", "far")  # a second memory space with the same kernels


def plan_variants(placed: pt.Placed) -> dict[str, pt.Plan]:
    return {
        "reuse": pt.make_plan(placed),
        "no reuse": pt.make_plan(placed, reuse=False),
        "best fit": pt.make_plan(placed, packer=best_fit),
    }


def poisoned_results(case: Case, placed: pt.Placed, plan: pt.Plan) -> dict[str, np.ndarray]:
    """The results of a run whose bytes are NaN before they are written and after they are freed."""
    executor = pt.Session().executor(placed, plan)
    with pt.debug("poison"):
        return checks.execute(executor, case.values)


def check_case(seed: int) -> None:
    """Plans verify; reuse and work in place change no bit; the result is near the specification."""
    case = random_case(seed)
    placed = pt.place(case.graph)
    variants = plan_variants(placed)
    for plan in variants.values():
        pt.verify(plan, placed)
    got, expected = (
        poisoned_results(case, placed, variants[name]) for name in ("reuse", "no reuse")
    )
    checks.assert_same_bits(got, expected, f"seed {seed}")
    checks.assert_all_close(got, pt.interpret(case.graph, case.values), f"seed {seed} on cpu")


def check_poisoned(seed: int) -> None:
    """The bits alone: what reuse and work in place do wrong shows in a run, also if nobody verifies."""
    case = random_case(seed)
    placed = pt.place(case.graph)
    reference = pt.Session().executor(placed, pt.make_plan(placed, reuse=False))
    expected = checks.execute(reference, case.values)
    try:
        got = poisoned_results(case, placed, pt.make_plan(placed))
    except IndexError as error:  # bytes of a mixture's routing: poison is no index
        raise AssertionError(f"seed {seed}: {error}") from None
    checks.assert_same_bits(got, expected, f"seed {seed}")


def check_verified(seed: int) -> None:
    """The verifier alone: it finds what is wrong with a plan before anything runs."""
    placed = pt.place(random_case(seed).graph)
    for plan in plan_variants(placed).values():
        pt.verify(plan, placed)


def check_numpy(seed: int) -> None:
    """The numpy backend, planned, gives the bits of its kernels run on fresh arrays."""
    case = random_case(seed)
    placed = pt.place(case.graph, Target((backends.numpy,)))
    plan = pt.make_plan(placed)
    pt.verify(plan, placed)
    expected = pt.interpret(case.graph, case.values, np.float32)
    checks.assert_same_bits(poisoned_results(case, placed, plan), expected, f"seed {seed} on numpy")


def check_recomputed(seed: int) -> None:
    """Recomputation changes no bit, and the backward pass reads no forward value that it was not to keep."""
    case, reference = random_case(seed), random_case(seed, keep=False)
    got, expected = (
        checks.run_graph(case.graph, case.values),
        checks.run_graph(reference.graph, reference.values),
    )
    checks.assert_same_bits(got, expected, f"seed {seed}, recomputed")
    if case.keep is None:
        return
    last = max((t.call.serial for t in case.keep if t.call), default=-1)
    written = {t.base for t in case.graph.updates}

    def is_kept(t: Tensor) -> bool:
        call = t.call
        if call is None or t in case.keep or call.serial > last or call.op.writes:
            return True
        return call.phase != "forward" or any(x.base in written for x in call.reads)

    for call in case.graph.calls:
        lost = [t for t in call.reads if call.phase != "forward" and not is_kept(t)]
        assert not lost, f"seed {seed}: {call.op.name} reads {lost[0]}, which is not kept"


def check_slope(seed: int) -> None:
    """Gradients through uses of a value in several places, recomputed or not, are the loss's slope in float64."""
    case = random_case(seed, style="outputs")
    leaf_values = {
        n: v * np.ones((), v.dtype if v.dtype.kind == "i" else float)
        for n, v in case.values.items()
    }
    results = pt.interpret(case.graph, leaf_values)
    rng = np.random.default_rng(seed)
    directions = {
        n[2:]: rng.standard_normal(g.shape) for n, g in results.items() if n.startswith("d/")
    }
    loss_graph = pt.Graph({"loss": case.graph.outputs["loss"]}, case.graph.updates)
    slope = checks.slope(loss_graph, leaf_values, directions)
    checks.assert_slope(
        slope, {n: results[f"d/{n}"] * d for n, d in directions.items()}, f"seed {seed}"
    )


def check_spaces(seed: int) -> None:
    """Leaves and calls spread over two memory spaces give the bits of one."""
    case = random_case(seed)
    written = {t.base for t in case.graph.updates}
    rng = np.random.default_rng(seed)
    movable = [
        leaf for leaf in case.graph.leaves if leaf not in written and leaf.kind != "constant"
    ]
    homes = {leaf.label: FAR for leaf in movable if rng.random() < 0.5}
    placed = pt.place(case.graph, Target((backends.cpu, FAR), homes))
    plan = pt.make_plan(placed)
    pt.verify(plan, placed)
    for step in placed.steps:
        remote_reads = {
            t.label for t in step.reads if placed.home[t.base].space != step.backend.space
        }
        assert not remote_reads or step.op is ops.cont, (
            f"{step.op.name} reads {remote_reads} in another space"
        )
    expected = checks.run_graph(case.graph, case.values)
    checks.assert_same_bits(
        poisoned_results(case, placed, plan), expected, f"seed {seed} with {sorted(homes)} far"
    )


def check_parts() -> None:
    """Two parts of a value, of one shape, that are read in another space."""
    x, w = ops.tanh(pt.input("x", (100, 8))), pt.weight("w", (2, 8))
    parts = (ops.narrow(x, axis=0, start=start, length=2) for start in (4, 10))
    graph = pt.Graph({str(i): ops.mul(part, w) for i, part in enumerate(parts)})
    placed = pt.place(graph, Target((backends.cpu, FAR), {"w": FAR}))
    copied = [s.results[0].spec.nbytes for s in placed.steps if s.op is ops.cont]
    assert copied == [2 * 8 * 4] * 2, copied
    rng = np.random.default_rng(0)
    inputs = {t.label: rng.random(t.shape, np.float32) for t in graph.leaves}
    got = checks.execute(pt.Session().executor(placed), inputs)
    checks.assert_same_bits(got, checks.run_graph(graph, inputs), "parts")


def sequence_of(graph: pt.Graph, rng: np.random.Generator) -> list[int]:
    """A random order of the calls that can run, with barriers at random."""
    needs, left, sequence = call_dependencies(graph), set(range(len(graph.calls))), list[int]()
    while left:
        runnable = [i for i in sorted(left) if left.isdisjoint(needs[i])]
        sequence.append(runnable[int(rng.integers(len(runnable)))])
        left.remove(sequence[-1])
        sequence += [BARRIER] * int(rng.integers(0, 2))
    return sequence


def check_sequence(seed: int) -> None:
    """Plans of a random sequence with barriers verify, where leaves are not written beside, and keep the bits."""
    case = random_case(seed)
    sequence = sequence_of(case.graph, np.random.default_rng(seed))
    serialized = [index for i in sequence if i != BARRIER for index in (i, BARRIER)]
    expected = checks.run_graph(case.graph, case.values)
    for order in (sequence, serialized):
        placed = pt.place(case.graph, sequence=order)
        for plan in plan_variants(placed).values():
            verify_beside(plan, placed)
            checks.assert_same_bits(
                poisoned_results(case, placed, plan), expected, f"seed {seed} in another order"
            )


def check_sequences(seeds: Sequence[int]) -> None:
    for seed in seeds:
        check_sequence(seed)


def verify_beside(plan: pt.Plan, placed: pt.Placed) -> None:
    """Verify; that a leaf is read and written beside is the sequence's fault, not the plan's."""
    writes = [i for i, step in enumerate(placed.steps) if step.op.writes]
    if placed.barriers is None or not writes:
        pt.verify(plan, placed)
        return
    try:
        pt.verify(plan, placed)
    except pt.PlanError as error:
        steps = [int(n) for n in re.findall(r"step (\d+)", str(error))]
        if "no barrier" not in str(error) or not set(steps) & set(writes):
            raise


def check_session(seeds: Sequence[int]) -> None:
    """Executors of one session share its arena and give what they give alone."""
    cases = [random_case(seed, prefix=f"{seed}.") for seed in seeds]
    references = [checks.run_graph(case.graph, case.values) for case in cases]
    session = pt.Session()
    executors = [session.executor(pt.place(case.graph)) for case in cases]
    sizes = [e.plan.arena().nbytes for e in executors]
    assert session.buffer("host").nbytes == max(sizes), (
        "the arena is not as large as the largest plan"
    )
    for _ in range(2):
        outputs = [checks.execute(e, case.values) for case, e in zip(cases, executors, strict=True)]
        for got, expected in zip(outputs, references, strict=True):
            checks.assert_same_bits(got, expected, f"seeds {seeds}, together")


# ---- the verifier --------------------------------------------------------------------------------------------


def small_graph(width: int = 32) -> pt.Placed:
    """Five values of one size; x is read at steps 0 and 2; step 3 has a workspace and two results."""
    x, w = pt.input("x", (width, width)), pt.weight("w", (width,))
    exp = pt.named("exp", ops.exp(x))
    negative = pt.named("negative", ops.neg(exp))
    total = pt.named("total", ops.add(negative, x))
    dx, dw = ops.rms_norm_back(exp, total, w, eps=1e-5)
    product = pt.named("twice", ops.mul(pt.named("dx", dx), dx))
    out = pt.named("out", ops.add(ops.transpose(product), w))
    return pt.place(pt.Graph({"out": out, "dw": pt.named("dw", dw)}))


def plan_without_reuse(placed: pt.Placed) -> Plan:
    """Nothing in place and no two buffers at one offset, so that one change is one mistake."""
    return pt.make_plan(placed, reuse=False)


def changed(plan: Plan, name: str, **fields: Any) -> Plan:
    """The plan with one buffer changed, in an arena that is large enough."""
    assert any(b.name == name for b in plan.buffers), name
    buffers = tuple(replace(b, **fields) if b.name == name else b for b in plan.buffers)
    top = max(b.offset + b.nbytes for b in buffers) + 64
    arenas = tuple(replace(a, nbytes=max(a.nbytes, top)) for a in plan.arenas)
    return replace(plan, buffers=buffers, arenas=arenas)


def move_buffer(name: str, other: str, by: int = 0) -> Change:
    """`name` to where `other` is, or beside."""

    def change(plan: Plan) -> Plan:
        at = next(b.offset for b in plan.buffers if b.name == other)
        return changed(plan, name, offset=at + by)

    return change


def drop_buffer(name: str) -> Change:
    return lambda plan: replace(plan, buffers=tuple(b for b in plan.buffers if b.name != name))


def change_arena(**fields: int) -> Change:
    return lambda plan: replace(plan, arenas=tuple(replace(a, **fields) for a in plan.arenas))


# what is changed, and what the verifier says
BROKEN: dict[str, tuple[Change, str]] = {
    "a result over an input that is read later": (move_buffer("exp", "x"), "add reads x, .* overwritten by exp"),
    "a result over a value that is read later": (move_buffer("negative", "x"), "add reads x, .* by negative"),
    "a result over another result": (move_buffer("dw", "dx"), "dw and dx share bytes"),
    "over an input, not permitted": (move_buffer("dw", "total"), "dw overwrites input total"),
    "over an input, shifted": (move_buffer("dx", "total", 1024), "dx overwrites input total"),
    "over an input that is read twice": (move_buffer("twice", "dx"), "twice overwrites input dx"),
    "over an input that is read transposed": (move_buffer("out", "twice"), "out overwrites input permute"),
    "a workspace over an input": (move_buffer("dx work", "exp"), "workspace overwrites input exp"),
    "a workspace over a result": (move_buffer("dx work", "dw"), "workspace and dw share bytes"),
    "an output over another": (move_buffer("dw", "out"), "output dw reads dw, .* by out"),
    "an offset that is not aligned": (move_buffer("dw", "out", 8192 + 32), "dw: offset .* multiple of 64"),
    "an offset below zero": (lambda p: changed(p, "out", offset=-64), "out: offset -64"),
    "a buffer too small": (lambda p: changed(p, "total", nbytes=4095), "4095 bytes and needs 4096"),
    "a workspace too small": (lambda p: changed(p, "dx work", nbytes=127), "127 bytes and needs 128"),
    "a workspace for another step": (lambda p: changed(p, "dx work", start=2, end=3), "1 workspaces planned, 0 needed"),
    "a workspace missing": (drop_buffer("dx work"), "0 workspaces planned, 1 needed"),
    "a tensor missing": (drop_buffer("total"), "total has no bytes"),
    "an arena too small": (change_arena(nbytes=8192), "offset 8192 .* inside the arena"),
    "a life that begins too late": (lambda p: changed(p, "exp", start=1), r"\[1, 4\), used in \(0, 4\)"),
    "a life that ends too early": (lambda p: changed(p, "total", end=3), r"\[2, 3\), used in \(2, 4\)"),
    "an output that ends too early": (lambda p: changed(p, "dw", end=6), r"\[3, 6\), used in \(3, 7\)"),
    "a lower bound that is none": (change_arena(lower_bound=64), "lower bound 64"),
    "a peak at another step": (change_arena(peak_step=0), "at step 0"),
}  # fmt: skip


def check_rejected(name: str) -> None:
    """The verifier rejects one kind of broken plan, and says why."""
    change, text = BROKEN[name]
    placed = small_graph()
    pt.verify(plan_without_reuse(placed), placed)
    assert_raises(
        (pt.PlanError,), text, lambda: pt.verify(change(plan_without_reuse(placed)), placed)
    )


def check_belonging() -> None:
    """A plan is refused by a graph it was not made for."""
    placed, plan = small_graph(), pt.make_plan(small_graph(width=24))
    for use in (lambda: pt.verify(plan, placed), lambda: pt.Session().executor(placed, plan)):
        assert_raises((pt.GraphError,), "the plan is for .* not for this graph", use)


def assert_raises(kinds: tuple[type[Exception], ...], text: str, use: Callable[[], object]) -> None:
    try:
        use()
    except kinds as error:
        assert re.search(text, str(error)), f"{error} does not say {text}"
        return
    raise AssertionError(f"nothing was raised that says {text}")


# ---- packing -------------------------------------------------------------------------------------------------


def packing_problem(seed: int, max_buffers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """start, end and size of up to `max_buffers` buffers."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, max_buffers + 1))
    start = rng.integers(0, 8, n)
    return start, start + rng.integers(1, 5, n), 64 * rng.integers(1, 6, n)


def check_packer(packer: Packer) -> None:
    """No two buffers share a byte at one time, by looking at each pair."""
    for seed in range(200):
        start, end, size = packing_problem(seed, 24)
        at = packer(start, end, size)
        for i, j in itertools.combinations(range(len(size)), 2):
            together = start[i] < end[j] and start[j] < end[i]
            share = at[i] < at[j] + size[j] and at[j] < at[i] + size[i]
            assert not (together and share), f"problem {seed}: buffers {i} and {j} share bytes"
        assert at.min() == 0
        assert packing_height(size, at) >= lower_bound(start, end, size)[0]


def check_lower_bound() -> None:
    for seed in range(200):
        start, end, size = packing_problem(seed, 24)
        alive = [int(size[(start <= t) & (t < end)].sum()) for t in range(int(end.max()))]
        expected = max(alive), alive.index(max(alive))
        got = lower_bound(start, end, size)
        assert got == expected, f"problem {seed}: lower bound {got}, counted {expected}"


# (start, end, units of 64 bytes) in order of allocation, and the offset of the last one
TRACES = {
    "the smallest block that fits": ([(0, 1, 3), (0, 9, 1), (0, 1, 2), (0, 9, 1), (1, 2, 2)], 4),
    "among equal blocks the last": ([(0, 1, 2), (0, 9, 1), (0, 1, 2), (0, 9, 1), (1, 2, 1)], 3),
    "the unbounded block as last resort": ([(0, 1, 2), (0, 9, 1), (1, 2, 3)], 3),
    "any block before the unbounded one": ([(0, 1, 9), (0, 9, 1), (1, 2, 1)], 0),
    "freed blocks merge to the left": ([(0, 1, 1), (0, 2, 1), (0, 9, 1), (2, 3, 2)], 0),
    "freed blocks merge to the right": ([(0, 2, 1), (0, 1, 1), (0, 9, 1), (2, 3, 2)], 0),
    "freed blocks merge on both sides": ([(0, 1, 1), (0, 2, 1), (0, 1, 1), (0, 9, 1), (2, 3, 3)], 0),
    "the unbounded block grows downwards": ([(0, 9, 1), (0, 1, 1), (0, 2, 1), (2, 3, 9)], 1),
    "a block in use is not taken": ([(0, 1, 2), (0, 9, 1), (1, 3, 1), (1, 3, 1), (2, 3, 1)], 3),
    "what is left of a block stays free": ([(0, 1, 3), (0, 9, 1), (1, 3, 2), (2, 3, 1)], 2),
    "a block is free at the step after the last read": ([(0, 2, 2), (1, 2, 2), (2, 3, 4)], 0),
}  # fmt: skip


def check_trace(name: str) -> None:
    """best_fit puts buffers where ggml's allocator does, in traces made by hand."""
    buffers, expected = TRACES[name]
    start, end, units = (np.array(column) for column in zip(*buffers, strict=True))
    at = int(best_fit(start, end, 64 * units)[-1])
    assert at == 64 * expected, f"{name}: at {at}, not {64 * expected}"
