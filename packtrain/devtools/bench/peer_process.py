"""Peers of a comparison, each in a process of its own: their thread pools would fight in one. They take turns.

    peer = Peer("packtrain.devtools.bench.training", "peer", "15m")     peer() -> what the made function returns

The child imports the module, so that this process need not have what it loads. Requests and answers are pickled; what
a library prints goes to standard error.
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

PAUSE = 0.02  # seconds before a turn: threads of the one before have stopped waiting for more
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}  # the same limits as ours, for PyTorch and its libraries
AVX512 = {
    "ATEN_CPU_CAPABILITY": "avx512",
    "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}
FORCED = {"avx2": AVX2, "avx512": AVX512}
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # torch.compile leaves no processes behind


class PeerFailed(Exception):
    """A peer cannot do what is asked; one sentence."""


class Peer:
    """`with Peer(module, function, *given) as peer:` a process that calls function(*given) once, and what that returns
    at each turn. Raises PeerFailed."""

    def __init__(self, module: str, function: str, *given: Any) -> None:
        self.asked = module, function, given

    def __enter__(self) -> "Peer":
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "packtrain.devtools.bench.peer_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=limited(),
        )
        try:
            self._ask(self.asked)
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
        self.errors.close()

    def _ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            done, answer = pickle.load(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise PeerFailed(self._last_words()) from None
        if not done:
            raise PeerFailed(answer)
        return answer

    def _last_words(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {code}"


def limited() -> dict[str, str]:
    """Environment variables of a peer: it uses no more of the processor than we are told to."""
    return {**ALONE, **variables(), **FORCED.get(os.environ.get("PACKTRAIN_CPU", ""), {})}


def main() -> None:
    """The child. Its standard output is for answers alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work: Any = None
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            if work is None:
                module, function, args = request
                work = getattr(importlib.import_module(module), function)(*args)
                answer = True, None
            else:
                answer = True, work(*request)
        except Exception as error:
            text = str(error).strip().splitlines()[:1]
            kind = [] if isinstance(error, InputError) and text else [type(error).__name__]
            answer = False, ": ".join([*kind, *text])
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
