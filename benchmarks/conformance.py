"""packtrain beside llama.cpp on the same files: python -m benchmarks.conformance --llama-python PYTHON

Models  small ones of random weights, of every architecture and in several types: logarithms of probabilities of
        llama.cpp's five likeliest tokens at every position, and greedy replies. A variant that is wrong on purpose
        (a file in which one thing is changed) must be seen to differ. `--model FILE` does it with your own.
Adapters  random ones of rank 4, beside their bases and merged into them: the same likeliest token wherever llama.cpp
        is sure of it, and nearly the same logarithms of probabilities of the tokens that follow.
Texts   random ones, through every vocabulary of `--vocabularies FOLDER`: the same ids.

PYTHON has llama-cpp-python; llama.cpp works in a process of its own (benchmarks/peer.py). In quantized models it
rounds activations to 8 bits as well, packtrain does not: hence their limit. `--write FILE` keeps the tables.
Exit code 1 if anything is beyond its limit.
"""

import argparse
import contextlib
import datetime
import io
import json
import math
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.cli import main as packtrain
from packtrain.generate import Generator
from packtrain.gguf import GGUF, Value, write
from packtrain.models.adapted import adapted, read_scaled
from packtrain.models.file import ModelFile, open_model
from packtrain.tokenizer import Tokenizer
from packtrain.version import __version__
from tests.adapters import RANK, random_adapter
from tests.architectures import CONFIGS, random_model

LIMITS = {
    "F32": 0.01,
    "Q8_0": 0.1,
    "Q4_K_M": math.inf,
}  # of |difference of logarithms of probabilities|
TOP, TOKENS, REPLY = 5, 48, 24
TEXTS = 1000
ADAPTED = ("llama", "qwen2", "gemma2", "phi3", "llama experts")
ADAPTED_LIMITS = {"F32": 0.02, "F16": 0.02, "Q8_0": 0.05, "Q4_K_M": 0.05}
POSITIONS, SURE, SCALE = 256, 0.1, 0.75  # tokens, nats between the two likeliest, of the adapter
Values, Arrays = dict[str, Value], dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Row:
    """A model: how far off it is, how far off wrong ones are, and how much of the replies is equal."""

    name: str
    type: str
    off: float
    limit: float
    wrong: dict[str, float]
    equal: int

    @property
    def good(self) -> bool:
        exact = self.type != "F32" or self.equal == REPLY
        return self.off <= self.limit and exact and all(w > self.limit for w in self.wrong.values())

    def __str__(self) -> str:
        wrong = ", ".join(f"{name} {off:.2g}" for name, off in self.wrong.items()) or "-"
        said = "" if self.good else " **no**"
        limit = self.limit if math.isfinite(self.limit) else "none"
        return (
            f"| {self.name} | {self.type} | {self.off:.1e} | {limit}{said} | {wrong}"
            f" | {self.equal} of {REPLY} |"
        )


INTRODUCTION = """# Beside llama.cpp

packtrain {} and llama-cpp-python {}, {}; `make conformance` makes this page.

Small models of random weights, {tokens} random tokens, KV cache in f32, no flash attention. The difference is that of
logarithms of probabilities of llama.cpp's {top} likeliest tokens, the largest over all positions. In the files that
are wrong on purpose one thing is changed. Replies are greedy. In quantized models llama.cpp rounds activations to 8
bits, packtrain does not: replies may part where two tokens are nearly as likely, and where another expert comes out
first more than that changes. So replies must be equal in F32 only, and Q4_K_M has no limit. gemma's differences in
F32 are those of llama.cpp's table of gelu, which is f16.
"""
HEADING = """| architecture | type | largest difference | limit | wrong on purpose: difference | reply equal |
|---|---|---|---|---|---|"""


# ---- both sides ----------------------------------------------------------------------------------------------


def ask(python: str, **question: Any) -> dict[str, Any]:
    """llama.cpp's answer, see benchmarks/peer.py."""
    command = [python, "-m", "benchmarks.peer"]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def logits(model: ModelFile, tokens: Sequence[int]) -> np.ndarray:
    """At every position, fed one by one; the last row is from all in one, which must not differ."""
    one = Generator.of(model, len(tokens))
    rows = [one.feed([token]).copy() for token in tokens]
    one.forget()
    return np.array([*rows[:-1], one.feed(tokens)])


def reply(model: ModelFile, tokens: Sequence[int]) -> list[int]:
    one, made = Generator.of(model, len(tokens) + REPLY), list[int]()
    found = one.feed(tokens)
    while len(made) < REPLY:
        made.append(int(found.argmax()))
        found = one.feed(made[-1:])
    return made


def logarithms(logits: np.ndarray) -> np.ndarray:
    """Of probabilities."""
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def off(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of logarithms of probabilities of their likeliest tokens."""
    a, b = map(logarithms, (ours, theirs))
    top = np.argsort(-b, -1)[:, :TOP]
    return float(np.abs(np.take_along_axis(a - b, top, -1)).max())


# ---- wrong on purpose ----------------------------------------------------------------------------------------


def rope_layout(model: ModelFile, values: Values, arrays: Arrays) -> None:
    """Pairs of a head's rows in the other order."""
    config = model.config
    d = config.head_width
    for name in [*arrays]:
        rows = {"attn_q": config.head_count * d, "attn_k": config.head_count_kv * d,
                "attn_qkv": config.head_count * d}.get(name.split(".")[-2], 0)  # fmt: skip
        w = arrays[name].copy()
        w[:rows] = (
            w[:rows].reshape(-1, d // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w[:rows].shape)
        )
        arrays[name] = w


def key(name: str, change: Callable[[Any], Any]) -> Callable[[ModelFile, Values, Arrays], None]:
    """Another value of a key of the architecture, where the file has it."""

    def edit(model: ModelFile, values: Values, arrays: Arrays) -> None:
        whole = f"{values['general.architecture'].value}.{name}"
        if whole in values:
            values[whole] = Value(values[whole].kind, change(values[whole].value))

    return edit


def tensor(part: str, value: float) -> Callable[[ModelFile, Values, Arrays], None]:
    """A constant instead of a tensor of every block, as if it were not there."""

    def edit(model: ModelFile, values: Values, arrays: Arrays) -> None:
        for name in arrays:
            if name.endswith(part):
                arrays[name] = np.full_like(arrays[name], value)

    return edit


WRONG: dict[str, Callable[[ModelFile, Values, Arrays], None]] = {
    "rope layout": rope_layout,
    "rope base": key("rope.freq_base", lambda base: base * 1.5),
    "no yarn": key("rope.scaling.type", lambda type: "linear" if type == "yarn" else type),
    "rope factor": key("rope.scaling.factor", lambda factor: factor * 1.5),
    "no rope factors": tensor("rope_freqs.weight", 1.0),
    "window + 1": key("attention.sliding_window", lambda window: window + 1),
    "base of windows": key("rope.freq_base_swa", lambda base: base * 1.5),
    "soft cap of scores": key("attn_logit_softcapping", lambda cap: cap / 2),
    "soft cap of logits": key("final_logit_softcapping", lambda cap: cap / 2),
    "temperature": key("attention.temperature_scale", lambda scale: scale * 1.5),
    "one expert less": key("expert_used_count", lambda used: used - 1),
    "no bias": tensor("attn_q.bias", 0.0),
    "no norm of heads": tensor("attn_q_norm.weight", 1.0),
    "no norm after": tensor("post_ffw_norm.weight", 1.0),
}  # fmt: skip


def wrong(model: ModelFile, folder: Path) -> Iterator[tuple[str, ModelFile]]:
    """The model with one thing changed, for each thing that it has."""
    for name, edit in WRONG.items():
        values, before = (
            dict(model.gguf.values),
            {n: model.gguf.array(n) for n in model.gguf.entries},
        )
        arrays = dict(before)
        edit(model, values, arrays)
        same = all(np.array_equal(arrays[n], before[n]) for n in arrays)
        if not same or values != model.gguf.values:
            write(folder / "wrong.gguf", values, arrays)
            yield name, open_model(folder / "wrong.gguf")


# ---- the tables ----------------------------------------------------------------------------------------------


def compared(name: str, kind: str, path: Path, python: str, others: bool = False) -> Row:
    """The row of a model file; `others` are compared too: those that are wrong."""
    model, folder = open_model(path), path.parent
    rng = random.Random(0)
    tokens = [1, *(rng.randrange(3, model.config.vocab_size) for _ in range(TOKENS - 1))]
    with tempfile.NamedTemporaryFile(suffix=".npy") as scores:
        answer = ask(python, model=str(path), tokens=tokens, count=REPLY, scores=scores.name)
        theirs, written = np.load(scores.name), reply(model, tokens)
    equal = next(
        (i for i, (a, b) in enumerate(zip(written, answer["reply"], strict=True)) if a != b), REPLY
    )
    bad = wrong(model, folder) if others else ()
    seen = {what: off(logits(variant, tokens), theirs) for what, variant in bad}
    return Row(name, kind, off(logits(model, tokens), theirs), LIMITS[kind], seen, equal)


def kind_of(path: Path) -> str:
    """The row of LIMITS that a file of one's own belongs to."""
    types = {str(e.dtype) for e in GGUF(path).entries.values()}
    return "F32" if types == {"f32"} else "Q8_0" if types <= {"f32", "q8_0"} else "Q4_K_M"


def models(python: str, names: Sequence[str]) -> Iterator[Row]:
    for name in names:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            random_model(folder / "F32.gguf", name)
            for kind in LIMITS:
                path = folder / f"{kind}.gguf"
                if kind != "F32":
                    silently("quantize", folder / "F32.gguf", path, kind)
                yield compared(name, kind, path, python, others=kind == "F32")


def silently(*command: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert packtrain([*map(str, command)]) == 0


def adapters(python: str) -> Iterator[tuple[bool, str]]:
    """Whether a row is good, and the row, for each architecture, type, and way to use an adapter."""
    for name, kind in ((name, kind) for name in ADAPTED for kind in ADAPTED_LIMITS):
        with tempfile.TemporaryDirectory() as made:
            base, merged = Path(made) / "base.gguf", Path(made) / "merged.gguf"
            random_model(Path(made) / "f32.gguf", name)
            silently("quantize", Path(made) / "f32.gguf", base, kind)
            model = open_model(base)
            path = random_adapter(Path(made) / "adapter.gguf", model)
            silently("merge", base, f"{path}:{SCALE}", "-o", merged)
            beside = adapted(model, read_scaled((f"{path}:{SCALE}",), model.gguf))
            lora = {"model": str(base), "lora": [path, SCALE]}
            for how, ours, question in (("beside", beside, lora),
                                        ("merged", open_model(merged), {"model": str(merged)})):  # fmt: skip
                yield adapter_row(python, f"| {name} | {kind} | {how}", ours, model, question)


def adapter_row(
    python: str, title: str, ours: ModelFile, base: ModelFile, question: dict[str, Any]
) -> tuple[bool, str]:
    rng = random.Random(1)
    tokens = [1, *(rng.randrange(3, base.config.vocab_size) for _ in range(POSITIONS))]
    theirs = scored(python, tokens[:-1], question)
    found, without = (logarithms(logits(model, tokens[:-1])) for model in (ours, base))
    second, first = np.sort(theirs, -1)[:, -2:].T
    sure = first - second > SURE
    other = sure & (found.argmax(-1) != theirs.argmax(-1))
    at = np.arange(POSITIONS), np.array(tokens[1:])
    mean, unlike = (float(np.abs(x[at] - theirs[at]).mean()) for x in (found, without))
    limit = ADAPTED_LIMITS[title.split(" | ")[1]]
    count, same = f"{other.sum()} of {sure.sum()}", True
    if (
        other.any()
    ):  # then llama.cpp must find so, too, where it need not round activations to 8 bits
        unpacked = f"{question['model']}.f32"
        silently("quantize", question["model"], unpacked, "F32", "--allow-requantize")
        exact = scored(python, tokens[:-1], question | {"model": unpacked})
        same = bool((found.argmax(-1) == exact.argmax(-1))[other].all())
        count += ", as in llama.cpp with the weights unpacked" if same else ""
    good = mean <= limit < unlike and same
    said = "" if good else " **no**"
    return good, f"{title} | {mean:.1e} | {limit}{said} | {unlike:.2g} | {count} |"


def scored(python: str, tokens: Sequence[int], question: dict[str, Any]) -> np.ndarray:
    """Logarithms of llama.cpp's probabilities at every position."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as scores:
        ask(python, **question, tokens=list(tokens), count=0, scores=scores.name)
        return logarithms(np.load(scores.name))


def random_texts(count: int) -> list[str]:
    """Words, numbers, spaces, marks and letters of many scripts, names of special tokens, bytes that pair up oddly."""
    rng, made = random.Random(0), list[str]()
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
        made.append("".join(p + rng.choice(("", "", " ")) for p in parts if p != "\0"))
    return made


def vocabularies(python: str, folder: Path) -> Iterator[tuple[bool, str]]:
    """Whether all is equal, and a row of the table, for each file."""
    texts = random_texts(TEXTS)
    for path in sorted(folder.glob("*.gguf")):
        ours, differ = Tokenizer(GGUF(path).metadata), list[str]()
        for special in (False, True):
            theirs = ask(python, model=str(path), texts=texts, special=special)["ids"]
            differ += [
                text
                for text, ids in zip(texts, theirs, strict=True)
                if ours.encode(text, special=special) != ids
            ]
        first = f", the first {differ[0]!r}" if differ else ""
        yield not differ, f"| {path.stem} | {2 * len(texts):,} | {len(differ)}{first} |"


ADAPTER_HEADING = f"""
Random adapters of rank {RANK} for every matrix of the blocks, experts and routers included, and for embeddings that are
not the head, scale {SCALE}, beside the base and merged into it. The difference is the mean over {POSITIONS} positions
of that of the logarithm of the probability of the token that follows; without the adapter it is as in the column after
the limit. The same token must come out first wherever llama.cpp's two likeliest are more than {SURE} nats apart; where
it does not, llama.cpp must find ours, too, in a file of the same weights as F32, for which it rounds no activations.

| architecture | type | adapter | mean difference | limit | without it | other likeliest token where sure |
|---|---|---|---|---|---|---|"""
TEXT_HEADING = (
    "| vocabulary | texts, special tokens as text and as tokens | different ids |\n|---|---|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--model", type=Path, action="append", help="a model file of your own")
    parser.add_argument("--only", action="append", help="this architecture; may be given again")
    parser.add_argument("--vocabularies", type=Path, help="a folder of GGUF files")
    parser.add_argument("--write", type=Path, help="keep the tables in this file")
    args = parser.parse_args()
    good, lines, python = True, list[str](), args.llama_python

    def say(line: str, fine: bool = True) -> None:
        nonlocal good
        good = good and fine
        lines.append(line)
        print(line, flush=True)

    say(
        INTRODUCTION.format(
            __version__, ask(python)["version"], datetime.date.today(), tokens=TOKENS, top=TOP
        )
    )
    say(HEADING)
    own = (compared(path.stem, kind_of(path), path, python) for path in args.model or ())
    for row in own if args.model else models(python, args.only or list(CONFIGS)):
        say(str(row), row.good)
    if not args.model:
        say(ADAPTER_HEADING)
        for fine, line in adapters(python):
            say(line, fine)
    if args.vocabularies:
        say("\n" + TEXT_HEADING)
        for fine, line in vocabularies(python, args.vocabularies):
            say(line, fine)
    if args.write:
        args.write.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
