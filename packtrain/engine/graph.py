"""Graph: the calls that some outputs need, in the order written; verified on creation, printable."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from operator import attrgetter

from packtrain.engine.tensor import Call, GraphError, Tensor


class Graph:
    """The calls that `outputs` (values to read) and `updates` (leaf handles to compute) need, in the order written.

    offloaded  forward values that `place` copies to host memory until the backward pass reads them

    Raises GraphError if two leaves share a name or a call reads a leaf's older handle after a write to that leaf.
    """

    def __init__(
        self, outputs: Mapping[str, Tensor] | Iterable[Tensor], updates: Iterable[Tensor] = ()
    ) -> None:
        self.outputs = dict(outputs) if isinstance(outputs, Mapping) else _outputs_by_name(outputs)
        self.updates, self.offloaded = tuple(updates), frozenset[Tensor]()
        not_written = [t.label for t in self.updates if t.call is None or not t.call.op.writes]
        if not_written:
            requirement = "each must be the handle that a writing op returned"
            raise GraphError(f"updates has {', '.join(not_written)}; {requirement}")
        self.calls = _reachable([*self.outputs.values(), *self.updates])
        read_tensors = [t for call in self.calls for t in call.reads] + list(self.outputs.values())
        bases = dict.fromkeys([t.shared or t for t in read_tensors])
        self.leaves = tuple([base for base in bases if base.kind])
        self.names = self._unique_names()
        self.check_handles(self.calls)

    def _unique_names(self) -> dict[Tensor, str]:
        """Return a name for every tensor: weights, states and inputs keep theirs, others get #2, #3 … if needed."""
        names: dict[Tensor, str] = {}
        use_counts: dict[str, int] = {}
        for leaf in [leaf for leaf in self.leaves if leaf.kind != "constant"]:
            label = leaf.name or ""
            if label in use_counts:
                fact = f"two leaves are called {label}"
                raise GraphError(f"{fact}; names of leaves must be unique")
            names[leaf], use_counts[label] = label, 1
        results = [t for call in self.calls for t in call.results]
        for t in [*(leaf for leaf in self.leaves if leaf.kind == "constant"), *results]:
            name = t.name or (t.call.op.name if t.call else "leaf")
            names[t] = unique_name(name, use_counts) if name in use_counts else name
            use_counts[names[t]] = 1
        return names

    def check_handles(self, calls: Iterable[Call]) -> None:
        """Raise GraphError if one of `calls`, in this order, reads a leaf as it was before an earlier call wrote it."""
        current_handles: dict[Tensor, Tensor] = {}
        for call in calls:
            for t in call.reads:
                if (t.shared or t) in current_handles:
                    self._check_newest_handle(t, current_handles, call.op.name, call.location)
            for index in range(len(call.op.writes)):
                handle = call.results[index]
                current_handles[handle.shared or handle] = handle
        for name, t in self.outputs.items():
            if t.base in current_handles:
                self._check_newest_handle(t, current_handles, f"output {name}", "")

    def _check_newest_handle(
        self, t: Tensor, current_handles: dict[Tensor, Tensor], who: str, location: str
    ) -> None:
        """Raise GraphError unless t is read after the last write to its leaf."""
        newest = current_handles[t.base]
        if t.handle is newest:
            return
        assert newest.call is not None
        reader_line = f"\n  at {location}" if location else ""
        raise GraphError(
            f"{who}: reads {t.base.name} as it was before {newest.call.op.name} wrote it at {newest.call.location}; "
            f"read the handle that {newest.call.op.name} returned, or copy the value before the write{reader_line}"
        )

    @property
    def written(self) -> list[str]:
        """Names of the leaves that calls write: updated weights, moments, caches."""
        handles = [t for call in self.calls for t in call.results[: len(call.op.writes)]]
        return [self.names[t.shared or t] for t in handles]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of calls, specs, attributes and names, independent of source lines: equal for equal graphs."""
        return hashlib.sha256("\n".join(self._text_lines(origins=False)).encode()).hexdigest()[:16]

    def _text_lines(self, *, origins: bool) -> list[str]:
        lines = [f"{leaf.kind} {leaf.line(self.names)}" for leaf in self.leaves]
        for call in self.calls:
            comment = f"  # {call.location}" if origins else ""
            for t in call.results:
                lines.append(t.line(self.names) + comment)
        return lines + [f"output {name} = {self.names[t]}" for name, t in self.outputs.items()]

    def __str__(self) -> str:
        return "\n".join([f"graph of {len(self.calls)} calls", *self._text_lines(origins=True)])


def unique_name(name: str, use_counts: dict[str, int]) -> str:
    """Return `name`, or `name#2`, `name#3` … if taken; `use_counts` holds the last number used for each name."""
    candidate = name
    while candidate in use_counts:
        use_counts[name] += 1
        candidate = f"{name}#{use_counts[name]}"
    use_counts[candidate] = 1
    return candidate


def _outputs_by_name(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    listed = list(tensors)
    named = {t.label: t for t in listed}
    if len(named) < len(set(listed)) or any(t.name is None for t in listed if len(listed) > 1):
        fact = f"outputs {[t.label for t in listed]} need unique names"
        raise GraphError(f"{fact}; give a dict of name -> tensor")
    return named


def _reachable(roots: Iterable[Tensor]) -> tuple[Call, ...]:
    """Return the calls that compute these tensors, directly or through others, in the order written."""
    visited: set[Call] = set()
    stack = [t.call for t in roots]
    while stack:
        call = stack.pop()
        if call is None or call in visited:
            continue
        visited.add(call)
        stack += map(attrgetter("call"), call.reads)
    return tuple(sorted(visited, key=attrgetter("serial")))
