"""The sentences in which README.md, docs/ and the public docstrings promise something, and the tests that hold them.

1. `document_sentences` and `docstring_sentences` read the documents anew. They import nothing of ours: an integration
   whose library is not installed is read all the same.
2. `promises` keeps the sentences with one of `WORDS`.
3. `entries` reads ``promises.md``, and `existing_tests` the names of the tests that there are.
4. `problems` says where they do not fit together.

``python -m tests.promises`` writes ``promises.md`` again in the order of the documents: entries stay, those of
sentences that are gone go, new sentences come with nothing beside them, which the test does not let pass.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "tests" / "promises.md"
README, SECURITY = "README.md", "SECURITY.md"
MEASURED = ("guard-scenarios.md",)  # what a script writes is no promise; so is what stands between its two markers
PACKAGES = ("", "guard", "capture", "sentinel", "dump", "testing")
MODULES = ("errors", "recursive_op", "testing.strategies", "integrations")

# What "one" promises the number of, and "no" the absence of: "one of them", "no matter" and the like promise nothing.
COUNTED = "collective|all_reduce|all_gather|gather|exchange|reduction|answer|verdict|text|order|copy|storage|buffer"
ABSENT = (
    "(?:communicat|collective|thread|process|port|file|output|pickle|random|grad|parameter|layer|mode|rank|identity|"
    "in-place|optimizer|scheduler|other|torch)"
)
WORDS = re.compile(
    r"\b(?:(?i:always|never|every(?:thing|where|body)?(?! \d)|nothing|at once|the (?:very )?same|none of (?:them|the)|"
    rf"bit for bit|bitwise|bit-identical)|[Nn]o {ABSENT}\w*|(?:[Oo]ne|[Aa] single)(?: [\w-]+){{0,2}} (?:{COUNTED})s?)\b"
)
LITERAL = r"``[^`]+``|`[^`]+`"
# A demand on the user and a condition promise nothing: "every rank must call", "where no rank has it".
DEMANDS = re.compile(
    r"[Ee]very rank[^.;:]*? must [^.;:]*|[Aa]ll ranks must see the same file system|"
    r"every rank(?:'s [Tt]rainer)?, or none|\b(?:where|whether) no \w+"
)
NO_PROMISE = "no promise: "


@dataclass(frozen=True)
class Sentence:
    """``group`` is the README's section, ``docs/guard.md: Limits`` or a public name; ``row`` a row's first cell."""

    group: str
    text: str
    row: str = ""

    @property
    def line(self) -> str:
        return f"{self.row}: {self.text}" if self.row else self.text

    @property
    def promises(self) -> bool:
        return bool(WORDS.search(DEMANDS.sub(" ", re.sub(LITERAL, "``", self.text))))


# --- from documents to sentences ---------------------------------------------------------------------------------


def split(text: str) -> Iterator[str]:
    """Sentences of a paragraph. What stands between backticks never ends one."""
    text = " ".join(text.split())
    literals: list[str] = []

    def hide(found: re.Match[str]) -> str:
        literals.append(found.group())
        return f"`{len(literals) - 1}`"

    hidden = re.sub(LITERAL, hide, text)
    for part in re.split(r"(?<![. ]\w\.)(?<=[.!?])[)\"'*]*\s+(?=[A-Z`\"'(\[*])", hidden):
        if part:
            yield re.sub(r"`(\d+)`", lambda found: literals[int(found.group(1))], part).strip()


def documents(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """README.md and SECURITY.md, then the pages of docs/."""
    security = [root / SECURITY] if (root / SECURITY).exists() else []
    return [
        root / README,
        *security,
        *sorted(page for page in (root / "docs").glob("*.md") if page.name not in MEASURED),
    ]


def document_sentences(text: str, name: str = README) -> Iterator[Sentence]:
    """The sentences of one document, ``name`` as it is below the root."""
    text = re.sub(r"^<!-- measured: begin -->$.*?^<!-- measured: end -->$", "", text, flags=re.MULTILINE | re.DOTALL)
    prefix = "" if name == README else f"{name}: "
    section, fence = "", ""
    paragraph: list[str] = []

    def flush() -> Iterator[Sentence]:
        for sentence in split(" ".join(paragraph)):
            yield Sentence(section, sentence)
        paragraph.clear()

    for line in text.splitlines():
        if line.startswith("```"):
            yield from flush()
            fence = "" if fence else line
        elif fence:
            if fence == "```python" and "  # " in f"  {line}":
                yield Sentence(section, line.split("# ", 1)[1].strip())
        elif line.startswith("#"):
            yield from flush()
            section = prefix + line.lstrip("# ")
        elif line.startswith("|"):
            yield from flush()
            yield from (Sentence(section, sentence, row) for row, cell in _cells(line) for sentence in split(cell))
        else:
            if not line.strip() or re.match(r"(\d+\.|-) ", line):
                yield from flush()
            paragraph.append(re.sub(r"^(\d+\.|-) ", "", line))
    yield from flush()


def _cells(line: str) -> Iterator[tuple[str, str]]:
    """Each cell of a table's row beside the row's first one, which says what it is about."""
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
    return ((cells[0], cell) for cell in cells[1:] if set(cell) - set("-: "))


def docstring_sentences(root: pathlib.Path = ROOT) -> Iterator[Sentence]:
    seen: set[ast.AST] = set()
    for group, node in public_nodes(root):
        if node not in seen:
            seen.add(node)
            for paragraph in _paragraphs(ast.get_docstring(node) or ""):
                for sentence in split(paragraph):
                    yield Sentence(group, sentence)


def _paragraphs(docstring: str) -> Iterator[str]:
    """Split at blank lines, bullets, and items of a section ("Args:"); examples are left out."""
    paragraph: list[str] = []
    section_indent, code_indent = -1, -1
    for line in [*docstring.splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        if code_indent >= 0 and (not line.strip() or indent > code_indent):
            continue
        after_code, code_indent = code_indent >= 0, -1
        heading = re.match(r"\s*[A-Z]\w+:$", line)
        bullet = re.match(r"\s*(?:-|\d+\.) ", line)
        item = section_indent >= 0 and re.match(rf"\s{{{section_indent + 4}}}[\w*, ]+: ", line)
        if not line.strip() or heading or bullet or item or after_code or indent <= section_indent:
            yield " ".join(paragraph)
            paragraph = []
        if heading:
            section_indent = indent
            code_indent = indent if line.strip() in ("Example:", "Examples:") else -1
        elif line.strip():
            section_indent = section_indent if indent > section_indent else -1
            code_indent = indent if line.endswith("::") else -1
            paragraph.append(re.sub(r"^(?:-|\d+\.) |::$", "", line.strip()))


# --- from the package to its public names -------------------------------------------------------------------------

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_nodes(root: pathlib.Path = ROOT) -> Iterator[tuple[str, Documented]]:
    """Every public module, name, method and property with the name under which users reach it."""
    modules = [*PACKAGES, *MODULES]
    integrations = sorted((root / "ddpstats" / "integrations").glob("[a-z]*.py"))
    modules += [f"integrations.{file.stem}" for file in integrations]
    trees = _Trees(root)
    for short in modules:
        module = f"ddpstats.{short}".rstrip(".")
        tree = trees[module]
        yield module if short else f"{module}.__init__", tree
        for name in _exported(tree):
            found = trees.find(module, name)
            if found is not None:
                yield from _members(f"{module}.{name}", *found, trees)


class _Trees:
    def __init__(self, root: pathlib.Path) -> None:
        self._root = root
        self._read: dict[str, ast.Module] = {}

    def __getitem__(self, module: str) -> ast.Module:
        if module not in self._read:
            path = self._root.joinpath(*module.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._read[module] = ast.parse(file.read_text())
        return self._read[module]

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
        """The definition of a name, through any number of imports within ddpstats."""
        if not module.startswith("ddpstats"):
            return None
        for node in ast.walk(self[module]):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(node.module, alias.name)
        return None


def _exported(tree: ast.Module) -> list[str]:
    """``__all__`` where it is a list; else names imported as themselves, and public ones defined here."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            and isinstance(node.value, ast.List)
        ):
            return [str(ast.literal_eval(name)) for name in node.value.elts]
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = [alias.name for alias in imports if alias.asname == alias.name]
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return sorted(name for name in {*names, *defined} if not name.startswith("_"))


def _members(
    name: str, module: str, node: ast.ClassDef | ast.FunctionDef, trees: _Trees
) -> Iterator[tuple[str, Documented]]:
    """A function; or a class with its public methods, those of our own base classes too."""
    yield name, node
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            special = {"__init__", "__call__", "__enter__", "__exit__"}
            if isinstance(member, ast.FunctionDef) and (member.name in special or not member.name.startswith("_")):
                yield f"{name}.{member.name}", member
        for base in node.bases:
            found = trees.find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None:
                yield from list(_members(name, *found, trees))[1:]


def promises(root: pathlib.Path = ROOT) -> list[Sentence]:
    """Each sentence once for its section or name."""
    sentences = [
        sentence
        for page in documents(root)
        for sentence in document_sentences(page.read_text(), page.relative_to(root).as_posix())
    ]
    sentences += docstring_sentences(root)
    return list(dict.fromkeys(sentence for sentence in sentences if sentence.promises))


# --- from promises.md to what is wrong with it ---------------------------------------------------------------------

Entries = dict[tuple[str, str], list[str]]


def entries(text: str) -> Entries:
    """What stands beside each sentence; keys are its section or name, and its line."""
    found: Entries = {}
    group, beside = "", list[str]()
    for line in text.splitlines():
        if line.startswith("### "):
            group = line.removeprefix("### ")
        elif line.startswith("> "):
            beside = found.setdefault((group, line.removeprefix("> ")), [])
        elif line.startswith("- ") and found:
            beside.append(line.removeprefix("- "))
    return found


def existing_tests(root: pathlib.Path = ROOT) -> set[str]:
    """``tests/test_x.py::test_y``, without what parametrization adds."""
    names = set()
    for file in (root / "tests").rglob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                names.add(f"{file.relative_to(root)}::{node.name}")
    return names


def problems(sentences: list[Sentence], listed: Entries, tests: set[str]) -> list[str]:
    """One line for each thing that does not fit."""
    there = {(sentence.group, sentence.line) for sentence in sentences}
    found = [f"not in promises.md: {group}: {line}" for group, line in there if (group, line) not in listed]
    for (group, line), beside in listed.items():
        if (group, line) not in there:
            found.append(f"no longer in the documents: {group}: {line}")
        if not beside or any(len(item.removeprefix(NO_PROMISE)) < 10 for item in beside):
            found.append(f"neither a test nor a reason beside it: {group}: {line}")
        missing = [item for item in beside if not item.startswith(NO_PROMISE) and item.split("[")[0] not in tests]
        found.extend(f"no such test: {item}: {group}: {line}" for item in missing)
    return sorted(found)


def written(head: str, sentences: list[Sentence], listed: Entries) -> str:
    """``promises.md``, in the order of the documents."""
    lines, title, group = [head.rstrip()], "", ""
    for sentence in sentences:
        new_title = _title(sentence.group)
        if title != new_title:
            lines += ["", f"## {new_title}"]
            title = new_title
        if group != sentence.group:
            lines += ["", f"### {sentence.group}"]
            group = sentence.group
        beside = listed.get((sentence.group, sentence.line), [])
        lines += ["", f"> {sentence.line}", "", *(f"- {item}" for item in beside)]
    return "\n".join(lines).rstrip() + "\n"


def _title(group: str) -> str:
    if group.startswith("ddpstats."):
        return "Docstrings"
    return group.split(": ")[0] if group.startswith(("docs/", SECURITY)) else README


def main() -> None:
    text = FILE.read_text()
    sentences, listed = promises(), entries(text)
    FILE.write_text(written(text.split("\n## ")[0], sentences, listed))
    print(*problems(sentences, listed, existing_tests()), sep="\n")


if __name__ == "__main__":
    main()
