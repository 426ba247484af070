"""packtrain doctor: show whether packtrain can work here: CPU, kernels, caches, memory, installed packages."""

import json
import platform
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain.cli import DONE, FAILED
from packtrain.common.memory import machine_memory
from packtrain.common.options import option
from packtrain.common.version import __version__
from packtrain.devtools.bench.machine_rates import describe_machine, package_version
from packtrain.engine.memory_plan import size_text
from packtrain.kernels.runtime import kernel_cache
from packtrain.kernels.runtime.environment import cache_root

REQUIRED = "numpy", "numba", "threadpoolctl", "sentencepiece", "rich", "pyyaml", "jinja2", "psutil"
OPTIONAL = {  # package: its extra, and what it brings
    "torch": ("torch", "--device torch:cpu, cuda and mps, --nproc"), "triton": ("torch", "kernels of --device cuda"),
    "starlette": ("server", "packtrain serve, --watch"), "uvicorn": ("server", "packtrain serve, --watch"),
    "llguidance": ("grammar", "--grammar, --json-schema, required tools"),
    "pyarrow": ("data", "Parquet, Arrow and Feather files"),
    "python-calamine": ("data", "Excel and OpenDocument files"),
}  # fmt: skip
MODULES = {"pyyaml": "yaml"}  # modules that have another name than their package
# features for which kernels differ, best first
KERNEL_LEVELS = "AMX bf16", "AVX-512", "AVX2", "NEON"


@dataclass(frozen=True)
class DoctorSettings:
    """Settings of the report."""

    json: bool = option(False, "print JSON")


def run(settings: DoctorSettings) -> int:
    """Print what packtrain finds on this machine; returns 1 if packtrain cannot work here."""
    problems = list[str]()
    for name in REQUIRED:
        try:
            import_module(MODULES.get(name, name))
        except Exception as error:  # a broken package raises anything
            advice = f"pip install --force-reinstall {name}"
            problems.append(f"{name} cannot be imported: {error}; {advice}")
    report = {
        "packtrain": __version__, "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(), "memory": machine_memory(), "cache": str(cache_root()),
        "caches": _cache_sizes(cache_root()),
        "packages": {name: package_version(name) for name in (*REQUIRED, *OPTIONAL)}, "problems": problems,
    }  # fmt: skip
    if not problems:
        machine, names = describe_machine(), kernel_cache.kernel_modules()
        report |= {name: machine[name] for name in ("cpu", "features", "threads")}
        levels = (level for level in KERNEL_LEVELS if level in machine["features"])
        report["kernel_level"] = next(levels, "any CPU of its kind")
        report["kernels"] = {
            "modules": len(names), "missing": len(kernel_cache.missing_modules(names)),
            "folders": sorted({str(p.parent) for p in map(kernel_cache.complete, names) if p}),
        }  # fmt: skip
    print(json.dumps(report, indent=2) if settings.json else "\n".join(_lines(report)))
    return FAILED if report["problems"] else DONE


def _cache_sizes(root: Path) -> dict[str, int]:
    """Return the bytes of each folder in the cache, and of all files beside them."""
    sizes = dict[str, int]()
    for path in root.rglob("*"):
        name = path.relative_to(root).parts[0] if path.parent != root else "other files"
        sizes[name] = sizes.get(name, 0) + (path.lstat().st_size if path.is_file() else 0)
    return sizes


def _lines(report: dict[str, Any]) -> list[str]:
    memory, rows = report["memory"], {n: report[n] for n in ("packtrain", "python", "platform")}
    if "cpu" in report:
        kernels = report["kernels"]
        rows["CPU"] = f"{report['cpu']}; {', '.join(report['features'])}"
        rows["kernels"] = f"for {report['kernel_level']}, {report['threads']} threads"
        num_compiled = kernels["modules"] - kernels["missing"]
        hint = "; packtrain compile compiles the others" * bool(kernels["missing"])
        places = " in ".join(["modules compiled", *filter(None, [", ".join(kernels["folders"])])])
        rows["compiled"] = f"{num_compiled} of {kernels['modules']} {places}{hint}"
    sizes = (f"{name} {size_text(nbytes)}" for name, nbytes in report["caches"].items())
    rows["cache"] = "; ".join([report["cache"], *sizes])
    rows["memory"] = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in memory.items())
    for name, version in report["packages"].items():
        extra, purpose = OPTIONAL.get(name, ("", ""))
        absent = f"not installed; pip install 'packtrain[{extra}]' brings {purpose}"
        rows[name] = version or (absent if extra else "not installed, but required")
    lines = [f"{name:<16}{text}" for name, text in rows.items()]
    return [*lines, *(f"problem: {text}" for text in report["problems"] or ["none"])]
