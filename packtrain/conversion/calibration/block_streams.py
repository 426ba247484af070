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
        embedded = [embed({n: batch[n] for n in embed.inputs}) for batch in batches]
        self.x, self.z = ([embeddings[name] for embeddings in embedded] for name in ("x", "z"))
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
            run_outputs = run(self._inputs(run, at))
            z = run_outputs["z"].reshape(-1, site.z.shape[-1])[:, columns]
            counts = self.real[at].reshape(-1)
            if site.expert is not None:
                counts = counts[run_outputs["token"]] & (run_outputs["expert"] == expert)
            z *= counts[:, None]
            product(z.T, z, squares)
            if shift is not None:
                x = run_outputs["x"].reshape(-1, site.z.shape[-1])[:, columns]
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
            shared_x = {name: t for name, t in block.shared.items() if name.startswith("x")}
            run = self._run(Graph({"x": block.x, **shared_x}))
            for at in range(len(self.batches)):
                outputs = run(self._inputs(run, at))
                self.x[at] = outputs["x"]
                self.shared[at] |= {
                    f"{n}{name[1:]}": outputs[name] for name in shared_x for n in "xz"
                }
        for x, z in zip(self.x, self.z, strict=True):
            z[...] = x

    def advance(self, block: Block) -> None:
        """Advance through a block."""
        run = self._run(Graph({"x": block.x, "z": block.z, **block.shared}))
        for at in range(len(self.batches)):
            outputs = run(self._inputs(run, at))
            self.x[at], self.z[at] = outputs["x"], outputs["z"]
            self.shared[at] |= {name: outputs[name] for name in block.shared}

    def through(self, graph: Graph) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        """The outputs of a graph of a block for each batch, by its index."""
        run = self._run(graph)
        for at in range(len(self.batches)):
            yield at, run(self._inputs(run, at))

    def _inputs(self, run, at: int) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
        available = {"x": self.x[at], "z": self.z[at], **self.shared[at], **self.batches[at]}
        return {name: available[name] for name in run.inputs}


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
        base_leaves = {name: leaf for name, leaf in x.items() if name not in adapted.added}
        changed = {n: weight(MERGED + n, x[n].shape, dtype) for n, dtype in merged.items()}
        merged_names = {leaf: name for name, leaf in changed.items()}
        return cls(adapted, x, base_leaves | changed, merged_names, shape)

    def embedding(self) -> Graph:
        tokens, pos = (input(name, self.shape, i32) for name in ("tokens", "pos"))
        config, weights_by_stream = self.adapted.config, {"x": self.x, "z": self.z}
        first = {
            n: transformer.embedding(config, w, tokens, pos) for n, w in weights_by_stream.items()
        }
        if config.traits.streams:
            first = {n: altup.spread(config, weights_by_stream[n], h) for n, h in first.items()}
        return Graph(first)

    def block(self, i: int) -> Block:
        config, time = self.adapted.config, self.shape[-1]
        tokens, pos, seq = (input(name, self.shape, i32) for name in ("tokens", "pos", "seq"))
        tables = transformer.rope_tables(config, self.x, pos, time)
        source, out, shared = config.source_of(i), dict[str, Tensor](), dict[str, Tensor]()
        for name, w in (("x", self.x), ("z", self.z)):
            h, kv_by_source = input(name, (*self.shape, *config.stream_shape), f32), {}
            heads = (*self.shape, config.kv_heads_of(source), config.width_of(source))
            k, v = (f"{name}.{part}.{source}" for part in "kv")
            if source != i:
                kv_by_source[source] = input(k, heads, f32), input(v, heads, f32)
            layer_embeddings = None
            if config.embedding_length_per_layer:
                first = transformer.embedding(config, w, tokens, pos)
                layer_embeddings = transformer.embeddings(config, w, tokens, first)
            mixer = transformer.in_batch(config, pos, seq, kv_by_source)
            out[name] = block(config, w, i, h, tables, mixer, layer_embeddings)
            if any(config.source_of(j) == i for j in range(i + 1, config.block_count)):
                shared |= dict(zip((k, v), kv_by_source[i], strict=True))
        sites = _sites(out["x"], out["z"], self.own, config.expert_count)
        return Block(sites, out["x"], out["z"], shared)


def _sites(x: Tensor, z: Tensor, merged_names: Mapping[Tensor, str], experts: int) -> list[Site]:
    """The inputs of the merged stream's own matrices, in order."""
    x_sources = {leaf.label: source for leaf, source, _ in _reads(x)}
    sites_by_source: dict[
        Tensor, tuple[list[str], Tensor | None, tuple[Tensor, Tensor] | None]
    ] = {}
    for leaf, source, expert in _reads(z):
        if leaf not in merged_names:
            continue
        name, expert_rows = merged_names[leaf], None
        if expert is not None:
            call = source.call
            # rows by token: those of all tokens work as well
            if call is not None and call.op is ops.get_rows:
                source = call.reads[0]
                x_call = x_sources[name].call
                x_source = None if x_call is None else x_call.reads[0]
            else:
                x_source, expert_rows = None, expert
        else:
            x_source = x_sources[name]
        names, _, _ = sites_by_source.setdefault(source, ([], x_source, expert_rows))
        if name not in names:
            names.append(name)
    return [
        Site(tuple(names), a, z, expert_rows, experts)
        for z, (names, a, expert_rows) in sites_by_source.items()
    ]


def _reads(end: Tensor) -> list[tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]]:
    """For each product with a stored matrix: the matrix, its input, and for experts whose row is whose."""
    reads, tokens = [], None
    for call in Graph({"end": end}).calls:
        if call.op is ops.group_rows:
            tokens = call.results[0]
        if call.op in PRODUCTS and call.reads[1].base.kind == "weight":
            expert = None
            if call.op is ops.matmul_id:
                assert tokens is not None
                expert = call.reads[2], tokens
            reads.append((call.reads[1].base, call.reads[0], expert))
    return reads
