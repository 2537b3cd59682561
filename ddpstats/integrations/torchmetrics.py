"""torchmetrics whose ranks may hold different metrics and lists of different lengths; two or three collectives per
`compute`, and twice as many where ranks hold different members of a collection.

1. ``Metric._sync_dist``: the metric's whole state travels in one gather, where stock torchmetrics has a barrier and one
   or two all_gathers per state. torchmetrics' own reductions then run on what came, as before. What is sent goes
   through the CPU, whatever the device of the states; what came is put where the rank's own state is.
2. ``MetricCollection.compute``: the states of all members travel in one gather, by member name, and each member's
   ``_sync_dist`` finds its entries there. A member's state comes from the ranks that have the member. Stock
   torchmetrics pairs members by position: {loss: 1, aa: 100} and {loss: 1, zz: 100} give loss 50.5.
3. Where some rank lacks a member, the first rank that has it computes it and sends the result, which then is in what
   every rank's ``compute`` returns, under the names and in the order that all members together would give. The metric
   itself does not travel. If it cannot be computed, or gives what does not travel (other than tensors, numbers, texts
   and dicts, lists and tuples of these), every rank raises `InvalidStats` that names the member.
4. ``MetricCollection.forward`` with ``dist_sync_on_step``: ranks first exchange their members' names, then the members
   step one after another in one order; a rank without the member takes part with nothing, and has the result.
5. What cannot be reduced together (shapes, a tensor and a list, reductions, classes) is a `SchemaConflict` on every
   rank; ranks that compute metrics of two classes at a time get a `ProtocolMismatch`.

Lists may differ in length under any reduction. Items without a reduction come in stock's order: the first item of each
rank, then the second of each.

``compute`` of a collection is collective whenever some member is to sync, also where its result is cached: the ranks
cannot know each other's caches. So a second ``compute`` on rank 0 alone, which stock answers from the cache, must read
the first result instead. If one rank has a member's result cached and another has not, both compute it again.

Whether a member syncs at all (``sync_on_compute``, ``dist_sync_on_step``, ``process_group``) must be the same on all
ranks that have it, and every rank's collection needs one that does.

Not covered, and as in stock torchmetrics: a ``dist_sync_fn`` of your own; states of other things than tensors and lists
of tensors (masks of MeanAveragePrecision). Members that sync in ways of their own do it by themselves, one after
another, and every rank must have them: those with a ``_sync_dist`` of their own, and wrappers other than
ClasswiseWrapper, MinMaxMetric, MultioutputWrapper and sums or products of metrics. An error in the middle of
``forward`` leaves a metric there, as any error does.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._ranks.comm import group_ranks
from ddpstats.integrations.matching import Kind, Matching, unite
from ddpstats.integrations.patches import Patches

__all__ = ["install", "uninstall"]

# Where `compute` does nothing but call that of the metrics inside; the first has sums, products, ... of metrics.
_DELEGATING = ("metric", "wrappers.classwise", "wrappers.minmax", "wrappers.multioutput")

_patches = Patches("torchmetrics")
_RELIED_ON = (
    "torchmetrics:Metric._sync_dist(self, dist_sync_fn, process_group)",
    "torchmetrics:Metric.sync(self, dist_sync_fn, process_group, should_sync, distributed_available)",
    "torchmetrics:MetricCollection.compute(self)",
    "torchmetrics:MetricCollection.forward(self, args, kwargs)",
    "torchmetrics:MetricCollection.items(self, keep_base, copy_state)",
    "torchmetrics:metric.CompositionalMetric",
    "torchmetrics:wrappers.abstract.WrapperMetric",
    "torchmetrics:utilities.dim_zero_cat",
    "torchmetrics:utilities.distributed.gather_all_tensors",
)

# What a rank sends of one metric; see `_entry`.
MetricEntry = dict[str, Any]

# By member, global rank, and path of a metric inside of the member (empty: the member itself).
MetricsOfMembers = dict[str, dict[int, dict[str, MetricEntry]]]

# By the id of a metric and its group: the ranks' entries, while its collection computes.
_gathered: dict[tuple[int, Any], dict[int, MetricEntry]] = {}


def install() -> None:
    """Patch the installed torchmetrics. Local and idempotent; every rank must call it, or none.

    Metrics that exist already are covered. A torchmetrics that lacks what this relies on, whatever its version, is
    left unpatched, with a warning that names the difference. Does nothing under ``DDPSTATS_DISABLE=1``.

    Raises:
        ConfigError: torchmetrics is not installed.

    Example::

        rank 0: MetricCollection {"loss": 1, "aa": 100}   rank 1: MetricCollection {"loss": 1, "zz": 100}
        stock computes loss 50.5 on both; after install() both have aa 100, loss 1, zz 100
    """
    if _patches.should_patch(_RELIED_ON, _probe):
        _patches.wrap(_library().Metric, "_sync_dist", _sync_dist)
        _patches.wrap(_library().MetricCollection, "compute", _compute)
        _patches.wrap(_library().MetricCollection, "forward", _forward)


def uninstall() -> None:
    """Put torchmetrics' own methods back. Local and idempotent."""
    _patches.restore()


def _probe() -> str | None:
    metric = _library().SumMetric(sync_on_compute=False)  # nothing of a probe may wait for other ranks
    metric.update(2.0)
    states = [state for state, reduction in metric._reductions.items() if callable(reduction)]
    values = [getattr(metric, state, None) for state in states]
    if values != [2.0] or metric.compute() != 2.0:
        return f"keeps other states in a SumMetric of 2.0: {dict(zip(states, values, strict=True))}"
    collection = _library().MetricCollection({"a": metric})
    results = _with_members(collection, {"a": metric, "b": _KnownResult(3.0, {})}).compute()
    return None if results == {"a": 2.0, "b": 3.0} else f"computes {results} for members that are a = 2.0 and b = 3.0"


# -- in place of torchmetrics' ----------------------------------------------------------------------------------------


def _sync_dist(original: Callable[..., Any], self: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    group = _group_of(self, process_group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return  # outside of its group a metric keeps its own state
    entries: dict[int, MetricEntry] = {}
    if _is_default(dist_sync_fn) and _is_shared(group):
        entries = _gathered.get((id(self), group)) or _exchange(type(self).__qualname__, lambda: _entry(self), group)
    if not entries or any(entry["by_itself"] for entry in entries.values()):
        options = {} if dist_sync_fn is None else {"dist_sync_fn": dist_sync_fn}
        original(self, **options, process_group=process_group)
        return
    for state, reduction in self._reductions.items():
        values = [entry["states"][state][1] for entry in entries.values()]
        setattr(self, state, _reduce(values, reduction, getattr(self, state), self))


def _compute(original: Callable[..., dict[str, Any]], self: Any) -> dict[str, Any]:
    own = dict(self.items(keep_base=True, copy_state=False))
    matched: list[tuple[Matching, MetricsOfMembers]] = []
    gathered: dict[tuple[int, Any], dict[int, MetricEntry]] = {}
    for group, matching, metrics in _by_group(self, "_to_sync", _metrics_of):
        trees = matching.gather(functools.partial(_entries, metrics, own))
        members: MetricsOfMembers = unite({rank: _with_states(tree) for rank, tree in trees.items()})
        for (name, path), entries in _match_entries(matching, members).items():
            metric = metrics.get(name, {}).get(path)
            if metric is not None:
                if not all(entry["cached"] for entry in entries.values()):  # no rank may keep an older result
                    metric._computed = None
                if not any(entry["by_itself"] for entry in entries.values()):
                    gathered[id(metric), group] = entries
        matched.append((matching, members))
    _gathered.update(gathered)
    try:
        everyones: dict[str, Any] = {}
        for matching, members in matched:
            everyones |= _everyones(own, matching, members, lambda name: own[name].compute())
        return original(_with_members(self, {**everyones, **own}))
    finally:
        for key in gathered:
            _gathered.pop(key, None)


def _forward(original: Callable[..., dict[str, Any]], self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    own = dict(self.items(keep_base=True, copy_state=False))
    everyones: dict[str, Any] = {}
    stepped: dict[str, _KnownResult] = {}
    for group, matching, metrics in _by_group(self, "dist_sync_on_step", lambda member: {"": member}):
        headings = {name: {"": _heading(own[name], own[name])} for name in metrics}
        members: MetricsOfMembers = unite(matching.gather(headings))
        _match_entries(matching, members)
        for name, held in members.items():
            if name in metrics:
                result = own[name](*args, **own[name]._filter_kwargs(**kwargs))
                stepped[name] = _KnownResult(result, _first(held)["naming"])
            else:
                _exchange(_first(held)["class"], None, group)
        everyones |= _everyones(own, matching, members, lambda name: stepped[name].compute())
    return original(_with_members(self, {**everyones, **own, **stepped}), *args, **kwargs)


def _make_matching(call: str, group: Any) -> Matching:
    return Matching(
        call,
        group,
        "Make the metric with the same class and arguments (num_classes, thresholds, ...) on all ranks, or give it "
        "another name in the collection. Nothing was reduced.",
    )


# -- a collection in which some results are known already --------------------------------------------------------------


class _KnownResult:
    """A member of a collection that gives a known result."""

    def __init__(self, result: Any, naming: Mapping[str, Any]) -> None:
        self._result = result
        vars(self).update(naming)

    def compute(self, *_: Any) -> Any:
        return self._result

    __call__ = compute

    def _filter_kwargs(self, **_: Any) -> dict[str, Any]:
        return {}


def _everyones(
    own: Mapping[str, Any], matching: Matching, members: MetricsOfMembers, result_of: Callable[[str], Any]
) -> dict[str, Any]:
    """Return all ranks' members in one order, with a `_KnownResult` for each that this rank lacks.

    Nothing where no rank lacks any. Collective if some rank lacks some member.
    """
    device = next((member.device for member in own.values()), torch.device("cpu"))
    results = matching.share_results(members, result_of, device)
    if all(len(held) == len(matching.ranks) for held in members.values()):
        return {}
    return {
        name: own[name] if name in own else _KnownResult(results[name], _first(held)["naming"])
        for name, held in members.items()
    }


def _with_members(collection: Any, members: Mapping[str, Any]) -> Any:
    """Return a copy of the collection that has these ``members``."""
    changed = copy.copy(collection)
    vars(changed)["_modules"] = dict(members)
    return changed


def _first(held: Mapping[int, Mapping[str, MetricEntry]]) -> MetricEntry:
    return next(iter(next(iter(held.values())).values()))


# -- which metrics of a collection sync, and where --------------------------------------------------------------------


def _by_group(
    collection: Any, flag: str, metrics_of: Callable[[Any], dict[str, Any]]
) -> list[tuple[Any, Matching, dict[str, dict[str, Any]]]]:
    """Return what has ``flag`` of the metrics that each member gives, by group (in one order on all ranks) and name."""
    # with prefix and postfix, so that "train/" is never paired with "val/" unnoticed
    call = f"torchmetrics/MetricCollection {collection.prefix or ''}...{collection.postfix or ''}"
    groups: dict[Any, dict[str, dict[str, Any]]] = {}
    if flag == "_to_sync" and not len(collection) and _is_shared(_group_of(collection)):
        groups[dist.group.WORLD] = {}  # a collection without members: the other ranks' may have some
    for name, member in collection.items(keep_base=True, copy_state=False):
        for path, metric in metrics_of(member).items():
            for leaf in _leaves(metric).values():
                group, is_available = _group_of(leaf), leaf.distributed_available_fn
                if getattr(leaf, flag) and callable(is_available) and is_available() and _is_shared(group):
                    groups.setdefault(group, {}).setdefault(name, {})[path] = metric
                    break
    in_order = sorted(groups, key=lambda group: (group_ranks(group), group.group_name))
    return [(group, _make_matching(call, group), groups[group]) for group in in_order]


def _metrics_of(member: Any) -> dict[str, Any]:
    """Return the metrics that are computed for a member, by path: of one that delegates to others, those."""
    metrics = _leaves(member)
    modules = {type(inner).compute.__module__ for inner in member.modules() if _is_wrapper(inner)}
    delegates = modules <= {f"torchmetrics.{name}" for name in _DELEGATING}
    return metrics if delegates and not any(map(_is_by_itself, metrics.values())) else {"": member}


def _leaves(metric: Any) -> dict[str, Any]:
    """Return the metrics that are no wrappers, by path."""
    metrics = {path: inner for path, inner in metric.named_modules() if isinstance(inner, _library().Metric)}
    return {path: inner for path, inner in metrics.items() if not _is_wrapper(inner)}


def _is_wrapper(module: Any) -> bool:
    return isinstance(module, (_library().metric.CompositionalMetric, _library().wrappers.abstract.WrapperMetric))


def _is_by_itself(metric: Any) -> bool:
    """Return whether a metric syncs otherwise than by torchmetrics' own gathering of its states."""
    has_own_sync = type(metric)._sync_dist is not _library().Metric._sync_dist
    return has_own_sync or not _is_default(metric.dist_sync_fn) or list(_leaves(metric)) != [""]


def _is_default(dist_sync_fn: Any) -> bool:
    return dist_sync_fn is None or dist_sync_fn is _library().utilities.distributed.gather_all_tensors


def _group_of(metric: Any, process_group: Any = None) -> Any:
    group = process_group or getattr(metric, "process_group", None)
    return dist.group.WORLD if group is None and dist.is_available() and dist.is_initialized() else group


def _is_shared(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and group.size() > 1


# -- what ranks send of a metric --------------------------------------------------------------------------------------

# What a collection reads of a member to name the entries of a dict that it gives.
_NAMING = ("prefix", "postfix", "_from_collection")


def _heading(metric: Any, member: Any) -> MetricEntry:
    return {
        "class": type(metric).__qualname__,
        "by_itself": _is_by_itself(metric),
        "cached": metric._computed is not None,
        "naming": {name: getattr(member, name) for name in _NAMING if hasattr(member, name)},
        "states": {},
    }


def _entry(metric: Any, member: Any = None) -> MetricEntry:
    """Return the heading and, where they are tensors and lists of tensors, the states with their reductions."""
    entry = _heading(metric, member)
    values = [getattr(metric, state) for state in metric._reductions]
    if not all(map(_is_tensors, values)):
        return {**entry, "by_itself": True}
    states = {state: [_name(fx), _compact(getattr(metric, state), fx)] for state, fx in metric._reductions.items()}
    return {**entry, "by_itself": False, "states": states}


def _entries(metrics: Mapping[str, Mapping[str, Any]], members: Mapping[str, Any]) -> dict[str, dict[str, MetricEntry]]:
    """Return an entry for each metric; a compute group shares its states, which are sent once."""
    entries: dict[str, dict[str, MetricEntry]] = {}
    sent: dict[Any, list[str]] = {}
    for name, inner in metrics.items():
        for path, metric in inner.items():
            key = tuple((state, id(getattr(metric, state)), fx) for state, fx in metric._reductions.items())
            if _is_by_itself(metric) or key in sent:
                entry = {**_heading(metric, members[name]), "states": sent.get(key, {})}
            else:
                entry = _entry(metric, members[name])
                if not entry["by_itself"]:
                    sent[key] = [name, path]
            entries.setdefault(name, {})[path] = entry
    return entries


def _with_states(entries: dict[str, dict[str, MetricEntry]]) -> dict[str, dict[str, MetricEntry]]:
    """Return what `_entries` made, with the states that several metrics share in each of them."""
    for entry in (entry for inner in entries.values() for entry in inner.values()):
        if isinstance(entry["states"], list):
            name, path = entry["states"]
            entry["states"] = entries[name][path]["states"]
    return entries


def _is_tensors(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, torch.Tensor) for item in items)


def _compact(value: Any, reduction: Any) -> Any:
    """Return a list that is to be concatenated as a list of one tensor."""
    return [reduction(value)] if _is_cat(reduction) and isinstance(value, list) and len(value) > 1 else value


def _is_cat(reduction: Any) -> bool:
    return reduction is _library().utilities.dim_zero_cat


def _name(reduction: Any) -> str:
    name = getattr(reduction, "__qualname__", type(reduction).__qualname__)
    return "None" if reduction is None else str(name).removeprefix("dim_zero_")


# -- what came --------------------------------------------------------------------------------------------------------


def _exchange(class_name: str, entry: Callable[[], MetricEntry] | None, group: Any) -> dict[int, MetricEntry]:
    """Return the ranks' entries of one metric. Every rank of ``group`` must call; None where it has no such metric."""
    matching = _make_matching(f"torchmetrics/{class_name}", group)
    entries = {rank: {"": entry} for rank, entry in matching.gather(entry).items() if entry is not None}
    return _match_entries(matching, {class_name: entries})[class_name, ""]


def _match_entries(matching: Matching, members: MetricsOfMembers) -> dict[tuple[str, str], dict[int, MetricEntry]]:
    """Return each metric's entries by member and path. Raises `SchemaConflict` where they do not fit together."""
    fitting: dict[tuple[str, str], dict[int, MetricEntry]] = {}
    for name, held in members.items():
        is_by_itself = any(entry["by_itself"] for entries in held.values() for entry in entries.values())
        suffix = ", which syncs by itself and must be on every rank" if is_by_itself else ""
        kinds = {rank: Kind(_classes(entries) + suffix) for rank, entries in held.items()}
        if is_by_itself:
            kinds = {rank: kinds.get(rank, Kind("no such metric")) for rank in matching.ranks}
        matching.check((name,), kinds)
        for path, entries in unite(held).items():
            fitting[name, path] = entries
            by_state = unite({rank: entry["states"] for rank, entry in entries.items()})
            for state, values in by_state.items() if not is_by_itself else ():
                inner = (name, path, state) if path else (name, state)
                matching.check(inner, {rank: _kind(*values.get(rank, [None, None])) for rank in entries})
    return fitting


def _classes(entries: Mapping[str, MetricEntry]) -> str:
    return ", ".join(f"{entry['class']}{f' as {path}' if path else ''}" for path, entry in sorted(entries.items()))


def _kind(reduction: str | None, value: Any) -> Kind:
    """Return what ranks must agree on: shapes only of tensors and of lists that are concatenated, unless empty."""
    if reduction is None:
        return Kind("no such state")
    what = f"{'a tensor' if isinstance(value, torch.Tensor) else 'a list'}, reduction {reduction}"
    if isinstance(value, torch.Tensor):
        return Kind(what, f", shape ({', '.join(map(str, value.shape))})")
    if reduction != "cat" or not value or value[0].shape == (0,):  # torch.cat ignores tensors of this one shape
        return Kind(what)
    return Kind(what, f", items of shape ({', '.join(['*', *map(str, value[0].shape[1:])])})")


def _reduce(values: list[Any], reduction: Any, own: Any, metric: Any) -> Any:
    """Apply torchmetrics' own reduction to the ranks' values of one state."""
    device = next(iter([own] if isinstance(own, torch.Tensor) else own), metric).device
    if isinstance(own, torch.Tensor):
        value: Any = torch.stack([tensor.to(device) for tensor in values])
    else:
        value = [item.to(device) for row in zip_longest(*values) for item in row if item is not None]
        if not value and not _is_cat(reduction):
            return []
        value = value or [torch.tensor([], device=device, dtype=metric.dtype)]
    return value if reduction is None else reduction(value)


def _library() -> Any:
    return importlib.import_module("torchmetrics")
