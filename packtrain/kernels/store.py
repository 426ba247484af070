"""Where compiled kernels are kept: a folder for each module, named after all that its code depends on.

Once the file COMPLETE is in a folder it is only read, whoever wrote it: a cache that an image or another user brings
may be read-only. What is missing there goes to a folder of the user's own.
"""

import ast
import contextlib
import hashlib
import importlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from packtrain.kernels.runtime import cache_root, platform_parts, refusal, writable

FOLDER = Path(__file__).parent
# the kernel modules, with those that each imports, so that none is read to know; a test compares
MADE_OF = {
    "attention": "attention_few call online simd tile visible",
    "attention_back": "attention call online simd tile visible",
    "attention_few": "call online simd tile visible",
    "bits": "simd",
    "call": "",
    "codes": "bits call simd",
    "dequantize": "bits call rooms simd",
    "dots": "bits call rooms simd",
    "elementwise": "call simd",
    "experts": "call dequantize matmul packed simd",
    "gemm": "call simd",
    "loss": "call dequantize matmul packed simd",
    "matmul": "call gemm simd",
    "norm": "call simd",
    "online": "call dequantize simd visible",
    "packed": "call dequantize dots gemm simd",
    "packing": "call",
    "quantize": "bits call codes rooms simd",
    "reduce": "call simd",
    "rooms": "bits call",
    "rope": "call simd",
    "rows": "call dequantize simd",
    "simd": "",
    "softmax": "call simd",
    "tile": "call simd",
    "update": "bits call dequantize elementwise simd",
    "visible": "call simd tile",
    "windows": "call simd",
}
TYPES, LIST = FOLDER.parent / "types", FOLDER.parent / "dtypes.py"
ROLES = {"dequantize": "unpack", "dots": "dot", "quantize": "pack"}  # modules of what types do
COMPLETE = "complete"
DAYS_KEPT = 30
given: Path | None = None  # in a compiling child: where its parent wants the results


@cache
def modules() -> list[str]:
    """The kernel modules; those that most others are made of first, then the largest."""
    users = {name: sum(name in needed(other) for other in MADE_OF) for name in MADE_OF}
    sizes = {name: (FOLDER / f"{name}.py").stat().st_size for name in MADE_OF}
    return sorted(MADE_OF, key=lambda name: (-users[name], -sizes[name]))


@cache
def needed(name: str) -> frozenset[str]:
    """The kernel modules that this one is made of: itself and all that it imports."""
    return frozenset([name]).union(*map(needed, MADE_OF[name].split()))


def fingerprint(name: str) -> str:
    """Everything a module's code depends on: the platform and the text of the sources, not where they lie."""
    parts = list(platform_parts())
    for one in sorted(needed(name)):
        parts += [one, (FOLDER / f"{one}.py").read_text(encoding="utf-8")]
        if one in ROLES:
            parts += [of_role(file, ROLES[one]) for file in (LIST, *sorted(TYPES.glob("*.py")))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def of_role(file: Path, role: str) -> str:
    """What a role's code in a room depends on: all but the functions of other roles, and those that only they call."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list]
    for_role = [
        f
        for f in functions
        if role in {d.attr for d in f.decorator_list if isinstance(d, ast.Attribute)}
    ]
    called = [*for_role, *(node for node in tree.body if node not in functions)]
    for node in called:  # grows
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        called += [f for f in functions if f.name in names and f not in called]
    return "\n".join(map(ast.unparse, called))


@cache
def folder_name(name: str) -> str:
    return f"{name}-{fingerprint(name)}"


def own_folder(make: bool = False) -> list[Path]:
    """A folder for this user's kernels among temporary files, where nobody else can put any; none if there is none."""
    if not hasattr(os, "getuid"):
        return []
    folder = Path(tempfile.gettempdir()) / f"packtrain-{os.getuid()}"
    with contextlib.suppress(OSError):
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.getuid()
            and not about.st_mode & 0o022
        ):
            return [folder / "kernels"]
    return []


@cache
def roots() -> list[Path]:
    """Where compiled modules may be, the usual place first."""
    return [given] if given else [cache_root() / "kernels", *own_folder()]


@cache
def target() -> Path:
    """Where missing modules are compiled to: the usual place, or one that the next command finds, or neither."""
    if given:
        return given
    usual = cache_root() / "kernels"
    found = next((root for root in (usual, *own_folder(make=True)) if refusal(root) is None), None)
    found = found or writable(usual)
    if found not in roots():
        roots().append(found)
    return found


def complete(name: str) -> Path | None:
    """The folder with all of a module's compiled code, if there is one."""
    folders = (root / folder_name(name) for root in roots())
    return next((folder for folder in folders if (folder / COMPLETE).exists()), None)


def folder_of(name: str) -> Path:
    """Where a module's compiled code is, or will be."""
    return complete(name) or target() / folder_name(name)


def missing(names: Collection[str]) -> list[str]:
    """Those of these modules, and of all that they need, that are not compiled."""
    wanted = frozenset[str]().union(*(needed(name) for name in names))
    return [name for name in modules() if name in wanted and complete(name) is None]


def sweep(root: Path) -> None:
    """Remove kernels of other versions that were compiled more than a month ago."""
    current = {folder_name(name) for name in modules()}
    for folder in root.iterdir():
        old = time.time() - folder.stat().st_mtime > DAYS_KEPT * 24 * 3600
        if folder.is_dir() and folder.name not in current and old:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def numba_cache(folder: Path) -> Iterator[None]:
    """Let numba keep what it compiles in `folder` meanwhile; the user's own numba code keeps its place."""
    caching = importlib.import_module("numba.core.caching")
    locator = importlib.import_module(f"{__package__}.locator").InFolder
    before, locator.folder = caching.CacheImpl._locator_classes, str(folder)
    caching.CacheImpl._locator_classes = [locator]
    try:
        yield
    finally:
        caching.CacheImpl._locator_classes = before
