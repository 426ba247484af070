"""Who may import whom, and how light `import packtrain` is."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import packtrain
from packtrain.engine.backends import DEVICES

ROOT = Path(packtrain.__file__).parent

# every room, from the bottom up, and what it may import
LAYERS = {
    "common": "",
    "dtypes": "",
    "distributed": "common",
    "gguf": "common dtypes",
    "kernels": "common dtypes",
    "engine": "common dtypes distributed kernels",
    "data": "common gguf kernels",
    "models": "common dtypes gguf kernels engine data",
    "inference": "common dtypes engine data models",
    "planner": "common dtypes distributed kernels engine models inference",
    "conversion": "common dtypes gguf kernels engine data models inference",
    "training": "common dtypes distributed gguf kernels engine data models inference planner",
    "serving": "common data models inference training",
    "workflows": "common dtypes distributed gguf kernels engine data models inference planner conversion training"
    " serving",
    "devtools": "common dtypes kernels engine models planner training",
    "api": "common training workflows",
    "cli": "common distributed gguf kernels engine data models planner conversion training workflows devtools",
    "__main__": "",
}
OUTSIDE = {
    "__main__": {"packtrain_command"},
    "serving": {"numpy", "starlette", "uvicorn"},
    "kernels": {"numpy", "numba", "llvmlite", "threadpoolctl"},
    "engine/backends/triton": {"numpy", "torch", "triton"},
    "common": {"numpy", "yaml", "psutil"},
    "data": {"numpy", "jinja2", "sentencepiece"},
    "conversion": {"numpy", "sentencepiece"},
    "training/monitoring": {"numpy", "rich"},
}
LAZY_MODULES = {"kernels"}  # numba and llvmlite are loaded when first needed
# packages in kernels/ from the lowest up; those of one floor import none of each other
KERNEL_FLOORS = "runtime", "simd", "quant", "matmul", "attention logits rowwise state_space text"
NUMBAS = {"_defns", "_locator_classes"}  # of numba, which has no public names for them
TORCHS = {  # of PyTorch, likewise
    "_python_dispatch",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
TIMES_NUMPY = 2  # importing packtrain beside NumPy: 1.05 were measured


@pytest.fixture(scope="module")
def sources() -> list[tuple[str, str, ast.Module]]:
    """Module of the first level, place in the tree, and syntax of every file but the public `__init__`."""
    paths = [file.relative_to(ROOT) for file in sorted(ROOT.rglob("*.py"))]
    return [
        (path.parts[0].removesuffix(".py"), str(path), ast.parse((ROOT / path).read_text()))
        for path in paths
        if path != Path("__init__.py")
    ]


def imported_names(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Dotted names of what is imported; `from a import b` counts as a.b, which may be more than a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_module_has_its_layer(sources):
    homeless = {module for module, _, _ in sources} - LAYERS.keys()
    assert not homeless, f"say in LAYERS what {sorted(homeless)} may import"


def test_the_layers_have_no_cycle():
    for i, (module, allowed) in enumerate(LAYERS.items()):
        assert set(allowed.split()) <= set(list(LAYERS)[:i]), f"{module} comes before what it uses"


def test_imports_point_down_the_layers(sources):
    wrong = []
    for module, path, tree in sources:
        for node, name in imported_names(tree):
            top, *rest = name.split(".")
            target = rest[0] if top == "packtrain" else module
            if target not in {module, *LAYERS[module].split()}:
                wrong.append(f"{path}:{node.lineno}: {module} imports {target}")
    assert wrong == []


def test_kernels_import_packages_on_floors_below_their_own(sources):
    floors = {name: i for i, names in enumerate(KERNEL_FLOORS) for name in names.split()}
    wrong = []
    for module, path, tree in sources:
        if module == "kernels" and path.count("/") == 2:
            package = path.split("/")[1]
            for node, name in imported_names(tree):
                target = name.split(".")[2] if name.startswith("packtrain.kernels.") else package
                if target != package and not floors.get(target, len(floors)) < floors[package]:
                    wrong.append(f"{path}:{node.lineno}: {package} imports {target}")
    assert wrong == []


def test_other_packages_are_imported_where_they_may_be(sources):
    wrong = []
    for module, path, tree in sources:
        rooms = (packages for folder, packages in OUTSIDE.items() if path.startswith(folder))
        allowed = next(rooms, {"numpy"}) | sys.stdlib_module_names | {"packtrain"}
        for node, name in imported_names(tree):
            if name.partition(".")[0] not in allowed:
                wrong.append(f"{path}:{node.lineno}: {module} imports {name}")
    assert wrong == []


def test_nothing_is_imported_late(sources):
    wrong = []
    for module, path, tree in sources:
        tried = [node for part in tree.body if isinstance(part, ast.Try) for node in part.body]
        top = {id(node) for node in (*tree.body, *tried)}  # tried: what not every system has
        late_lines = [node.lineno for node, _ in imported_names(tree) if id(node) not in top]
        wrong += [
            f"{path}:{number}: a late import" for number in late_lines if module not in LAZY_MODULES
        ]
    assert wrong == []


@pytest.mark.parametrize(
    "code, unloaded",
    [
        ("import packtrain.cli.main", ["numpy"]),  # --version
        ("import packtrain.cli.quantize", ["packtrain.engine.ops", "rich"]),
    ],
)
def test_a_command_loads_what_it_needs(code, unloaded):
    said = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {said}"], capture_output=True, text=True, check=True
    )
    assert not {*unloaded} & {*done.stdout.split()}


def test_importing_is_light(tmp_path):
    """Neither numba nor torch; with the engine at most twice what NumPy takes, in the same process."""
    code = (
        "import sys, time; import packtrain; assert 'numpy' not in sys.modules; "
        "began = time.thread_time(); import numpy; there = time.thread_time(); "
        "packtrain.Session, packtrain.differentiate, packtrain.interpret, packtrain.engine.ops; "
        "print(time.thread_time() - there, there - began, *{'torch', 'numba', 'llvmlite'} & set(sys.modules))"
    )
    # compiled to bytecode by the first run, also where Python is told not to keep any
    bytecode_env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    took = []
    for _ in range(8):
        said = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT.parent,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **bytecode_env},
        ).stdout.split()
        assert said[2:] == [], f"import packtrain loads {said[2:]}"
        took.append([*map(float, said[:2])])
    ours, numpys = map(min, zip(*took, strict=True))  # what others of the machine take comes on top
    assert ours / numpys <= TIMES_NUMPY


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines that use another module's underscore names: imports, and attributes that this file does not define."""
    nodes = [*ast.walk(tree)]
    outside = {
        (alias.asname or alias.name).partition(".")[0]
        for node, name in imported_names(tree)
        if not name.startswith("packtrain")
        for alias in node.names
    }
    defined_names = {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    defined_names |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and is_own(n.value)}
    defined_names |= {
        n.target.id
        for n in nodes
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for node, name in imported_names(tree):
        private = [part for part in name.split(".")[1:] if part.startswith("_")]
        if name.startswith("packtrain.") and any(not part.startswith("__") for part in private):
            yield node.lineno, name
    for n in nodes:
        if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.startswith("__"):
            root = ast.unparse(n).partition(".")[0]
            if (
                not is_own(n.value)
                and n.attr not in defined_names | NUMBAS | TORCHS
                and root not in outside
            ):
                yield n.lineno, ast.unparse(n)


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_module_uses_another_s_private_names(sources):
    wrong = [
        f"{path}:{n}: {private_name}"
        for _, path, tree in sources
        for n, private_name in private_names(tree)
    ]
    assert wrong == []


def test_each_device_has_its_module():
    """Also those of PyTorch, which a machine without it never loads."""
    for kind, module in DEVICES.items():
        assert find_spec(f"packtrain.engine.backends.{module}"), f"{kind}: {module}"


def test_private_names_are_seen():
    code = (
        "from packtrain.engine.graph import _reachable\nimport packtrain.engine.autodiff as g\n"
        "g._check\nobject._hidden\nself._own"
    )
    reported = [private_name for _, private_name in private_names(ast.parse(code))]
    assert reported == ["packtrain.engine.graph._reachable", "g._check", "object._hidden"]
