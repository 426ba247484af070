"""Compile each kernel module in a child of its own and print its seconds of CPU and most memory, a line of JSON each.

    python -m benchmarks.compile_modules FOLDER [MODULE …]

FOLDER gets the kernels. The first line, "none", is a child that compiles nothing: Python, numba and, under an emulator,
its own tables. A module's figures include loading the modules that it needs, which are compiled before it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from packtrain.kernels.runtime import kernel_cache

if sys.platform == "win32":
    raise SystemExit("benchmarks.compile_modules needs Linux")

NOTHING = "none"  # a child that compiles nothing


def main(folder: Path, names: list[str]) -> int:
    """Compile `names`, or all modules, and those that they need; returns how many children failed."""
    folder.mkdir(parents=True, exist_ok=True)
    kernel_cache.child_folder, num_failed = folder, 0
    for name in [NOTHING, *kernel_cache.missing_modules(names or kernel_cache.kernel_modules())]:
        command = [sys.executable, "-m", "packtrain.kernels", str(folder)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert child.stdin is not None
        child.stdin.write(b"" if name == NOTHING else f"{name}\n".encode())
        child.stdin.close()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        figures = {
            "module": name,
            "seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "mib": usage.ru_maxrss >> 10,
            "exit": child.returncode,
        }
        print(json.dumps(figures), flush=True)
        num_failed += child.returncode != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), sys.argv[2:]), 1))
