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
PLAIN = ("q2_K", "q3_K")  # packed bit for bit without weights


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


def cases() -> Iterator[tuple[str, str]]:
    """Name of the type, and of the rows."""
    for name in PLAIN:
        for rows in ("odd", "normal", "heavy", "positive"):
            yield name, rows


def load() -> dict[str, str]:
    """Digests by `type rows`."""
    found: dict[str, str] = json.loads(RECORD.read_text())
    return found


def pack(library: ctypes.CDLL, dtype: Dtype, x: np.ndarray) -> np.ndarray:
    made = np.empty((len(x), dtype.row_nbytes(x.shape[1])), np.uint8)
    function = getattr(library, f"quantize_{dtype.name}")
    function.restype = ctypes.c_size_t
    rows, width = map(ctypes.c_int64, x.shape)
    function(
        x.ctypes.data_as(ctypes.c_void_p), made.ctypes.data_as(ctypes.c_void_p), rows, width, None
    )
    return made


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    found = {
        f"{name} {rows}": digest(pack(library, DTYPES[name], rows_of(rows)))
        for name, rows in cases()
    }
    RECORD.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{RECORD.name}: {len(found)} cases")


if __name__ == "__main__":
    main()
