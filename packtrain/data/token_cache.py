"""Cached folders, each filled once by a child process, whose memory is freed before the result is used.

`python -m <module>` answers a request by filling a folder under another name, which is then renamed, so that a folder
is complete whenever it exists. The cache is no part of common/: it bounds what the child compiles, so it needs kernels.
"""

import errno
import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from packtrain.common.child_process import variables
from packtrain.common.errors import DiskFull, DoesNotFit, InputError, UserError
from packtrain.common.memory import parse_size, private_nbytes, release_memory
from packtrain.kernels.runtime import kernel_cache, loader

DAY_SECONDS, SECONDS_BETWEEN_LINES = 24 * 3600.0, 3.0
PATH_FIELDS = "data", "model", "vocab"  # of recipes
ReportProgress = Callable[[str], None]
Recipe = TypeVar("Recipe")
Result = TypeVar("Result")
Item = TypeVar("Item")
# stack of a thread; one of the pool touches up to 1.5 MiB when it starts (kernels/runtime/work_stealing.py)
STACK_NBYTES = 7 << 18
# memory of a child before it reads: 20 to 27 MiB were measured, and threads reserve theirs
CHILD_START_NBYTES = 40 << 20
# memory of a second child that renders chats: for both children, 61 MiB were enough and 51 were not
RENDERING_NBYTES = 32 << 20
SPARE_NBYTES = 4 << 20  # by how much equal processes differ
TOKEN_NBYTES = 350  # per vocabulary token in both children; 330 measured with Gemma 3's 262,144
DATA = re.compile(r"^VmData:\s+(\d+) kB$", re.MULTILINE)


def read_or_build(
    read: Callable[[Path], Result], folder: Path, module: str, recipe: Any, *options: Any
) -> Result:
    """Return read(folder), a folder of the cache. If reading raises OSError or ValueError, a child running `module` on
    `recipe` fills the folder first: see `build_folder`, whose arguments from `report` on are `options`."""
    with suppress(OSError, ValueError):
        return read(folder)
    build_folder(folder, module, asdict(recipe), *options)
    return read(folder)


def report_progress(
    items: Iterable[Item], report: ReportProgress, sentence: Callable[[], str]
) -> Iterator[Item]:
    """Yield the items, and report sentence() every few seconds."""
    last_printed = time.monotonic()
    for item in items:
        if time.monotonic() - last_printed > SECONDS_BETWEEN_LINES:
            last_printed = time.monotonic()
            report(sentence())
        yield item


def build_folder(
    folder: Path, module: str, request: Mapping[str, Any], report: ReportProgress, memory: str | None = None,
    vocab_size: int = 0, renders_chats: bool = False,
) -> None:  # fmt: skip
    """Let a child run `module` on `request` (plain data) to fill the folder, in place of a damaged one. Raises
    InputError, DiskFull, and RuntimeError if the child fails for no such reason.

    memory         --memory, for this process and the child, None: no limit; raises DoesNotFit if it is too small
    vocab_size     tokens of the vocabulary that the child reads
    renders_chats  whether the child renders chats in a child of its own
    """
    budget_nbytes = None
    if memory is not None:
        release_memory()
        used_nbytes = private_nbytes()
        budget_nbytes = parse_size(memory, "--memory") - used_nbytes
        min_nbytes = CHILD_START_NBYTES + TOKEN_NBYTES * vocab_size
        min_nbytes += RENDERING_NBYTES * renders_chats
        if budget_nbytes < min_nbytes:
            min_mib = -(-(used_nbytes + min_nbytes + SPARE_NBYTES) // (1 << 20))
            missing_names = kernel_cache.missing_modules(kernel_cache.kernel_modules())
            compile_mib = loader.min_compile_mib(used_nbytes, missing_names)
            work = "reading the data" if compile_mib <= min_mib else "compiling kernels, once,"
            raise DoesNotFit(f"--memory: {work} needs at least {max(min_mib, compile_mib)}MiB")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for unfinished_folder in folder.parent.glob("*-*"):  # of processes that were killed
            if time.time() - unfinished_folder.stat().st_mtime > DAY_SECONDS:
                shutil.rmtree(unfinished_folder, ignore_errors=True)
        temp_folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"{folder.parent}: tokens cannot be cached there: {reason}") from None
    try:
        _run_child(module, {**request, "folder": str(temp_folder), "room": budget_nbytes}, report)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another process was faster
            temp_folder.rename(folder)
    finally:
        shutil.rmtree(temp_folder, ignore_errors=True)


def serve_request(
    recipe_type: Callable[..., Recipe], write_folder: Callable[[Recipe, Path, ReportProgress, int | None], None],
    reading_position: Mapping[str, str], child_share: Callable[[int], int] = lambda room: 0,
) -> None:  # fmt: skip
    """Run as the child: call `write_folder(recipe, folder, report, budget)` for the request on stdin.

    reading_position  `place` is the file and row that were read last, which an error for lack of memory names
    child_share       returns, of the bytes that --memory leaves, those that a child of this child takes
    Each line on stdout is ["say", sentence], or ["error", sentence], or ["full", sentence] if the disk is full.
    """

    def send(message_type: str, sentence: str) -> None:
        print(json.dumps([message_type, sentence]), flush=True)

    request = json.loads(sys.stdin.readline())
    folder, budget_nbytes = Path(request.pop("folder")), request.pop("room")
    paths = {name: Path(request[name]) for name in PATH_FIELDS if request.get(name)}
    try:
        if budget_nbytes is not None:
            _limit_memory(budget_nbytes - child_share(budget_nbytes))
        recipe = recipe_type(**request | paths)
        write_folder(recipe, folder, lambda sentence: send("say", sentence), budget_nbytes)
    except UserError as error:
        send("error", str(error))
    except (MemoryError, RuntimeError, ImportError, SystemError, OSError) as error:
        if _is_lack_of_memory(error, budget_nbytes):
            return send("error", _too_large(reading_position["place"], budget_nbytes))
        if not isinstance(error, OSError):
            raise
        message_type = "full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "error"
        send(message_type, f"{error.filename or folder}: {(error.strerror or str(error)).lower()}")


def _is_lack_of_memory(error: Exception, budget_nbytes: int | None) -> bool:
    """Tell whether `error` means lack of memory: within a budget also errors without errno, as libraries raise them."""
    if isinstance(error, RuntimeError):
        return "start new thread" in str(error)
    may_be_budget = getattr(error, "errno", None) in (None, errno.ENOMEM)
    return isinstance(error, MemoryError) or (budget_nbytes is not None and may_be_budget)


def _too_large(location: str, room: int | None) -> str:
    available = "there is" if room is None else f"the {room >> 20} MiB that --memory leaves for it"
    return f"{location} needs more memory to be read than {available}; shorten it, or give more"


def _limit_memory(nbytes: int) -> None:
    """Limit the private memory that this process may still take, beyond which it raises MemoryError."""
    loader.memory_budget = nbytes
    threading.stack_size(STACK_NBYTES)
    with suppress(ImportError, OSError, ValueError):  # some systems have no such limit
        status = Path("/proc/self/status").read_text(encoding="ascii")
        reserved_nbytes = sum(1024 * int(kb) for kb in DATA.findall(status)) - private_nbytes()
        limits = importlib.import_module("resource")
        _, hard_limit = limits.getrlimit(limits.RLIMIT_DATA)
        limits.setrlimit(limits.RLIMIT_DATA, (nbytes + max(reserved_nbytes, 0), hard_limit))


def _run_child(module: str, request: Mapping[str, Any], report: ReportProgress) -> None:
    """Run the module in a child that reads `request` from stdin; raises its errors, passes its messages to `report`."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", module], env=variables(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        ) as child,
    ):  # fmt: skip
        assert child.stdin and child.stdout
        request_line = json.dumps(request, default=str).encode() + b"\n"
        try:
            for write_step in (partial(child.stdin.write, request_line), child.stdin.close):
                with suppress(BrokenPipeError):  # why a child has ended is read below
                    write_step()
            for line in child.stdout:
                message_type, sentence = json.loads(line)
                if message_type == "error":
                    raise InputError(sentence)
                if message_type == "full":
                    raise DiskFull(f"{sentence}; the tokens of the data are cached there")
                report(sentence)
            child.wait()
        except BaseException:
            child.kill()
            raise
        if child.returncode == -signal.SIGINT:
            raise KeyboardInterrupt
        if child.returncode < 0 and request["room"] is not None:  # LLVM aborts if it gets no memory
            raise InputError(_too_large(request["data"], request["room"]))
        if child.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"it ended with {child.returncode}"
            raise RuntimeError(f"the child process that prepares the text failed: {reason}")
