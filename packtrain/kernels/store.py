"""The cache of compiled kernels: a folder for each module, named by a hash of everything that its code depends on.

A folder with the file COMPLETE is only read: a cache from a container image or another user may be read-only.
Missing modules are compiled into the user's own folder.
"""

import ast
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from packtrain.kernels.runtime import cache_root, platform_parts, refusal, writable

FOLDER = Path(__file__).parent
# the kernel modules with their imports, listed so that no file need be read; a test compares
MADE_OF = {
    "amx": "call panels simd",
    "attention": "call online simd tile visible",
    "attention_back": "attention call online simd tile visible",
    "attention_cells": "attention call dequantize online panels simd tile visible",
    "bits": "simd",
    "call": "crew pool",
    "cast": "bits call simd",
    "choosing": "bits call simd",
    "code_panels": "dot_tile gemm octets simd",
    "codes": "bits call simd",
    "convolution": "call gemm operands panels simd",
    "crew": "",
    "delta": "call simd vectors",
    "dequantize": "bits call rooms simd",
    "dot_tile": "call folds octets panels simd",
    "dots": "bits call rooms simd",
    "elementwise": "call simd",
    "experts": "call dequantize matmul packed simd",
    "folds": "",
    "gemm": "amx call operands panels simd",
    "head": "amx call dequantize logits simd",
    "logits": "call simd",
    "loss": "call dequantize gemm logits packed simd",
    "matmul": "call gemm simd",
    "norm": "call simd",
    "octets": "bits simd",
    "online": "call dequantize simd visible",
    "operands": "call panels simd",
    "packed": "amx call dequantize dots gemm matmul panels simd",
    "packing": "call",
    "peak": "call simd",
    "panels": "call simd",
    "pool": "crew",
    "quantize": "bits call codes dequantize rooms search simd",
    "recoding": "bits call codes dequantize rooms simd",
    "reduce": "call simd",
    "rooms": "bits call octets simd",
    "rounded": "bits call code_panels codes dot_tile gemm octets panels rooms simd",
    "rope": "call simd",
    "rows": "bits call codes dequantize rooms simd",
    "scan": "call simd vectors",
    "search": "call simd",
    "short_conv": "call simd",
    "simd": "folds",
    "snapping": "bits call codes quantize rooms search simd",
    "softmax": "call simd",
    "splitting": "call",
    "tile": "call simd",
    "tokens": "call splitting",
    "update": "bits call dequantize elementwise simd",
    "vectors": "call simd",
    "visible": "call simd tile",
    "weighing": "bits call codes quantize rooms search simd",
    "windows": "call simd",
}
DTYPES = FOLDER.parent / "dtypes"
ROLES = {
    "dequantize": "unpack",
    "dots": "dot",
    "rounded": "codes scales",
    "quantize": "pack",
    "recoding": "recode",
    "snapping": "snap",
    "weighing": "weigh",
}  # module -> functions of a type that it compiles
COMPLETE = "complete"  # a file with the checksum of the machine code
FINGERPRINT = re.compile("[0-9a-f]{16}")
DAYS_KEPT = 30
given: Path | None = None  # in a compiling child: the folder for results
distrusted: set[Path] = set()  # damaged folders that cannot be written


@cache
def modules() -> list[str]:
    """The kernel modules, those that most others import first, then the largest."""
    users = {name: sum(name in needed(other) for other in MADE_OF) for name in MADE_OF}
    sizes = {name: (FOLDER / f"{name}.py").stat().st_size for name in MADE_OF}
    return sorted(MADE_OF, key=lambda name: (-users[name], -sizes[name]))


@cache
def needed(name: str) -> frozenset[str]:
    """This kernel module and all that it imports."""
    return frozenset([name]).union(*map(needed, MADE_OF[name].split()))


def fingerprint(name: str) -> str:
    """Hash of everything a module's code depends on: the platform and the sources, not their location."""
    parts = list(platform_parts())
    for module_name in sorted(needed(name)):
        parts += [module_name, (FOLDER / f"{module_name}.py").read_text(encoding="utf-8")]
        if module_name in ROLES:
            sources = (file.read_text(encoding="utf-8") for file in sorted(DTYPES.glob("*.py")))
            parts.append(of_role("\n".join(sources), ROLES[module_name]))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@cache
def _parsed(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


@cache
def of_role(source: str, role: str) -> str:
    """The part of the files in dtypes/ that some roles depend on: all but functions used only by others."""
    nodes = _parsed(source)
    functions = [f for f in nodes if isinstance(f, ast.FunctionDef) and f.decorator_list]
    for_role = [f for f in functions if not decorators(f).isdisjoint(role.split())]
    called = [*for_role, *(node for node in nodes if node not in functions)]
    for node in called:  # grows
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        called += [f for f in functions if f.name in names and f not in called]
    lines = source.splitlines()
    return "\n".join(line for node in called for line in lines[first_line(node) : node.end_lineno])


def decorators(function: ast.FunctionDef) -> set[str]:
    """The last names of a function's decorators."""
    called = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return {d.attr for d in called if isinstance(d, ast.Attribute)}


def first_line(node: ast.stmt) -> int:
    """The line, from 0, where a statement begins with its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1


@cache
def folder_name(name: str) -> str:
    return f"{name}-{kept().get(name) or fingerprint(name)}"


def kept_name() -> str:
    """The name of the file with all fingerprints, a hash of all that they depend on: parsing it takes longer."""
    files = [*(FOLDER / f"{name}.py" for name in MADE_OF), *sorted(DTYPES.glob("*.py"))]
    parts = [
        *platform_parts(),
        repr(MADE_OF),
        *(f"{file.name}\0{file.read_text('utf-8')}" for file in files),
    ]
    return f"names-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"


@cache
def kept() -> dict[str, str]:
    """The fingerprints of all modules, if they have been kept."""
    for root in roots():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            fingerprints = json.loads((root / kept_name()).read_text())
            if isinstance(fingerprints, dict) and all(
                FINGERPRINT.fullmatch(str(fingerprints.get(n))) for n in MADE_OF
            ):
                return fingerprints
    return {}


def keep() -> None:
    """Keep the fingerprints of all modules for other processes, where that is possible and has not been done."""
    root = next((root for root in roots() if os.access(root, os.W_OK)), None)
    if root is None or kept():
        return
    path = root / kept_name()
    part = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk
        part.write_text(json.dumps({name: fingerprint(name) for name in MADE_OF}))
        part.replace(path)
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def own_folder(make: bool = False) -> list[Path]:
    """A temporary folder for this user's kernels that nobody else can write; empty if there is none."""
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
    """Folders that may have compiled modules, the usual one first."""
    return [given] if given else [cache_root() / "kernels", *own_folder()]


@cache
def target() -> Path:
    """Where to compile missing modules to: the usual folder, one that later commands find, or a temporary one."""
    if given:
        return given
    default_folder = cache_root() / "kernels"
    folder = next(
        (root for root in (default_folder, *own_folder(make=True)) if refusal(root) is None), None
    )
    folder = folder or writable(default_folder)
    if folder not in roots():
        roots().append(folder)
    return folder


def complete(name: str) -> Path | None:
    """The folder with a module's complete compiled code, or None."""
    folders = (root / folder_name(name) for root in roots())
    good = (folder for folder in folders if folder not in distrusted)
    return next((folder for folder in good if (folder / COMPLETE).exists()), None)


def distrust(folder: Path) -> None:
    """Have a damaged folder compiled again."""
    try:
        (folder / COMPLETE).unlink(missing_ok=True)
    except OSError:
        distrusted.add(folder)


def folder_of(name: str) -> Path:
    """Where a module's compiled code is, or will be."""
    return complete(name) or target() / folder_name(name)


def missing(names: Collection[str]) -> list[str]:
    """Those of these modules, and of the modules that they need, that are not compiled."""
    required = frozenset[str]().union(*(needed(name) for name in names))
    return [name for name in modules() if name in required and complete(name) is None]


def sweep(root: Path) -> None:
    """Remove kernels of other versions that were compiled more than a month ago."""
    current = {folder_name(name) for name in modules()}
    for folder in root.iterdir():
        old = time.time() - folder.stat().st_mtime > DAYS_KEPT * 24 * 3600
        if folder.is_dir() and folder.name not in current and old:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.suffix == ".json" and old:
            folder.unlink(missing_ok=True)


@contextlib.contextmanager
def numba_cache(folder: Path) -> Iterator[None]:
    """Inside the block numba caches in `folder`; the user's own numba code keeps its cache."""
    caching = importlib.import_module("numba.core.caching")
    locator = importlib.import_module(f"{__package__}.locator")
    before = caching.CacheImpl._locator_classes, caching.Cache.load_overload
    locator.InFolder.folder = str(folder)
    locator.InFolder.complete = (folder / COMPLETE).exists()
    caching.CacheImpl._locator_classes = [locator.InFolder]
    caching.Cache.load_overload = locator.load_overload
    try:
        yield
    finally:
        caching.CacheImpl._locator_classes, caching.Cache.load_overload = before
