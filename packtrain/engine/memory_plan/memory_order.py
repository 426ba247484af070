"""Other orders of a graph's calls: of several, the one whose arenas need the fewest bytes.

Calls keep the order of a leaf's writes and of what reads it before and after. Results do not change by a bit.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from packtrain.engine.backends import CPU, Target
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan.lifetimes import columns, storages
from packtrain.engine.memory_plan.memory_plan import make_plan
from packtrain.engine.packing import lower_bound
from packtrain.engine.placement import BARRIER, place
from packtrain.engine.tensor import Tensor

Needs = Sequence[Sequence[int]]  # for each call, those that must come before it


def least_order(graph: Graph, target: Target = CPU) -> list[int]:
    """The sequence for `place` with the least lower bound: the written order, unless another one needs less."""
    written, *alternatives = map(_sequence, orders(graph))
    best = min((written, *alternatives), key=lambda sequence: _bound(graph, target, sequence))
    packed = {id(call_order): _nbytes(graph, target, call_order) for call_order in (written, best)}
    return best if packed[id(best)] < packed[id(written)] else written


def orders(graph: Graph) -> Iterator[list[int]]:
    """The written order; depth-first from the outputs, as listed, in reverse, and by size (Sethi and Ullman 1970)."""
    yield list(range(len(graph.calls)))
    needs, number = needed_before(graph), {call: i for i, call in enumerate(graph.calls)}
    end_calls = (t.call for t in (*graph.outputs.values(), *graph.updates))
    roots = list(dict.fromkeys(number[call] for call in end_calls if call is not None))
    yield depth_first(needs, roots, lambda calls: calls)
    yield depth_first(needs, roots, lambda calls: calls[::-1])
    gain = _gains(graph, needs)
    yield depth_first(needs, roots, lambda calls: sorted(calls, key=lambda i: -gain[i]))


def needed_before(graph: Graph) -> Needs:
    """For each call its inputs' calls, and for one that writes a leaf all that read it as it was."""
    number = {call: i for i, call in enumerate(graph.calls)}
    readers: dict[Tensor, list[int]] = {}
    for i, call in enumerate(graph.calls):
        for t in call.reads:
            if t.base.kind:
                readers.setdefault(t.handle, []).append(i)
    needs = list[list[int]]()
    for i, call in enumerate(graph.calls):
        inputs = [number[t.call] for t in call.reads if t.call is not None]
        written = (call.inputs[k] for k in call.op.writes)
        before = chain.from_iterable(readers[t.handle] for t in written if t is not None)
        needs.append([k for k in dict.fromkeys((*inputs, *before)) if k != i])
    return needs


def depth_first(
    needs: Needs, roots: list[int], arranged: Callable[[list[int]], list[int]]
) -> list[int]:
    """Each call as soon as the calls that it needs are done, which begin in the order of `arranged`."""
    order, done = list[int](), set[int]()
    stack = [(i, False) for i in reversed(arranged(roots))]
    while stack:
        i, needs_done = stack.pop()
        if i in done:
            continue
        if needs_done:
            done.add(i)
            order.append(i)
            continue
        stack.append((i, True))
        stack += [(k, False) for k in reversed(arranged(list(needs[i]))) if k not in done]
    return order


def _gains(graph: Graph, needs: Needs) -> list[int]:
    """By how much each call's peak exceeds what it leaves, as if no value were read twice."""
    peak, left = list[int](), list[int]()
    for call, before in zip(graph.calls, needs, strict=True):
        live_nbytes = 0
        peak_nbytes = 0
        for k in sorted(before, key=lambda k: left[k] - peak[k]):
            peak_nbytes = max(peak_nbytes, live_nbytes + peak[k])
            live_nbytes += left[k]
        result_nbytes = (
            0 if call.op.view else sum(t.spec.nbytes for t in call.results if not t.base.kind)
        )
        peak.append(max(peak_nbytes, live_nbytes + result_nbytes))
        left.append(live_nbytes if call.op.view else result_nbytes)
    return [peak_nbytes - rest for peak_nbytes, rest in zip(peak, left, strict=True)]


def _sequence(order: list[int]) -> list[int]:
    """The order with a barrier after every call."""
    return [index for i in order for index in (i, BARRIER)]


def _bound(graph: Graph, target: Target, sequence: list[int]) -> int:
    """The lower bounds of all arenas together."""
    placed, total = place(graph, target, sequence), 0
    stored = storages(placed)
    for space, alignment in {(b.space, b.alignment) for b in placed.home.values()}:
        lifetimes = columns([s for s in stored if s.space == space], alignment)
        total += lower_bound(*lifetimes)[0]
    return total


def _nbytes(graph: Graph, target: Target, sequence: list[int]) -> int:
    return sum(arena.nbytes for arena in make_plan(place(graph, target, sequence)).arenas)
