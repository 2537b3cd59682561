"""torch's private names stand in `torch_compat`, `torch_groups` and two files below; what a torch lacks is told."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpstats
from ddpstats._observe import torch_compat
from tests.programs import without_gloo

ROOT = Path(ddpstats.__file__).parent
HOMES = {
    *(ROOT / "_observe" / name for name in ("torch_compat.py", "torch_groups.py")),
    *(ROOT / "_transport" / "gloo_group.py", ROOT / "_base" / "compiled.py"),
}
NAMES_MODULES = ROOT / "_observe" / "user_frames.py"  # in strings

_PYTHONS = frozenset((
    "_fields", "_replace", "_asdict", "_make", "_getframe", "_current_frames", "_exit", "_DummyThread",
    "_rand", "_bit_generator", "_shutdown", "_run_exitfuncs", "_run_code", "_run_module_as_main",
))  # fmt: skip
"""Private names of the standard library and numpy."""

_OURS = ("self", "cls")
_READERS = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})


def _torchs_names() -> set[str]:
    """Private names that objects of torch's have which we meet: tensors, modules, groups, operators, ..."""
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn
    objects = [
        torch.library.Library, torch.ones(1), nn.Module(), node,
        torch.ones(1).untyped_storage(), torch.nn.parallel.DistributedDataParallel, torch.ops.aten.mm,
        torch.ops.aten.mm.default, dist.ProcessGroup, dist.Work, dist.distributed_c10d.Store, torch.optim.Optimizer,
    ]  # fmt: skip
    names = {name for one in objects for name in dir(one)}
    return {name for name in names if _is_private(name)}


def _is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_(?!_)\w+", name) is not None


def _root(node: ast.AST) -> str:
    """The name that an expression begins with; of ``getattr(x, ...)`` and other calls of one, that of ``x``."""
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
    """Attributes, methods and slots that classes of this file define, and what it sets on ``self``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(inner.name)
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    found.add(inner.target.id)
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    found |= {inner.attr} if isinstance(inner.value, ast.Name) and inner.value.id in _OURS else set()
                elif isinstance(inner, ast.Assign):
                    found |= {target.id for target in inner.targets if isinstance(target, ast.Name)}
    return found


def _torch_aliases(tree: ast.AST) -> set[str]:
    """The names under which a file has torch, or something of torch's."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.asname or "torch" for one in node.names if one.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {one.asname or one.name for one in node.names}
    return found


def private_names(source: str, ours: set[str], torchs: set[str], *, foreign: bool = False) -> Iterator[str]:
    """Each private name of torch's in a file of the package, as "line: code".

    ``ours``: what any class of the package defines. ``foreign``: the file reads private names of another library, so
    that only those that torch has count.
    """
    tree = ast.parse(source)
    own, aliases = _own_names(tree), _torch_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(one.name for one in node.names)]
            names = [part for part in parts if _is_private(part)]
        elif isinstance(node, ast.Import):
            paths = [one.name.split(".") for one in node.names if one.name.split(".")[0] == "torch"]
            names = [part for path in paths for part in path if _is_private(part)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = _root(node.value)
            names = [node.attr] if _is_torchs(node.attr, root, own, aliases, ours, torchs, foreign) else []
        elif isinstance(node, ast.Call) and node.args and _called(node) in _READERS:
            given = [one.value for one in node.args if isinstance(one, ast.Constant)]
            root = _root(node.args[0])
            names = [
                str(one)
                for one in given
                if _is_private(one) and _is_torchs(str(one), root, own, aliases, ours, torchs, foreign)
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"^torch(?:\.\w+)*\._\w+", node.value)
        else:
            continue
        if names:
            yield f"{node.lineno}: {ast.unparse(node).splitlines()[0][:80]}"


def _is_torchs(
    name: str, root: str, own: set[str], aliases: set[str], ours: set[str], torchs: set[str], foreign: bool
) -> bool:
    if root in aliases:
        return True
    if name in own or root in _OURS:
        return False
    return name in torchs or not (foreign or name in ours or name in _PYTHONS)


def test_private_names_of_torch_stand_in_their_files_alone() -> None:
    sources = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    ours = set().union(*(_own_names(ast.parse(source)) for source in sources.values()))
    torchs = _torchs_names()
    found = [
        f"{path.relative_to(ROOT)}:{name}"
        for path, source in sources.items()
        if path not in HOMES
        for name in private_names(source, ours, torchs, foreign=path.parent.name == "integrations")
        if path != NAMES_MODULES or not re.match(r"\d+: '", name)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "torch._C.x", "from torch._ops import OpOverload", "import torch._dynamo", "tensor._version",
        "getattr(tensor, '_version', 0)", "group._get_backend(1)", "module._buffers", "packet.default._schema",
        "replica._unheard_of", "name == 'torch._tensor'", "dist.distributed_c10d._world",
        "operator.attrgetter('_cdata')", "getattr(dist, name)._handle", "Tensor._values",
    ],
)  # fmt: skip
def test_every_way_to_name_one_is_noticed(line: str) -> None:
    source = f"import torch\nimport torch.distributed as dist\nfrom torch import Tensor\n{line}\n"
    assert [one.partition(":")[0] for one in private_names(source, set(), _torchs_names())] == ["4"]


def test_names_of_our_own_are_not_taken_for_torchs() -> None:
    source = textwrap.dedent("""
        class Ours:
            _version: int
            def __init__(self): self._buffers = {}
            def take(self, other): return other._version, other._buffers, self._anything, value._fields, other._made
    """)
    assert list(private_names(source, {"_made"}, _torchs_names())) == []


def test_this_torch_lacks_nothing() -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"torch {torch.__version__} lacks {torch_compat.lacking()}")
    assert torch_compat.lacking() == {}


_WITHOUT = [
    "_C._len_torch_dispatch_stack", "_C._autograd._profiler_enabled", "_C._is_tracing", "_C._current_graph_task_id",
    "_C._current_autograd_node", "autograd._get_sequence_nr", "autograd.graph.Node._sequence_nr", "_foreach_norm",
    "_foreach_copy_", "_C._dispatch_get_all_op_names", "_C._dispatch_get_computed_kernel_for_dispatch_key",
    "_C._len_torch_function_stack", "distributed._DEFAULT_FIRST_BUCKET_BYTES",
    "_C._functorch.is_functorch_wrapped_tensor", "_C._dispatch_keyset_full_after",
]  # fmt: skip


def test_a_torch_without_a_name_loses_what_is_told_and_nothing_else() -> None:
    """Each name is taken away in an interpreter of its own start; the package still imports, and still observes."""
    script = textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        import torch._dynamo
        kept = torch.ones(2, 3, requires_grad=True)
        for path in sys.argv[1:]:
            *owners, name = path.split(".")
            owner = torch
            for one in owners:
                owner = getattr(owner, one)
            try:
                delattr(owner, name)
            except (AttributeError, TypeError):
                setattr(owner, name, None)
        from ddpstats._observe import collectives, gradient_norms, gradients, torch_compat
        print(*sorted(torch_compat.lacking()))
        class Seen:
            ops = []
            def before(self, call): self.ops.append(call.op)
            def after(self, call, work): pass
            def waiting(self, work, limited): return False
        collectives.subscribe(seen := Seen())
        from ddpstats._transport.gloo_group import group_of_one
        with group_of_one("test") as only:
            only[0].allreduce([torch.ones(1)]).wait()
        collectives.unsubscribe(seen)
        print(*seen.ops)
        print(gradient_norms.measure([torch.tensor([3.0, 4.0])]).item(), torch_compat.next_node_number())
    """)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *_WITHOUT], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    lacking, ops, values = without_gloo(ran.stdout).splitlines()
    assert set(lacking.split()) == {f"torch.{name}" for name in _WITHOUT} | set(torch_compat.lacking())
    assert ops == "all_reduce"
    assert values == "5.0 -1"
