"""`__all__` says the truth, everywhere, and every op can be had by name."""

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import packtrain
import packtrain.engine.optim  # its ops are known when it is loaded
from packtrain.engine import ops
from packtrain.engine.tensor import OPS, Op

# they load numba, PyTorch and Triton
LEFT_OUT = (
    "packtrain.kernels.",
    "packtrain.engine.backends.triton.",
    "benchmarks.torch_ops",
)
MODULES = [
    packtrain,
    *(
        importlib.import_module(module_info.name)
        for module_info in pkgutil.walk_packages(packtrain.__path__, "packtrain.")
        if not module_info.name.startswith(LEFT_OUT)
    ),
]
DECLARING = [module for module in MODULES if hasattr(module, "__all__")]


def test_packages_declare_what_they_export():
    """Those that define names of their own; the others export what they import."""
    names = {module.__name__ for module in DECLARING}
    assert names >= {"packtrain", "packtrain.engine.ops", "packtrain.engine.backends"}


def test_modules_import_names_from_where_they_are_defined_or_from_a_package():
    folder = Path(packtrain.__path__[0])
    paths = {
        ".".join(("packtrain", *path.relative_to(folder).with_suffix("").parts)): path
        for path in folder.rglob("*.py")
    }
    imports = {
        module: [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        for module, path in paths.items()
        if not module.startswith("packtrain.kernels.")  # types are checked loosely there
    }
    # `X as X` says that a module passes X on
    passed_on = {
        module: {a.name for n in nodes for a in n.names if a.asname != a.name}
        for module, nodes in imports.items()
    }
    strangers = [
        f"{module}: {alias.name} from {node.module}"
        for module, nodes in imports.items()
        for node in nodes
        for alias in node.names
        if alias.name in passed_on.get(node.module, ())
    ]
    assert strangers == []


@pytest.mark.parametrize("module", DECLARING, ids=lambda module: module.__name__)
def test_what_is_declared_exists_once_and_in_order(module: ModuleType):
    declared = list(module.__all__)
    missing = [name for name in declared if not hasattr(module, name)]
    duplicates = [name for name in set(declared) if declared.count(name) > 1]
    assert (missing, duplicates) == ([], [])
    own_names = declared[: -len(ops.__all__)] if module is packtrain else declared
    assert own_names == sorted(
        own_names, key=lambda name: (not name.isupper(), name)
    )  # as ruff sorts


def test_what_is_loaded_on_first_use_is_what_type_checkers_see():
    source = Path(packtrain.__path__[0], "__init__.py").read_text()
    (listed,) = (
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert list(packtrain.__all__) == [*ast.literal_eval(listed), *ops.__all__]
    for name in ast.literal_eval(listed):
        attribute = getattr(packtrain, name)
        assert isinstance(attribute, ModuleType) == (name in ("backends", "dtypes", "ops")), name


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="'tokenise'"):
        getattr(packtrain, "tokenise")  # noqa: B009


def test_every_op_is_exported_under_its_name():
    defined_ops = {
        name: op
        for name, op in OPS.items()
        if op.rule.__module__.startswith("packtrain.engine.ops.")
    }
    assert {name: getattr(ops, name, None) for name in defined_ops} == defined_ops
    assert set(defined_ops) <= set(ops.__all__) <= set(packtrain.__all__)
    homes = {op.rule.__module__ for name, op in OPS.items() if name not in defined_ops}
    assert {home.rpartition(".")[0] for home in homes} == {
        "packtrain.engine.optim",
        "packtrain.engine",
    }  # with their optimizers; row tiles run graphs


def test_ops_export_nothing_but_ops_and_compositions_of_them():
    non_ops = [name for name in ops.__all__ if not isinstance(getattr(ops, name), Op)]
    homes = {name: getattr(ops, name).__module__ for name in non_ops}
    assert all(home.startswith("packtrain.engine.ops.") for home in homes.values()), homes


def test_the_package_exports_all_it_names():
    public = {
        name
        for name, value in vars(packtrain).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public <= set(packtrain.__all__)
