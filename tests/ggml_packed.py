"""Which bytes ggml itself packs for some rows: their digests.

`python -m tests.ggml_packed LIBGGML_BASE` records what the functions of that library give into
tests/goldens/packed.json.
"""

import ctypes
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packtrain.dtypes import DTYPES, Dtype

RECORD = Path(__file__).parent / "goldens" / "packed.json"
# packed bit for bit without weights
UNWEIGHED_TYPES = ("q2_K", "q3_K", "iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_s")
WEIGHED_TYPES = (  # and with them
    *("q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
    *("iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m"),
)
ROWS = ("odd", "normal", "heavy", "positive")


def odd_rows() -> np.ndarray:
    """Normal rows among rows of zeros, of one value, of few values, tiny, tinier than f16, and large."""
    x = np.random.RandomState(0).standard_normal((12, 512)).astype(np.float32)
    x[0], x[1], x[2, :64], x[3, ::3] = 0, -1.5, 1e-37, 0
    x[4] *= 1e-30
    x[5] *= 1e-7
    x[6] *= 1e4
    x[7] = np.round(x[7] * 8) / 4
    x[8] = np.abs(x[8])
    x[9, ::2] = -x[9, 1::2]  # equal sizes of both signs
    return x


def rows_of(name: str) -> np.ndarray:
    if name == "odd":
        return odd_rows()
    rng = np.random.RandomState(0)
    normal = rng.standard_normal((64, 1024)).astype(np.float32)
    if name == "heavy":
        return normal * np.exp(rng.standard_normal((64, 1024))).astype(np.float32)
    return np.abs(normal) + np.float32(0.5) if name == "positive" else normal


def digest(packed: np.ndarray) -> str:
    return hashlib.sha256(packed.tobytes()).hexdigest()[:16]


def weights_of(width: int) -> np.ndarray:
    """Weights of columns, of very different sizes; one is nothing."""
    weights = np.exp(2 * np.random.RandomState(1).standard_normal(width)).astype(np.float32)
    weights[5] = 0
    return weights


def cases() -> Iterator[tuple[str, str, bool]]:
    """Name of the type, and of the rows, and whether columns have weights."""
    for names, weighed in ((UNWEIGHED_TYPES, False), (WEIGHED_TYPES, True)):
        for name in names:
            yield from ((name, rows, weighed) for rows in ROWS)


def load() -> dict[str, str]:
    """Digests by `type rows weighed`."""
    digests: dict[str, str] = json.loads(RECORD.read_text())
    return digests


def pack(
    library: ctypes.CDLL, dtype: Dtype, x: np.ndarray, weights: np.ndarray | None
) -> np.ndarray:
    packed = np.empty((len(x), dtype.row_nbytes(x.shape[1])), np.uint8)
    library.ggml_quantize_init(dtype.number)
    function = getattr(library, f"quantize_{dtype.name}")
    function.restype = ctypes.c_size_t
    rows, width = map(ctypes.c_int64, x.shape)
    source, destination = (array.ctypes.data_as(ctypes.c_void_p) for array in (x, packed))
    importance = None if weights is None else weights.ctypes.data_as(ctypes.c_void_p)
    function(source, destination, rows, width, importance)
    return packed


def main() -> None:
    library, digests = ctypes.CDLL(sys.argv[1]), {}
    for name, rows, weighed in cases():
        x = rows_of(rows)
        weights = weights_of(x.shape[1]) if weighed else None
        digests[f"{name} {rows} {weighed}"] = digest(pack(library, DTYPES[name], x, weights))
    RECORD.write_text(json.dumps(digests, indent=0) + "\n")
    print(f"{RECORD.name}: {len(digests)} cases")


if __name__ == "__main__":
    main()
