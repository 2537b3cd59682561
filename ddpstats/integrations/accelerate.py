"""accelerate's gather and reduce matched by key: dicts may differ between ranks in keys and in their order.

`install` replaces ``accelerate.utils.gather`` and ``reduce`` wherever accelerate has bound them, which covers
``Accelerator.gather`` and ``Accelerator.reduce``, and replaces ``Accelerator.gather_for_metrics``. Stock accelerate
issues one collective per leaf, in the order of each rank's own dict, and takes a dict of Python numbers for a list of
its keys. Ours, for anything that is a dict, list or tuple:

1. sends every rank's tree to every rank, in one collective (two above 16 kB) beside accelerate's own group;
2. combines what ranks hold under one key, or at one position of a sequence, over the ranks that hold it. Every rank
   gets the union of keys, in the order in which ranks 0, 1, 2, ... first have them;
3. puts the result into containers of the types, and on the devices, that this rank passed. What this rank lacked is on
   the accelerator's device, in plain containers.

Reduce: "mean" over the ranks that hold the key, "max", else the sum as in stock. Computed in float64, integers exactly;
the result has the dtype that the ranks' dtypes promote to. A mean of integer tensors, which stock refuses, has torch's
default dtype. Python numbers give a Python number. Gather: concatenated along dimension 0, whose size may differ; each
rank's Python number is one element (float64, int64 or bool). Results have no grad.

Raises on every rank, with one text: `SchemaConflict` for a container against a leaf, or shapes that do not fit;
`InvalidStats` for a leaf that is neither a dense tensor nor a number; `ProtocolMismatch` for a reduce against a gather,
or two reductions.

Left to accelerate: a bare tensor, which has no keys and may be large (so one rank's bare tensor against another's dict
is not told apart: `RankMissing` in the end); ``use_gather_object=True``; lists and tuples of objects in
``gather_for_metrics``; a single process; XLA; ``scale``, which only XLA has; ``broadcast``, ``pad_across_processes``.
``gather_for_metrics`` drops the duplicates of the last batch from tensors, as stock does, also from 0-d ones; not from
Python numbers.

Non-finite gradients: `ddpstats.NaNCapture` needs nothing of this module. accelerate's loop with it::

    capture = NaNCapture("captures", model=model, optimizer=optimizer, scaler=accelerator.scaler)   # after prepare()
    for batch in loader:
        with accelerator.accumulate(model):
            with capture.micro_batch(batch) as micro:
                loss = model(**batch)["loss"]
                micro.loss = loss / accelerator.gradient_accumulation_steps     # what backward() differentiates
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                verdict = capture.check()       # before clip_grad_norm_, which unscales: so nothing is unscaled twice
                if verdict.should_stop:
                    break
                if verdict.should_skip:
                    optimizer.zero_grad()
                    continue
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

With ``mixed_precision`` accelerate puts autocast into the model's own ``forward``, where the capture does not see it:
replay with ``--precision amp``.
"""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ddpstats._base.paths import Index, Path, format_path
from ddpstats._base.text import holders_lines, ranks_text
from ddpstats._ranks.comm import describe_group, group_ranks, resolve_group
from ddpstats._ranks.gather import can_encode, gather_trees
from ddpstats.errors import InvalidStats, SchemaConflict
from ddpstats.integrations.patches import Patches, in_place_of

__all__ = ["install", "uninstall"]

_patches = Patches("accelerate")
_RELIED_ON = (
    "accelerate.utils.operations:gather(tensor)",
    "accelerate.utils.operations:reduce(tensor, reduction, scale)",
    "accelerate.accelerator:Accelerator.gather(self, tensor)",
    "accelerate.accelerator:Accelerator.gather_for_metrics(self, input_data, use_gather_object)",
    "accelerate.accelerator:Accelerator.reduce(self, tensor, reduction, scale)",
    "accelerate.state:PartialState",
    "accelerate.utils.constants:TORCH_DISTRIBUTED_OPERATION_TYPES",
)


def install() -> None:
    """Patch the installed accelerate. Local and idempotent; every rank must call it, or none.

    Your own modules that imported ``gather`` or ``reduce`` by name before this call keep the old ones. An
    accelerate that lacks what this relies on, whatever its version, is left unpatched, with a warning that names the
    difference. Does nothing under ``DDPSTATS_DISABLE=1``.

    Raises:
        ConfigError: accelerate is not installed.

    Example::

        rank 0: accelerator.reduce({"a": tensor(1.), "b": tensor(2.)})   rank 1: {"b": tensor(20.), "a": tensor(10.)}
        stock gives rank 0 a=21, b=12; after install() every rank has a=11, b=22
    """
    if _patches.should_patch(_RELIED_ON):
        operations = importlib.import_module("accelerate.utils.operations")
        accelerator = importlib.import_module("accelerate.accelerator").Accelerator
        for theirs, ours in ((operations.gather, _gather), (operations.reduce, _reduce)):
            _patches.replace_everywhere("accelerate", theirs, in_place_of(theirs, ours))
        _patches.wrap(accelerator, "gather_for_metrics", _gather_for_metrics)


def uninstall() -> None:
    """Put accelerate's own functions back. Local and idempotent."""
    _patches.restore()


# -- in place of accelerate's -----------------------------------------------------------------------------------------


def _gather(original: Callable[..., Any], tensor: Any) -> Any:
    return _combined(tensor, "accelerate.gather", _gathered) if _is_ours(tensor) else original(tensor)


def _reduce(original: Callable[..., Any], tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    if not _is_ours(tensor):
        return original(tensor, reduction, scale)
    return _combined(tensor, f"accelerate.reduce, {reduction!r}", lambda held: _reduced(held, reduction))


def _gather_for_metrics(
    original: Callable[..., Any], self: Any, input_data: Any, use_gather_object: bool = False
) -> Any:
    # Lists and tuples are accelerate's business: of tensors, it comes to `gather`; of objects, it is right.
    if use_gather_object or not isinstance(input_data, Mapping) or not _is_ours(input_data):
        return original(self, input_data, use_gather_object)
    samples = _samples_left(self.gradient_state)
    return _combined(input_data, "accelerate.gather", lambda held: _gathered(held, samples))


def _is_ours(value: Any) -> bool:
    """Whether ``value`` has keys or positions, and there are other ranks in a group of torch.distributed."""
    if not isinstance(value, (Mapping, list, tuple)):
        return False
    kinds = importlib.import_module("accelerate.utils.constants").TORCH_DISTRIBUTED_OPERATION_TYPES
    state = _state()
    return state.distributed_type in kinds and state.num_processes > 1


def _samples_left(gradient_state: Any) -> int | None:
    """How many samples of the last, filled up batch are no duplicates; None where all of them are wanted."""
    try:
        remainder = int(gradient_state.remainder)
        return remainder if gradient_state.end_of_dataloader and remainder > 0 else None
    except Exception:  # a dataset without length, as stock
        return None


# -- every rank's tree, combined --------------------------------------------------------------------------------------

# What a rank holds under one path, as it travels: a kind, and the leaf or the children.
Node = list[Any]
Held = dict[int, Any]
"""By global rank, ascending."""

Combine = Callable[[Held], Any]
"""The leaves of one path (tensors on the CPU, numbers) to one leaf; raises `_Unfit` with what ranks hold."""


class _Unfit(Exception):
    """Leaves that cannot be combined; holds the ranks' own words on them."""

    def __init__(self, by_rank: dict[int, str]) -> None:
        super().__init__()
        self.by_rank = by_rank


def _combined(own: Any, call: str, combine: Combine) -> Any:
    group = resolve_group(None)
    assert group is not None
    nodes = dict(zip(group_ranks(group), gather_trees(_node(own), name=call), strict=True))
    return _like(own, _Combination(call, describe_group(group), combine).of(nodes, ()), _state().device)


def _node(value: Any) -> Node:
    """``value`` for the wire. What cannot be sent is sent as a complaint, so that all ranks learn of it."""
    if isinstance(value, torch.Tensor):
        kind = f"a tensor ({value.layout}, {value.dtype}, on {value.device})"
        return ["leaf", value.detach()] if can_encode(value) else ["bad", kind]
    if isinstance(value, bool):
        return ["leaf", value]
    if isinstance(value, int | float):  # also numpy's float64, which is a float
        return ["leaf", int(value) if isinstance(value, int) else float(value)]
    if isinstance(value, Mapping):
        return ["dict", [[_wire_key(key), _node(item)] for key, item in value.items()]]
    if _is_namedtuple(value):
        return [f"namedtuple ({', '.join(value._fields)})", [[i, _node(item)] for i, item in enumerate(value)]]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", [[i, _node(item)] for i, item in enumerate(value)]]
    return ["bad", f"an object of type {type(value).__name__}"]


class _Combination:
    def __init__(self, call: str, group: str, combine: Combine) -> None:
        self._call, self._group, self._combine = call, group, combine

    def of(self, held: dict[int, Node], path: Path) -> Any:
        """One tree of what ranks hold under ``path``: dicts, lists, tuples, tensors on the CPU, numbers."""
        for rank, (kind, content) in held.items():
            if kind == "bad":
                raise self._invalid(rank, path, content)
        families = {rank: "list" if kind == "tuple" else kind for rank, (kind, _) in held.items()}
        if len(set(families.values())) > 1:
            spelled = {rank: _leaf_text(it) if kind == "leaf" else f"a {kind}" for rank, (kind, it) in held.items()}
            raise self._conflict(spelled, path)
        contents = {rank: content for rank, (_, content) in held.items()}
        kind = next(iter(held.values()))[0]
        if kind == "leaf":
            try:
                return self._combine(
                    {rank: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for rank, leaf in contents.items()}
                )
            except _Unfit as unfit:
                raise self._conflict(unfit.by_rank, path) from None
        by_key: dict[Any, dict[int, Node]] = {}
        for rank, pairs in contents.items():
            for key, node in pairs:
                by_key.setdefault(key, {})[rank] = node
        if kind == "dict":
            return {key: self.of(nodes, (*path, key)) for key, nodes in by_key.items()}
        items = [self.of(by_key[i], (*path, Index(i))) for i in sorted(by_key)]
        return items if kind == "list" else tuple(items)

    def _conflict(self, by_rank: dict[int, str], path: Path) -> SchemaConflict:
        spelled = format_path(path) or None
        where = f" under {spelled!r}" if spelled else ""
        lines = [f"{self._call}: ranks of {self._group} hold what cannot be combined{where}:"]
        lines += holders_lines(by_rank)
        lines.append("Give each key one structure and fitting shapes on all ranks, or use different keys.")
        return SchemaConflict("\n".join(lines), ranks=by_rank, path=spelled, group=self._group)

    def _invalid(self, rank: int, path: Path, what: str) -> InvalidStats:
        spelled = format_path(path) or None
        where = f" under {spelled!r}" if spelled else ""
        text = (
            f"{self._call}: {ranks_text([rank])} of {self._group} holds {what}{where}; leaves must be dense tensors or "
            "numbers. For other objects there is gather_for_metrics(..., use_gather_object=True)."
        )
        return InvalidStats(text, ranks=[rank], path=spelled, group=self._group)


def _like(own: Any, combined: Any, device: torch.device) -> Any:
    """``combined`` in containers and on devices like those of ``own``, what this rank passed (`_LACKING`: nothing)."""
    if isinstance(combined, torch.Tensor):
        return combined.to(own.device if isinstance(own, torch.Tensor) else device)
    if isinstance(combined, dict):
        has: Any = own if isinstance(own, Mapping) else {}
        keys = {_wire_key(key): key for key in has}
        items = {}
        for wired, item in combined.items():
            key = keys[wired] if wired in keys else wired[-1] if isinstance(wired, tuple) and _KEY in wired else wired
            items[key] = _like(has.get(key, _LACKING), item, device)
        if isinstance(own, defaultdict):
            return type(own)(own.default_factory, items)
        return items if own is _LACKING else _rebuilt(type(own), items)
    if isinstance(combined, (list, tuple)):
        held: Any = own if isinstance(own, (list, tuple)) else ()
        found = [_like(held[i] if i < len(held) else _LACKING, item, device) for i, item in enumerate(combined)]
        if _is_namedtuple(own):
            return type(own)(*found)
        return _rebuilt(type(combined if own is _LACKING else own), found)
    return combined


def _rebuilt(kind: Any, items: Any) -> Any:
    """``items`` as a container of that type; as it is where the type takes no tensors, like Counter."""
    try:
        return kind(items)
    except Exception:
        return items


_LACKING = object()


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


_KEY = "ddpstats: key of another type"


def _wire_key(key: Any) -> Any:
    """A key that can be sent; one of another type (Enum, numpy's integers) as that type and its spelling."""
    if _is_plain(key):
        return key
    return _KEY, f"{type(key).__module__}.{type(key).__qualname__}", str(key)


def _is_plain(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain, key))
    return key is None or type(key) in (bool, int, float, str)


def _leaf_text(leaf: Any) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else "a number"


# -- combining leaves -------------------------------------------------------------------------------------------------


def _gathered(held: Held, samples: int | None = None) -> torch.Tensor:
    """Along dimension 0, in the order of ranks; ``samples`` of them unless each rank holds a number."""
    tensors = {rank: _tensor(leaf) for rank, leaf in held.items()}
    parts = {rank: tensor if tensor.ndim else tensor[None] for rank, tensor in tensors.items()}
    # A rank without any sample often has torch.tensor([]), whatever shape and dtype the others have.
    parts = {rank: part for rank, part in parts.items() if part.shape != (0,)} or parts
    if len({part.shape[1:] for part in parts.values()}) > 1:
        raise _Unfit({rank: _leaf_text(held[rank]) for rank in parts})
    dtype = _promoted(parts.values())
    whole = torch.cat([part.to(dtype) for part in parts.values()])
    return whole[:samples] if any(isinstance(leaf, torch.Tensor) for leaf in held.values()) else whole


def _reduced(held: Held, reduction: str) -> Any:
    """A number where all are numbers, else a tensor."""
    if not any(isinstance(leaf, torch.Tensor) for leaf in held.values()):
        return _reduced_numbers(list(held.values()), reduction)
    tensors = {rank: _tensor(leaf) for rank, leaf in held.items()}
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        raise _Unfit({rank: _leaf_text(leaf) for rank, leaf in held.items()})
    if reduction == "max" and any(tensor.is_complex() for tensor in tensors.values()):
        raise _Unfit(dict.fromkeys(held, "complex numbers, which have no maximum"))
    dtype = _promoted(tensors.values())
    inexact = dtype.is_floating_point or dtype.is_complex
    wide = torch.promote_types(dtype, torch.float64) if inexact else torch.int64
    combine = torch.maximum if reduction == "max" else torch.add
    total = functools.reduce(combine, [tensor.to(wide, copy=True) for tensor in tensors.values()])
    if reduction != "mean":
        return total.to(dtype)
    mean = total.to(torch.promote_types(wide, torch.float64)) / len(tensors)
    return mean.to(dtype if inexact else torch.get_default_dtype())


def _reduced_numbers(numbers: list[Any], reduction: str) -> Any:
    if reduction == "max":
        return next((number for number in numbers if number != number), max(numbers))
    return sum(numbers) / len(numbers) if reduction == "mean" else sum(numbers)


def _promoted(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _tensor(leaf: Any) -> torch.Tensor:
    """A number as it would be as a tensor without loss."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    return torch.tensor(leaf, dtype={bool: torch.bool, int: torch.int64, float: torch.float64}[type(leaf)])


def _state() -> Any:
    return importlib.import_module("accelerate.state").PartialState()
