"""accelerate's gather and reduce matched by key: dicts may differ between ranks in keys and in their order.

`install` replaces ``accelerate.utils.gather`` and ``reduce`` wherever accelerate has bound them, which covers
``Accelerator.gather`` and ``Accelerator.reduce``, and replaces ``Accelerator.gather_for_metrics``. Stock accelerate
issues one collective per leaf, in the order of each rank's own dict, and takes a dict of Python numbers for a list of
its keys. The replacement, where the argument is a dict, or a list or tuple with a dict in it:

1. sends every rank's tree to every rank, in two or three collectives beside accelerate's own group;
2. combines what ranks hold under one key, or at one index of a sequence, over the ranks that hold it. Every rank gets
   the union of keys, in the order in which ranks 0, 1, 2, ... first have them;
3. puts the result into containers of the types, and on the devices, that this rank passed. What this rank lacked is on
   the accelerator's device, in plain containers, under its key (the text of a key that is neither str nor int).

Reduce: "mean" over the ranks that hold the key, "max", otherwise the sum as in stock. Computed in float64, integers
exactly; the result has the dtype that the ranks' dtypes promote to. A mean of integer tensors, which stock refuses, has
torch's default dtype. Python numbers give a Python number. Gather: concatenated along dimension 0, whose size may
differ; each rank's Python number is one element (float64, int64 or bool). Results have no grad.

Raises on every rank, with one text: `SchemaConflict` for a container against a leaf, or shapes that do not fit (in
accelerate's debug mode it is a ``DistributedOperationException``, too, as accelerate's own error about shapes);
`InvalidStats` for a leaf that is neither a dense tensor nor a number; `ProtocolMismatch` for a reduce against a gather,
or for two different reductions.

Left to accelerate: tensors, and lists and tuples of them, which have no keys and may be large (so one rank's tensor
against another's dict ends in `RankMissing`); ``use_gather_object=True``; lists and tuples of objects in
``gather_for_metrics``; a single process; XLA; ``scale``, which only XLA has; ``broadcast``, ``pad_across_processes``.
``gather_for_metrics`` drops the duplicates of the last batch from tensors, as stock does, also from 0-d ones; not from
Python numbers.

Non-finite gradients: `ddpstats.NaNCapture` needs nothing of this module. accelerate's loop with it::

    capture = NaNCapture("captures", model=model, scaler=accelerator.scaler)   # after prepare()
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
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddpstats._base.paths import Index, Path
from ddpstats._ranks.exchange import InvalidLeaf
from ddpstats._ranks.gather import can_store
from ddpstats.errors import SchemaConflict
from ddpstats.integrations.matching import Matching, pack, unite
from ddpstats.integrations.patches import Patches, in_place_of

__all__ = ["install", "uninstall"]

_patches = Patches("accelerate")
_RELIED_ON = (
    "accelerate.utils.operations:gather(tensor)",
    "accelerate.utils.operations:reduce(tensor, reduction, scale)",
    "accelerate.utils.operations:honor_type(obj, generator)",
    "accelerate.accelerator:Accelerator.gather_for_metrics(self, input_data, use_gather_object)",
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
        operations = _operations()
        accelerator = importlib.import_module("accelerate.accelerator").Accelerator
        for theirs, ours in ((operations.gather, _gather), (operations.reduce, _reduce)):
            _patches.replace_everywhere("accelerate", theirs, in_place_of(theirs, ours))
        _patches.wrap(accelerator, "gather_for_metrics", _gather_for_metrics)


def uninstall() -> None:
    """Put accelerate's own functions back. Local and idempotent."""
    _patches.restore()


# -- in place of accelerate's -----------------------------------------------------------------------------------------


def _gather(original: Callable[..., Any], tensor: Any) -> Any:
    return _combine(tensor, "accelerate.gather", _gather_leaves) if _has_keys(tensor) else original(tensor)


def _reduce(original: Callable[..., Any], tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    if not _has_keys(tensor):
        return original(tensor, reduction, scale)
    return _combine(tensor, f"accelerate.reduce, {reduction!r}", lambda leaves: _reduce_leaves(leaves, reduction))


def _gather_for_metrics(
    original: Callable[..., Any], self: Any, input_data: Any, use_gather_object: bool = False
) -> Any:
    # Lists and tuples are accelerate's business: of tensors, it comes to `gather`; of objects, it is right.
    if use_gather_object or not isinstance(input_data, Mapping) or not _has_keys(input_data):
        return original(self, input_data, use_gather_object)
    samples = _count_samples_left(self.gradient_state)
    return _combine(input_data, "accelerate.gather", lambda leaves: _gather_leaves(leaves, samples))


def _has_keys(tree: Any) -> bool:
    """Return whether a dict is in ``tree``, and other ranks are in a group of torch.distributed."""
    kinds = importlib.import_module("accelerate.utils.constants").TORCH_DISTRIBUTED_OPERATION_TYPES
    return _has_dict(tree) and _state().num_processes > 1 and _state().distributed_type in kinds


def _has_dict(tree: Any) -> bool:
    return isinstance(tree, Mapping) or (isinstance(tree, (list, tuple)) and any(map(_has_dict, tree)))


def _count_samples_left(gradient_state: Any) -> int | None:
    """Return how many samples of the last, filled up batch are no duplicates; None where all of them are wanted."""
    try:
        remainder = int(gradient_state.remainder)
        return remainder if gradient_state.end_of_dataloader and remainder > 0 else None
    except Exception:  # a dataset without length, as stock
        return None


# -- every rank's tree, combined --------------------------------------------------------------------------------------

# Makes one leaf of the ranks' leaves (tensors on the CPU, numbers); None where their shapes do not fit.
CombineLeaves = Callable[[list[Any]], Any]


def _combine(own: Any, call: str, combine: CombineLeaves) -> Any:
    matching = Matching(call, None, "Give each key one structure and fitting shapes on all ranks, or use other keys.")
    trees = matching.gather(lambda: _sendable(own, ()))
    return _like(own, _unite(matching, trees, (), combine), _state().device)


def _sendable(tree: Any, path: Path) -> Any:
    """Return ``tree`` as plain containers of tensors on the CPU and plain numbers. Raises `InvalidLeaf`."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu() if can_store(tree) else tree
    if isinstance(tree, int | float):
        return pack(tree)
    if isinstance(tree, Mapping):
        return {_key_to_send(key): _sendable(item, (*path, _key_to_send(key))) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [_sendable(item, (*path, Index(index))) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    raise InvalidLeaf(
        path,
        f"an object of type {type(tree).__name__}; leaves must be dense tensors or numbers. For other objects call "
        "accelerate.utils.gather_object([tree]), which returns a list of every rank's tree",
    )


def _key_to_send(key: Any) -> str | int:
    """Return a key of another type (an Enum, a tuple) as its type and text."""
    return key if type(key) in (str, int) else f"{type(key).__name__} {key}"


def _unite(matching: Matching, trees: dict[int, Any], path: Path, combine: CombineLeaves) -> Any:
    """Return one tree of what the ranks hold under ``path``."""
    first = next(iter(trees.values()))
    fits = len({(isinstance(tree, dict), isinstance(tree, (list, tuple))) for tree in trees.values()}) == 1
    if fits and isinstance(first, dict):
        return {key: _unite(matching, below, (*path, key), combine) for key, below in unite(trees).items()}
    if fits and isinstance(first, (list, tuple)):
        by_index = unite({rank: dict(enumerate(tree)) for rank, tree in trees.items()})
        items = [_unite(matching, below, (*path, Index(index)), combine) for index, below in by_index.items()]
        return items if isinstance(first, list) else tuple(items)
    leaf = combine(list(trees.values())) if fits else None
    if leaf is None:
        conflict = matching.conflict(path, {rank: _text(tree) for rank, tree in trees.items()})
        raise _as_accelerates(conflict) if _state().debug else conflict
    return leaf


def _as_accelerates(conflict: SchemaConflict) -> SchemaConflict:
    """Return the same error as one that is also of the class which accelerate raises in its debug mode."""
    bases = (SchemaConflict, _operations().DistributedOperationException)
    both: type[SchemaConflict] = type("SchemaConflict", bases, {"__module__": SchemaConflict.__module__})
    return both(str(conflict), ranks=conflict.ranks, path=conflict.path, group=conflict.group)


def _text(tree: Any) -> str:
    if isinstance(tree, torch.Tensor):
        return f"a tensor of shape {tuple(tree.shape)}"
    return "a number" if isinstance(tree, int | float) else f"a {type(tree).__name__}"


def _like(own: Any, united: Any, device: torch.device) -> Any:
    """Return ``united`` in containers and on devices like those of ``own``, which this rank passed; None: nothing."""
    if isinstance(united, torch.Tensor):
        return united.to(own.device if isinstance(own, torch.Tensor) else device)
    if isinstance(united, dict):
        own_items = {_key_to_send(key): (key, item) for key, item in (own or {}).items()}
        filled = {}
        for sent_key, item in united.items():
            key, own_item = own_items.get(sent_key, (sent_key, None))
            filled[key] = _like(own_item, item, device)
        return filled if own is None or isinstance(own, defaultdict) else type(own)(filled)
    if isinstance(united, (list, tuple)):
        own_list = list(own or ())
        own_list += [None] * (len(united) - len(own_list))
        listed = [_like(own_item, item, device) for own_item, item in zip(own_list, united, strict=True)]
        return type(united)(listed) if own is None else _operations().honor_type(own, listed)
    return united


# -- combining leaves -------------------------------------------------------------------------------------------------


def _gather_leaves(leaves: list[Any], samples: int | None = None) -> torch.Tensor | None:
    """Concatenate in the order of ranks; ``samples`` of them unless each rank holds a number."""
    parts = [tensor if tensor.ndim else tensor[None] for tensor in map(_tensor, leaves)]
    # A rank without any sample often has torch.tensor([]), whatever shape and dtype the others have.
    parts = [part for part in parts if part.shape != (0,)] or parts
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    whole = torch.cat([part.to(dtype) for part in parts])
    return whole[:samples] if any(isinstance(leaf, torch.Tensor) for leaf in leaves) else whole


def _reduce_leaves(leaves: list[Any], reduction: str) -> Any:
    """Reduce to a number where all are numbers, otherwise to a tensor."""
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        if reduction == "max":
            return next((leaf for leaf in leaves if leaf != leaf), max(leaves))
        return sum(leaves) / len(leaves) if reduction == "mean" else sum(leaves)
    tensors = list(map(_tensor, leaves))
    if len({tensor.shape for tensor in tensors}) > 1:
        return None
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    inexact = dtype.is_floating_point or dtype.is_complex
    wide = torch.promote_types(dtype, torch.float64) if inexact else torch.int64
    combine = torch.maximum if reduction == "max" else torch.add
    total = functools.reduce(combine, [tensor.to(wide, copy=True) for tensor in tensors])
    if reduction != "mean":
        return total.to(dtype)
    mean = total.to(torch.promote_types(wide, torch.float64)) / len(tensors)
    return mean.to(dtype if inexact else torch.get_default_dtype())


def _tensor(leaf: Any) -> torch.Tensor:
    """Return a number as it would be as a tensor without loss."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)


def _state() -> Any:
    return importlib.import_module("accelerate.state").PartialState()


def _operations() -> Any:
    return importlib.import_module("accelerate.utils.operations")
