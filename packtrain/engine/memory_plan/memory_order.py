"""Searches other orders of a graph's calls for the one whose arenas need the fewest bytes.

Each write of a leaf stays between the reads before and after it. Results do not change by a bit.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from packtrain.engine.backends import CPU, Target
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan.lifetimes import lifetime_columns, storage_lifetimes
from packtrain.engine.memory_plan.memory_plan import make_plan
from packtrain.engine.packing import lower_bound
from packtrain.engine.placement import BARRIER, place
from packtrain.engine.tensor import Tensor

CallDependencies = Sequence[Sequence[int]]  # for each call, the calls that must come before it


def least_order(graph: Graph, target: Target = CPU) -> list[int]:
    """Return the sequence of calls, for `place`, of the fewest arena bytes; as written unless another needs less."""
    orders = candidate_orders(graph)
    written, *alternatives = ([i for at in order for i in (at, BARRIER)] for order in orders)
    best = min((written, *alternatives), key=lambda sequence: _bound(graph, target, sequence))
    packed = {id(call_order): _nbytes(graph, target, call_order) for call_order in (written, best)}
    return best if packed[id(best)] < packed[id(written)] else written


def candidate_orders(graph: Graph) -> Iterator[list[int]]:
    """Yield orders of calls: as written; depth-first from outputs as listed, reversed or by size (Sethi, Ullman)."""
    yield list(range(len(graph.calls)))
    needs, call_index = call_dependencies(graph), {call: i for i, call in enumerate(graph.calls)}
    end_calls = (t.call for t in (*graph.outputs.values(), *graph.updates))
    roots = list(dict.fromkeys(call_index[call] for call in end_calls if call is not None))
    yield depth_first(needs, roots, lambda calls: calls)
    yield depth_first(needs, roots, lambda calls: calls[::-1])
    peak_excess = _peak_excesses(graph, needs)
    yield depth_first(needs, roots, lambda calls: sorted(calls, key=lambda i: -peak_excess[i]))


def call_dependencies(graph: Graph) -> CallDependencies:
    """Return for each call those that must precede it: its inputs', and if it writes a leaf, old values' readers."""
    call_index = {call: i for i, call in enumerate(graph.calls)}
    readers: dict[Tensor, list[int]] = {}
    for i, call in enumerate(graph.calls):
        for t in call.reads:
            if t.base.kind:
                readers.setdefault(t.handle, []).append(i)
    dependencies = list[list[int]]()
    for i, call in enumerate(graph.calls):
        inputs = [call_index[t.call] for t in call.reads if t.call is not None]
        written_leaves = (call.inputs[k] for k in call.op.writes)
        before = chain.from_iterable(readers[t.handle] for t in written_leaves if t is not None)
        dependencies.append([k for k in dict.fromkeys((*inputs, *before)) if k != i])
    return dependencies


def depth_first(
    needs: CallDependencies, roots: list[int], arrange: Callable[[list[int]], list[int]]
) -> list[int]:
    """Return call indices so that each call follows those it needs; `arrange` sorts the roots, and a call's needs."""
    order, done_calls = list[int](), set[int]()
    stack = [(i, False) for i in reversed(arrange(roots))]
    while stack:
        i, is_expanded = stack.pop()
        if i in done_calls:
            continue
        if is_expanded:
            done_calls.add(i)
            order.append(i)
            continue
        stack.append((i, True))
        stack += [(k, False) for k in reversed(arrange(list(needs[i]))) if k not in done_calls]
    return order


def _peak_excesses(graph: Graph, needs: CallDependencies) -> list[int]:
    """Return, by call, the peak bytes of computing it less those of its results, as if no value were read twice."""
    call_peaks, call_remains = list[int](), list[int]()
    for call, predecessors in zip(graph.calls, needs, strict=True):
        live_nbytes = peak_nbytes = 0
        for k in sorted(predecessors, key=lambda k: call_remains[k] - call_peaks[k]):
            peak_nbytes = max(peak_nbytes, live_nbytes + call_peaks[k])
            live_nbytes += call_remains[k]
        new_results = () if call.op.view else (t for t in call.results if not t.base.kind)
        result_nbytes = sum(t.spec.nbytes for t in new_results)
        call_peaks.append(max(peak_nbytes, live_nbytes + result_nbytes))
        call_remains.append(live_nbytes if call.op.view else result_nbytes)
    return [peak_nbytes - rest for peak_nbytes, rest in zip(call_peaks, call_remains, strict=True)]


def _bound(graph: Graph, target: Target, sequence: list[int]) -> int:
    """Return a lower bound of the bytes of all arenas if calls run in this sequence, without packing."""
    placed, total_nbytes = place(graph, target, sequence), 0
    storage_list = storage_lifetimes(placed)
    for space, alignment in {(b.space, b.alignment) for b in placed.home.values()}:
        lifetimes = lifetime_columns([s for s in storage_list if s.space == space], alignment)
        total_nbytes += lower_bound(*lifetimes)[0]
    return total_nbytes


def _nbytes(graph: Graph, target: Target, sequence: list[int]) -> int:
    """Return the bytes of all arenas of the plan in which calls run in this order."""
    return sum(arena.nbytes for arena in make_plan(place(graph, target, sequence)).arenas)
