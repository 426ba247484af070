"""Compiles kernels ahead of use in child processes, which bounds and frees all the memory of compiling.

Modules are distributed as they become ready, so that two children finish together. Under a memory limit there is one
child, or one for each module, or an error that names the memory that compiling needs.
"""

import contextlib
import importlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from packtrain.common.child_process import variables
from packtrain.common.errors import DoesNotFit
from packtrain.common.gc_control import not_collecting
from packtrain.common.memory import private_nbytes
from packtrain.kernels import machine, runtime, store
from packtrain.kernels.crew import AVAILABLE, start, threads

MIB = 1 << 20
# most private memory in MiB of a child that compiles several modules, and of one that ends after one module;
# 38 are numba and numpy
LASTING, SINGLE = 320, 152
LARGER = {"rounded": 330}  # modules that take more, and have a child of their own
CHILDREN = 2  # most at a time
loaded: dict[str, Any] = {}  # the modules of this process
found_complete = set[str]()  # those whose compiled code is there, and that of all they need
loading = threading.RLock()
budget: int | None = (
    None  # most private memory of this process and its children, where a call has no limit
)
PAUSE = 5.0  # seconds between progress lines where they cannot be redrawn


@dataclass(frozen=True, slots=True)
class Way:
    """How many children compile at a time, and whether each compiles several modules or one."""

    children: int
    lasting: bool

    def nbytes(self, names: Collection[str]) -> int:
        """Most private memory of the children while they compile these modules."""
        largest_module = max((LARGER.get(name, SINGLE) for name in names), default=SINGLE)
        return (
            self.children * MIB * (max(LASTING, largest_module) if self.lasting else largest_module)
        )


WAYS = (Way(2, True), Way(2, False), Way(1, True), Way(1, False))  # the fastest first


def way(limit: int | None, used: int, names: Collection[str]) -> Way:
    """The fastest way to compile these modules within the limit, beside `used` bytes. Raises DoesNotFit."""
    max_children = min(runtime.allowed_cpus(), CHILDREN)
    for option in WAYS:
        if option.children <= max_children and (
            limit is None or used + option.nbytes(names) <= limit
        ):
            return option
    needed_mib = -(-(used + WAYS[-1].nbytes(names)) // MIB)
    raise DoesNotFit(
        f"--memory: compiling kernels needs {needed_mib} MiB; run `packtrain"
        f" compile` first, or give --memory {needed_mib}MiB"
    )


def prepare(names: Collection[str], limit: int | None = None, used: int = 0) -> int:
    """Compile those of these modules that are missing; returns how many.

    With a limit, all processes together stay within it; this one has `used` bytes. Raises DoesNotFit.
    """
    missing = store.missing(names)
    if not missing:
        store.keep()
        return 0
    if limit is None and budget is not None:
        limit, used = budget, private_nbytes()
    chosen = way(limit, used, missing)
    with alone(store.target() / "lock"):
        missing = store.missing(names)
        if missing:
            store.sweep(store.target())
            _compile(missing, chosen)
            store.keep()
    return len(missing)


def _compile(names: list[str], chosen: Way) -> None:
    progress = CompileProgress(len(names))
    progress.begin()
    error = Compiling(names, progress.done).run(chosen)
    progress.end()
    if error and budget is not None:
        raise MemoryError(error)
    if error:
        runtime.say(f"the compiling child failed ({error}); compiling in this process")


@dataclass(slots=True)
class CompileProgress:
    """Prints how many modules are compiled: on a terminal in one line, elsewhere occasionally."""

    count: int
    finished: int = 0
    began: float = field(default_factory=time.perf_counter)
    printed: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        runtime.say(f"compiling {self.count} kernel modules, once for this machine …")

    def done(self) -> None:
        self.finished += 1
        now = time.perf_counter()
        line = f"compiled {self.finished} of {self.count} kernel modules, {now - self.began:.0f} s"
        if sys.stderr is not None and sys.stderr.isatty():
            end = "\n" if self.finished == self.count else ""
            with contextlib.suppress(OSError):
                print(f"\rpacktrain: {line}", end=end, file=sys.stderr, flush=True)
        elif now - self.printed >= PAUSE and self.finished < self.count:
            runtime.say(line)
            self.printed = now

    def end(self) -> None:
        if self.finished == self.count:
            runtime.say(f"kernels compiled in {time.perf_counter() - self.began:.0f} s")


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock against other processes, so that several started at once compile nothing twice."""
    try:
        import fcntl
    except ImportError:  # Windows: no lock, they compile it twice
        yield
        return
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            runtime.say("another process is compiling kernels; waiting for it …")
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Compiling:
    """Distributes modules to children; a module is ready once those that it needs are compiled."""

    def __init__(self, names: list[str], done: Callable[[], None]) -> None:
        self.waiting, self.done = list(names), done
        self.unfinished = set(names)
        self.error = ""
        self.children: set[subprocess.Popen[str]] = set()
        self.changed = threading.Condition()

    def run(self, chosen: Way) -> str:
        """Compile all of them; returns the error message, or an empty text."""
        count = min(chosen.children, len(self.waiting))
        threads = [
            threading.Thread(target=self._work, args=(chosen.lasting,)) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._stop("stopped")
            for thread in threads:
                thread.join()
        return self.error

    def _take(self) -> str | None:
        """The next module that is ready; None when there are no more."""
        with self.changed:
            while self.waiting and not self.error:
                for name in self.waiting:
                    if not (store.needed(name) - {name}) & self.unfinished:
                        self.waiting.remove(name)
                        return name
                self.changed.wait()
        return None

    def _finish(self, name: str) -> None:
        with self.changed:
            self.unfinished.discard(name)
            self.done()
            self.changed.notify_all()

    def _stop(self, error: str) -> None:
        with self.changed:
            if self.unfinished:
                self.error = self.error or error
            for child in self.children:
                child.kill()
            self.changed.notify_all()

    def _work(self, lasting: bool) -> None:
        """A thread: gives modules to one child, or each to a new child."""
        with tempfile.TemporaryFile("w+") as errors:
            try:
                name = self._take()
                while name is not None:
                    with self._child(errors) as child:
                        goes_on = True
                        while name is not None and goes_on:
                            _ask(child, name)
                            self._finish(name)
                            last, name = name, self._take()
                            goes_on = lasting and not LARGER.keys() & {last, name}
            except (OSError, ChildProcessError) as error:
                errors.seek(0)
                lines = errors.read().strip().splitlines()
                self._stop(lines[-1] if lines else str(error))

    @contextlib.contextmanager
    def _child(self, errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", __package__, str(store.target())]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=variables(), stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as child:
            with self.changed:
                self.children.add(child)
            try:
                yield child
            except BaseException:
                child.kill()
                raise
            finally:
                with self.changed:
                    self.children.discard(child)


def _ask(child: "subprocess.Popen[str]", name: str) -> None:
    """Let a child compile a module. Raises OSError, ChildProcessError."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{name}\n")
    child.stdin.flush()
    if child.stdout.readline().strip() != name:
        raise ChildProcessError(f"exit {child.wait()}")


def compile_into(root: str) -> None:
    """The child: compiles modules named on standard input and prints each name when done."""
    store.given = Path(root)
    for line in sys.stdin:
        name = line.strip()
        folder = store.folder_of(name)
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted child has left
        for other in sorted(store.needed(name) - {name}):
            with_numba(other)
        before = len(machine.made)
        checksum = machine.save(with_numba(name), machine.made[before:], folder)
        (folder / store.COMPLETE).write_text(checksum)
        print(name, flush=True)


def load(name: str) -> Any:
    """A kernel module, and first those that it needs, under the policy; from the cache it comes without numba."""
    with loading, not_collecting():
        return loaded.get(name) or _loaded(name)


def _loaded(name: str) -> Any:
    if store.given is None and name not in found_complete:
        prepare([name])
    itself = sys.modules.get(f"{__package__}.{name}")
    if itself is not None:  # crew, which has no kernels, or a module that was imported
        return shown(name, itself)
    if name not in found_complete:
        if not AVAILABLE or not all(map(store.complete, store.needed(name))):
            return with_numba(name)
        found_complete.update(store.needed(name))
    runtime.limit_blas()
    for other in sorted(store.needed(name) - {name}):
        load(other)
    cached_module = _from_cache(name)
    if cached_module is None:
        return with_numba(name)
    if name == "call":
        start(cached_module.serve)
    return shown(name, cached_module)


def _from_cache(name: str) -> Any:
    """The module as machine code, compiled again if that is damaged; None if that does not help."""
    for _ in range(2):
        folder = store.complete(name)
        if folder is None:
            break
        try:
            checksum = (folder / store.COMPLETE).read_text("utf-8", "replace")
            return machine.load(name, folder, checksum, with_numba)
        except (machine.Damaged, OSError) as error:
            if budget is not None and isinstance(
                error, OSError
            ):  # it may be the bound that refuses
                raise MemoryError(str(error)) from None
            runtime.say(f"{folder} is damaged")
            store.distrust(folder)
            prepare([name])
    return None


@cache
def with_numba(name: str) -> Any:
    """Import a kernel module itself, to compile it or with it, and first those that it needs.

    One whose cache cannot be read is compiled again.
    """
    runtime.prepare_numba()
    runtime.limit_blas()
    for other in sorted(store.needed(name) - {name}):
        with_numba(other)
    try:
        return shown(name, _imported(name))
    except Exception:
        folder = store.complete(name)
        if folder is None:
            raise
    store.distrust(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return shown(name, _imported(name))


def _imported(name: str) -> ModuleType:
    folder = store.folder_of(name)
    if store.complete(name) is None:
        folder.mkdir(exist_ok=True)
    try:
        with not_collecting(), store.numba_cache(folder):
            return importlib.import_module(f"{__package__}.{name}")
    except OSError as error:
        error.filename = error.filename or str(folder)  # of a full disk it has none
        raise


def shown(name: str, module: Any) -> Any:
    """Have `kernels.name` be this module."""
    setattr(sys.modules[__package__], name, module)
    loaded[name] = module
    return module


def is_loaded(name: str) -> bool:
    return name in loaded


def load_all(names: Collection[str] | None = None, limit: int | None = None, used: int = 0) -> None:
    """Compile and load these modules, or all, so that their memory is in use before it is measured.

    That includes the stacks of all threads, where products put packed blocks.
    """
    names = store.modules() if names is None else names
    prepare(names, limit, used)
    for name in names:
        load(name)
    if any("gemm" in store.needed(name) for name in names):
        load("gemm").use_stacks(threads())
