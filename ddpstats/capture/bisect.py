"""``--bisect``: the first operation whose inputs are finite, whose output is not, and whose value arrives.

The step is run once more, and a ``TorchDispatchMode`` sees every operation, forward and backward:

1. What was not finite in the batch, the parameters and the buffers before is marked as a *source*.
2. Which inputs of an operation are not finite? What it overwrites (the target of ``copy_``, of ``out=``) is no input.
3. An output that is not finite, of inputs that are: this operation is an *origin*. So is one that makes a NaN of
   infinities which were put there on purpose (``masked_fill(-inf)``, a mask): a softmax over a row of nothing but -inf.
4. An output that is not finite, of inputs that are not: the value has the *mark* of that input, and has passed one
   more operation. An infinity that was put there on purpose has a mark as well, but loses against any other.
5. Marks belong to storages, so that views and in-place operations keep them; an output that fills its storage with
   finite values takes the mark away. A storage is held weakly: memory is given back, but its identity is not reused.
6. The symptom is the first loss that is not finite, otherwise the gradient whose value is the oldest. Its mark names
   the origin. Values that never arrived (an infinity that a mask or a ``where`` took away) are not blamed.

An operation's call site is the innermost module whose forward pass is running, and the user's frames. A backward
operation has neither: it belongs to an autograd node, and the call site is that of the operation which made the node.
Nodes are numbered by each thread from 0 on. A forward pass that checkpointing runs again makes its nodes in the thread
of the backward pass; so a node is known by its number and the backward pass in which it was made.

Checked on torch 2.13. Where torch does not report the running node, or the numbers of nodes, backward operations are
found, but not their module.
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ddpstats._base.text import dtype_name
from ddpstats._observe.frames import step_frames
from ddpstats._observe.tensor_rules import is_uninitialized, may_be_mask, overwrites_target, puts_infinity
from ddpstats._observe.torch_compat import (
    DispatchMode,
    current_node,
    graph_task,
    next_node_number,
    node_number,
    schema,
    storage_id,
    tree_leaves,
)
from ddpstats._rerun.record import walk, widen

if TYPE_CHECKING:
    from ddpstats.capture.replay import Replay

_MOST_FRAMES = 12
_SHOWN_STEPS = 4
_LOW_PRECISION = ("torch.float16", "torch.bfloat16")

OPERATION, PUT, SOURCE, UNKNOWN = "operation", "put", "source", "unknown"
_STRENGTH = {OPERATION: 3, SOURCE: 3, UNKNOWN: 2, PUT: 1}
_HEADLINES = {
    OPERATION: "the first operation whose inputs are finite and whose output is not",
    PUT: "a NaN or infinity that was put there on purpose, or uninitialized memory, arrives",
    SOURCE: "not finite before the step",
    UNKNOWN: "a tensor that torch did not make holds a NaN (made by numpy?), first used by",
}


class Frame(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str


class OperationSite(NamedTuple):
    """The module whose forward pass was running, with its class, and the user's frames, innermost last."""

    module: str | None = None
    module_class: str | None = None
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class NonfiniteOrigin:
    """The operation or the source from which a value that is not finite comes.

    Attributes:
        kind: ``operation`` made it of finite inputs; ``put``: an infinity or uninitialized memory, on purpose;
            ``source``: it was in the batch, a parameter or a buffer before the step; ``unknown``: a tensor that no
            operation made.
        order: the operation's number in the step.
        what: the operation's name; for a source, the path in it.
        autograd_node: the name of the node that ran; None in the forward pass.
        inputs, outputs: statistics of tensors, and numbers, in the order of the arguments.
    """

    kind: str
    order: int
    what: str
    micro_batch: int
    autograd_node: str | None
    module: str | None
    module_class: str | None
    frames: tuple[Frame, ...]
    inputs: list[dict[str, Any] | str]
    outputs: list[dict[str, Any]]


@dataclass(frozen=True)
class NonfiniteMark:
    """The origin of a storage's value that is not finite, and the operations between."""

    origin: NonfiniteOrigin
    passed: str | None = None
    before: NonfiniteMark | None = None


class _Input(NamedTuple):
    tensor: Tensor
    has_nan: bool
    has_inf: bool
    mark: NonfiniteMark | None


class OperationTracer:
    """Marks of one run. Use `watch` around what is to be seen. ``micro_batch`` is the current one."""

    def __init__(self, model: nn.Module) -> None:
        self.micro_batch = 0
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules: list[tuple[str, str]] = []
        self._sites: dict[tuple[int, int], OperationSite] = {}  # (backward pass that made the node, its number)
        self._makers: dict[int, int] = {}  # backward pass -> the backward pass in which its nodes were made
        self._maker = graph_task()
        self._marks: dict[int, tuple[StorageWeakRef, NonfiniteMark]] = {}
        self._operations = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch this thread, and what autograd does for it."""
        self._modules.clear()
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with _TracerMode(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def add_source(self, what: str, tensor: Tensor) -> None:
        """Mark a tensor from before the step. Infinities may be meant: a mask has them. A NaN is not."""
        has_nan, has_inf = nan_and_inf(tensor)
        if has_nan or has_inf:
            has_positive = bool((tensor.detach() == math.inf).any())
            kind = PUT if may_be_mask(has_nan=has_nan, has_positive_infinity=has_positive) else SOURCE
            outputs = [tensor_stats(tensor)]
            origin = NonfiniteOrigin(
                kind, self._operations, what, self.micro_batch, None, *OperationSite(), [], outputs
            )
            self._set(tensor, NonfiniteMark(origin))

    def mark_of(self, tensor: Tensor) -> NonfiniteMark | None:
        """Return None for a tensor that is finite, or that no operation under `watch` made."""
        return self._input(tensor).mark

    def _input(self, tensor: Tensor) -> _Input:
        has_nan, has_inf = nan_and_inf(tensor)
        mark = self._marks.get(storage_id(tensor.untyped_storage())) if has_nan or has_inf else None
        return _Input(tensor, has_nan, has_inf, mark and mark[1])

    # -- one operation ------------------------------------------------------------------------------------------------

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and mark its outputs."""
        self._operations += 1
        site, node = self._call_site()
        read, written = _inputs_of(func, args, kwargs)
        inputs = [self._input(tensor) for tensor in read]
        before = {id(tensor): tensor_stats(tensor) for tensor in read if id(tensor) in written}
        result = func(*args, **kwargs)
        outputs = {id(tensor): tensor for tensor in [*_tensors(result), *written.values()]}
        for output in outputs.values():
            has_nan, has_inf = nan_and_inf(output)
            mark = _strongest(inputs, has_nan)
            born_here = has_nan and not any(tensor.has_nan for tensor in inputs)
            if not (has_nan or has_inf):
                self._clear(output)
            elif mark is None or (born_here and mark.origin.kind == PUT):
                kind, shown = _kind(func, args, kwargs, inputs, born_here), _arguments_before(args, kwargs, before)
                stats = [tensor_stats(output)]
                origin = NonfiniteOrigin(kind, self._operations, str(func), self.micro_batch, node, *site, shown, stats)
                self._set(output, NonfiniteMark(origin))
            elif not _is_view_of_input(inputs, output):
                self._set(output, NonfiniteMark(mark.origin, str(func), mark))
        return result

    def _set(self, tensor: Tensor, mark: NonfiniteMark) -> None:
        storage = tensor.untyped_storage()
        old = self._marks.get(storage_id(storage))
        # A part of a storage was written: the rest's origin counts, unless that was put there on purpose
        if old is None or _fills(tensor) or _STRENGTH[old[1].origin.kind] < _STRENGTH[mark.origin.kind]:
            self._marks[storage_id(storage)] = (StorageWeakRef(storage), mark)  # type: ignore[no-untyped-call]

    def _clear(self, tensor: Tensor) -> None:
        key = storage_id(tensor.untyped_storage()) if _has_numbers(tensor) else None
        if key in self._marks and (_fills(tensor) or not any(nan_and_inf(_whole(tensor)))):
            del self._marks[key]

    # -- call sites ---------------------------------------------------------------------------------------------------

    def _call_site(self) -> tuple[OperationSite, str | None]:
        node, task = current_node(), graph_task()
        if node is not None and not self._is_run_again(node):
            maker = self._makers.setdefault(task, self._maker)
            return self._sites.get((maker, node_number(node)), OperationSite()), str(node.name())
        module, module_class = self._modules[-1] if self._modules else (None, None)
        site = OperationSite(module, module_class, _frames())
        self._maker = task
        # an operation that has a node runs with the number after the node's
        self._sites.setdefault((task, next_node_number() - 1), site)
        return site, None

    def _is_run_again(self, node: Any) -> bool:
        """Return whether a forward pass is run inside the backward pass, by checkpointing."""
        is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        return bool(self._modules) or (is_python and torch.is_grad_enabled())

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._modules.append((self._names.get(id(module), "(not part of the model)"), type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._modules:
            self._modules.pop()


class _TracerMode(DispatchMode):  # type: ignore[misc]
    def __init__(self, tracer: OperationTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a wrapper: it calls again, with the tensors that are inside
        return self._tracer.operation(func, args, kwargs or {})


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _strongest(inputs: list[_Input], nan_wanted: bool) -> NonfiniteMark | None:
    """Return the mark that an output inherits: of an input with a NaN where it has one; put on purpose comes last."""
    bad = [(tensor, tensor.mark) for tensor in inputs if tensor.mark is not None]
    with_nan = [pair for pair in bad if pair[0].has_nan]
    marks = [mark for _, mark in (with_nan if nan_wanted and with_nan else bad)]
    return max(marks, key=lambda mark: (_STRENGTH[mark.origin.kind], -mark.origin.order), default=None)


def _inputs_of(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return the tensors that are read, and by identity those that are written to."""
    name = func.overloadpacket.__name__
    read: list[Tensor] = []
    written: dict[int, Tensor] = {}
    for index, argument in enumerate(schema(func).arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and (argument.kwarg_only or overwrites_target(name)):
            continue  # the operation returns it
        tensors = list(_tensors(value))
        read += tensors
        written.update({id(tensor): tensor for tensor in tensors if writes})
    return read, written


def _kind(func: Any, args: Any, kwargs: Any, inputs: list[_Input], born_here: bool) -> str:
    """Return the kind of an origin: its value is not finite, and no input's mark explains it."""
    if any(tensor.has_nan or tensor.has_inf for tensor in inputs):
        if born_here:
            return OPERATION
        # tensors that no operation made: ``torch.tensor(-inf)``, or numpy's
        return UNKNOWN if any(tensor.has_nan for tensor in inputs) else PUT
    name = func.overloadpacket.__name__
    numbers = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, float)]
    return PUT if is_uninitialized(name) or puts_infinity(name, numbers) else OPERATION


def _is_view_of_input(inputs: list[_Input], output: Tensor) -> bool:
    """Return whether the output shows an input's memory, which has its mark: no operation that a value passes."""
    storage = storage_id(output.untyped_storage())
    tensors = [tensor.tensor for tensor in inputs if tensor.tensor is not output]
    return any(storage_id(tensor.untyped_storage()) == storage for tensor in tensors)


def _fills(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def _whole(tensor: Tensor) -> Tensor:
    """Return all of the storage of which ``tensor`` shows a part."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
    return whole


def _arguments_before(args: Any, kwargs: Any, before: dict[int, dict[str, Any]]) -> list[dict[str, Any] | str]:
    """Return the arguments as they were: ``before`` has those that the operation has changed since."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if leaf is not None]
    return [(before.get(id(leaf)) or tensor_stats(leaf)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]


def _frames() -> tuple[Frame, ...]:
    """Return the program's frames, innermost last, up to what calls the step; without generated code."""
    frames = (frame for frame in step_frames() if not frame.f_code.co_filename.startswith("<"))
    lines = [Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames]
    return tuple(reversed(lines[:_MOST_FRAMES]))


# -- statistics of a tensor -------------------------------------------------------------------------------------------


def _has_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and tensor.device.type != "meta" and tensor.numel() > 0


def nan_and_inf(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether there is a NaN, and an infinity. One pass over a tensor that is finite."""
    with torch.no_grad():
        wide = widen(tensor)
        if not _has_numbers(wide) or bool(wide.isfinite().all()):
            return False, False
        return bool(wide.isnan().any()), bool(wide.isinf().any())


def tensor_stats(tensor: Tensor) -> dict[str, Any]:
    """Return the range of the finite elements, and how many others there are, with the first one's index."""
    stats: dict[str, Any] = {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype), "low": None, "high": None}
    if not _has_numbers(tensor):
        return stats | {"nans": 0, "infs": 0, "first": None}
    with torch.no_grad():
        tensor = widen(tensor)
        finite, nans = tensor.isfinite(), int(tensor.isnan().sum())
        infs = int((~finite).sum()) - nans
        real = (tensor.abs() if tensor.is_complex() else tensor)[finite].to(torch.float64)
        if real.numel():
            stats |= {"low": float(real.min()), "high": float(real.max())}
        first = tuple((~finite).nonzero()[0].tolist()) if nans or infs else None
    return stats | {"nans": nans, "infs": infs, "first": first}


def _tensor_text(stats: dict[str, Any] | str) -> str:
    if isinstance(stats, str):
        return stats
    finite = "no finite element" if stats["low"] is None else f"finite from {stats['low']:.6g} to {stats['high']:.6g}"
    counts = f", {stats['nans']} NaN, {stats['infs']} Inf" if stats["nans"] or stats["infs"] else ""
    where = f", the first at {list(stats['first'])}" if stats["first"] else ""
    return f"{dtype_name(stats['dtype'])}{list(stats['shape'])} {finite}{counts}{where}"


# -- the search -------------------------------------------------------------------------------------------------------


def bisect(replay: Replay) -> dict[str, Any]:
    """Run the step once, slowly. Return the symptom, its origin, the path between, and what the step raised."""
    search = Search(replay)
    error = replay.run(search).error
    mark = search.mark
    return {
        "symptom": search.symptom,
        "origin": None if mark is None else _origin_json(mark.origin),
        "path": [] if mark is None else _path(mark),
        "error": error,
    }


class Search:
    """Shows the tracer the state before the step, and looks for the symptom after each micro-batch."""

    def __init__(self, replay: Replay) -> None:
        self._replay, self._tracer = replay, OperationTracer(replay.model)
        self.symptom: str | None = None
        self.mark: NonfiniteMark | None = None

    @contextmanager
    def watch(self, index: int, batch: Any) -> Iterator[None]:
        """Watch the forward and backward pass of a micro-batch."""
        self._tracer.micro_batch = index
        if index == 0:
            for name, parameter in self._replay.named_parameters().items():
                self._tracer.add_source(f"parameter {name}, before the step", parameter)
            for name, buffer in self._replay.named_buffers().items():
                self._tracer.add_source(f"buffer {name}, before the step", buffer)
        for path, leaf in walk(batch):
            if isinstance(leaf, Tensor):
                self._tracer.add_source(path, leaf)
        with self._tracer.watch():
            yield

    def look(self, index: int, loss: Tensor, gradients: dict[str, Tensor]) -> None:
        """Look at what came out."""
        if self.symptom is not None:
            return
        bad = [name for name, gradient in gradients.items() if any(nan_and_inf(gradient))]
        if any(nan_and_inf(loss)):
            self.symptom, self.mark = f"the loss of micro-batch {index}", self._tracer.mark_of(loss)
        elif bad:
            marks = {name: mark for name in bad if (mark := self._tracer.mark_of(gradients[name])) is not None}
            first = min(marks, key=lambda name: marks[name].origin.order, default=bad[0])
            more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
            self.symptom, self.mark = f"the gradient of {first}{more}, micro-batch {index}", marks.get(first)


def _origin_json(origin: NonfiniteOrigin) -> dict[str, Any]:
    return asdict(origin) | {
        "direction": "forward" if origin.autograd_node is None else "backward",
        "frames": [
            frame._asdict() | {"source": linecache.getline(frame.file, frame.line).strip()} for frame in origin.frames
        ],
    }


def _path(mark: NonfiniteMark) -> list[str]:
    """Return the operations that the value passed: repetitions are counted, and the middle is left out."""
    names = []
    step: NonfiniteMark | None = mark
    while step is not None and step.passed is not None:
        names.append(step.passed)
        step = step.before
    groups = [(name, len(list(group))) for name, group in itertools.groupby(reversed(names))]
    steps = [name if count == 1 else f"{name} ({count} times)" for name, count in groups]
    if len(steps) <= 2 * _SHOWN_STEPS:
        return steps
    return [*steps[:_SHOWN_STEPS], f"({len(steps) - 2 * _SHOWN_STEPS} more)", *steps[-_SHOWN_STEPS:]]


def as_text(result: dict[str, Any]) -> str:
    """Return the lines of a report for people."""
    origin, symptom = result["origin"], result["symptom"]
    if symptom is None:
        lines = ["bisect: every loss and every gradient was finite while every operation was looked at"]
    elif origin is None:
        lines = [f"bisect: {symptom} is not finite, and no traced operation produced it"]
    else:
        node = "" if origin["autograd_node"] is None else f" ({origin['autograd_node']})"
        where = "" if origin["kind"] == SOURCE else f" in the {origin['direction']} pass{node}"
        lines = [
            f"bisect: {_HEADLINES[origin['kind']]}: {origin['what']}{where} of micro-batch {origin['micro_batch']}"
        ]
        if origin["kind"] != SOURCE:
            lines.append(f"  in {_module_text(origin)}")
        if origin["frames"]:
            lines.append(f"  {'the forward operation was called' if node else 'called'} at:")
        for frame in origin["frames"]:
            lines += [f'    File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}']
            lines += [f"      {frame['source']}"] if frame["source"] else []
        for title, tensors in (("inputs", origin["inputs"]), ("output", origin["outputs"])):
            lines += [f"  {title}:", *(f"    {_tensor_text(stats)}" for stats in tensors)] if tensors else []
        output = origin["outputs"][0]
        if output["dtype"] in _LOW_PRECISION and output["infs"]:
            dtype = dtype_name(output["dtype"])
            lines.append(f"  {dtype} may be too narrow: --precision fp32 distinguishes overflow from mathematics")
        if result["path"]:
            lines.append(f"  and then passed: {' -> '.join(result['path'])}")
        lines.append(f"  it arrived at: {symptom}")
    if result["error"] is not None:
        lines.append(f"  the step raised {result['error']}")
    return "\n".join(lines)


def _module_text(origin: dict[str, Any]) -> str:
    name, kind = origin["module"], origin["module_class"]
    if name is None and not origin["frames"] and origin["autograd_node"] is not None:
        return f"a module that is not known (the node is {origin['autograd_node']})"
    if name is None:
        return "the step function, outside the model"
    return f"module {name} ({kind})" if name else f"the model itself ({kind})"
