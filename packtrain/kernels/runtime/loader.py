"""Compile kernels ahead of use in child processes, which bounds and frees all the memory of compiling.

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
from packtrain.common.files import fcntl, write_text
from packtrain.common.gc_control import gc_paused
from packtrain.common.memory import private_nbytes
from packtrain.kernels.runtime import environment, kernel_cache, machine_code
from packtrain.kernels.runtime.thread_pool import HAS_THREAD_POOL, start_threads, threads

MIB = 1 << 20
# most private memory in MiB of a child that compiles one module; 38 are numba and numpy
SINGLE_MIB = 152
# MiB of a child that compiles all modules: with AVX-512, and without, where LLVM makes long code of vectors of 64 bytes
LASTING_MIB = 320, 640  # 586 were measured
# MiB of modules that take more, and have a child of their own: with AVX-512, and without
LARGER = {"row_products": (190, 320)}
MAX_CHILDREN = 2  # most children at a time
loaded_modules: dict[str, Any] = {}  # the modules of this process
complete_modules = set[str]()  # modules whose code is in the cache, with that of all they need
load_lock = threading.RLock()
# most private memory of this process and its children, where a call has no limit
memory_budget: int | None = None
SLACK_NBYTES = 4 * MIB  # by which this process's private memory differs from one start to the next
PAUSE = 5.0  # seconds between progress lines where they cannot be redrawn


@cache
def peak_mib(name: str) -> int:
    """Return the most private memory in MiB of a child that compiles this module alone."""
    return _for_this_cpu(*LARGER[name]) if name in LARGER else SINGLE_MIB


def _for_this_cpu(avx512_mib: int, other_mib: int) -> int:
    features = environment.chosen_cpu().get("CPU_FEATURES") or ""
    with contextlib.suppress(OSError):  # without llvmlite, which takes 30 MiB in this process
        features = features or Path("/proc/cpuinfo").read_text()
    return avx512_mib if "avx512f" in features else other_mib


@dataclass(frozen=True, slots=True)
class CompileMode:
    """A strategy of compiling: how many children there are at a time, and whether each compiles several modules."""

    children: int
    lasting: bool

    def max_nbytes(self, names: Collection[str]) -> int:
        """Return the most private memory of the children while they compile these modules."""
        child_mib = max(map(peak_mib, names), default=SINGLE_MIB)
        if self.lasting:
            child_mib = max(child_mib, _for_this_cpu(*LASTING_MIB))
        return self.children * child_mib * MIB


# the fastest first
COMPILE_MODES = (
    CompileMode(2, True), CompileMode(2, False), CompileMode(1, True), CompileMode(1, False),
)  # fmt: skip


def choose_mode(limit: int | None, used: int, names: Collection[str]) -> CompileMode:
    """Return the fastest CompileMode for these modules within the limit, beside `used` bytes. Raises DoesNotFit."""
    max_children = min(environment.allowed_cpus(), MAX_CHILDREN)
    for compile_mode in COMPILE_MODES:
        if compile_mode.children <= max_children and (
            limit is None or used + compile_mode.max_nbytes(names) <= limit
        ):
            return compile_mode
    needed_mib = min_compile_mib(used, names)
    raise DoesNotFit(
        f"--memory: compiling kernels needs {needed_mib} MiB; run `packtrain"
        f" compile` first, or give --memory {needed_mib}MiB"
    )


def min_compile_mib(used: int, names: Collection[str]) -> int:
    """Return the smallest --memory within which these modules compile beside `used` bytes; 0 if there are none."""
    return -(-(used + COMPILE_MODES[-1].max_nbytes(names) + SLACK_NBYTES) // MIB) if names else 0


def prepare(names: Collection[str], limit: int | None = None, used: int = 0) -> int:
    """Compile those of these modules that are missing; returns how many were missing.

    With a limit, all processes together stay within it; this one has `used` bytes. Raises DoesNotFit.
    """
    missing_names = kernel_cache.missing_modules(names)
    if not missing_names:
        kernel_cache.save_fingerprints()
        complete_modules.update(*map(kernel_cache.needed, names if HAS_THREAD_POOL else ()))
        return 0
    if limit is None and memory_budget is not None:
        limit, used = memory_budget, private_nbytes()
    compile_mode = choose_mode(limit, used, missing_names)
    with file_lock(kernel_cache.target_folder() / "lock"):
        missing_names = kernel_cache.missing_modules(names)
        if missing_names:
            kernel_cache.remove_old_kernels(kernel_cache.target_folder())
            _compile(missing_names, compile_mode)
            kernel_cache.save_fingerprints()
    return len(missing_names)


def _compile(names: list[str], compile_mode: CompileMode) -> None:
    progress = CompileProgress(len(names))
    progress.print_start()
    error = ModuleCompiler(names, progress.count_module).compile_all(compile_mode)
    progress.print_finish()
    if error and memory_budget is not None:
        raise MemoryError(error)
    if error:
        message = f"the compiling child failed ({error}); compiling in this process"
        environment.print_message(message)


@dataclass(slots=True)
class CompileProgress:
    """Prints how many modules are compiled: on a terminal in one line, elsewhere occasionally."""

    count: int
    num_finished: int = 0
    start_seconds: float = field(default_factory=time.perf_counter)
    printed_seconds: float = field(default_factory=time.perf_counter)

    def print_start(self) -> None:
        environment.print_message(f"compiling {self.count} kernel modules, once for this machine …")

    def count_module(self) -> None:
        self.num_finished += 1
        now_seconds = time.perf_counter()
        counts, seconds = f"{self.num_finished} of {self.count}", now_seconds - self.start_seconds
        progress_text = f"compiled {counts} kernel modules, {seconds:.0f} s"
        if sys.stderr is not None and sys.stderr.isatty():
            line_end = "\n" if self.num_finished == self.count else ""
            with contextlib.suppress(OSError):
                print(f"\rpacktrain: {progress_text}", end=line_end, file=sys.stderr, flush=True)
        elif now_seconds - self.printed_seconds >= PAUSE and self.num_finished < self.count:
            environment.print_message(progress_text)
            self.printed_seconds = now_seconds

    def print_finish(self) -> None:
        if self.num_finished == self.count:
            seconds = time.perf_counter() - self.start_seconds
            environment.print_message(f"kernels compiled in {seconds:.0f} s")


@contextlib.contextmanager
def file_lock(lock_path: Path) -> Iterator[None]:
    """Lock against other processes, so that several started at once compile nothing twice."""
    if fcntl is None:  # Windows: no lock, they compile it twice
        yield
        return
    with open(lock_path, "w") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            environment.print_message("another process is compiling kernels; waiting for it …")
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


class ModuleCompiler:
    """Distributes modules to children; a module is ready once the modules that it needs are compiled."""

    def __init__(self, names: list[str], on_done: Callable[[], None]) -> None:
        self.waiting_names, self.on_done = list(names), on_done
        self.unfinished_names = set(names)
        self.error_text = ""
        self.children: set[subprocess.Popen[str]] = set()
        self.state_changed = threading.Condition()

    def compile_all(self, compile_mode: CompileMode) -> str:
        """Compile all modules; returns the error message, or an empty text."""
        count = min(compile_mode.children, len(self.waiting_names))
        worker_threads = [
            threading.Thread(target=self._work, args=(compile_mode.lasting,)) for _ in range(count)
        ]
        for thread in worker_threads:
            thread.start()
        try:
            for thread in worker_threads:
                thread.join()
        finally:
            self._stop("stopped")
            for thread in worker_threads:
                thread.join()
        return self.error_text

    def _take_module(self) -> str | None:
        """Wait for a module whose imports are compiled, and return its name; None when no module is left."""
        with self.state_changed:
            while self.waiting_names and not self.error_text:
                for module_name in self.waiting_names:
                    imports = kernel_cache.needed(module_name) - {module_name}
                    if not imports & self.unfinished_names:
                        self.waiting_names.remove(module_name)
                        return module_name
                self.state_changed.wait()
        return None

    def _finish_module(self, name: str) -> None:
        with self.state_changed:
            self.unfinished_names.discard(name)
            self.on_done()
            self.state_changed.notify_all()

    def _stop(self, error_text: str) -> None:
        with self.state_changed:
            if self.unfinished_names:
                self.error_text = self.error_text or error_text
            for child in self.children:
                child.kill()
            self.state_changed.notify_all()

    def _work(self, lasting: bool) -> None:
        """Give modules to one child if `lasting`, else, or if one is large, each to its own: the life of a thread."""
        with tempfile.TemporaryFile("w+") as error_file:
            try:
                module_name = self._take_module()
                while module_name is not None:
                    with self._start_child(error_file) as child:
                        keep_child = True
                        while module_name is not None and keep_child:
                            _ask(child, module_name)
                            self._finish_module(module_name)
                            last_name, module_name = module_name, self._take_module()
                            keep_child = lasting and not LARGER.keys() & {last_name, module_name}
            except (OSError, ChildProcessError) as error:
                error_file.seek(0)
                error_lines = error_file.read().strip().splitlines()
                self._stop(error_lines[-1] if error_lines else str(error))

    @contextlib.contextmanager
    def _start_child(self, error_file: IO[str]) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", kernel_cache.PACKAGE, str(kernel_cache.target_folder())]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=variables(), stdin=pipe, stdout=pipe, stderr=error_file, text=True
        ) as child:
            with self.state_changed:
                self.children.add(child)
            try:
                yield child
            except BaseException:
                child.kill()
                raise
            finally:
                with self.state_changed:
                    self.children.discard(child)


def _ask(child: "subprocess.Popen[str]", name: str) -> None:
    """Let a child compile a module, and wait for it. Raises OSError, ChildProcessError."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{name}\n")
    child.stdin.flush()
    if child.stdout.readline().strip() != name:
        raise ChildProcessError(f"exit {child.wait()}")


def compile_into(cache_folder: str) -> None:
    """Compile modules named on standard input into a folder, and print each name when done: the child's work."""
    kernel_cache.child_folder = Path(cache_folder)
    for input_line in sys.stdin:
        name = input_line.strip()
        folder = kernel_cache.module_folder(name)
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted child has left
        for required_name in sorted(kernel_cache.needed(name) - {name}):
            with_numba(required_name)
        before = len(dispatchers := machine_code.compiled_dispatchers)
        checksum = machine_code.save(with_numba(name), dispatchers[before:], folder)
        write_text(folder / kernel_cache.CHECKSUM_FILE, checksum)
        print(name, flush=True)


def load(name: str) -> Any:
    """Return a kernel module, after loading those that it needs; a module in the cache loads without numba."""
    if (module := loaded_modules.get(name)) is not None:
        return module
    with load_lock, gc_paused():
        return loaded_modules.get(name) or _loaded(name)


def _loaded(name: str) -> Any:
    if kernel_cache.child_folder is None and name not in complete_modules:
        prepare([name])
    imported_module = sys.modules.get(kernel_cache.import_path(name))
    if imported_module is not None:  # thread_pool, which has no kernels, or an imported module
        return set_module(name, imported_module)
    if name not in complete_modules:
        if not HAS_THREAD_POOL or not all(map(kernel_cache.complete, kernel_cache.needed(name))):
            return with_numba(name)
        complete_modules.update(kernel_cache.needed(name))
    environment.limit_blas()
    for required_name in sorted(kernel_cache.needed(name) - {name} - loaded_modules.keys()):
        load(required_name)
    cached_module = _from_cache(name)
    if cached_module is None:
        return with_numba(name)
    if name == "jit":
        start_threads(cached_module.serve)
    return set_module(name, cached_module)


def _from_cache(name: str) -> Any:
    """Return a module as machine code, compiled again if that is damaged; None if that does not help."""
    for _ in range(2):
        folder = kernel_cache.complete(name)
        if folder is None:
            break
        try:
            checksum = (folder / kernel_cache.CHECKSUM_FILE).read_text("utf-8", "replace")
            return machine_code.load(name, folder, checksum, with_numba)
        except (machine_code.DamagedCacheError, OSError) as error:
            if isinstance(error, OSError) and (memory_budget is not None or error.errno is None):
                raise MemoryError(
                    str(error)
                ) from None  # the bound, or a library that finds no room
            environment.print_message(f"{folder} is damaged")
            kernel_cache.distrust(folder)
            prepare([name])
    return None


@cache
def with_numba(name: str) -> Any:
    """Import a kernel module with numba, after those that it needs; a module with an unreadable cache is recompiled."""
    environment.prepare_numba()
    environment.limit_blas()
    for required_name in sorted(kernel_cache.needed(name) - {name}):
        with_numba(required_name)
    try:
        return set_module(name, _imported(name))
    except Exception as error:
        folder = kernel_cache.complete(name)
        if folder is None or isinstance(error, MemoryError | OSError | SystemError | ImportError):
            raise  # for lack of memory, say: the cache may be sound, and other processes use it
    kernel_cache.distrust(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return set_module(name, _imported(name))


def _imported(name: str) -> ModuleType:
    folder = kernel_cache.module_folder(name)
    if kernel_cache.complete(name) is None:
        folder.mkdir(exist_ok=True)
    try:
        with gc_paused(), kernel_cache.numba_cache(folder):
            return importlib.import_module(kernel_cache.import_path(name))
    except OSError as error:
        error.filename = error.filename or str(folder)  # of a full disk it has none
        raise


def set_module(name: str, module: Any) -> Any:
    """Make a module the attribute `name` of packtrain.kernels."""
    setattr(sys.modules[kernel_cache.PACKAGE], name, module)
    loaded_modules[name] = module
    return module


def is_loaded(name: str) -> bool:
    return name in loaded_modules


def load_all(names: Collection[str] | None = None, limit: int | None = None, used: int = 0) -> None:
    """Compile and load these modules, or all, so that their memory is in use before it is measured.

    The stacks of all threads, where products put packed blocks, are touched, too.
    """
    names = kernel_cache.kernel_modules() if names is None else names
    prepare(names, limit, used)
    for module_name in names:
        load(module_name)
    if any("gemm" in kernel_cache.needed(module_name) for module_name in names):
        load("gemm").use_stacks(threads())
