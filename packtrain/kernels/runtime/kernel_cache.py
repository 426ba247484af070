"""The cache of compiled kernels: a folder for each module, named by a hash of everything that its code depends on.

A folder with the file CHECKSUM_FILE is only read: a cache from a container image or another user may be read-only.
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

from packtrain.kernels.runtime.environment import (
    cache_root, platform_identity, writable, write_error,
)  # fmt: skip

PACKAGE = "packtrain.kernels"
KERNELS_FOLDER = Path(__file__).parents[1]
# modules that compile or load kernels, and have none
HOST_MODULES = {
    "__init__", "__main__", "cache_locator", "counter_rng", "environment", "fused_products", "kernel_cache", "loader",
    "machine_code", "quantized_arrays",
}  # fmt: skip
IMPORT_PATTERN = re.compile(r"^from (packtrain\.kernels\S*) import (\([^)]*\)|.*)$", re.MULTILINE)
DTYPES_FOLDER = KERNELS_FOLDER.parent / "dtypes"
# module -> functions of a type that it compiles
MODULE_ROLES = {
    "dequantize": "unpack", "dots": "dot", "rounding": "codes", "row_products": "codes scales",
    "panel_products": "codes scales", "rows": "pack", "quantize": "pack", "requantize": "recode",
    "grid_quantize": "snap", "weighted_quantize": "weigh",
}  # fmt: skip
CHECKSUM_FILE = "complete"  # a file with the checksum of the machine code
FINGERPRINT_PATTERN = re.compile("[0-9a-f]{16}")
MAX_AGE_DAYS = 30
child_folder: Path | None = None  # in a compiling child: the folder for results
distrusted_folders: set[Path] = set()  # damaged folders that cannot be written


@cache
def module_files() -> dict[str, Path]:
    """Return the file of each kernel module by its stem, which stands once in all folders of kernels."""
    return {f.stem: f for f in sorted(KERNELS_FOLDER.rglob("*.py")) if f.stem not in HOST_MODULES}


def import_path(name: str) -> str:
    """Return the dotted name of a kernel module, with which the symbols of its kernels begin."""
    folders = module_files()[name].parent.relative_to(KERNELS_FOLDER).parts
    return ".".join((PACKAGE, *folders, name))


@cache
def module_imports() -> dict[str, frozenset[str]]:
    """Return, by name of kernel module, the names of the kernel modules that it imports, from its source."""
    paths = {
        path: name for name in module_files() for path in (f"{PACKAGE}.{name}", import_path(name))
    }
    imports = dict[str, frozenset[str]]()
    for name, file in module_files().items():
        imported_paths = set[str]()
        for module, words in IMPORT_PATTERN.findall(file.read_text(encoding="utf-8")):
            imported_paths |= {module, *map(f"{module}.".__add__, re.findall(r"\w+", words))}
        imports[name] = frozenset(map(paths.__getitem__, imported_paths & paths.keys()))
    return imports


@cache
def kernel_modules() -> list[str]:
    """Return the kernel modules, those that most others import first, then the largest."""
    names = module_imports()
    num_users = {name: sum(name in needed(user) for user in names) for name in names}
    sizes = {name: file.stat().st_size for name, file in module_files().items()}
    return sorted(names, key=lambda name: (-num_users[name], -sizes[name]))


@cache
def needed(name: str) -> frozenset[str]:
    """Return the names of a kernel module and of all that it imports."""
    return frozenset([name]).union(*map(needed, module_imports()[name]))


def fingerprint(name: str) -> str:
    """Return a hash of everything a module's code depends on: the platform and the sources, not their location."""
    hashed_parts = list(platform_identity())
    for module_name in sorted(needed(name)):
        source = module_files()[module_name].read_text(encoding="utf-8")
        hashed_parts += [import_path(module_name), source]
        if module_name in MODULE_ROLES:
            files = sorted(DTYPES_FOLDER.glob("*.py"))
            sources = (file.read_text(encoding="utf-8") for file in files)
            hashed_parts.append(role_source("\n".join(sources), MODULE_ROLES[module_name]))
    return hashlib.sha256("\0".join(hashed_parts).encode()).hexdigest()[:16]


@cache
def _parsed_statements(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


@cache
def role_source(source: str, role: str) -> str:
    """Return what `role`, names of roles by spaces, needs of a source of dtypes/: no functions that only others use."""
    nodes = _parsed_statements(source)
    functions = [f for f in nodes if isinstance(f, ast.FunctionDef) and f.decorator_list]
    role_functions = [f for f in functions if not decorator_names(f).isdisjoint(role.split())]
    called = [*role_functions, *(node for node in nodes if node not in functions)]
    for node in called:  # grows
        used_names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        called += [f for f in functions if f.name in used_names and f not in called]
    lines = source.splitlines()
    return "\n".join(line for node in called for line in lines[first_line(node) : node.end_lineno])


def decorator_names(function: ast.FunctionDef) -> set[str]:
    """Return the last names of a function's decorators."""
    decorator_calls = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return {d.attr for d in decorator_calls if isinstance(d, ast.Attribute)}


def first_line(node: ast.stmt) -> int:
    """Return the line, from 0, where a statement begins with its decorators."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1


@cache
def folder_name(name: str) -> str:
    return f"{name}-{saved_fingerprints().get(name) or fingerprint(name)}"


def fingerprints_file() -> str:
    """Return the name of the file of all fingerprints: a hash of all sources, faster than parsing them."""
    files = [*module_files().values(), *sorted(DTYPES_FOLDER.glob("*.py"))]
    texts = (f"{file.parent.name}/{file.name}\0{file.read_text('utf-8')}" for file in files)
    hashed_parts = [*platform_identity(), *texts]
    return f"names-{hashlib.sha256(chr(0).join(hashed_parts).encode()).hexdigest()[:16]}.json"


@cache
def saved_fingerprints() -> dict[str, str]:
    """Return the fingerprint (hash) of each kernel module, as a cache folder holds them; {} if none does."""
    for root in cache_roots():
        with contextlib.suppress(OSError, ValueError, RecursionError):
            fingerprints = json.loads((root / fingerprints_file()).read_text())
            if isinstance(fingerprints, dict) and all(
                FINGERPRINT_PATTERN.fullmatch(str(fingerprints.get(n))) for n in module_imports()
            ):
                return fingerprints
    return {}


def save_fingerprints() -> None:
    """Save the fingerprints of all modules for other processes, where that is possible and has not been done."""
    writable_root = next((root for root in cache_roots() if os.access(root, os.W_OK)), None)
    if writable_root is None or saved_fingerprints():
        return
    file_path = writable_root / fingerprints_file()
    partial_path = file_path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk
        partial_path.write_text(json.dumps({name: fingerprint(name) for name in module_imports()}))
        partial_path.replace(file_path)
    with contextlib.suppress(OSError):
        partial_path.unlink(missing_ok=True)


def private_folder(create: bool = False) -> list[Path]:
    """Return [a temporary folder for this user's kernels that nobody else can write], or [] if there is none."""
    if not hasattr(os, "getuid"):
        return []
    folder = Path(tempfile.gettempdir()) / f"packtrain-{os.getuid()}"
    with contextlib.suppress(OSError):
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        folder_stat = folder.lstat()
        if (
            stat.S_ISDIR(folder_stat.st_mode)
            and folder_stat.st_uid == os.getuid()
            and not folder_stat.st_mode & 0o022
        ):
            return [folder / "kernels"]
    return []


@cache
def cache_roots() -> list[Path]:
    """Return the folders that may have compiled modules, the usual one first."""
    return [child_folder] if child_folder else [cache_root() / "kernels", *private_folder()]


@cache
def target_folder() -> Path:
    """Return the folder for missing modules: the usual one, one that later commands find, or a temporary one."""
    if child_folder:
        return child_folder
    default_folder = cache_root() / "kernels"
    roots = default_folder, *private_folder(create=True)
    usable_folders = (root for root in roots if write_error(root) is None)
    usable_folder = next(usable_folders, None) or writable(default_folder)
    if usable_folder not in cache_roots():
        cache_roots().append(usable_folder)
    return usable_folder


def complete(name: str) -> Path | None:
    """Return the folder with a module's complete compiled code, or None."""
    for root in cache_roots():
        folder = root / folder_name(name)
        if folder not in distrusted_folders and os.path.exists(f"{folder}/{CHECKSUM_FILE}"):
            return folder
    return None


def distrust(folder: Path) -> None:
    """Mark a damaged folder, so that its module is compiled again."""
    try:
        (folder / CHECKSUM_FILE).unlink(missing_ok=True)
    except OSError:
        distrusted_folders.add(folder)


def module_folder(name: str) -> Path:
    """Return the folder where a module's compiled code is, or will be."""
    return complete(name) or target_folder() / folder_name(name)


def missing_modules(names: Collection[str]) -> list[str]:
    """Return those of these modules, and of the modules that they need, that are not compiled."""
    all_required = frozenset[str]().union(*map(needed, names))
    missing_names = [name for name in all_required if complete(name) is None]
    return [name for name in kernel_modules() if name in missing_names] if missing_names else []


def remove_old_kernels(root: Path) -> None:
    """Remove kernels of other versions that were compiled more than a month ago."""
    current_names = {folder_name(module_name) for module_name in kernel_modules()}
    for folder in root.iterdir():
        is_old = time.time() - folder.stat().st_mtime > MAX_AGE_DAYS * 24 * 3600
        if folder.is_dir() and folder.name not in current_names and is_old:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.suffix == ".json" and is_old:
            folder.unlink(missing_ok=True)


@contextlib.contextmanager
def numba_cache(folder: Path) -> Iterator[None]:
    """Let numba cache in `folder` inside the block; the user's own numba code keeps its cache."""
    caching = importlib.import_module("numba.core.caching")
    locator = importlib.import_module(f"{__package__}.cache_locator")
    original_hooks = caching.CacheImpl._locator_classes, caching.Cache.load_overload
    locator.InFolder.folder = str(folder)
    locator.InFolder.complete = (folder / CHECKSUM_FILE).exists()
    caching.CacheImpl._locator_classes = [locator.InFolder]
    caching.Cache.load_overload = locator.load_overload
    try:
        yield
    finally:
        caching.CacheImpl._locator_classes, caching.Cache.load_overload = original_hooks
