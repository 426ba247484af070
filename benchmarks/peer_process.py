"""Runs each peer of a comparison in its own process, in turns: their thread pools would fight in one process.

    with PeerProcess("benchmarks.torch_peer", "products", 2) as peer: seconds = peer(product)

The child imports the module, so that this process need not load its packages. Requests and answers are pickled;
prints of libraries go to standard error.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from packtrain.common.child_process import variables
from packtrain.common.errors import InputError

PAUSE = 0.02  # seconds before a turn, in which the previous peer's threads stop spinning
# variables that limit PyTorch and its libraries to the instructions that our kernels use
INSTRUCTION_SETS = "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"
AVX2 = dict(zip(INSTRUCTION_SETS, ("avx2", "AVX2", "AVX2"), strict=True))
AVX512 = dict(zip(INSTRUCTION_SETS, ("avx512", "AVX512", "AVX512_CORE_BF16"), strict=True))
FORCED = {"avx2": AVX2, "avx512": AVX512}
SINGLE_PROCESS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # torch.compile leaves no processes behind


class PeerError(Exception):
    """A peer failed; the message is one sentence."""


class PeerProcess:
    """`with PeerProcess(module, function, *args) as peer:` a child calls function(*args); peer() calls its result.

    PeerError is raised if the child's function raises or the child ends.
    """

    def __init__(self, module: str, function: str, *args: Any) -> None:
        self.request = module, function, args

    def __enter__(self) -> "PeerProcess":
        self.stderr_file = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.peer_process"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.stderr_file, env=peer_environment(),
        )  # fmt: skip
        try:
            self._ask(self.request)
        except BaseException:
            self.close()
            raise
        return self

    def __call__(self, *args: Any) -> Any:
        time.sleep(PAUSE)
        return self._ask(args)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.stderr_file.close()

    def _ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            succeeded, answer = pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise PeerError(self._last_error()) from None
        if not succeeded:
            raise PeerError(answer)
        return answer

    def _last_error(self) -> str:
        code = self.process.wait()
        self.stderr_file.seek(0)
        lines = self.stderr_file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {code}"


def peer_environment() -> dict[str, str]:
    """Return a peer's environment variables, which limit PyTorch to the CPU features of PACKTRAIN_CPU."""
    return {**SINGLE_PROCESS, **variables(), **FORCED.get(os.environ.get("PACKTRAIN_CPU", ""), {})}


def main() -> None:
    """Run the child of a PeerProcess: answer pickled requests; standard output is for answers alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    answer_stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    peer_function: Any = None
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            if peer_function is None:
                module, function, args = request
                peer_function = getattr(importlib.import_module(module), function)(*args)
                answer = True, None
            else:
                answer = True, peer_function(*request)
        except Exception as error:
            text = str(error).strip().splitlines()[:1]
            error_type = [] if isinstance(error, InputError) and text else [type(error).__name__]
            answer = False, ": ".join([*error_type, *text])
        pickle.dump(answer, answer_stream)
        answer_stream.flush()


if __name__ == "__main__":
    main()
