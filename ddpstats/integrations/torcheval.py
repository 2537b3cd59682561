"""torcheval's metrics merged by name: states, dict keys and members of a collection may differ between ranks.

`install` replaces ``get_synced_metric``, ``get_synced_metric_collection`` and ``sync_and_compute_collection``.
torcheval's ``sync_and_compute``, ``get_synced_state_dict`` and ``get_synced_state_dict_collection`` call the first two.
Stock torcheval gathers state after state in the sorted order of each rank's own names, and labels what it receives with
those names. Instead:

1. prepares the metrics as stock does (``_prepare_for_merge_state``) and gathers the states of the whole collection at
   once, each under its name and with the class of its metric;
2. raises `SchemaConflict` on every rank where ranks hold another class, another set of states or another kind of state
   (tensor, list, dict, number) under one name;
3. merges each member as stock does, on the metric's device, own state first, over the ranks that have the member;
4. where shapes or dtypes differ, which some metrics merge and others do not, all ranks learn in a second gather
   whether any of them failed, and raise `SchemaConflict` if so.

``sync_and_compute_collection`` returns the results of all members on every rank: the first rank that has a member which
others lack computes it and sends the result. The metric itself does not travel, so ``get_synced_metric_collection``
and ``get_synced_state_dict_collection`` return the members that this rank has.

Results equal stock's bit for bit where those were right. Covered besides: subgroups, for which stock makes lists of the
world's size and takes a group rank for a global one.

Where a metric raises before anything is sent (``state_dict`` of a state of unknown type), or a result that others need
cannot be computed or sent, every rank raises `InvalidStats`. Not covered: keys of dict states must be str, numbers,
None or tuples of these, names of members str or int (otherwise `InvalidStats` on every rank). Kinds of state that
torcheval's own ``_add_state`` refuses, such as deques.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from ddpstats._base.paths import Path
from ddpstats._base.text import dtype_name, ranks_text
from ddpstats.integrations.matching import Kind, Matching, error_text, pack, unite, unpack
from ddpstats.integrations.patches import Patches

__all__ = ["install", "uninstall"]

_patches = Patches("torcheval")
_RELIED_ON = (
    "torcheval.metrics.toolkit:get_synced_metric(metric, process_group)",
    "torcheval.metrics.toolkit:get_synced_metric_collection(metric_collection, process_group)",
    "torcheval.metrics.toolkit:sync_and_compute_collection(metrics, process_group)",
    "torcheval.metrics.toolkit:_convert_to_psuedo_metric(metric_state_dict)",
    "torcheval.metrics.toolkit:clone_metric(metric)",
    "torcheval.metrics.toolkit:_get_world_size(process_group)",
    "torcheval.metrics.toolkit:_validate_rank_and_world_size(world_size)",
)
_SINGLE = ""  # the one member where a bare metric is synced


# One metric of one rank: its class, and its states by name.
Member = tuple[str, dict[str, Any]]

# By name and global rank.
MembersByRank = dict[str, dict[int, Member]]


def install() -> None:
    """Patch the installed torcheval. Local and idempotent; every rank must call it, or none.

    Your own modules that imported one of the functions by name before this call keep the old one. A torcheval that
    lacks what this relies on is left unpatched, with a warning that names the difference. Does nothing under
    ``DDPSTATS_DISABLE=1``.

    Raises:
        ConfigError: torcheval is not installed.

    Example::

        rank 0: sync_and_compute_collection({"loss": Mean(), "acc_a": Mean()})   rank 1: {"loss": ..., "acc_b": ...}
        stock averages acc_a with acc_b; after install() each is the mean over the ranks that have it, on every rank
    """
    if _patches.should_patch(_RELIED_ON):
        toolkit = _toolkit()
        for name, ours in _OURS.items():
            theirs = getattr(toolkit, name)
            _patches.replace_everywhere("torcheval", theirs, functools.wraps(theirs)(ours))


def uninstall() -> None:
    """Put torcheval's own functions back. Local and idempotent."""
    _patches.restore()


# -- in place of torcheval's ------------------------------------------------------------------------------------------


def _get_synced_metric(metric: Any, process_group: Any = None) -> Any:
    if _is_alone(process_group):
        return metric
    return _metric_of(_merge_metrics({_SINGLE: metric}, _make_matching("get_synced_metric", process_group))[0], _SINGLE)


def _get_synced_metric_collection(metric_collection: MutableMapping[str, Any], process_group: Any = None) -> Any:
    if _is_alone(process_group):
        return metric_collection
    merged, _ = _merge_metrics(metric_collection, _make_matching("get_synced_metric_collection", process_group))
    return {name: _metric_of(merged, name) for name in merged}


def _sync_and_compute_collection(metrics: MutableMapping[str, Any], process_group: Any = None) -> dict[str, Any]:
    if _is_alone(process_group):
        return {name: metric.compute() for name, metric in metrics.items()}
    # stock calls get_synced_metric_collection for its part, so ranks may call either
    matching = _make_matching("get_synced_metric_collection", process_group)
    merged, members = _merge_metrics(metrics, matching)
    result_of = functools.cache(lambda name: _metric_of(merged, name).compute())
    device = next((metric.device for metric in metrics.values()), torch.device("cpu"))
    others = matching.share_results(members, result_of, device)
    return {name: others[name] if name in others else result_of(name) for name in members}


_OURS: dict[str, Callable[..., Any]] = {
    "get_synced_metric": _get_synced_metric,
    "get_synced_metric_collection": _get_synced_metric_collection,
    "sync_and_compute_collection": _sync_and_compute_collection,
}


def _is_alone(group: Any) -> bool:
    """Raise what torcheval raises on a rank that is no member of ``group``, and warn as it does."""
    world_size: int = _toolkit()._get_world_size(group)
    _toolkit()._validate_rank_and_world_size(world_size)
    return world_size == 1


def _make_matching(function: str, group: Any) -> Matching:
    return Matching(
        f"torcheval.{function}",
        group,
        "Make the metric with the same class and arguments on all ranks and update it with values of one kind, or give "
        "it another name. Nothing was merged.",
    )


def _merge_metrics(metrics: Mapping[str, Any], matching: Matching) -> tuple[dict[str, Any], MembersByRank]:
    """Merge each of ``metrics`` with those of its name on the other ranks, and return every rank's too. Collective.

    Where merging fails, the error is in the metric's place: the other ranks may wait for this one.
    """
    by_rank = unpack(matching.gather(lambda: {name: pack(_member(metric)) for name, metric in metrics.items()}))
    members: MembersByRank = unite(by_rank)
    doubts = _doubts(matching, members)
    merged: dict[str, Any] = {}
    for name, metric in metrics.items():
        others = [member for rank, member in members[name].items() if rank != torch.distributed.get_rank()]
        try:
            merged[name] = _merge(metric, others)
            if name in doubts:  # lists are only appended to each other until the result is computed
                _toolkit().clone_metric(merged[name]).compute()
        except Exception as error:
            merged[name] = error
    if doubts:
        _settle(matching, doubts, merged)
    return merged, members


def _metric_of(merged: Mapping[str, Any], name: str) -> Any:
    if isinstance(merged[name], Exception):
        raise merged[name]
    return merged[name]


def _member(metric: Any) -> Member:
    metric._prepare_for_merge_state()
    return f"{type(metric).__module__}.{type(metric).__qualname__}", metric.state_dict()


def _merge(metric: Any, others: list[Member]) -> Any:
    toolkit = _toolkit()
    peers = [toolkit._convert_to_psuedo_metric(unpack(states, metric.device)) for _, states in others]
    return toolkit.clone_metric(metric).to(metric.device).merge_state(peers)


# -- do they fit together? --------------------------------------------------------------------------------------------

# Where tensors differ in a way that some metrics can merge, and each rank's words for them.
Doubt = tuple[Path, dict[int, str]]


def _doubts(matching: Matching, members: MembersByRank) -> dict[str, Doubt]:
    """Return the first doubt about each member that has one. Raises `SchemaConflict` where no metric could merge."""
    doubts: dict[str, Doubt] = {}
    for name, held in members.items():
        path: Path = () if name == _SINGLE else (name,)
        matching.check(path, {rank: Kind(f"a {class_name}") for rank, (class_name, _) in held.items()})
        for state in unite({rank: states for rank, (_, states) in held.items()}):
            values = {rank: states.get(state) for rank, (_, states) in held.items()}
            matching.check((*path, state), {rank: Kind(_kind(value)) for rank, value in values.items()})
            for key, texts in unite({rank: _tensors(value) for rank, value in values.items()}).items():
                if len(set(texts.values())) > 1:
                    doubts.setdefault(name, ((*path, state, *key), texts))
    return doubts


def _settle(matching: Matching, doubts: dict[str, Doubt], merged: dict[str, Any]) -> None:
    """Raise `SchemaConflict` on every rank if a member in doubt could not be merged on some. Collective."""
    errors = {name: error for name, error in merged.items() if isinstance(error, Exception)}
    failed = unite(matching.gather({name: error_text(error) for name, error in errors.items()}, ", merged"))
    for name, (path, by_rank) in doubts.items():
        if name in failed:
            reason = f"merging failed on {ranks_text(failed[name])}, there with {next(iter(failed[name].values()))}"
            raise matching.conflict(path, by_rank, reason)


def _kind(state: Any) -> str:
    if state is None:
        return "no such state"
    return "a number" if isinstance(state, int | float) else f"a {type(state).__name__}"


def _tensors(state: Any) -> dict[Path, str]:
    """Return what the tensors of a state are: of a tensor, of a dict under each key, of a list with items."""
    if isinstance(state, torch.Tensor):
        return {(): _tensor_text(state)}
    if isinstance(state, dict):
        return {(str(key),): _tensor_text(tensor) for key, tensor in state.items()}
    if not isinstance(state, list) or not state:
        return {}
    dims = sorted({tensor.ndim for tensor in state})
    return {(): f"a list of tensors with {' or '.join(map(str, dims))} dimensions"}


def _tensor_text(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}, {dtype_name(tensor.dtype)}"


def _toolkit() -> Any:
    return importlib.import_module("torcheval.metrics.toolkit")
