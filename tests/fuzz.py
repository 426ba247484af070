"""Hostile GGUF files by seed: a valid file is taken apart, changed where it hurts, and put together again.

`Draft.of(path)` takes a file apart, `hostile(draft, seed)` gives the bytes of a changed one, `judged(use, path)` says
what became of it. A changed file may be used or refused, in one printable line; all else is a `Fault`: any other
error, a warning, more memory than its size class, or more time than `SECONDS`.
"""

import random
import resource
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from packtrain.common.errors import LONGEST, InputError
from packtrain.gguf import GGUF
from packtrain.gguf.gguf_format import DTYPE_BY_NUMBER, KINDS, NUMPY_CODES

SECONDS = 10.0
STRING, ARRAY = KINDS.index("string"), KINDS.index("array")
NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1,
           2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63))  # fmt: skip
REALS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-45,
    1e-30,
    1e9,
    3e38,
    float("nan"),
    float("inf"),
    -float("inf"),
)
TEXTS = (b"", b" ", b"llama", b"gpt2", b"qwen2", b"gemma3", b"none", b"linear", b"yarn", b"\xff\xfe", b"\x1b[2J\r\n",
         b"<s>", b"<0x00>", b"<0xZZ>", "\u2581".encode(), "\u00e9".encode()[:1], b"a" * 70, b"x" * 5000, b"a b", b"\0",
         b"{{ messages }}", b"{% for x in range(10**9) %}{% endfor %}", b"{{ ''.__class__ }}", b"{{ 'a' * 10**9 }}",
         b"{% if %}", b"{{" * 900)  # fmt: skip
KEYS = ("general.alignment", "general.architecture", "general.type", "split.count", "split.no", "split.tensors.count",
        "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.precompiled_charsmap",
        "tokenizer.chat_template")  # fmt: skip
MODEL_KEYS = ("expert_count", "expert_used_count", "rope.scaling.type", "rope.scaling.factor", "rope.dimension_count",
              "rope.freq_base", "attention.head_count_kv", "attention.key_length", "attention.value_length",
              "attention.sliding_window", "attn_logit_softcapping", "attention.scale", "vocab_size")  # fmt: skip


class Fault(Exception):
    """What a hostile file must not bring about."""


def encode_value(kind: str, value: Any) -> bytes:
    """A metadata value as in a file; whole numbers wrap around."""
    if isinstance(value, list):
        body = b"".join(encode_value(kind, element)[4:] for element in value)
        return struct.pack("<IIQ", ARRAY, KINDS.index(kind), len(value)) + body
    if kind == "string":
        return struct.pack("<IQ", STRING, len(value)) + value
    dtype = np.dtype(NUMPY_CODES[kind])
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            body = np.asarray(value, dtype).tobytes()
    else:
        body = (int(value) % (1 << 8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little")
    return struct.pack("<I", KINDS.index(kind)) + body


def to_python(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@dataclass
class Draft:
    """A file in its pieces: (key, value) and (name, ggml shape, type, offset) as they will be written, and the data."""

    values: dict[str, Any]
    pairs: list[tuple[bytes, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes
    alignment: int = 32
    announced: tuple[int, int] = (0, 0)  # more tensors and pairs than there are

    @classmethod
    def of(cls, path: Path) -> "Draft":
        gguf, raw = GGUF(path), path.read_bytes()
        numbers = {dtype: number for number, dtype in DTYPE_BY_NUMBER.items()}
        start = min((e.offset for e in gguf.entries.values()), default=len(raw))
        values = {key: (value.kind, to_python(value.value)) for key, value in gguf.values.items()}
        values = {
            k: (kind, v.encode() if isinstance(v, str) else v) for k, (kind, v) in values.items()
        }
        tensors = [
            (e.name.encode(), list(e.shape[::-1]), numbers[e.dtype], e.offset - start)
            for e in gguf.entries.values()
        ]
        pairs = [(key.encode(), encode_value(*value)) for key, value in values.items()]
        return cls(values, pairs, tensors, raw[start:])

    def encode(self) -> bytearray:
        tensors, pairs = (
            (len(listed) + count_delta) % 2**64
            for listed, count_delta in zip((self.tensors, self.pairs), self.announced, strict=True)
        )
        encoded = bytearray(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs))
        for key, value in self.pairs:
            encoded += struct.pack("<Q", len(key)) + key + value
        for name, shape, number, offset in self.tensors:
            encoded += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
            encoded += b"".join(struct.pack("<Q", axis % 2**64) for axis in shape)
            encoded += struct.pack("<IQ", number % 2**32, offset % 2**64)
        return encoded + bytes(-len(encoded) % self.alignment) + self.data


# ---- changes to the pieces ---------------------------------------------------------------------------------------

Rng = random.Random


def any_value(rng: Rng) -> tuple[str, Any]:
    """A value of any kind, often absurd."""
    kind = rng.choice([kind for kind in KINDS if kind != "array"])
    pool = {"string": TEXTS, "f32": REALS, "f64": REALS}.get(kind, NUMBERS)
    if rng.random() < 0.25:
        return kind, [rng.choice(pool) for _ in range(rng.choice((0, 1, 2, 5, 300)))]
    return kind, rng.choice(pool)


def nearby_number(rng: Rng, number: int) -> int:
    """A number that a count, size or offset could be mistaken for."""
    by = rng.choice((1, -1, 8, 32, -32, 256))
    return rng.choice((number + by, number * 2, number // 2, -number, rng.choice(NUMBERS)))


def change_value(rng: Rng, draft: Draft) -> None:
    i = rng.randrange(len(draft.pairs))
    draft.pairs[i] = (draft.pairs[i][0], encode_value(*any_value(rng)))


def nudge_value(rng: Rng, draft: Draft) -> None:
    """The right kind, another number, text or element."""
    key = rng.choice(list(draft.values))
    kind, value = draft.values[key]
    among = {"string": TEXTS, "f32": REALS, "f64": REALS}.get(kind, NUMBERS)
    if isinstance(value, list):
        value = list(value)
        for _ in range(rng.choice((1, 1, 3))):
            if value:
                value[rng.randrange(len(value))] = rng.choice((*among[:], rng.choice(value)))
        value = rng.choice((value, value, value[: len(value) // 2], value * 2, []))
    elif isinstance(value, bool) or not isinstance(value, int):
        value = rng.choice(among)
    else:
        value = nearby_number(rng, value)
    at = next((i for i, pair in enumerate(draft.pairs) if pair[0] == key.encode()), 0)
    draft.pairs[at] = (key.encode(), encode_value(kind, value))


def add_value(rng: Rng, draft: Draft) -> None:
    architecture = to_python(draft.values.get("general.architecture", ("string", b"llama")))[
        1
    ].decode()
    key = rng.choice((rng.choice(KEYS), f"{architecture}.{rng.choice(MODEL_KEYS)}"))
    draft.pairs.insert(
        rng.randrange(len(draft.pairs) + 1), (key.encode(), encode_value(*any_value(rng)))
    )


def drop_value(rng: Rng, draft: Draft) -> None:
    del draft.pairs[rng.randrange(len(draft.pairs))]


def twice_value(rng: Rng, draft: Draft) -> None:
    draft.pairs.append(rng.choice(draft.pairs))


def swap_values(rng: Rng, draft: Draft) -> None:
    (a, x), (b, y) = rng.sample(draft.pairs, 2) if len(draft.pairs) > 1 else draft.pairs * 2
    draft.pairs = [(k, {a: y, b: x}.get(k, v)) for k, v in draft.pairs]


def change_key(rng: Rng, draft: Draft) -> None:
    i = rng.randrange(len(draft.pairs))
    draft.pairs[i] = (rng.choice(TEXTS), draft.pairs[i][1])


def change_tensor(rng: Rng, draft: Draft) -> None:
    i = rng.randrange(len(draft.tensors))
    name, shape, number, offset = draft.tensors[i]
    mutation = rng.randrange(6)
    if mutation == 0:
        name = rng.choice((rng.choice(TEXTS), rng.choice(draft.tensors)[0]))
    elif mutation == 1 and shape:
        shape[rng.randrange(len(shape))] = nearby_number(rng, rng.choice(shape))
    elif mutation == 2:
        shape = rng.choice(
            ([], shape[::-1], [*shape, 1], [1, *shape], [rng.choice(NUMBERS)] * 4, shape * 3)
        )
    elif mutation == 3:
        number = rng.choice((*DTYPE_BY_NUMBER, *NUMBERS))
    else:
        offset = rng.choice((nearby_number(rng, offset), rng.choice(draft.tensors)[3]))
    draft.tensors[i] = (name, shape, number, offset)


def drop_tensor(rng: Rng, draft: Draft) -> None:
    if len(draft.tensors) > 1:
        del draft.tensors[rng.randrange(len(draft.tensors))]


def twice_tensor(rng: Rng, draft: Draft) -> None:
    name, *rest = rng.choice(draft.tensors)
    draft.tensors.append((rng.choice((name, name + b"2", b"blk.9.attn_q.weight")), *rest))  # type: ignore[arg-type]


def swap_tensors(rng: Rng, draft: Draft) -> None:
    i, j = (rng.randrange(len(draft.tensors)) for _ in range(2))
    (a, *x), (b, *y) = draft.tensors[i], draft.tensors[j]
    draft.tensors[i], draft.tensors[j] = (a, *y), (b, *x)  # type: ignore[assignment]


def change_counts(rng: Rng, draft: Draft) -> None:
    draft.announced = (rng.choice((0, 1, -1, *NUMBERS)), rng.choice((0, 1, -1, *NUMBERS)))


def change_weights(rng: Rng, draft: Draft) -> None:
    """Values that are not finite or are huge, where f32 or a block's scale stands."""
    data = bytearray(draft.data)
    for _ in range(rng.choice((1, 8, 200))):
        at = rng.randrange(max(len(data) // 4, 1)) * 4
        data[at : at + 4] = struct.pack("<f", rng.choice(REALS))
    draft.data = bytes(data[: len(draft.data)])


PIECES: tuple[Callable[[Rng, Draft], None], ...] = (
    change_value, change_value, nudge_value, nudge_value, nudge_value, add_value, add_value, drop_value, twice_value,
    swap_values, change_key, change_tensor, change_tensor, change_tensor, drop_tensor, twice_tensor, swap_tensors,
    change_counts, change_weights,
)  # fmt: skip


# ---- changes to the bytes ----------------------------------------------------------------------------------------


def flip(rng: Rng, raw: bytearray) -> None:
    for _ in range(rng.choice((1, 2, 16))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)


def overwrite(rng: Rng, raw: bytearray) -> None:
    at = rng.randrange(len(raw))
    raw[at : at + 8] = (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")


def truncate(rng: Rng, raw: bytearray) -> None:
    del raw[rng.choice((rng.randrange(len(raw)), len(raw) - rng.randrange(64))) :]


def repeat(rng: Rng, raw: bytearray) -> None:
    at, size = rng.randrange(len(raw)), rng.choice((1, 8, 100))
    raw[at:at] = raw[at : at + size]


def cut(rng: Rng, raw: bytearray) -> None:
    at = rng.randrange(len(raw))
    del raw[at : at + rng.choice((1, 4, 8, 100))]


BYTES = (flip, overwrite, truncate, repeat, cut)


def hostile_bytes(draft: Draft, seed: int, head: int = 1 << 12) -> bytes:
    """The bytes of a changed file; changes to bytes fall into its first `head` bytes or anywhere."""
    rng = Rng(seed)
    fresh = replace(
        draft, pairs=[*draft.pairs], tensors=[(n, [*s], t, o) for n, s, t, o in draft.tensors]
    )
    if rng.random() < 0.75:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(PIECES)(rng, fresh)
            if not fresh.pairs:
                break
        raw = fresh.encode()
        if rng.random() < 0.8:
            return bytes(raw)
    else:
        raw = fresh.encode()
    first = raw[:head] if rng.random() < 0.8 else raw
    rest = raw[len(first) :]
    rng.choice(BYTES)(rng, first)
    return bytes(first + rest)


# ---- the judgement -----------------------------------------------------------------------------------------------


def judge_file(use: Callable[[Path], object], path: Path) -> str:
    """`used`, or the kind of the refusal. Raises Fault."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(path)
    except InputError as error:
        line = str(error)
        if not line or not line.isprintable() or len(line) > LONGEST:
            raise Fault(f"refused in more than a printable line: {line[:300]!r}") from error
        return type(error).__name__
    except Exception as error:
        raise Fault(f"{type(error).__name__}: {error}"[:300]) from error
    return "used"


@contextmanager
def limit_resources(nbytes: int) -> Iterator[None]:
    """Within it, memory beyond what there is now and `nbytes` more is refused, and so are more than SECONDS."""

    def raise_timeout(number: int, frame: FrameType | None) -> None:
        raise Fault(f"took more than {SECONDS} seconds")

    before, handler = (
        resource.getrlimit(resource.RLIMIT_AS),
        signal.signal(signal.SIGALRM, raise_timeout),
    )
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
