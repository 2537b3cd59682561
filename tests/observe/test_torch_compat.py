"""ddpstats uses private names of torch in a few files alone, and reports what a torch lacks instead of failing.

The files are `torch_compat`, `groups` and two files below them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpstats
from ddpstats._observe import groups
from tests import programs

ROOT = Path(ddpstats.__file__).parent
HOMES = {
    *(ROOT / "_observe" / name for name in ("torch_compat.py", "groups.py")),
    *(ROOT / "_ranks" / "gloo.py", ROOT / "_base" / "lazy.py"),
}
NAMES_MODULES = ROOT / "_observe" / "frames.py"  # in strings

_OWNERS = ("self", "cls")
_READERS = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})


def _torchs_names() -> set[str]:
    """Return the private names of the objects of torch that the package handles: tensors, modules, groups, ..."""
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn
    objects = [
        torch.library.Library, torch.ones(1), nn.Module(), node,
        torch.ones(1).untyped_storage(), torch.nn.parallel.DistributedDataParallel, torch.ops.aten.mm,
        torch.ops.aten.mm.default, dist.ProcessGroup, dist.Work, dist.distributed_c10d.Store, torch.optim.Optimizer,
    ]  # fmt: skip
    names = {name for thing in objects for name in dir(thing)}
    return {name for name in names if _is_private(name)}


def _is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_(?!_)\w+", name) is not None


def _root(node: ast.AST) -> str:
    """Return the name that an expression begins with; for ``getattr(x, ...)``, that of ``x``."""
    while not isinstance(node, ast.Name):
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.args[0] if isinstance(node.func, ast.Name) and node.args else node.func
        else:
            return ""
    return node.id


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else _root(node.func)


def _own_names(tree: ast.AST) -> set[str]:
    """Return the attributes, methods and slots that classes of this file define, and what it sets on ``self``."""
    names: set[str] = set()
    for node in (inner for outer in ast.walk(tree) if isinstance(outer, ast.ClassDef) for inner in ast.walk(outer)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node.value) in _OWNERS:
            names.add(node.attr)
    return names


def _is_torch(module: str | None) -> bool:
    return (module or "").split(".")[0] == "torch"


def _torch_aliases(tree: ast.AST) -> set[str]:
    """Return the names under which a file has torch, or something of torch's."""
    names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "torch" for alias in node.names if _is_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _uses(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield each use of a name of something: (where, what the expression begins with, the name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            paths = [f"{module}.{alias.name}" if module else alias.name for alias in node.names]
            yield from ((node, "torch", part) for path in paths if _is_torch(path) for part in path.split("."))
        elif isinstance(node, ast.Attribute):
            yield node, _root(node.value), node.attr
        elif isinstance(node, ast.Call) and node.args and _called(node) in _READERS:
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((node, _root(node.args[0]), name) for name in names if isinstance(name, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths = re.findall(r"^torch(?:\.\w+)+", node.value)
            yield from ((node, "torch", part) for path in paths for part in path.split("."))


def private_names(source: str, torchs: set[str]) -> Iterator[str]:
    """Yield each private name of torch's in a file of the package, as "line: code"."""
    tree = ast.parse(source)
    own, aliases = _own_names(tree), _torch_aliases(tree)
    for node, root, name in _uses(tree):
        is_torchs = root in aliases or (name in torchs and name not in own and root not in _OWNERS)
        if is_torchs and _is_private(name):
            yield f"{node.lineno}: {ast.unparse(node).splitlines()[0][:80]}"


@pytest.mark.slow
def test_private_names_of_torch_are_in_their_files_alone() -> None:
    torchs = _torchs_names()
    uses = [
        f"{path.relative_to(ROOT)}:{name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path not in HOMES
        for name in private_names(path.read_text(), torchs)
        if path != NAMES_MODULES or not re.match(r"\d+: '", name)
    ]
    assert uses == []


@pytest.mark.parametrize(
    "line",
    [
        "torch._C.x", "from torch._ops import OpOverload", "import torch._dynamo", "tensor._version",
        "getattr(tensor, '_version', 0)", "group._get_backend(1)", "module._buffers", "packet.default._schema",
        "name == 'torch._tensor'", "dist.distributed_c10d._world",
        "operator.attrgetter('_cdata')", "getattr(dist, name)._handle", "Tensor._values",
    ],
)  # fmt: skip
def test_every_way_to_name_one_is_noticed(line: str) -> None:
    source = f"import torch\nimport torch.distributed as dist\nfrom torch import Tensor\n{line}\n"
    assert [use.partition(":")[0] for use in private_names(source, _torchs_names())] == ["4"]


def test_names_of_the_package_are_not_taken_for_torchs() -> None:
    source = textwrap.dedent("""
        class Ours:
            _version: int
            def __init__(self): self._buffers = {}
            def take(self, other): return other._version, other._buffers, self._anything, value._fields
    """)
    assert list(private_names(source, _torchs_names())) == []


def test_this_torch_lacks_nothing() -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"torch {torch.__version__} lacks {sorted(groups.lacking)}")
    assert sorted(groups.lacking) == []


_WITHOUT = [
    "_C._len_torch_dispatch_stack", "_C._autograd._profiler_enabled", "_C._is_tracing", "_C._current_graph_task_id",
    "_C._current_autograd_node", "autograd._get_sequence_nr", "autograd.graph.Node._sequence_nr", "_foreach_norm",
    "_foreach_copy_", "_C._dispatch_get_all_op_names", "_C._dispatch_get_computed_kernel_for_dispatch_key",
    "overrides._get_current_function_mode_stack",
    "_C._functorch.is_functorch_wrapped_tensor", "_C._dispatch_keyset_full_after",
]  # fmt: skip


@pytest.mark.slow
def test_a_torch_without_a_name_loses_what_is_reported_and_nothing_else() -> None:
    """Each name is taken away in a fresh interpreter; the package still imports, and still observes."""
    script = textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        import torch._dynamo
        for path in sys.argv[1:]:
            *owners, name = path.split(".")
            owner = torch
            for one in owners:
                owner = getattr(owner, one)
            try:
                delattr(owner, name)
            except (AttributeError, TypeError):
                setattr(owner, name, None)
        from ddpstats._observe import collectives, gradient_norms, gradients, groups, torch_compat
        print(*sorted(groups.lacking))
        class Seen(collectives.Subscriber):
            ops = []
            def before(self, call): self.ops.append(call.op)
        collectives.subscribe(seen := Seen())
        from ddpstats._observe.groups import group_of_one
        with group_of_one("test") as only:
            only[0].allreduce([torch.ones(1)]).wait()
        collectives.unsubscribe(seen)
        print(*seen.ops)
        print(gradient_norms.measure([torch.tensor([3.0, 4.0])]).item(), torch_compat.next_node_number())
    """)
    done = programs.run(["-W", "ignore", "-c", script, *_WITHOUT], fresh=True)
    assert done.returncode == 0, done.stderr
    lacking, ops, values = programs.without_gloo(done.stdout).splitlines()
    assert set(lacking.split()) == {f"torch.{name}" for name in _WITHOUT} | groups.lacking
    assert ops == "all_reduce"
    assert values == "5.0 -1"
