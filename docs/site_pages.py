"""Pages of the site that are not files of docs/: a hook of mkdocs.yml, for `make docs`.

README, CHANGELOG and CONTRIBUTING become pages. The library reference is written from the names that packtrain exports
and their docstrings. A file of the source that a page links becomes a page with its text. Links follow.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

import packtrain

ROOT = Path(__file__).resolve().parent.parent
PAGE_NAMES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
SECTION_TITLES = {
    "api": "The commands as functions",
    "training.generic": "Training any model",
    "engine.optim": "Optimizers",
    "inference.kv_cache": "Contexts",
    "inference.sampling": "Choosing tokens",
    "engine.tensor": "Tensors and ops",
    "engine.graph": "Graphs",
    "engine.autodiff": "Gradients",
    "engine.placement": "Placement",
    "engine.memory_plan": "Plans",
    "engine.executor": "Execution",
    "engine.interpreter": "The specification",
}
RESULTS = (
    "training_result.TrainingResult",
    "planned_run.PlannedRun",
    "evaluation.EvalResult",
    "comparison.ComparisonResult",
    "generation_settings.GeneratedText",
)


def on_config(config: Any) -> Any:
    config["mdx_configs"]["toc"]["slugify"] = anchor
    return config


def anchor(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_files(files: Any, config: Any) -> Any:
    pages = [ROOT / name for name in PAGE_NAMES] + sorted((ROOT / "docs").glob("*.md"))
    linked_paths = {path for page in pages for path in link_paths(page).values()}
    added_pages = {name: (ROOT / source).read_text() for source, name in PAGE_NAMES.items()}
    added_pages["api.md"] = library_reference()
    for path in sorted(linked_paths):
        if site_path(path).startswith("source/"):
            language = "python" if path.suffix == ".py" else ""
            title = path.relative_to(ROOT)
            text = f"# {title}\n\n~~~~~~{language}\n{path.read_text()}\n~~~~~~\n"
            added_pages[site_path(path)] = text
    for name, content in added_pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def link_paths(page: Path) -> dict[str, Path]:
    """Return the file of the repository that each relative link of a page names."""
    targets = {target for _, target in LINK.findall(page.read_text())}
    return {target: (page.parent / target).resolve() for target in targets}


def site_path(path: Path) -> str:
    """Return where a file of the repository is in the site's tree of sources."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGE_NAMES or name.startswith("docs/"):
        return PAGE_NAMES.get(name, name.removeprefix("docs/"))
    return f"source/{name}.md"


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Point links between files of the repository at the pages that those files become."""
    place = page.file.src_uri
    sources = {site_path(ROOT / name): ROOT / name for name in PAGE_NAMES}
    source = sources.get(place, ROOT / "docs" / place)
    if not source.exists():  # a page that only the site has
        return text
    paths = link_paths(source)

    def follow(match: re.Match[str]) -> str:
        target = site_path(paths[match[2]])
        return match[1] + os.path.relpath(target, PurePosixPath(place).parent)

    return LINK.sub(follow, text)


def library_reference() -> str:
    """Return the page of mkdocstrings' directives for all public names but the ops, which have a page."""
    lines = [
        "# Library reference",
        "",
        "Every public name of `import packtrain as pt` but the [ops](ops.md) and the element types (`pt.f32`, …).",
        "The settings of a command are listed under [its name](reference.md) and by `help(pt.finetune)`.",
    ]
    for module, title in SECTION_TITLES.items():
        lines += ["", f"## {title}"]
        for name in packtrain._LAZY_EXPORTS[module]:
            home = getattr(getattr(packtrain, name), "__module__", f"packtrain.{module}")
            lines += directive(f"{home}.{name}", f"pt.{name}")
    lines += ["", "## Results of commands"]
    for result in RESULTS:
        lines += directive(f"packtrain.workflows.{result}", result.rpartition(".")[2])
    return "\n".join(lines)


def directive(path: str, heading: str) -> list[str]:
    return ["", f"::: {path}", "    options:", f"      heading: {heading}"]
