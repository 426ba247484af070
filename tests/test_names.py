"""Names say what they hold: file stems stand once, and vague lone words only grow fewer."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import packtrain

ROOT = Path(packtrain.__file__).parent
# of each other, one op, one stem; test_kernel_cache.py holds the stems of kernels/ apart
MIRRORS = "kernels", "engine/ops", "engine/backends/triton"
# as names, words that say nothing of a value
WORDS = (
    "again alone along anew apart asked away began begun behind beside bare ended ending ends few found given going"
    " held here how idle kept known late learnt least less looking made many more most near never others own passed"
    " plain prepared reached ready same say several some spare taken takes there told turned twice unread usual want"
    " wanted way ways what when where which whole why within without"
)
VAGUE = {*WORDS.split()}
LIMITS = {"packtrain": 160, "tests": 71, "benchmarks": 9}  # uses of them; these only fall


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def test_a_file_stem_stands_once():
    folders = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        folder = str(path.parent.relative_to(ROOT))
        if path.stem not in ("__init__", "__main__") and not f"{folder}/".startswith(
            tuple(f"{mirror}/" for mirror in MIRRORS)
        ):
            folders[path.stem].append(folder)
    assert not {stem: rooms for stem, rooms in folders.items() if len(rooms) > 1}


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    folders = [ROOT.parent / name for name in LIMITS]
    return {path: ast.parse(path.read_text()) for f in folders for path in f.rglob("*.py")}


def test_a_class_name_stands_once(trees):
    files = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and path.is_relative_to(ROOT):
                files[node.name].add(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in files.items() if len(paths) > 1}


def test_vague_names_only_grow_fewer(trees):
    for folder, limit in LIMITS.items():
        parsed = [t for path, t in trees.items() if path.is_relative_to(ROOT.parent / folder)]
        names = (name for tree in parsed for name in identifiers(tree))
        count = sum(name.strip("_") in VAGUE for name in names)
        assert count <= limit, f"{folder}: {count:,} uses of vague names, {limit:,} at most"


def test_a_vague_name_is_seen():
    tree = ast.parse("def f(given): found = given.own")
    assert VAGUE & {*identifiers(tree)} == {"given", "found", "own"}
