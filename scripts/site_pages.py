"""A hook of mkdocs (mkdocs.yml): pages of the site besides docs/, and links that lead there as they do on GitHub.

1. `on_files` adds the documents at the top of the repository (README.md is the first page), the notebook as a page, and
   a page for each module of the reference, and for each example that a page links to.
2. `on_page_markdown` turns links to files of the repository into links to those pages. Any other link stays as it
   is, and the strict build refuses it.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
NOTEBOOK = "two-ranks"
INTEGRATIONS = sorted(
    path.stem for path in (ROOT / "ddpstats" / "integrations").glob("*.py") if "\n__all__ =" in path.read_text()
)
REFERENCE = {  # page -> modules
    "ddpstats": ["ddpstats"],
    "errors": ["ddpstats.errors"],
    "integrations": ["ddpstats.integrations", *(f"ddpstats.integrations.{name}" for name in INTEGRATIONS)],
    "testing": ["ddpstats.testing", "ddpstats.testing.strategies"],
}
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    made = {page: (ROOT / name).read_text() for name, page in DOCUMENTS.items()}
    made[f"{NOTEBOOK}.md"] = _of_notebook(json.loads((ROOT / "docs" / f"{NOTEBOOK}.ipynb").read_text()))
    made |= {f"reference/{page}.md": _reference(modules) for page, modules in REFERENCE.items()}
    for name in _linked_files():
        if name.endswith(".py") and not name.startswith("ddpstats/"):
            made[_page_of(name)] = f"# {name}\n\n```python\n{(ROOT / name).read_text()}```\n"
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = page.file.src_uri
    folder = "" if source in DOCUMENTS.values() else posixpath.join("docs", posixpath.dirname(source))

    def leads_to(link: re.Match[str]) -> str:
        target = _page_of(posixpath.normpath(posixpath.join(folder, link[1])))
        return f"]({posixpath.relpath(target, posixpath.dirname(source) or '.')}{link[2] or ''})"

    return LINK.sub(leads_to, markdown)


def _linked_files() -> set[str]:
    """Files of the repository, outside of docs/, that its pages link to."""
    pages = [ROOT / name for name in DOCUMENTS] + sorted((ROOT / "docs").glob("*.md"))
    linked = {(page.parent / link[1]).resolve() for page in pages for link in LINK.finditer(page.read_text())}
    files = {path for path in linked if path.is_file() and ROOT / "docs" not in path.parents}
    return {path.relative_to(ROOT).as_posix() for path in files}


def _page_of(name: str) -> str:
    """Return the page that shows a file of the repository, or the name itself where it has none."""
    if name.startswith("ddpstats/integrations"):
        return "reference/integrations.md"
    if name.endswith(".py"):
        return name.removesuffix(".py") + ".md"
    if name == f"docs/{NOTEBOOK}.ipynb":
        return f"{NOTEBOOK}.md"
    return DOCUMENTS.get(name, name.removeprefix("docs/"))


def _of_notebook(notebook: Any) -> str:
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts)


def _reference(modules: list[str]) -> str:
    parts = []
    for module in modules:
        level = 1 if module == modules[0] else 2
        options = {"heading_level": level, "show_root_full_path": True, "members": _public(module)}
        parts.append(f"::: {module}\n    options: {json.dumps(options)}")
    return "\n\n".join(parts)


def _public(module: str) -> list[str]:
    """Return a module's public names: what it imports as itself, and what it defines without an underscore."""
    path = ROOT.joinpath(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    imported = [alias.name for alias in aliases if alias.asname == alias.name]
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in [*imported, *defined] if not name.startswith("_")]
