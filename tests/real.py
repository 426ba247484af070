"""Where the real base is: PACKTRAIN_REAL_BASE, or what `make real-base` fetches."""

import os
from pathlib import Path

FETCHED = Path(__file__).parent.parent / "build/real/gemma-3-270m-q4_k_m.gguf"
BASE = Path(os.environ.get("PACKTRAIN_REAL_BASE") or FETCHED)
