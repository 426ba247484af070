"""The budgets of the style page, in lines after `ruff format`. All violations are named at once."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import packtrain

ROOT = Path(packtrain.__file__).parent
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_OP_LINES, MAX_CORE_LINES, MAX_PACKAGE_LINES = (
    400,
    40,
    80,
    2_480,
    78_528,
)
CORE_MODULES = {
    "engine/tensor", "engine/graph", "engine/autodiff", "engine/placement", "engine/memory_plan", "engine/executor",
    "engine/instrumentation", "engine/interpreter", "common/debug",
}  # fmt: skip


def lines() -> dict[Path, int]:
    files = sorted(ROOT.rglob("*.py"))
    return {f.relative_to(ROOT): len(f.read_text().splitlines()) for f in files}


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in lines():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def check_limit(limit: int, counts: dict[str, int]) -> None:
    """Fail with everything that is longer than the limit, the longest first."""
    too_long = sorted(((n, label) for label, n in counts.items() if n > limit), reverse=True)
    said = [f"{label}: {n} lines" for n, label in too_long]
    assert not said, "\n".join([f"longer than {limit} lines:", *said])


def length(node: ast.FunctionDef | ast.AsyncFunctionDef, *, decorators: bool) -> int:
    """Lines of a function; its decorators belong to an op's room, not to the function."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return node.end_lineno - (first if decorators else node.lineno) + 1


def test_files():
    check_limit(MAX_FILE_LINES, {str(path): count for path, count in lines().items()})


def test_functions():
    counts = {
        f"{path}:{node.lineno} {node.name}": length(node, decorators=False)
        for path, node in functions()
    }
    assert len(counts) > 300
    check_limit(MAX_FUNCTION_LINES, counts)


def rooms() -> Counter[str]:
    """For each op the lines of everything that is decorated for it."""
    counts: Counter[str] = Counter()
    for path, node in functions():
        for decorator in node.decorator_list:
            owner = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = owner.value.id if isinstance(owner, ast.Attribute) else owner.id
            is_op = path.parts[:2] in (("engine", "ops"), ("engine", "optim"))
            if is_op and name == "op":
                name = node.name
            if is_op:
                counts[name] += length(node, decorators=True)
    return counts


def test_op_rooms():
    op_rooms = rooms()
    assert {"matmul", "attention", "rms_norm"} <= set(op_rooms)
    check_limit(MAX_OP_LINES, op_rooms)


def test_the_core_and_the_whole():
    core = dict.fromkeys(CORE_MODULES, 0)
    for path, count in lines().items():
        module = "/".join(path.parts[:2]).removesuffix(".py")
        if module in core:
            core[module] += count
    assert all(core.values()), core
    check_limit(MAX_CORE_LINES, {"the core": sum(core.values())})
    check_limit(MAX_PACKAGE_LINES, {"packtrain": sum(lines().values())})
