"""Two residual streams through a model in lockstep: as it should be, with unmerged adapters or before it is quantized,
and as it is in the file that is written, as far as that has come.

Each block has sites: inputs of its matrices, grouped by equal input. A site yields sums over the tokens of all
batches. The graphs are the model's own; inputs of matrices are found in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packtrain.conversion.calibration.error_feedback import product
from packtrain.dtypes import Dtype, dtype_of, f32, i32
from packtrain.engine import ops
from packtrain.engine.backends import CPU, Target
from packtrain.engine.backends.host import return_freed
from packtrain.engine.executor import Session
from packtrain.engine.graph import Graph
from packtrain.engine.placement import place
from packtrain.engine.tensor import Tensor, input, weight
from packtrain.models import altup, transformer
from packtrain.models.block import block
from packtrain.models.block_weights import Weights
from packtrain.models.model_file import ModelFile

Batch = Mapping[str, np.ndarray]
MERGED = "merged/"  # prefix of leaves of the merged file, so that a session can tell them apart
PRODUCTS = {ops.matmul, ops.matmul_id}


@dataclass(frozen=True, slots=True)
class Site:
    """The input of some matrices of a block: x with the adapter, z as merged.

    expert  for inputs sorted by expert: expert and token of each row; x is then None, because its rows may be in a
            different order
    experts number of experts
    """

    names: tuple[str, ...]
    x: Tensor | None
    z: Tensor
    expert: tuple[Tensor, Tensor] | None = None
    experts: int = 1


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over tokens of a site's input: squares ZᵀZ (n, n), shift (X - Z)ᵀZ (n, n), and the number of tokens."""

    squares: np.ndarray
    shift: np.ndarray | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block in both streams: sites in computed order, its outputs, and keys and values that later blocks have."""

    sites: list[Site]
    x: Tensor
    z: Tensor
    shared: Mapping[str, Tensor]


class Streams:
    """Both streams of some batches, between two blocks.

    adapted  the base with the adapters of its blocks
    merged   mapped matrices of the file that is being written: each is read only after its final values are there
    """

    def __init__(
        self,
        adapted: ModelFile,
        merged: Mapping[str, np.ndarray],
        batches: Sequence[Batch],
        target: Target = CPU,
    ) -> None:
        return_freed()  # matrices of all sizes come and go, and what is kept of them is in no plan
        self.adapted, self.batches, self.target = adapted, batches, target
        self.shape = batches[0]["tokens"].shape
        self.session = Session(target.limits)
        self.session.share(adapted.stored() | {MERGED + n: array for n, array in merged.items()})
        types = {name: dtype_of(array) for name, array in merged.items()}
        self.graphs = Graphs.of(adapted, types, self.shape)
        self.real = [~padding(batch) for batch in batches]
        embed = self._run(self.graphs.embedding())
        both = [embed({n: batch[n] for n in embed.inputs}) for batch in batches]
        self.x, self.z = ([one[name] for one in both] for name in ("x", "z"))
        self.shared = [dict[str, np.ndarray]() for _ in batches]

    def _run(self, graph: Graph):  # type: ignore[no-untyped-def]
        return self.session.executor(place(graph, self.target))

    def block(self, i: int) -> Block:
        return self.graphs.block(i)

    def moments(self, site: Site, columns: slice, expert: int | None = None) -> Moments:
        """Sums over all tokens, or those of one expert, of some columns."""
        outputs = {"z": site.z} | ({} if site.x is None else {"x": site.x})
        if site.expert is not None:
            outputs |= dict(zip(("expert", "token"), site.expert, strict=True))
        run, n = self._run(Graph(outputs)), columns.stop - columns.start
        squares = np.zeros((n, n), np.float32)
        shift = None if site.x is None else np.zeros((n, n), np.float32)
        count = 0
        for at in range(len(self.batches)):
            got = run(self._inputs(run, at))
            z, counts = (
                got["z"].reshape(-1, site.z.shape[-1])[:, columns],
                self.real[at].reshape(-1),
            )
            if site.expert is not None:
                counts = counts[got["token"]] & (got["expert"] == expert)
            z *= counts[:, None]
            product(z.T, z, squares)
            if shift is not None:
                x = got["x"].reshape(-1, site.z.shape[-1])[:, columns]
                x *= counts[:, None]
                x -= z
                product(x.T, z, shift)
            count += int(counts.sum())
        return Moments(squares, shift, count)

    def pass_by(self, blocks: int) -> None:
        """Advance through the first blocks, in which nothing is merged: both streams are equal there."""
        if not blocks:
            return
        for i in range(blocks):
            block = self.block(i)
            own = {name: t for name, t in block.shared.items() if name.startswith("x")}
            run = self._run(Graph({"x": block.x, **own}))
            for at in range(len(self.batches)):
                got = run(self._inputs(run, at))
                self.x[at] = got["x"]
                self.shared[at] |= {f"{n}{name[1:]}": got[name] for name in own for n in "xz"}
        for x, z in zip(self.x, self.z, strict=True):
            z[...] = x

    def advance(self, block: Block) -> None:
        """Advance through a block."""
        run = self._run(Graph({"x": block.x, "z": block.z, **block.shared}))
        for at in range(len(self.batches)):
            got = run(self._inputs(run, at))
            self.x[at], self.z[at] = got["x"], got["z"]
            self.shared[at] |= {name: got[name] for name in block.shared}

    def through(self, graph: Graph) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        """The outputs of a graph of a block for each batch, by its index."""
        run = self._run(graph)
        for at in range(len(self.batches)):
            yield at, run(self._inputs(run, at))

    def _inputs(self, run, at: int) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
        there = {"x": self.x[at], "z": self.z[at], **self.shared[at], **self.batches[at]}
        return {name: there[name] for name in run.inputs}


def padding(batch: Batch) -> np.ndarray:
    """Where rows are padding, (B, T)."""
    return np.asarray((batch["tokens"] == 0) & (batch["targets"] == 0))


# ---- graphs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Graphs:
    """The graphs of both streams for batches of one shape; inputs `x` and `z` (B, T, C), `pos` and `seq`.

    own  names of leaves that only the merged stream has
    """

    adapted: ModelFile
    x: Weights
    z: Weights
    own: Mapping[Tensor, str]
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls, adapted: ModelFile, merged: Mapping[str, Dtype], shape: tuple[int, ...]
    ) -> "Graphs":
        """Graphs in which one of the streams reads these matrices from the merged file."""
        x = transformer.weights(adapted.config, adapted.types())
        bare = {name: leaf for name, leaf in x.items() if name not in adapted.added}
        changed = {n: weight(MERGED + n, x[n].shape, dtype) for n, dtype in merged.items()}
        own = {leaf: name for name, leaf in changed.items()}
        return cls(adapted, x, bare | changed, own, shape)

    def embedding(self) -> Graph:
        tokens, pos = (input(name, self.shape, i32) for name in ("tokens", "pos"))
        config, ends = self.adapted.config, {"x": self.x, "z": self.z}
        first = {n: transformer.embedding(config, w, tokens, pos) for n, w in ends.items()}
        if config.traits.streams:
            first = {n: altup.spread(config, ends[n], h) for n, h in first.items()}
        return Graph(first)

    def block(self, i: int) -> Block:
        config, time = self.adapted.config, self.shape[-1]
        tokens, pos, seq = (input(name, self.shape, i32) for name in ("tokens", "pos", "seq"))
        tables = transformer.rope_tables(config, self.x, pos, time)
        source, out, shared = config.source_of(i), dict[str, Tensor](), dict[str, Tensor]()
        for name, w in (("x", self.x), ("z", self.z)):
            h, made = input(name, (*self.shape, *config.stream_shape), f32), {}
            heads = (*self.shape, config.kv_heads_of(source), config.width_of(source))
            k, v = (f"{name}.{part}.{source}" for part in "kv")
            if source != i:
                made[source] = input(k, heads, f32), input(v, heads, f32)
            own = None
            if config.embedding_length_per_layer:
                first = transformer.embedding(config, w, tokens, pos)
                own = transformer.embeddings(config, w, tokens, first)
            mixer = transformer.in_batch(config, pos, seq, made)
            out[name] = block(config, w, i, h, tables, mixer, own)
            if any(config.source_of(j) == i for j in range(i + 1, config.block_count)):
                shared |= dict(zip((k, v), made[i], strict=True))
        sites = _sites(out["x"], out["z"], self.own, config.expert_count)
        return Block(sites, out["x"], out["z"], shared)


def _sites(x: Tensor, z: Tensor, own: Mapping[Tensor, str], experts: int) -> list[Site]:
    """The inputs of the merged stream's own matrices, in order."""
    beside = {leaf.label: source for leaf, source, _ in _reads(x)}
    found: dict[Tensor, tuple[list[str], Tensor | None, tuple[Tensor, Tensor] | None]] = {}
    for leaf, source, expert in _reads(z):
        if leaf not in own:
            continue
        name, its = own[leaf], None
        if expert is not None:
            call = source.call
            # rows by token: those of all tokens work as well
            if call is not None and call.op is ops.get_rows:
                source = call.reads[0]
                other = beside[name].call
                x_source = None if other is None else other.reads[0]
            else:
                x_source, its = None, expert
        else:
            x_source = beside[name]
        names, _, _ = found.setdefault(source, ([], x_source, its))
        if name not in names:
            names.append(name)
    return [Site(tuple(names), a, z, its, experts) for z, (names, a, its) in found.items()]


def _reads(end: Tensor) -> list[tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]]:
    """For each product with a stored matrix: the matrix, its input, and for experts whose row is whose."""
    found, tokens = [], None
    for call in Graph({"end": end}).calls:
        if call.op is ops.group_rows:
            tokens = call.results[0]
        if call.op in PRODUCTS and call.reads[1].base.kind == "weight":
            expert = None
            if call.op is ops.matmul_id:
                assert tokens is not None
                expert = call.reads[2], tokens
            found.append((call.reads[1].base, call.reads[0], expert))
    return found
