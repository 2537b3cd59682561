"""What ranks send of their torchmetrics metrics, and what they make of what came."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from ddpstats._base.paths import format_path
from ddpstats._base.text import holders_lines
from ddpstats._ranks.comm import describe_group, group_ranks
from ddpstats._ranks.gather import gather_trees
from ddpstats.errors import SchemaConflict

_SHOWN_CONFLICTS = 5
_ABSENT = "no such metric"

Entry = dict[str, Any]
"""What a rank sends of one metric; see `entry_of`."""

Held = list[tuple[int, Entry]]
"""One metric's entries with the global ranks that sent them, in the order of the group."""


# -- kinds of metrics --------------------------------------------------------------------------------------------------


def is_metric(module: Any) -> bool:
    from torchmetrics import Metric

    return isinstance(module, Metric)


def is_wrapper(metric: Any) -> bool:
    """Whether it has no state to sync, only metrics that have."""
    from torchmetrics.metric import CompositionalMetric
    from torchmetrics.wrappers.abstract import WrapperMetric

    return isinstance(metric, (CompositionalMetric, WrapperMetric))


def leaves_of(metric: Any) -> list[Any]:
    return [one for one in metric.modules() if is_metric(one) and not is_wrapper(one)]


def has_own_way(metric: Any) -> bool:
    from torchmetrics import Metric

    return (
        type(metric)._sync_dist is not Metric._sync_dist
        or not is_default(metric.dist_sync_fn)
        or leaves_of(metric) != [metric]
    )


def is_default(dist_sync_fn: Any) -> bool:
    from torchmetrics.utilities.distributed import gather_all_tensors

    return dist_sync_fn is None or dist_sync_fn is gather_all_tensors


# -- what ranks send of a metric --------------------------------------------------------------------------------------


def heading_of(metric: Any, own_way: bool) -> Entry:
    name = type(metric).__qualname__
    return {"class": name, "own_way": own_way, "cached": metric._computed is not None, "reductions": {}, "states": {}}


def entry_of(metric: Any, states_of: str | None = None) -> Entry:
    """Its class, reductions and states; without these where they are not tensors and lists of tensors.

    ``states_of``: the metric under this name has the same states, and they are sent with that one.
    """
    states: Any = states_of
    if states is None:
        states = {state: _compact(getattr(metric, state), fx) for state, fx in metric._reductions.items()}
        if not all(map(_is_plain, states.values())):
            return heading_of(metric, own_way=True)
    reductions = {state: _reduction_name(fx) for state, fx in metric._reductions.items()}
    return {**heading_of(metric, own_way=False), "reductions": reductions, "states": states}


def entries_of(metrics: dict[str, Any], members: dict[str, str]) -> dict[str, Entry]:
    """One entry per metric, with the member that it is of; a compute group shares its states, which are sent once."""
    found: dict[str, Entry] = {}
    holder: dict[Any, str] = {}
    for name, metric in metrics.items():
        if has_own_way(metric):
            found[name] = heading_of(metric, own_way=True)
            continue
        same = tuple(
            (state, id(getattr(metric, state)), _reduction_name(fx)) for state, fx in metric._reductions.items()
        )
        found[name] = entry_of(metric, holder.get(same))
        if not found[name]["own_way"]:
            holder.setdefault(same, name)
    return {name: {**entry, "member": members[name]} for name, entry in found.items()}


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


def exchange(class_name: str, entry: Callable[[], Entry] | None, group: Any) -> Held:
    """One metric's entries. Every rank of ``group`` must call; None where it has no such metric."""
    trees = gather_trees(entry, name=f"torchmetrics/{class_name}", group=group)
    held = [(rank, tree) for rank, tree in zip(group_ranks(group), trees, strict=True) if tree is not None]
    _check({class_name: held}, group)
    return held


def by_name(trees: list[dict[str, Entry]], group: Any) -> dict[str, Held]:
    """The ranks' entries by metric, in the order in which the ranks list them. Raises `SchemaConflict`."""
    found: dict[str, Held] = {}
    for rank, tree in zip(group_ranks(group), trees, strict=True):
        for name, entry in tree.items():
            states = tree[entry["states"]]["states"] if isinstance(entry["states"], str) else entry["states"]
            found.setdefault(name, []).append((rank, {**entry, "states": states}))
    _check(found, group)
    return found


def reduced(states: list[Any], reduction: Any, own: Any, metric: Any) -> Any:
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
