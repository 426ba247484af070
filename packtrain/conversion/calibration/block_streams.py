"""Runs two residual streams through a model in lockstep, to compare exact and rounded matrices.

Stream x is exact: with unmerged adapters, or before quantization. Stream z reads the file that is being written.
Each block has sites: inputs of its matrices, grouped by equal input. A site yields sums over the tokens of all
batches. The graphs are the model's own; inputs of matrices are found in them."""

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
from packtrain.models.block import transformer_block
from packtrain.models.lora_weights import Weights
from packtrain.models.model_file import ModelFile

TokenBatch = Mapping[str, np.ndarray]
MERGED = "merged/"  # prefix of leaves of the merged file, so that a session can tell them apart
MATMUL_OPS = {ops.matmul, ops.matmul_id}


@dataclass(frozen=True, slots=True)
class MatrixInput:
    """The input, equal for some matrices of a block: x (None: not known) in the exact stream, z in the merged one."""

    matrix_names: tuple[str, ...]
    x: Tensor | None
    z: Tensor
    # for inputs sorted by expert: expert and token of each row; x is then None, because its rows may be in another
    # order
    expert: tuple[Tensor, Tensor] | None = None
    experts: int = 1  # number of experts


@dataclass(frozen=True, slots=True)
class InputMoments:
    """Sums over tokens of a site's input: ZᵀZ (n, n), (X - Z)ᵀZ (n, n) or None without X, and how many tokens."""

    squares: np.ndarray
    shift: np.ndarray | None
    tokens: int


@dataclass(frozen=True, slots=True)
class StreamBlock:
    """A block in both streams: sites in computed order, its outputs, and keys and values that later blocks share."""

    matrix_inputs: list[MatrixInput]
    x: Tensor
    z: Tensor
    shared: Mapping[str, Tensor]


class StreamPair:
    """The residual streams of all batches, exact (x) and merged (z), which advance through a model block by block.

    adapted  the model with unmerged adapters of its blocks
    merged   matrices mapped from the file that is being written: each is read only after its final values are there
    """

    def __init__(
        self, adapted: ModelFile, merged: Mapping[str, np.ndarray], batches: Sequence[TokenBatch], target: Target = CPU,
    ) -> None:  # fmt: skip
        return_freed()  # matrices of all sizes come and go, and no plan counts memory that the heap keeps
        self.adapted, self.batches, self.target = adapted, batches, target
        self.shape = batches[0]["tokens"].shape
        self.session = Session(target.limits)
        self.session.share(adapted.stored() | {MERGED + n: array for n, array in merged.items()})
        types = {name: dtype_of(array) for name, array in merged.items()}
        self.stream_graphs = StreamGraphs.for_types(adapted, types, self.shape)
        self.real_masks = [~padding_mask(batch) for batch in batches]
        embed = self._executor(self.stream_graphs.embedding())
        embedded = [embed({n: batch[n] for n in embed.inputs}) for batch in batches]
        self.x, self.z = ([embeddings[name] for embeddings in embedded] for name in ("x", "z"))
        self.shared = [dict[str, np.ndarray]() for _ in batches]

    def _executor(self, graph: Graph):  # type: ignore[no-untyped-def]
        return self.session.executor(place(graph, self.target))

    def block(self, i: int) -> StreamBlock:
        return self.stream_graphs.build_block(i)

    def moments(self, site: MatrixInput, columns: slice, expert: int | None = None) -> InputMoments:
        """Sum ZᵀZ and (X - Z)ᵀZ over all tokens but padding, or over those of one `expert`, for `columns` of the input
        `site`: X (tokens, n) with exact matrices, Z with merged ones. Without site.x the shift is None."""
        outputs = {"z": site.z} | ({} if site.x is None else {"x": site.x})
        if site.expert is not None:
            outputs |= dict(zip(("expert", "token"), site.expert, strict=True))
        n = columns.stop - columns.start
        squares = np.zeros((n, n), np.float32)
        shift = None if site.x is None else np.zeros((n, n), np.float32)
        num_tokens = 0
        for batch_index, run_outputs in self.run_batches(Graph(outputs)):
            z = run_outputs["z"].reshape(-1, site.z.shape[-1])[:, columns]
            token_mask = self.real_masks[batch_index].reshape(-1)
            if site.expert is not None:
                token_mask = token_mask[run_outputs["token"]] & (run_outputs["expert"] == expert)
            z *= token_mask[:, None]
            product(z.T, z, squares)
            if shift is not None:
                x = run_outputs["x"].reshape(-1, site.z.shape[-1])[:, columns]
                x *= token_mask[:, None]
                x -= z
                product(x.T, z, shift)
            num_tokens += int(token_mask.sum())
        return InputMoments(squares, shift, num_tokens)

    def skip_blocks(self, blocks: int) -> None:
        """Advance both residual streams through the first blocks, in which nothing is merged: there they are equal."""
        if not blocks:
            return
        for i in range(blocks):
            block = self.block(i)
            shared_x = {name: t for name, t in block.shared.items() if name.startswith("x")}
            for batch_index, outputs in self.run_batches(Graph({"x": block.x, **shared_x})):
                self.x[batch_index] = outputs["x"]
                self.shared[batch_index] |= {
                    f"{n}{name[1:]}": outputs[name] for name in shared_x for n in "xz"
                }
        for x, z in zip(self.x, self.z, strict=True):
            z[...] = x

    def advance_through(self, block: StreamBlock) -> None:
        """Run a block on all batches: its outputs x and z are the next block's inputs."""
        graph = Graph({"x": block.x, "z": block.z, **block.shared})
        for batch_index, outputs in self.run_batches(graph):
            self.x[batch_index], self.z[batch_index] = outputs["x"], outputs["z"]
            self.shared[batch_index] |= {name: outputs[name] for name in block.shared}

    def run_batches(self, graph: Graph) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        """Run a block's graph on each batch, from its x and z so far; yield (index of the batch, outputs by name)."""
        executor = self._executor(graph)
        for i, batch in enumerate(self.batches):
            available = {"x": self.x[i], "z": self.z[i], **self.shared[i], **batch}
            yield i, executor({name: available[name] for name in executor.inputs})


def padding_mask(batch: TokenBatch) -> np.ndarray:
    """Return a bool mask (B, T), True where a row has padding."""
    return np.asarray((batch["tokens"] == 0) & (batch["targets"] == 0))


# ---- graphs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StreamGraphs:
    """Builds the graphs of both streams for batches of one shape; inputs are `x` and `z` (B, T, C), `pos` and `seq`."""

    adapted: ModelFile
    x: Weights
    z: Weights
    merged_names: Mapping[Tensor, str]  # names of the leaves that only the merged stream has
    shape: tuple[int, ...]

    @classmethod
    def for_types(
        cls, adapted: ModelFile, merged: Mapping[str, Dtype], shape: tuple[int, ...]
    ) -> "StreamGraphs":
        """Return builders of graphs for the model with unmerged adapters (stream x), and for the file in which they are
        merged (stream z), whose matrices have the types `merged`; `shape`: (rows, time) of a batch."""
        x = transformer.weights(adapted.config, adapted.matrix_dtypes())
        unmerged_leaves = {n: leaf for n, leaf in x.items() if n not in adapted.adapter_values}
        merged_leaves = {n: weight(MERGED + n, x[n].shape, dtype) for n, dtype in merged.items()}
        merged_names = {leaf: name for name, leaf in merged_leaves.items()}
        return cls(adapted, x, unmerged_leaves | merged_leaves, merged_names, shape)

    def embedding(self) -> Graph:
        """Build the graph that embeds a batch's tokens in both streams, exact (x) and merged (z)."""
        tokens, pos = (input(name, self.shape, i32) for name in ("tokens", "pos"))
        config, streams = self.adapted.config, {"x": self.x, "z": self.z}
        first = {n: transformer.embedding(config, w, tokens, pos) for n, w in streams.items()}
        if config.traits.num_streams:
            first = {n: altup.spread(config, streams[n], h) for n, h in first.items()}
        return Graph(first)

    def build_block(self, i: int) -> StreamBlock:
        """Build block i in both streams, exact (x) and merged (z), and find the inputs of its matrices."""
        config, seq_len = self.adapted.config, self.shape[-1]
        tokens, pos, seq = (input(name, self.shape, i32) for name in ("tokens", "pos", "seq"))
        tables = transformer.make_rope_tables(config, self.x, pos, seq_len)
        source, outputs, shared_kv = config.source_of(i), dict[str, Tensor](), dict[str, Tensor]()
        for name, w in (("x", self.x), ("z", self.z)):
            h, kv_by_source = input(name, (*self.shape, *config.stream_shape), f32), {}
            kv_shape = (*self.shape, config.kv_heads_of(source), config.width_of(source))
            k, v = (f"{name}.{kv_part}.{source}" for kv_part in "kv")
            if source != i:
                kv_by_source[source] = input(k, kv_shape, f32), input(v, kv_shape, f32)
            layer_embeddings = None
            if config.embedding_length_per_layer:
                token_embeddings = transformer.embedding(config, w, tokens, pos)
                layer_embeddings = transformer.layer_embeddings(config, w, tokens, token_embeddings)
            mixer = transformer.batch_mixer(config, pos, seq, kv_by_source)
            outputs[name] = transformer_block(config, w, i, h, tables, mixer, layer_embeddings)
            if any(config.source_of(j) == i for j in range(i + 1, config.block_count)):
                shared_kv |= dict(zip((k, v), kv_by_source[i], strict=True))
        matrix_inputs = _sites(outputs["x"], outputs["z"], self.merged_names, config.expert_count)
        return StreamBlock(matrix_inputs, outputs["x"], outputs["z"], shared_kv)


def _sites(x: Tensor, z: Tensor, merged: Mapping[Tensor, str], experts: int) -> list[MatrixInput]:
    """Find, in order, the inputs of matrices `merged` (leaf: name) on which a block's z depends, and their x."""
    x_sources = {leaf.label: source for leaf, source, _ in _matrix_reads(x)}
    sites: dict[Tensor, tuple[list[str], Tensor | None, tuple[Tensor, Tensor] | None]] = {}
    for leaf, source, expert in _matrix_reads(z):
        if leaf not in merged:
            continue
        name, expert_rows = merged[leaf], None
        if expert is not None:
            call = source.call
            # rows are gathered by token: the input of all tokens serves as well
            if call is not None and call.op is ops.get_rows:
                source = call.reads[0]
                x_call = x_sources[name].call
                x_source = None if x_call is None else x_call.reads[0]
            else:
                x_source, expert_rows = None, expert
        else:
            x_source = x_sources[name]
        names, _, _ = sites.setdefault(source, ([], x_source, expert_rows))
        if name not in names:
            names.append(name)
    return [MatrixInput(tuple(names), x, z, rows, experts) for z, (names, x, rows) in sites.items()]


def _matrix_reads(output: Tensor) -> list[tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]]:
    """Return for each product with a stored matrix: (matrix, input, (each input row's expert, its token) or None)."""
    matrix_reads, tokens = [], None
    for call in Graph({"end": output}).calls:
        if call.op is ops.group_rows:
            tokens = call.results[0]
        if call.op in MATMUL_OPS and call.reads[1].base.kind == "weight":
            expert = None
            if call.op is ops.matmul_id:
                assert tokens is not None
                expert = call.reads[2], tokens
            matrix_reads.append((call.reads[1].base, call.reads[0], expert))
    return matrix_reads
