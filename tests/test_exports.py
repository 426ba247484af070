"""`__all__` says the truth, everywhere, and every op can be had by name."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import packtrain
import packtrain.optim  # its ops are known when it is loaded
from packtrain import ops
from packtrain.tensor import OPS, Op

LEFT_OUT = (
    "packtrain.kernels.",
    "packtrain.checking.peers",
    "packtrain.benching.torch_",
)  # they load numba, and PyTorch
LATE = ("packtrain.library", "packtrain.fitting", "packtrain.optim")
MODULES = [
    packtrain,
    *(
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(packtrain.__path__, "packtrain.")
        if not found.name.startswith(LEFT_OUT)
    ),
]
DECLARING = [module for module in MODULES if hasattr(module, "__all__")]


def test_packages_declare_what_they_export():
    names = {module.__name__ for module in DECLARING}
    assert names >= {"packtrain", "packtrain.ops", "packtrain.planning", "packtrain.backends"}


@pytest.mark.parametrize("module", DECLARING, ids=lambda module: module.__name__)
def test_what_is_declared_exists_once_and_in_order(module: ModuleType):
    declared = list(module.__all__)
    missing = [name for name in declared if not hasattr(module, name)]
    twice = [name for name in set(declared) if declared.count(name) > 1]
    assert (missing, twice) == ([], [])
    own = declared[: -len(ops.__all__)] if module is packtrain else declared
    assert own == sorted(own, key=lambda name: (not name.isupper(), name))  # as ruff sorts


def test_every_op_is_exported_under_its_name():
    own = {name: op for name, op in OPS.items() if op.rule.__module__.startswith("packtrain.ops.")}
    assert {name: getattr(ops, name, None) for name in own} == own
    assert set(own) <= set(ops.__all__) <= set(packtrain.__all__)
    homes = {op.rule.__module__ for name, op in OPS.items() if name not in own}
    assert {home.rpartition(".")[0] for home in homes} == {
        "packtrain.optim"
    }  # with their optimizers


def test_ops_export_nothing_but_ops_and_compositions_of_them():
    others = [name for name in ops.__all__ if not isinstance(getattr(ops, name), Op)]
    homes = {name: getattr(ops, name).__module__ for name in others}
    assert all(home.startswith("packtrain.ops.") for home in homes.values()), homes


def test_the_package_exports_all_it_names():
    public = {
        name
        for name, value in vars(packtrain).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public <= set(packtrain.__all__)
    homes = {name: _home(name) or "" for name in packtrain.__all__}
    late = {name for name, home in homes.items() if home.startswith(LATE)}
    assert late.isdisjoint(public)  # they are loaded when one is asked for
    assert set(packtrain.__all__) - public - late <= {"__version__", *_modules()}
    with pytest.raises(AttributeError, match="'tokenise'"):
        _home("tokenise")


def _home(name: str) -> str | None:
    return getattr(getattr(packtrain, name), "__module__", None)


def _modules() -> set[str]:
    return {name for name, value in vars(packtrain).items() if isinstance(value, ModuleType)}
