"""packtrain beside llama.cpp on the same files: python -m benchmarks.conformance --llama-python PYTHON

Models  small ones of random weights, of every architecture and in several types: logarithms of probabilities of
        llama.cpp's five likeliest tokens at every position, and greedy replies. A variant that is wrong on purpose
        (a file in which one thing is changed) must be seen to differ. `--model FILE` does it with your own.
Types   as llama-quantize writes them, where it stands beside llama-server, see conformance_types.
Adapters  beside their bases and merged into them, random ones and tuned ones, see conformance_adapters.
Converters  llama.cpp's and `packtrain convert` on what transformers saves, see converters.
Texts   random ones, through every vocabulary of `--vocabularies FOLDER`: the same ids.
Chats   through seven chat templates and these vocabularies, `--llama-server PATH`: the same prompts and ids.
Perplexity  of small random models, with llama-perplexity where it stands beside llama-server; see perplexity.
Samplers  by how often they draw each token, see samplers.

PYTHON has llama-cpp-python; llama.cpp works in a process of its own (benchmarks/peer.py). In quantized models it
rounds activations to 8 bits as well, packtrain does not: hence their limit. `--write FILE` keeps the tables, `--parts`
makes some of them. Tables whose programs are not given are left out, and said to be.
Exit code 1 if anything is beyond its limit.
"""

import argparse
import datetime
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import (
    chat_templates,
    conformance_adapters,
    conformance_types,
    converters,
    perplexity,
    samplers,
    server_shapes,
)
from benchmarks.beside import (
    REPLY,
    TOP,
    ask_peer,
    greedy_reply,
    logits,
    logprob_error,
    peer_logprobs,
    run_silently,
)
from packtrain.common.version import __version__
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.models.model_file import ModelFile, open_model
from tests.architectures import CONFIGS, random_model

LIMITS = {
    "F32": 0.01,
    "Q8_0": 0.1,
    "Q4_K_M": math.inf,
}  # of |difference of logarithms of probabilities|
TOKENS, TEXTS, DEEP = 48, 1000, 32
PARTS = (
    "models", "types", "adapters", "tuned", "converters", "texts", "chats", "server", "perplexity", "samplers",
)  # fmt: skip
Values = dict[str, MetadataValue]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Row:
    """A model: how far off it is, how far off wrong ones are, and how much of the replies is equal.

    exact  how far off it is from llama.cpp with the weights unpacked, where more than the limit is allowed
    """

    name: str
    type: str
    off: float
    limit: float
    wrong: dict[str, float]
    equal: int
    exact: float = math.inf

    @property
    def good(self) -> bool:
        replies = self.type != "F32" or self.equal == REPLY
        is_close = self.off <= self.limit or self.exact <= LIMITS["F32"]
        return is_close and replies and all(w > self.limit for w in self.wrong.values())

    def __str__(self) -> str:
        wrong = (
            ", ".join(f"{name} {difference:.2g}" for name, difference in self.wrong.items()) or "-"
        )
        said = "" if self.good else " **no**"
        limit = self.limit if math.isfinite(self.limit) else "none"
        if math.isfinite(self.exact):
            limit = f"{limit}; unpacked {self.exact:.1e} of {LIMITS['F32']}"
        return (
            f"| {self.name} | {self.type} | {self.off:.1e} | {limit}{said} | {wrong}"
            f" | {self.equal} of {REPLY} |"
        )


INTRODUCTION = """# Beside llama.cpp

packtrain {} and llama-cpp-python {}, {}; `make conformance` makes this page: it builds llama.cpp with a C++
compiler, and the table of converters needs `TRANSFORMERS_PYTHON=…`, a Python with transformers (see the Makefile).

Small models of random weights, {tokens} random tokens, KV cache in f32, no flash attention. The difference is that of
logarithms of probabilities of llama.cpp's {top} likeliest tokens, the largest over all positions. In the files that
are wrong on purpose one thing is changed. Replies are greedy. In quantized models llama.cpp rounds activations to 8
bits, packtrain does not: replies may part where two tokens are nearly as likely, and where another expert comes out
first, or in many blocks, more than that changes. So replies must be equal in F32 only, and Q4_K_M has no limit; a model
with experts, {DEEP} blocks, undivided scores, convolutions or scans, whose gates multiply rounded values, that
is beyond Q8_0's must be within F32's of llama.cpp with the same weights unpacked, where nothing is rounded.
Where gelu is the activation, differences in F32 are those of llama.cpp's table of it, which is f16.
"""
HEADING = """| architecture | type | largest difference | limit | wrong on purpose: difference | reply equal |
|---|---|---|---|---|---|"""


# ---- wrong on purpose ----------------------------------------------------------------------------------------


def rope_layout(model: ModelFile, values: Values, arrays: Arrays) -> None:
    """Pairs of a head's rows in the other order."""
    config = model.config
    for name in [*arrays]:
        at = int(name.split(".")[1]) if name.startswith("blk.") else 0
        d, kv = config.width_of(at), config.kv_heads_of(at)
        rows = {"attn_q": config.head_count * d, "attn_k": kv * d, "attn_qkv": config.head_count * d,
                }.get(name.split(".")[-2], 0)  # fmt: skip
        w = arrays[name].copy()
        w[:rows] = (
            w[:rows].reshape(-1, d // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w[:rows].shape)
        )
        arrays[name] = w


def key(name: str, change: Callable[[Any], Any]) -> Callable[[ModelFile, Values, Arrays], None]:
    """Another value of a key of the architecture, where the file has it and others are not refused."""

    def edit(model: ModelFile, values: Values, arrays: Arrays) -> None:
        full_key = f"{values['general.architecture'].value}.{name}"
        if full_key in values and name not in model.config.traits.neutral:
            values[full_key] = MetadataValue(values[full_key].kind, change(values[full_key].value))

    return edit


def fill_tensor(part: str, value: float) -> Callable[[ModelFile, Values, Arrays], None]:
    """A constant instead of a tensor of every block, as if it were not there."""

    def edit(model: ModelFile, values: Values, arrays: Arrays) -> None:
        for name in arrays:
            if f".{name}".endswith(part):
                arrays[name] = np.full_like(arrays[name], value)

    return edit


WRONG: dict[str, Callable[[ModelFile, Values, Arrays], None]] = {
    "rope layout": rope_layout,
    "rope base": key("rope.freq_base", lambda base: base * 1.5),
    "no yarn": key("rope.scaling.type", lambda type: "linear" if type == "yarn" else type),
    "rope factor": key("rope.scaling.factor", lambda factor: factor * 1.5),
    "no rope factors": fill_tensor("rope_freqs.weight", 1.0),
    "window + 1": key("attention.sliding_window", lambda window: window + (window < 8192)),  # llama4 has no other
    "base of windows": key("rope.freq_base_swa", lambda base: base * 1.5),
    "soft cap of scores": key("attn_logit_softcapping", lambda cap: cap / 2),
    "soft cap of logits": key("final_logit_softcapping", lambda cap: cap / 2),
    "temperature": key("attention.temperature_scale", lambda scale: scale * 1.5),
    "scale of scores": key("attention.scale", lambda scale: scale * 1.5),
    "scale of embeddings": key("embedding_scale", lambda scale: scale * 1.5),
    "scale of residuals": key("residual_scale", lambda scale: scale * 1.5),
    "scale of logits": key("logit_scale", lambda scale: scale * 1.5),
    "one expert less": key("expert_used_count", lambda used: used - 1),
    "no bias": fill_tensor("attn_q.bias", 0.0),
    "no bias of norms": fill_tensor("_norm.bias", 0.0),
    "no bias of the head": fill_tensor(".output.bias", 0.0),
    "no positions": fill_tensor("position_embd.weight", 0.0),
    "no norm of heads": fill_tensor("attn_q_norm.weight", 1.0),
    "no norm after": fill_tensor("post_ffw_norm.weight", 1.0),
    "no embeddings of blocks": fill_tensor("inp_gate.weight", 0.0),
    "no mix of streams": fill_tensor("altup_predict_coef.weight", 0.0),
    "no laurel": fill_tensor("laurel_post_norm.weight", 0.0),
    "no scales of blocks": fill_tensor("layer_output_scale.weight", 1.0),
}  # fmt: skip


def altered_variants(model: ModelFile, folder: Path) -> Iterator[tuple[str, ModelFile]]:
    """The model with one thing changed, for each thing that it has."""
    uses_rope = model.config.turned
    for name, edit in ((n, e) for n, e in WRONG.items() if uses_rope or not n.startswith("rope")):
        values, original_arrays = (
            dict(model.gguf.values),
            {n: model.gguf.array(n) for n in model.gguf.entries},
        )
        arrays = dict(original_arrays)
        edit(model, values, arrays)
        is_unchanged = all(np.array_equal(arrays[n], original_arrays[n]) for n in arrays)
        if not is_unchanged or values != model.gguf.values:
            write_gguf(folder / "wrong.gguf", values, arrays)
            yield name, open_model(folder / "wrong.gguf")


# ---- the tables ----------------------------------------------------------------------------------------------


def compare_model(name: str, kind: str, path: Path, python: str, check_wrong: bool = False) -> Row:
    """The row of a model file; `check_wrong` are compared too: those that are wrong."""
    model, folder = open_model(path), path.parent
    rng = random.Random(0)
    tokens = [1, *(rng.randrange(3, model.config.vocab_size) for _ in range(TOKENS - 1))]
    with tempfile.NamedTemporaryFile(suffix=".npy") as scores:
        answer = ask_peer(python, model=str(path), tokens=tokens, count=REPLY, scores=scores.name)
        their_logits, our_reply = np.load(scores.name), greedy_reply(model, tokens)
    equal = next(
        (i for i, (a, b) in enumerate(zip(our_reply, answer["reply"], strict=True)) if a != b),
        REPLY,
    )
    wrong_variants = altered_variants(model, folder) if check_wrong else ()
    wrong_offsets = {
        label: logprob_error(logits(variant, tokens), their_logits)
        for label, variant in wrong_variants
    }
    our_logits = logits(model, tokens)
    row = Row(
        name, kind, logprob_error(our_logits, their_logits), LIMITS[kind], wrong_offsets, equal
    )
    config = model.config
    spreads = config.expert_count or config.block_count >= DEEP or config.conv_width or config.scan
    spreads = spreads or config.traits.unscaled_scores
    if row.off <= row.limit or not spreads:
        return row
    unpacked = folder / "unpacked.gguf"
    run_silently("quantize", path, unpacked, "F32", "--allow-requantize")
    return replace(
        row,
        exact=logprob_error(our_logits, peer_logprobs(python, tokens, {"model": str(unpacked)})),
    )


def kind_of(path: Path) -> str:
    """The row of LIMITS that a file of one's own belongs to."""
    types = {str(e.dtype) for e in GGUF(path).entries.values()}
    return "F32" if types == {"f32"} else "Q8_0" if types <= {"f32", "q8_0"} else "Q4_K_M"


def models(python: str, names: Sequence[str]) -> Iterator[Row]:
    for name in names:
        with tempfile.TemporaryDirectory() as tmp_folder:
            folder = Path(tmp_folder)
            random_model(folder / "F32.gguf", name)
            for kind in LIMITS:
                path = folder / f"{kind}.gguf"
                if kind != "F32":
                    run_silently("quantize", folder / "F32.gguf", path, kind)
                yield compare_model(name, kind, path, python, check_wrong=kind == "F32")


def random_texts(count: int) -> list[str]:
    """Words, numbers, spaces, marks and letters of many scripts, names of special tokens, bytes that pair up oddly."""
    rng, samples = random.Random(0), list[str]()
    ranges = [(32, 127), (160, 591), (880, 1423), (1488, 1900), (2304, 3000), (4352, 4607), (8192, 8704),
              (12288, 12600), (19968, 22000), (44032, 46000), (65024, 65536), (127744, 129535), (0, 32)]  # fmt: skip
    words = ["the", "The", "don't", "I'LL", " ", "  ", "\n", "\n\n ", "\t", "2024", "3.14", "...", "<s>", "</s>",
             "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "▁", "é", "e\u0301", "\u200b", "\ufeff", "\r\n"]  # fmt: skip
    for _ in range(count):
        low, high = rng.choice(ranges)
        parts = [
            rng.choice(words) if rng.random() < 0.5 else chr(rng.randrange(low, high))
            for _ in range(rng.choice((1, 3, 10, 40)))
        ]
        samples.append("".join(p + rng.choice(("", "", " ")) for p in parts if p != "\0"))
    return samples


def vocabularies(python: str, folder: Path) -> Iterator[tuple[bool, str]]:
    """Whether all is equal, and a row of the table, for each file."""
    texts = random_texts(TEXTS)
    for path in sorted(folder.glob("*.gguf")):
        tokenizer, differ = Tokenizer(GGUF(path).metadata), list[str]()
        for special in (False, True):
            their_ids = ask_peer(python, model=str(path), texts=texts, special=special)["ids"]
            differ += [
                text
                for text, ids in zip(texts, their_ids, strict=True)
                if tokenizer.encode(text, special=special) != ids
            ]
        first_difference = f", the first {differ[0]!r}" if differ else ""
        yield not differ, f"| {path.stem} | {2 * len(texts):,} | {len(differ)}{first_difference} |"


TEXT_HEADING = (
    "| vocabulary | texts, special tokens as text and as tokens | different ids |\n|---|---|---|"
)


def parts(args: argparse.Namespace) -> Iterator[tuple[str, str, Iterable[tuple[bool, str]]]]:
    """The tables of a page: a name, what stands above the rows, and for each row whether it is good."""
    python, server, named = args.llama_python, args.llama_server, args.vocabularies
    tools = Path(server or "absent/llama-server").parent
    quantizer, measurer = tools / "llama-quantize", tools / "llama-perplexity"
    if args.model:
        given_rows = (compare_model(path.stem, kind_of(path), path, python) for path in args.model)
        yield "models", HEADING, ((row.good, str(row)) for row in given_rows)
        if args.adapter:
            model_args = (
                args.model[0],
                kind_of(args.model[0]),
                args.adapter,
                args.text.read_text(),
            )
            rows = conformance_adapters.of_ones_own(python, *model_args)
            yield "adapters", conformance_adapters.HEADING, rows
        return
    model_rows = models(python, args.only or list(CONFIGS))
    yield "models", HEADING, ((row.good, str(row)) for row in model_rows)
    if quantizer.exists():
        rows = conformance_types.rows(python, quantizer)
        yield "types", conformance_types.HEADING, rows
    yield "adapters", conformance_adapters.HEADING, conformance_adapters.adapter_rows(python)
    yield "tuned", conformance_adapters.TUNED, conformance_adapters.tuned_rows(python)
    if args.converters:
        yield (
            "converters",
            converters.HEADING,
            converters.rows_from_python(args.converters[0], Path(args.converters[1])),
        )
    if named:
        yield "texts", "\n" + TEXT_HEADING, vocabularies(python, named)
    if named and server:
        yield "chats", "\n" + chat_templates.HEADING, chat_templates.rows(server, named)
    if server and args.served:
        yield "server", "\n" + server_shapes.HEADING, server_shapes.rows(server, args.served)
    if measurer.exists():
        heading = "\n" + perplexity.INTRODUCTION + perplexity.HEADING
        yield "perplexity", heading, perplexity.random_rows(measurer)
    yield "samplers", samplers.HEADING, samplers.rows(python)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--model", type=Path, action="append", help="a model file of your own")
    parser.add_argument("--adapter", type=Path, help="an adapter of your own for that model")
    parser.add_argument("--text", type=Path, help="whose first tokens the adapter is compared at")
    parser.add_argument("--only", action="append", help="this architecture; may be given again")
    parser.add_argument("--vocabularies", type=Path, help="a folder of GGUF files")
    parser.add_argument("--llama-server", help="llama.cpp's, for chat templates")
    parser.add_argument("--served", type=Path, help="a model file for the forms of answers")
    parser.add_argument(
        "--converters",
        nargs=2,
        metavar=("PYTHON", "LLAMA_CPP"),
        help="a Python with transformers, and llama.cpp's folder with its converter",
    )
    parser.add_argument("--parts", help="these tables only, by name: models,types,adapters,…")
    parser.add_argument("--write", type=Path, help="keep the tables in this file")
    args = parser.parse_args()
    if args.adapter and not (args.model and args.text):
        parser.error("--adapter needs --model and --text")
    if args.parts and args.write:
        parser.error("--write keeps whole pages: leave --parts out")
    return args


def main() -> int:
    args = options()
    good, lines = True, list[str]()

    def report_line(line: str, is_good: bool = True) -> None:
        nonlocal good
        good = good and is_good
        lines.append(line)
        print(line, flush=True)

    requested_parts = args.parts.split(",") if args.parts else None
    if not requested_parts:
        version, today = ask_peer(args.llama_python)["version"], datetime.date.today()
        report_line(
            INTRODUCTION.format(__version__, version, today, tokens=TOKENS, top=TOP, DEEP=DEEP)
        )
    tables = {name: (heading, rows) for name, heading, rows in parts(args)}
    if not (requested_parts or args.model) and (
        missing := [name for name in PARTS if name not in tables]
    ):
        print(f"left out, as what they need is not given: {', '.join(missing)}", file=sys.stderr)
    unknown = ", ".join(set(requested_parts or ()) - {*tables})
    if unknown:
        raise SystemExit(
            f"--parts: no table {unknown} with these settings; there are {', '.join(tables)}"
        )
    for heading, rows in (tables[name] for name in requested_parts or tables):
        report_line(heading)
        for is_good, line in rows:
            report_line(line, is_good)
    if args.write:
        args.write.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
