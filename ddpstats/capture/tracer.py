"""Every operation of a step, and where each value that is not finite came from.

For each operation, under a ``TorchDispatchMode`` that sees forward and backward:

1. Which inputs are not finite? What an operation overwrites (the target of ``copy_``, of ``out=``) is no input.
2. It runs.
3. An output that is not finite, of inputs that are: this operation is an *origin*. So is one that makes a NaN of
   infinities which were put there on purpose (``masked_fill(-inf)``, a mask): a softmax over a row of nothing but -inf.
4. An output that is not finite, of inputs that are not: the value has the *mark* of that input, and has passed one
   more operation. Infinities that somebody put there get a mark as well, but lose against any other.
5. Marks belong to storages, so that views and in-place operations keep them; an output that fills its storage with
   finite values takes the mark away. A storage is held weakly: memory is given back, but its identity is not reused.

Where an operation is: a stack of the modules whose forward pass is running, and the user's frames. A backward operation
has neither: it belongs to the autograd node, which has the sequence number that was current when the forward operation
ran, so what stood then is looked up.

Checked on torch 2.13. Where torch does not tell the node that runs, or the numbers of nodes, backward operations are
found, but not their module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ddpstats._observe.frames import step_frames
from ddpstats._observe.tensor_rules import is_uninitialized, may_be_mask, overwrites_target, puts_infinity
from ddpstats._observe.torch_compat import (
    DispatchMode,
    current_node,
    next_node_number,
    node_number,
    schema,
    storage_id,
    tree_leaves,
)
from ddpstats.capture._tensor_stats import TensorStats, nan_and_inf, tensor_stats

_MOST_FRAMES = 12

OPERATION, PUT, SOURCE, UNKNOWN = "operation", "put", "source", "unknown"
_STRENGTH = {OPERATION: 3, SOURCE: 3, UNKNOWN: 2, PUT: 1}


@dataclass(frozen=True)
class CallPlace:
    """Where an operation was called.

    Attributes:
        module: name and class of the innermost module whose forward pass was running; None outside any.
        frames: the user's, innermost last: (file, line, function).
    """

    module: tuple[str, str] | None
    frames: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class TracedOrigin:
    """Where a value that is not finite comes from.

    Attributes:
        kind: ``operation`` made it of finite inputs; ``put``: an infinity or uninitialized memory, on purpose;
            ``source``: it was in the batch, a parameter or a buffer before the step; ``unknown``: a tensor that no
            operation made.
        order: the operation's number in the step.
        what: the operation's name; for a source, the path in it.
        backward: the autograd node's name; None in the forward pass.
        inputs, outputs: tensors and numbers, in the order of the arguments.
    """

    kind: str
    order: int
    what: str
    micro_batch: int
    place: CallPlace
    backward: str | None = None
    inputs: tuple[TensorStats | str, ...] = ()
    outputs: tuple[TensorStats, ...] = ()


@dataclass(frozen=True)
class Mark:
    """What a storage's value that is not finite goes back to, and the operations between."""

    origin: TracedOrigin
    passed: str | None = None
    before: Mark | None = None

    def path(self) -> list[str]:
        found: list[str] = []
        mark: Mark | None = self
        while mark is not None and mark.passed is not None:
            found.append(mark.passed)
            mark = mark.before
        return found[::-1]


@dataclass
class _Input:
    tensor: Tensor
    has_nan: bool
    has_inf: bool
    mark: Mark | None


@dataclass
class _TracedCall:
    """One operation; ``shown`` are inputs that it has changed since."""

    func: Any
    args: Any
    kwargs: Any
    inputs: list[_Input]
    shown: Mapping[int, TensorStats]
    place: CallPlace
    backward: str | None


@dataclass
class OperationTracer:
    """Marks of one run. Use `watching` around what is to be seen.

    Attributes:
        micro_batch: the current one; whoever runs the step sets it.
    """

    model: nn.Module
    micro_batch: int = 0
    _names: dict[int, str] = field(default_factory=dict)
    _modules: list[tuple[str, str]] = field(default_factory=list)
    _places: dict[int, CallPlace] = field(default_factory=dict)
    _marks: dict[int, tuple[StorageWeakRef, Mark]] = field(default_factory=dict)
    _operations: int = 0

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in self.model.named_modules()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For one thread and what autograd does for it."""
        self._modules.clear()
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with _Mode(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def add_source(self, what: str, tensor: Tensor) -> None:
        """A tensor that was there before the step. Infinities may be meant: a mask has them. A NaN is not."""
        has_nan, has_inf = nan_and_inf(tensor)
        if has_nan or has_inf:
            has_positive = bool((tensor.detach() == math.inf).any())
            kind = PUT if may_be_mask(has_nan=has_nan, has_positive_infinity=has_positive) else SOURCE
            self._set(tensor, Mark(self._origin(kind, what, CallPlace(None, ()), None, (), (tensor_stats(tensor),))))

    def mark_of(self, tensor: Tensor) -> Mark | None:
        """None for a tensor that is finite, or that no operation under `watching` made."""
        return self._mark(tensor) if any(nan_and_inf(tensor)) else None

    def _mark(self, tensor: Tensor) -> Mark | None:
        found = self._marks.get(storage_id(tensor.untyped_storage()))
        return None if found is None else found[1]

    def _origin(
        self,
        kind: str,
        what: str,
        place: CallPlace,
        backward: str | None,
        inputs: tuple[TensorStats | str, ...],
        outputs: tuple[TensorStats, ...],
    ) -> TracedOrigin:
        return TracedOrigin(kind, self._operations, what, self.micro_batch, place, backward, inputs, outputs)

    # -- one operation ------------------------------------------------------------------------------------------------

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._operations += 1
        place, backward = self._where()
        inputs, written = _inputs_of(func, args, kwargs)
        read = [self._input(tensor) for tensor in inputs]
        shown = {id(tensor): tensor_stats(tensor) for tensor in inputs if id(tensor) in written}  # as before
        result = func(*args, **kwargs)
        call = _TracedCall(func, args, kwargs, read, shown, place, backward)
        outputs = {id(tensor): tensor for tensor in [*_tensors(result), *written.values()]}
        for output in outputs.values():
            self._judge(call, output)
        return result

    def _input(self, tensor: Tensor) -> _Input:
        has_nan, has_inf = nan_and_inf(tensor)
        return _Input(tensor, has_nan, has_inf, self._mark(tensor) if has_nan or has_inf else None)

    def _judge(self, call: _TracedCall, output: Tensor) -> None:
        has_nan, has_inf = nan_and_inf(output)
        if not (has_nan or has_inf):
            self._clear(output)
            return
        before = _strongest(call.inputs, has_nan)
        born_here = has_nan and not any(one.has_nan for one in call.inputs)
        if before is None or (born_here and before.origin.kind == PUT):
            stats = tuple(_shown_inputs(call))
            kind = _kind(call, born_here)
            origin = self._origin(kind, str(call.func), call.place, call.backward, stats, (tensor_stats(output),))
            self._set(output, Mark(origin))
        elif not _is_view_of_one(call.inputs, output):
            self._set(output, Mark(before.origin, str(call.func), before))

    def _set(self, tensor: Tensor, mark: Mark) -> None:
        storage = tensor.untyped_storage()
        found = self._marks.get(storage_id(storage))
        # A part of a storage was written: what the rest came from counts, unless that was put there on purpose
        if found is None or _fills(tensor) or _STRENGTH[found[1].origin.kind] < _STRENGTH[mark.origin.kind]:
            self._marks[storage_id(storage)] = (StorageWeakRef(storage), mark)  # type: ignore[no-untyped-call]

    def _clear(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        key = storage_id(tensor.untyped_storage())
        if key in self._marks and (_fills(tensor) or not any(nan_and_inf(_whole(tensor)))):
            del self._marks[key]

    # -- where it is --------------------------------------------------------------------------------------------------

    def _where(self) -> tuple[CallPlace, str | None]:
        node = current_node()
        if node is None or self._modules:  # a forward pass that is run again inside the backward pass: checkpointing
            place = CallPlace(self._modules[-1] if self._modules else None, _frames())
            # an operation that has a node ran with the number after the node's
            self._places.setdefault(next_node_number() - 1, place)
            return place, None
        return self._places.get(node_number(node), CallPlace(None, ())), str(node.name())

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        self._modules.append((name if name is not None else "(not part of the model)", type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._modules:
            self._modules.pop()


class _Mode(DispatchMode):  # type: ignore[misc]
    def __init__(self, tracer: OperationTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a wrapper: it calls again, with the tensors that are inside
        return self._tracer.operation(func, args, kwargs or {})


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _strongest(inputs: list[_Input], nan_wanted: bool) -> Mark | None:
    """The mark that an output inherits: of an input with a NaN where it has one; one put on purpose comes last."""
    bad = [one for one in inputs if one.mark is not None]
    with_nan = [one for one in bad if one.has_nan]
    candidates = with_nan if nan_wanted and with_nan else bad
    marks = [one.mark for one in candidates if one.mark is not None]
    return max(marks, key=lambda mark: (_STRENGTH[mark.origin.kind], -mark.origin.order), default=None)


def _inputs_of(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], dict[int, Tensor]]:
    """The tensors that are read, and by identity those of them that the operation writes to as well."""
    name = func.overloadpacket.__name__
    read: list[Tensor] = []
    written: dict[int, Tensor] = {}
    for place, argument in enumerate(schema(func).arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and (argument.kwarg_only or overwrites_target(name)):
            continue
        tensors = list(_tensors(value))
        read += tensors
        written.update({id(tensor): tensor for tensor in tensors if writes})
    return read, written


def _kind(call: _TracedCall, born_here: bool) -> str:
    """Of a value that is not finite and has no mark yet."""
    if any(one.has_nan or one.has_inf for one in call.inputs):
        if born_here:
            return OPERATION
        # tensors that no operation made: ``torch.tensor(-inf)``, or numpy's
        return UNKNOWN if any(one.has_nan for one in call.inputs) else PUT
    name = call.func.overloadpacket.__name__
    numbers = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, float)]
    return PUT if is_uninitialized(name) or puts_infinity(name, numbers) else OPERATION


def _is_view_of_one(inputs: list[_Input], output: Tensor) -> bool:
    """A view carries its mark already, and is no operation that a value passes."""
    storage = storage_id(output.untyped_storage())
    return any(one.tensor is not output and storage_id(one.tensor.untyped_storage()) == storage for one in inputs)


def _fills(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def _whole(tensor: Tensor) -> Tensor:
    """All of the storage of which ``tensor`` shows a part."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(storage, 0, (count,), (1,))
    return whole


def _shown_inputs(call: _TracedCall) -> Iterator[TensorStats | str]:
    for leaf in tree_leaves((call.args, call.kwargs)):
        if isinstance(leaf, Tensor):
            yield call.shown[id(leaf)] if id(leaf) in call.shown else tensor_stats(leaf)
        elif leaf is not None:
            yield repr(leaf)


def _frames() -> tuple[tuple[str, int, str], ...]:
    """The program's frames, innermost last, up to what calls the step; without generated code."""
    shown = (frame for frame in step_frames() if not frame.f_code.co_filename.startswith("<"))
    found = [(one.f_code.co_filename, one.f_lineno, one.f_code.co_name) for one in islice(shown, _MOST_FRAMES)]
    return tuple(reversed(found))
