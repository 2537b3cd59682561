"""torchmetrics whose ranks may hold different metrics and lists of different lengths; one collective per `compute`,
or two where states take more than 16 kB.

1. ``Metric._sync_dist``: the metric's whole state travels in one gather, where stock torchmetrics has a barrier and one
   or two all_gathers per state. torchmetrics' own reductions then run on what came, as before. What is sent goes
   through the CPU, whatever the device of the states; what came is put where the rank's own state is.
2. ``MetricCollection.compute``: the states of all members travel in one gather, by member name, and each member's
   ``_sync_dist`` finds its part there. A member's state comes from the ranks that have the member. Stock torchmetrics
   pairs members by position: {loss: 1, aa: 100} and {loss: 1, zz: 100} give loss 50.5.
3. ``MetricCollection.forward`` with ``dist_sync_on_step``: ranks first tell each other their members' names, then the
   members step one after another in one order; a rank without the member takes part with nothing.
4. What cannot be reduced together (shapes, a tensor and a list, reductions, classes) is a `SchemaConflict` on every
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
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddpstats._agreement.gather import gather_trees
from ddpstats._base.paths import format_path
from ddpstats._base.rank_names import holders_lines
from ddpstats._transport.comm import describe_group, group_ranks
from ddpstats.errors import SchemaConflict
from ddpstats.integrations._patches import Patches

__all__ = ["install", "uninstall"]

_SHOWN_CONFLICTS = 5
_ABSENT = "no such metric"

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

Entry = dict[str, Any]
"""What a rank sends of one metric; see `_entry`."""

Held = list[tuple[int, Entry]]
"""One metric's entries with the global ranks that sent them, in the order of the group."""

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
        stock computes loss 50.5 on both; after install() rank 0 has loss 1, aa 100 and rank 1 has loss 1, zz 100
    """
    if _patches.wanted(_RELIED_ON, _probe):
        from torchmetrics import Metric, MetricCollection

        _patches.replace(Metric, "_sync_dist", _sync_dist_with(Metric._sync_dist))
        _patches.replace(MetricCollection, "compute", _compute_with(MetricCollection.compute))
        _patches.replace(MetricCollection, "forward", _forward_with(MetricCollection.forward))


def uninstall() -> None:
    """Put torchmetrics' own methods back. Local and idempotent."""
    _patches.restore()


def _probe() -> str | None:
    from torchmetrics import SumMetric

    metric = SumMetric(sync_on_compute=False)  # nothing of a probe may wait for other ranks
    metric.update(2.0)
    states = [state for state, reduction in metric._reductions.items() if callable(reduction)]
    held = [getattr(metric, state, None) for state in states]
    if len(held) == 1 and isinstance(held[0], torch.Tensor) and held[0].item() == metric.compute().item() == 2.0:
        return None
    return f"keeps other states in a SumMetric of 2.0: {dict(zip(states, held, strict=True))}"


# -- in place of torchmetrics' ----------------------------------------------------------------------------------------


def _sync_dist_with(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _sync_dist(self: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        group = _group_of(self, process_group)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return  # outside of its group a metric keeps its own state
        theirs = {} if dist_sync_fn is None else {"dist_sync_fn": dist_sync_fn}
        if not (_is_default(dist_sync_fn) and _is_shared(group)):
            original(self, **theirs, process_group=process_group)
            return
        held = _gathered.get((id(self), group)) or _exchange(type(self).__qualname__, lambda: _entry(self), group)
        if any(entry["own_way"] for _, entry in held):
            original(self, **theirs, process_group=process_group)
            return
        for state, reduction in self._reductions.items():
            states = [entry["states"][state] for _, entry in held]
            setattr(self, state, _reduced(states, reduction, getattr(self, state), self))

    return _sync_dist


def _compute_with(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def compute(self: Any) -> dict[str, Any]:
        found: dict[tuple[int, Any], Held] = {}
        for group, metrics in _by_group(_computing(self), or_world=not len(self)).items():
            trees = gather_trees(functools.partial(_entries, metrics), name=_collection_name(self), group=group)
            for name, held in _by_name(trees, group).items():
                if name not in metrics:
                    continue
                if not all(entry["cached"] for _, entry in held):  # no rank may keep an older result than the others
                    metrics[name]._computed = None
                if not any(entry["own_way"] for _, entry in held):
                    found[id(metrics[name]), group] = held
        _gathered.update(found)
        try:
            return original(self)
        finally:
            for key in found:
                _gathered.pop(key, None)

    return compute


def _forward_with(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        results: dict[int, tuple[Any, deque[Any]]] = {}
        try:
            for group, members in _by_group(_stepping(self)).items():
                headings = {name: _heading(member, _has_own_way(member)) for name, member in members.items()}
                trees = gather_trees(headings, name=_collection_name(self), group=group)
                for name, held in _by_name(trees, group).items():
                    if name not in members:
                        _exchange(held[0][1]["class"], None, group)
                        continue
                    member = members[name]
                    result = member.forward(*args, **member._filter_kwargs(**kwargs))
                    results.setdefault(id(member), (member, deque()))[1].append(result)
            for member, answers in results.values():
                member.forward = functools.partial(_answer, answers)
            return original(self, *args, **kwargs)
        finally:
            for member, _ in results.values():
                vars(member).pop("forward", None)  # the class's own is back

    return forward


def _collection_name(collection: Any) -> str:
    """With what tells the collections of a program apart, so that "train/" never meets "val/" unnoticed."""
    return f"torchmetrics/MetricCollection {collection.prefix or ''}...{collection.postfix or ''}"


def _answer(results: deque[Any], *_: Any, **__: Any) -> Any:
    """One result for each name that the member has in the collection."""
    return results.popleft()


# -- which metrics of a collection sync, and where --------------------------------------------------------------------


def _computing(collection: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, metric, group) of what syncs in `compute`; for what delegates to other metrics, those."""
    for name, member in collection.items(keep_base=True, copy_state=False):
        for inner_name, metric in _delegates(name, member).items():
            yield from _if_syncing(inner_name, metric, "_to_sync")


def _stepping(collection: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, member, group) of what syncs in `forward`."""
    for name, member in collection.items(keep_base=True, copy_state=False):
        yield from _if_syncing(name, member, "dist_sync_on_step")


def _if_syncing(name: str, metric: Any, flag: str) -> Iterator[tuple[str, Any, Any]]:
    for one in _leaves(metric):
        if getattr(one, flag) and callable(one.distributed_available_fn) and one.distributed_available_fn():
            yield name, metric, _group_of(one)
            return


def _by_group(syncing: Iterator[tuple[str, Any, Any]], or_world: bool = False) -> dict[Any, dict[str, Any]]:
    """Per group, in an order that all ranks share, the metrics that sync there."""
    found: dict[Any, dict[str, Any]] = {}
    if or_world and dist.is_available() and dist.is_initialized() and _is_shared(dist.group.WORLD):
        found[dist.group.WORLD] = {}  # a collection without members: the other ranks' may have some
    for name, metric, group in syncing:
        if _is_shared(group):
            found.setdefault(group, {})[name] = metric
    return {group: found[group] for group in sorted(found, key=lambda one: (group_ranks(one), one.group_name))}


def _delegates(name: str, metric: Any) -> dict[str, Any]:
    if not _is_wrapper(metric) or type(metric).compute.__module__ not in _DELEGATING:
        return {name: metric}
    found: dict[str, Any] = {}
    for child_name, child in metric.named_children():
        for inner_name, inner in [("", child)] if _is_metric(child) else child.named_children():
            if _is_metric(inner):
                found.update(_delegates("/".join(filter(None, (name, child_name, inner_name))), inner))
    return found


def _leaves(metric: Any) -> list[Any]:
    return [one for one in metric.modules() if _is_metric(one) and not _is_wrapper(one)]


def _is_metric(module: Any) -> bool:
    from torchmetrics import Metric

    return isinstance(module, Metric)


def _is_wrapper(metric: Any) -> bool:
    """Whether it has no state to sync, only metrics that have."""
    from torchmetrics.metric import CompositionalMetric
    from torchmetrics.wrappers.abstract import WrapperMetric

    return isinstance(metric, (CompositionalMetric, WrapperMetric))


def _has_own_way(metric: Any) -> bool:
    from torchmetrics import Metric

    return (
        type(metric)._sync_dist is not Metric._sync_dist
        or not _is_default(metric.dist_sync_fn)
        or _leaves(metric) != [metric]
    )


def _is_default(dist_sync_fn: Any) -> bool:
    from torchmetrics.utilities.distributed import gather_all_tensors

    return dist_sync_fn is None or dist_sync_fn is gather_all_tensors


def _group_of(metric: Any, process_group: Any = None) -> Any:
    group = process_group or metric.process_group
    return dist.group.WORLD if group is None and dist.is_available() and dist.is_initialized() else group


def _is_shared(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and group.size() > 1


# -- what ranks send of a metric --------------------------------------------------------------------------------------


def _heading(metric: Any, own_way: bool) -> Entry:
    name = type(metric).__qualname__
    return {"class": name, "own_way": own_way, "cached": metric._computed is not None, "reductions": {}, "states": {}}


def _entry(metric: Any, states_of: str | None = None) -> Entry:
    """Its class, reductions and states; without these where they are not tensors and lists of tensors.

    ``states_of``: the metric under this name has the same states, and they are sent with that one.
    """
    states: Any = states_of
    if states is None:
        states = {state: _compact(getattr(metric, state), fx) for state, fx in metric._reductions.items()}
        if not all(map(_is_plain, states.values())):
            return _heading(metric, own_way=True)
    reductions = {state: _reduction_name(fx) for state, fx in metric._reductions.items()}
    return {**_heading(metric, own_way=False), "reductions": reductions, "states": states}


def _entries(metrics: dict[str, Any]) -> dict[str, Entry]:
    """One entry per metric; members of a compute group share their states, which are sent once."""
    found: dict[str, Entry] = {}
    holder: dict[Any, str] = {}
    for name, metric in metrics.items():
        if _has_own_way(metric):
            found[name] = _heading(metric, own_way=True)
            continue
        same = tuple(
            (state, id(getattr(metric, state)), _reduction_name(fx)) for state, fx in metric._reductions.items()
        )
        found[name] = _entry(metric, holder.get(same))
        if not found[name]["own_way"]:
            holder.setdefault(same, name)
    return found


def _compact(value: Any, reduction: Any) -> Any:
    """A list that is to be concatenated, as a list of one tensor."""
    if not _is_cat(reduction) or not _is_plain(value) or isinstance(value, torch.Tensor) or len(value) < 2:
        return value
    try:
        return [reduction(value)]
    except RuntimeError:
        return value  # sizes that do not fit: this rank must still take part, and all ranks meet the error afterwards


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)
    )


def _is_cat(reduction: Any) -> bool:
    from torchmetrics.utilities import dim_zero_cat

    return reduction is dim_zero_cat


def _reduction_name(reduction: Any) -> str:
    if reduction is None:
        return "None"
    return str(getattr(reduction, "__qualname__", type(reduction).__qualname__)).removeprefix("dim_zero_")


# -- what came --------------------------------------------------------------------------------------------------------


def _exchange(class_name: str, entry: Callable[[], Entry] | None, group: Any) -> Held:
    """One metric's entries. Every rank of ``group`` must call; None where it has no such metric."""
    trees = gather_trees(entry, name=f"torchmetrics/{class_name}", group=group)
    held = [(rank, tree) for rank, tree in zip(group_ranks(group), trees, strict=True) if tree is not None]
    _check({class_name: held}, group)
    return held


def _by_name(trees: list[dict[str, Entry]], group: Any) -> dict[str, Held]:
    """The ranks' entries by metric, in the order in which the ranks list them. Raises `SchemaConflict`."""
    found: dict[str, Held] = {}
    for rank, tree in zip(group_ranks(group), trees, strict=True):
        for name, entry in tree.items():
            states = tree[entry["states"]]["states"] if isinstance(entry["states"], str) else entry["states"]
            found.setdefault(name, []).append((rank, {**entry, "states": states}))
    _check(found, group)
    return found


def _reduced(states: list[Any], reduction: Any, own: Any, metric: Any) -> Any:
    """What stock's `_sync_dist` makes of all ranks' states."""
    mine = [own] if isinstance(own, torch.Tensor) else own
    device = mine[0].device if mine else metric.device
    if isinstance(own, torch.Tensor):
        value: Any = torch.stack([state.to(device) for state in states])
    else:
        value = [item.to(device) for row in zip_longest(*states) for item in row if item is not None]
        if not value and not _is_cat(reduction):
            return []
        value = value or [torch.tensor([], device=device, dtype=metric.dtype)]
    return value if reduction is None else reduction(value)


# -- conflicts --------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What ranks must agree on; ``shape`` only with those that have one."""

    what: str
    reduction: str
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sizes = [*(["*"] if self.what == "a list" else []), *map(str, self.shape or ())]
        shape = "" if self.shape is None else f" of shape ({', '.join(sizes)})"
        items = " of tensors" if self.what == "a list" and shape else ""
        return f"{self.what}{items}{shape}" + (f", reduction {self.reduction}" if self.reduction else "")


def _kinds(entry: Entry) -> dict[str, _Kind]:
    return {state: _kind(entry["states"][state], name) for state, name in entry["reductions"].items()}


def _kind(state: Any, reduction: str) -> _Kind:
    if isinstance(state, torch.Tensor):
        return _Kind("a tensor", reduction, tuple(state.shape))
    if reduction != "cat" or not state or state[0].shape == (0,):  # torch.cat ignores tensors of this one shape
        return _Kind("a list", reduction)
    return _Kind("a list", reduction, tuple(state[0].shape[1:]))


def _check(metrics: dict[str, Held], group: Any) -> None:
    """Raises `SchemaConflict` where the ranks' entries cannot be reduced together."""
    conflicts: list[tuple[tuple[str, ...], list[tuple[int, _Kind]]]] = []
    for name, held in metrics.items():
        classes = [(rank, _Kind(entry["class"], "")) for rank, entry in held]
        if any(entry["own_way"] for _, entry in held):
            absent = sorted(set(group_ranks(group)) - {rank for rank, _ in held})
            classes = [(rank, _Kind(f"{kind.what}, which syncs by itself", "")) for rank, kind in classes]
            classes += [(rank, _Kind(_ABSENT, "")) for rank in absent]
        if _differ(classes):
            conflicts.append(((name,), classes))
            continue
        by_rank = [(rank, _kinds(entry)) for rank, entry in held if not entry["own_way"]]
        for state in dict.fromkeys(state for _, kinds in by_rank for state in kinds):
            kinds_of = [(rank, kinds.get(state, _Kind("no such state", ""))) for rank, kinds in by_rank]
            if _differ(kinds_of):
                conflicts.append(((name, state), kinds_of))
    if conflicts:
        raise _conflict_error(conflicts, describe_group(group))


def _differ(held: list[tuple[int, _Kind]]) -> bool:
    shapes = {kind.shape for _, kind in held} - {None}
    return len({kind[:2] for _, kind in held}) > 1 or len(shapes) > 1


def _conflict_error(
    conflicts: list[tuple[tuple[str, ...], list[tuple[int, _Kind]]]], group_name: str
) -> SchemaConflict:
    lines: list[str] = []
    for path, held in conflicts[:_SHOWN_CONFLICTS]:
        where = f"metric {path[0]!r}" if len(path) == 1 else f"state {path[1]!r} of metric {path[0]!r}"
        lines.append(f"ranks of {group_name} hold different things as {where}:")
        lines += holders_lines({rank: str(kind) for rank, kind in held})
    if len(conflicts) > _SHOWN_CONFLICTS:
        lines.append(f"and {len(conflicts) - _SHOWN_CONFLICTS} more")
    if any(kind.what == _ABSENT for _, held in conflicts for _, kind in held):
        lines.append("A metric that syncs by itself must be in the collection of every rank.")
    lines.append(
        "Make the metric with the same class and arguments (num_classes, thresholds, ...) on all ranks, or give it "
        "another name in the collection. Nothing was reduced."
    )
    involved = {rank for _, held in conflicts for rank, _ in held}
    return SchemaConflict("\n".join(lines), ranks=involved, path=format_path(conflicts[0][0]), group=group_name)
