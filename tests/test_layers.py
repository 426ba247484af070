"""Who may import whom, and how light `import packtrain` is."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import packtrain

ROOT = Path(packtrain.__file__).parent

# every module of the first level, in reading order, and what it may import
LAYERS = {
    "version": "",
    "errors": "",
    "words": "",
    "collecting": "",
    "ranks": "errors",
    "events": "",
    "files": "errors",
    "settings": "errors words",
    "types": "",
    "dtypes": "types",
    "gguf": "dtypes errors files words",
    "child": "",
    "memory": "errors",
    "kernels": "collecting child errors memory types dtypes",
    "gpu": "",
    "tokenizer": "dtypes errors gguf kernels",
    "template": "errors files tokenizer",
    "vocabulary": "errors gguf tokenizer",
    "kept": "child errors kernels memory",
    "corpus": "errors words files gguf tokenizer vocabulary kept",
    "samples": "errors words files gguf tokenizer template kept corpus",
    "origin": "",
    "tensor": "dtypes origin",
    "graph": "dtypes tensor",
    "quant": "types dtypes errors kernels",
    "ops": "types dtypes errors tensor kernels gpu quant",
    "grad": "dtypes origin tensor graph ops",
    "optim": "ranks settings dtypes tensor graph kernels gpu ops grad",
    "interpreting": "dtypes tensor graph",
    "backends": "errors dtypes tensor kernels gpu ops",
    "copies": "tensor graph ops backends",
    "steps": "tensor ops backends",
    "overlap": "tensor graph ops backends copies steps",
    "placing": "dtypes tensor graph ops backends copies steps overlap",
    "debug": "errors",
    "stop": "",
    "packing": "kernels",
    "planning": "backends dtypes tensor graph packing steps placing words",
    "picture": "planning words",
    "observe": "backends dtypes tensor debug steps placing planning",
    "repeating": "backends debug kernels placing planning",
    "values": "tensor",
    "run": "errors backends dtypes tensor debug steps placing planning observe repeating values",
    "cost": "tensor ops steps placing",
    "speed": "backends dtypes tensor graph kernels ops steps placing run cost",
    "recompute": "backends graph ops placing packing planning tensor cost",
    "checking": "backends dtypes tensor graph kernels quant ops grad optim interpreting placing run words",
    "models": "words types dtypes errors files tensor ops gguf quant tokenizer",
    "flash": "backends dtypes errors models ops tensor",
    "merging": "backends types dtypes errors files tensor graph ops placing planning run kernels quant gguf models",
    "grammar": "errors tokenizer",
    "sampling": "errors words settings",
    "context": "backends dtypes errors files words memory tensor graph ops placing planning run models sampling",
    "convert": "dtypes errors files gguf tokenizer quant models context",
    "peft": "dtypes errors files gguf quant convert models",
    "generation": "backends dtypes errors words tokenizer models sampling context",
    "drafting": "errors generation models",
    "answers": "context generation sampling tokenizer",
    "beams": "context generation tokenizer",
    "embedding": "context errors models words",
    "watch": "errors events words files settings memory planning",
    "notebook": "errors events files stop kernels corpus watch",
    "design": "errors ranks child words files dtypes tensor graph ops optim steps placing packing planning memory"
    " kernels cost speed recompute models context watch version backends",
    "training": "child ranks errors events words files settings dtypes tensor graph optim placing planning run memory"
    " stop kernels quant gguf tokenizer template corpus samples speed models flash watch design backends version"
    " context ops cost",
    "serving": "errors words template samples tokenizer models sampling grammar context generation embedding watch"
    " memory version",
    "fitting": "notebook stop"
    " errors events words files dtypes tensor graph ops optim backends placing planning picture run memory"
    " kernels quant gguf watch design training",
    "tasks": "notebook"
    " ranks version errors events words files settings types dtypes graph placing cost planning picture run"
    " memory kernels quant gguf tokenizer corpus samples serving models flash merging grammar sampling context"
    " generation drafting answers beams embedding template watch design training backends",
    "benching": "child events dtypes tensor graph ops optim steps placing cost run speed memory kernels quant"
    " models design training version errors",
    "library": "errors events settings notebook tasks design training",
    "commands": "ranks errors events words files settings dtypes tensor graph placing planning picture run memory"
    " stop kernels quant gguf tokenizer vocabulary convert corpus samples cost speed recompute models peft template"
    " watch optim design training tasks backends checking benching",
    "cli": "collecting errors words settings debug kernels commands training version ranks",
    "__main__": "",
}
OUTSIDE = {
    "__main__": {"packtrain_command"},
    "serving": {"numpy", "starlette", "uvicorn"},
    "kernels": {"numpy", "numba", "llvmlite", "threadpoolctl"},
    "gpu": {"numpy", "torch", "triton"},
    "settings": {"yaml"},
    "template": {"jinja2", "numpy"},
    "vocabulary": {"numpy", "sentencepiece"},
    "convert": {"numpy", "sentencepiece"},
    "memory": {"psutil"},
    "watch": {"numpy", "rich"},
}
LATE = {"kernels"}  # numba and llvmlite are loaded when first needed
NUMBAS = {"_defns", "_locator_classes"}  # of numba, which has no public names for them
TORCHS = {  # of PyTorch, likewise
    "_python_dispatch",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
TIMES_NUMPY = 2  # importing packtrain beside NumPy: 1.05 were measured


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """Module of the first level, place in the tree, and syntax of every file but the public `__init__`."""
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT)
        if path != Path("__init__.py"):
            yield path.parts[0].removesuffix(".py"), str(path), ast.parse(file.read_text())


def imported(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Dotted names of what is imported; `from a import b` counts as a.b, which may be more than a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_module_has_its_layer():
    homeless = {module for module, _, _ in sources()} - LAYERS.keys()
    assert not homeless, f"say in LAYERS what {sorted(homeless)} may import"


def test_the_layers_have_no_cycle():
    for i, (module, allowed) in enumerate(LAYERS.items()):
        assert set(allowed.split()) <= set(list(LAYERS)[:i]), f"{module} comes before what it uses"


def test_imports_point_down_the_layers():
    wrong = []
    for module, path, tree in sources():
        for node, name in imported(tree):
            top, *rest = name.split(".")
            target = rest[0] if top == "packtrain" else module
            if target not in {module, *LAYERS[module].split()}:
                wrong.append(f"{path}:{node.lineno}: {module} imports {target}")
    assert wrong == []


def test_other_packages_are_imported_where_they_may_be():
    wrong = []
    for module, path, tree in sources():
        allowed = OUTSIDE.get(module, {"numpy"}) | sys.stdlib_module_names | {"packtrain"}
        for node, name in imported(tree):
            if name.partition(".")[0] not in allowed:
                wrong.append(f"{path}:{node.lineno}: {module} imports {name}")
    assert wrong == []


def test_nothing_is_imported_late():
    wrong = []
    for module, path, tree in sources():
        tried = [node for part in tree.body if isinstance(part, ast.Try) for node in part.body]
        top = {id(node) for node in (*tree.body, *tried)}  # tried: what not every system has
        late = [node.lineno for node, _ in imported(tree) if id(node) not in top]
        wrong += [f"{path}:{number}: a late import" for number in late if module not in LATE]
    assert wrong == []


@pytest.mark.parametrize(
    "code, without",
    [
        ("import packtrain.cli", ["numpy"]),  # --version
        ("import packtrain.commands.quantize", ["packtrain.ops", "rich"]),
    ],
)
def test_a_command_loads_what_it_needs(code, without):
    said = "import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {said}"], capture_output=True, text=True, check=True
    )
    assert not {*without} & {*done.stdout.split()}


def test_importing_is_light(tmp_path):
    """Neither numba nor torch; with the engine at most twice what NumPy takes, in the same process."""
    code = (
        "import sys, time; import packtrain; assert 'numpy' not in sys.modules; "
        "began = time.thread_time(); import numpy; there = time.thread_time(); "
        "packtrain.Session, packtrain.differentiate, packtrain.interpret, packtrain.ops; "
        "print(time.thread_time() - there, there - began, *{'torch', 'numba', 'llvmlite'} & set(sys.modules))"
    )
    # compiled to bytecode by the first run, also where Python is told not to keep any
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    took = []
    for _ in range(8):
        said = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT.parent,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **kept},
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
        for node, name in imported(tree)
        if not name.startswith("packtrain")
        for alias in node.names
    }
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and is_own(n.value)}
    own |= {
        n.target.id
        for n in nodes
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for node, name in imported(tree):
        private = [part for part in name.split(".")[1:] if part.startswith("_")]
        if name.startswith("packtrain.") and any(not part.startswith("__") for part in private):
            yield node.lineno, name
    for n in nodes:
        if isinstance(n, ast.Attribute) and n.attr.startswith("_") and not n.attr.startswith("__"):
            root = ast.unparse(n).partition(".")[0]
            if not is_own(n.value) and n.attr not in own | NUMBAS | TORCHS and root not in outside:
                yield n.lineno, ast.unparse(n)


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_module_uses_another_s_private_names():
    wrong = [
        f"{path}:{n}: {what}" for _, path, tree in sources() for n, what in private_names(tree)
    ]
    assert wrong == []


def test_private_names_are_seen():
    code = "from packtrain.graph import _reachable\nimport packtrain.grad as g\ng._check\nobject._hidden\nself._own"
    found = [what for _, what in private_names(ast.parse(code))]
    assert found == ["packtrain.graph._reachable", "g._check", "object._hidden"]
