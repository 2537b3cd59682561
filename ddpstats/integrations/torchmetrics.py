"""torchmetrics whose ranks may hold different metrics and lists of different lengths; one collective per `compute`,
one more where states take more than 16 kB, and one where ranks hold different members of a collection.

1. ``Metric._sync_dist``: the metric's whole state travels in one gather, where stock torchmetrics has a barrier and one
   or two all_gathers per state. torchmetrics' own reductions then run on what came, as before. What is sent goes
   through the CPU, whatever the device of the states; what came is put where the rank's own state is.
2. ``MetricCollection.compute``: the states of all members travel in one gather, by member name, and each member's
   ``_sync_dist`` finds its part there. A member's state comes from the ranks that have the member. Stock torchmetrics
   pairs members by position: {loss: 1, aa: 100} and {loss: 1, zz: 100} give loss 50.5.
3. Where some rank lacks a member, the first rank that has it computes it and sends the result, which then is in what
   every rank's ``compute`` returns, under the names and in the order that all members together would give. The metric
   itself does not travel. If it cannot be computed, or gives what does not travel (other than tensors, numbers, texts
   and dicts, lists and tuples of these), every rank raises `InvalidStats` that names the member.
4. ``MetricCollection.forward`` with ``dist_sync_on_step``: ranks first tell each other their members' names, then the
   members step one after another in one order; a rank without the member takes part with nothing, and has the result.
5. What cannot be reduced together (shapes, a tensor and a list, reductions, classes) is a `SchemaConflict` on every
   rank; ranks that compute metrics of two classes at a time get a `ProtocolMismatch`.

Lists may differ in length under any reduction. Items without a reduction come in stock's order: the first item of each
rank, then the second of each.

``compute`` of a collection is collective whenever some member is to sync, also where its result is cached: the ranks
cannot know each other's caches. So a second ``compute`` on rank 0 alone, which stock answers from the cache, must read
the first result instead. If one rank has a member's result cached and another has not, both compute it anew.

Whether a member syncs at all (``sync_on_compute``, ``dist_sync_on_step``, ``process_group``) must be alike on all
ranks that have it, and every rank's collection needs one that does.

Not covered, and as in stock torchmetrics: a ``dist_sync_fn`` of your own; states of other things than tensors and lists
of tensors (masks of MeanAveragePrecision). Members that sync in ways of their own do it by themselves, one after
another, and every rank must have them: those with a ``_sync_dist`` of their own, and wrappers other than
ClasswiseWrapper, MinMaxMetric, MultioutputWrapper and sums or products of metrics. An error in the middle of
``forward`` leaves a metric there, as any error does.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._ranks.comm import group_ranks
from ddpstats._ranks.gather import gather_trees
from ddpstats.integrations._partial_members import Elsewhere, Holders, everyones_members, holders_of
from ddpstats.integrations._torchmetrics_states import (
    Held,
    by_name,
    entries_of,
    entry_of,
    exchange,
    has_own_way,
    heading_of,
    is_default,
    is_metric,
    is_wrapper,
    leaves_of,
    reduced,
)
from ddpstats.integrations.patches import Patches

__all__ = ["install", "uninstall"]

# Where `compute` does nothing but call that of the metrics inside; the first has sums, products, ... of metrics.
_DELEGATING = frozenset(
    {
        "torchmetrics.metric",
        "torchmetrics.wrappers.classwise",
        "torchmetrics.wrappers.minmax",
        "torchmetrics.wrappers.multioutput",
    }
)

_patches = Patches("torchmetrics")
_RELIED_ON = (
    "torchmetrics:Metric._sync_dist(self, dist_sync_fn, process_group)",
    "torchmetrics:Metric.sync(self, dist_sync_fn, process_group, should_sync, distributed_available)",
    "torchmetrics:MetricCollection.compute(self)",
    "torchmetrics:MetricCollection.forward(self, args, kwargs)",
    "torchmetrics:MetricCollection.items(self, keep_base, copy_state)",
)

_gathered: dict[tuple[int, Any], Held] = {}
"""By the id of a metric and the group: what came for it, while its collection computes."""


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
        from torchmetrics import Metric, MetricCollection

        _patches.wrap(Metric, "_sync_dist", _sync_dist)
        _patches.wrap(MetricCollection, "compute", _compute)
        _patches.wrap(MetricCollection, "forward", _forward)


def uninstall() -> None:
    """Put torchmetrics' own methods back. Local and idempotent."""
    _patches.restore()


def _probe() -> str | None:
    from torchmetrics import MetricCollection, SumMetric

    metric = SumMetric(sync_on_compute=False)  # nothing of a probe may wait for other ranks
    metric.update(2.0)
    states = [state for state, reduction in metric._reductions.items() if callable(reduction)]
    held = [getattr(metric, state, None) for state in states]
    if len(held) != 1 or not isinstance(held[0], torch.Tensor) or not held[0].item() == metric.compute().item() == 2.0:
        return f"keeps other states in a SumMetric of 2.0: {dict(zip(states, held, strict=True))}"
    several = MetricCollection({"a": metric})
    several.add_module("b", Elsewhere(3.0))
    found = several.compute()
    return None if found == {"a": 2.0, "b": 3.0} else f"computes {found} for members that are a = 2.0 and b = 3.0"


# -- in place of torchmetrics' ----------------------------------------------------------------------------------------


def _sync_dist(original: Callable[..., Any], self: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    group = _group_of(self, process_group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return  # outside of its group a metric keeps its own state
    theirs = {} if dist_sync_fn is None else {"dist_sync_fn": dist_sync_fn}
    if not (is_default(dist_sync_fn) and _is_shared(group)):
        original(self, **theirs, process_group=process_group)
        return
    held = _gathered.get((id(self), group)) or exchange(type(self).__qualname__, lambda: entry_of(self), group)
    if any(entry["own_way"] for _, entry in held):
        original(self, **theirs, process_group=process_group)
        return
    for state, reduction in self._reductions.items():
        states = [entry["states"][state] for _, entry in held]
        setattr(self, state, reduced(states, reduction, getattr(self, state), self))


def _compute(original: Callable[..., dict[str, Any]], self: Any) -> dict[str, Any]:
    found: dict[tuple[int, Any], Held] = {}
    holders: dict[Any, Holders] = {}
    for group, syncing in _by_group(_syncing(self, "_to_sync", _delegates), or_world=not len(self)).items():
        metrics = {name: metric for _, name, metric in syncing}
        members = {name: member for member, name, _ in syncing}
        trees = gather_trees(functools.partial(entries_of, metrics, members), name=_collection_name(self), group=group)
        gathered = by_name(trees, group)
        holders[group] = holders_of(gathered)
        for name, held in gathered.items():
            if name not in metrics:
                continue
            if not all(entry["cached"] for _, entry in held):  # no rank may keep an older result than the others
                metrics[name]._computed = None
            if not any(entry["own_way"] for _, entry in held):
                found[id(metrics[name]), group] = held
    _gathered.update(found)
    try:
        with everyones_members(self, _collection_name(self), holders, lambda member: member.compute()):
            return original(self)
    finally:
        for key in found:
            _gathered.pop(key, None)


def _forward(original: Callable[..., dict[str, Any]], self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    results: dict[int, tuple[Any, deque[Any]]] = {}
    holders: dict[Any, Holders] = {}
    try:
        for group, syncing in _by_group(_syncing(self, "dist_sync_on_step", _itself)).items():
            members = {name: member for _, name, member in syncing}
            headings = {name: heading_of(member, has_own_way(member)) for name, member in members.items()}
            trees = gather_trees(headings, name=_collection_name(self), group=group)
            gathered = by_name(trees, group)
            holders[group] = holders_of(gathered)
            for name, held in gathered.items():
                if name not in members:
                    exchange(held[0][1]["class"], None, group)
                    continue
                member = members[name]
                result = member.forward(*args, **member._filter_kwargs(**kwargs))
                results.setdefault(id(member), (member, deque()))[1].append(result)
        for member, answers in results.values():
            member.forward = functools.partial(_answer, answers)
        with everyones_members(self, _collection_name(self), holders, lambda member: results[id(member)][1][-1]):
            return original(self, *args, **kwargs)
    finally:
        for member, _ in results.values():
            vars(member).pop("forward", None)  # the class's own is back


def _collection_name(collection: Any) -> str:
    """With what tells the collections of a program apart, so that "train/" never meets "val/" unnoticed."""
    return f"torchmetrics/MetricCollection {collection.prefix or ''}...{collection.postfix or ''}"


def _answer(results: deque[Any], *_: Any, **__: Any) -> Any:
    """One result for each name that the member has in the collection."""
    return results.popleft()


# -- which metrics of a collection sync, and where --------------------------------------------------------------------


Syncing = tuple[str, str, Any]
"""Name of a member, and a metric that syncs for it with that metric's own name: the member, or one inside of it."""


def _syncing(
    collection: Any, flag: str, of_member: Callable[[str, Any], dict[str, Any]]
) -> Iterator[tuple[Syncing, Any]]:
    """What has ``flag`` of the metrics that each member gives, and its group."""
    for name, member in collection.items(keep_base=True, copy_state=False):
        for inner_name, metric in of_member(name, member).items():
            for one in leaves_of(metric):
                if getattr(one, flag) and callable(one.distributed_available_fn) and one.distributed_available_fn():
                    yield (name, inner_name, metric), _group_of(one)
                    break


def _by_group(syncing: Iterator[tuple[Syncing, Any]], or_world: bool = False) -> dict[Any, list[Syncing]]:
    """Per group, in an order that all ranks share, what syncs there."""
    found: dict[Any, list[Syncing]] = {}
    if or_world and dist.is_available() and dist.is_initialized() and _is_shared(dist.group.WORLD):
        found[dist.group.WORLD] = []  # a collection without members: the other ranks' may have some
    for named, group in syncing:
        if _is_shared(group):
            found.setdefault(group, []).append(named)
    return {group: found[group] for group in sorted(found, key=lambda one: (group_ranks(one), one.group_name))}


def _itself(name: str, metric: Any) -> dict[str, Any]:
    """A member steps by itself, whatever is inside of it."""
    return {name: metric}


def _delegates(name: str, metric: Any) -> dict[str, Any]:
    """What is computed for a member: for one that delegates to other metrics, those."""
    if not is_wrapper(metric) or type(metric).compute.__module__ not in _DELEGATING:
        return {name: metric}
    found: dict[str, Any] = {}
    for child_name, child in metric.named_children():
        for inner_name, inner in [("", child)] if is_metric(child) else child.named_children():
            if is_metric(inner):
                found.update(_delegates("/".join(filter(None, (name, child_name, inner_name))), inner))
    return found


def _group_of(metric: Any, process_group: Any = None) -> Any:
    group = process_group or metric.process_group
    return dist.group.WORLD if group is None and dist.is_available() and dist.is_initialized() else group


def _is_shared(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and group.size() > 1
