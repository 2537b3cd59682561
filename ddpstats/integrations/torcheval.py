"""torcheval's metrics merged by name: states, dict keys and members of a collection may differ between ranks.

`install` replaces ``get_synced_metric`` and ``get_synced_metric_collection``, which ``sync_and_compute``,
``get_synced_state_dict`` and the ``_collection`` form of that call, and ``sync_and_compute_collection``. Stock
torcheval gathers state after state in the sorted order of each rank's own names, and labels what it receives with
those. Ours:

1. prepares the metrics as stock does (``_prepare_for_merge_state``) and gathers the states of the whole collection at
   once, each under its name and with the class of its metric;
2. raises `SchemaConflict` on every rank where ranks hold another class, another set of states or another kind of state
   (tensor, list, dict, number) under one name;
3. merges each member as stock does, on the metric's device, own state first, over the ranks that have the member;
4. where shapes or kinds of dtype differ, which some metrics merge and others do not, all ranks learn in a second gather
   whether any of them failed, and raise `SchemaConflict` if so.

Results equal stock's bit for bit where those were right. Covered besides: subgroups, for which stock makes lists of the
world's size and takes a group rank for a global one. A rank gets the members that it has itself.

Where a metric raises before anything is sent (``state_dict`` of a state of unknown type), every rank raises
`InvalidStats`. Not covered: keys of dict states must be str, numbers, None or tuples of these, names of members str or
int (else `InvalidStats` on every rank). Kinds of state that torcheval's own ``_add_state`` refuses, such as deques.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from ddpstats._base.paths import format_path
from ddpstats._base.text import holders_lines, ranks_text
from ddpstats._ranks.comm import describe_group, group_ranks, resolve_group
from ddpstats._ranks.gather import encode, gather_trees
from ddpstats.errors import InvalidStats, SchemaConflict
from ddpstats.integrations._partial_members import on_device, senders
from ddpstats.integrations.patches import Patches

__all__ = ["install", "uninstall"]

_patches = Patches("torcheval")
_RELIED_ON = (
    "torcheval.metrics.toolkit:get_synced_metric(metric, process_group)",
    "torcheval.metrics.toolkit:get_synced_metric_collection(metric_collection, process_group)",
    "torcheval.metrics.toolkit:sync_and_compute_collection(metrics, process_group)",
    "torcheval.metrics.toolkit:_convert_to_psuedo_metric(metric_state_dict)",
    "torcheval.metrics.toolkit:_get_world_size(process_group)",
    "torcheval.metrics.toolkit:_validate_rank_and_world_size(world_size)",
)
_SINGLE = ""  # the one member where a bare metric is synced

# One member of one rank, as it travels: the class of the metric, and its states by name.
Member = list[Any]


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
    return _synced({_SINGLE: metric}, process_group, "torcheval.get_synced_metric")[_SINGLE]


def _get_synced_metric_collection(metric_collection: MutableMapping[str, Any], process_group: Any = None) -> Any:
    return _synced(metric_collection, process_group, "torcheval.get_synced_metric_collection")


def _sync_and_compute_collection(metrics: MutableMapping[str, Any], process_group: Any = None) -> dict[str, Any]:
    call = "torcheval.get_synced_metric_collection"  # of which it is a part in stock, so ranks may call either
    synced = _synced(metrics, process_group, call, computing=True)
    return {name: metric.compute() for name, metric in synced.items()}


_OURS: dict[str, Callable[..., Any]] = {
    "get_synced_metric": _get_synced_metric,
    "get_synced_metric_collection": _get_synced_metric_collection,
    "sync_and_compute_collection": _sync_and_compute_collection,
}


def _alone(group: Any) -> bool:
    """Raises what torcheval raises on a rank that is no member of ``group``, and warns as it does."""
    toolkit = _toolkit()
    world_size: int = toolkit._get_world_size(group)
    toolkit._validate_rank_and_world_size(world_size)
    return world_size == 1


def _synced(metrics: Mapping[str, Any], group: Any, call: str, computing: bool = False) -> Mapping[str, Any]:
    """Each of ``metrics`` merged with its namesakes on the other ranks, and the members that only others have.

    ``computing``: raise `InvalidStats`, on every rank, if one that some rank lacks cannot be computed.
    """
    if _alone(group):
        return metrics
    gathered = gather_trees(lambda: _prepared(metrics), name=call, group=group)
    process_group = resolve_group(group)
    assert process_group is not None
    there = _Gathered(call, process_group, dict(zip(group_ranks(process_group), gathered, strict=True)))
    doubtful = there.doubtful()
    merged, failures = {}, {}
    for name, metric in metrics.items():
        try:
            merged[name] = _merged(metric, there.others(name), name in doubtful and doubtful[name].is_list)
        except Exception as failure:
            failures[name] = failure  # raised below: where there are doubts, the others wait for this rank
    if doubtful:
        there.settle(doubtful, {name: _text(error) for name, error in failures.items()})
    shown = there.shown(merged, failures, computing)
    for error in failures.values():
        raise error
    return {name: merged[name] if name in merged else shown[name] for name in (there.names() if shown else metrics)}


def _merged(metric: Any, others: Iterable[Member], try_compute: bool) -> Any:
    toolkit = _toolkit()
    states = [{name: _from_wire(node, metric.device) for name, node in member[1].items()} for member in others]
    peers = [toolkit._convert_to_psuedo_metric(state) for state in states]
    merged = _clone(metric).to(metric.device).merge_state(peers)
    if try_compute:  # the lists were only appended to each other
        copy.deepcopy(merged).compute()
    return merged


def _clone(metric: Any) -> Any:
    """As torcheval's clone_metric, with tensors cloned beforehand: to deepcopy them takes several times as long."""
    memo: dict[int, Any] = {}
    for values in (vars(metric), getattr(metric, "_state_name_to_default", {})):
        for value in values.values():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            for item in items:
                if type(item) is torch.Tensor and not item.requires_grad:
                    memo[id(item)] = item.clone()
    return copy.deepcopy(metric, memo)


# -- members that only other ranks have -------------------------------------------------------------------------------


def _shown_by(metric: Any, failure: Exception | None) -> dict[str, Any]:
    """What this rank sends of a merged metric to those that lack it: states, and the result or why there is none."""
    if failure is not None:
        return {"states": {}, "why": _text(failure)}
    states = _to_wire(metric)[1]
    try:
        result = _clone(metric).compute()
        sent = {"pairs": [list(pair) for pair in result.items()]} if isinstance(result, dict) else {"result": result}
        encode(sent)
    except Exception as error:
        sent = {"why": _text(error)}
    return {"states": states, **sent}


@functools.cache
def _elsewhere() -> Any:
    from torcheval.metrics import Metric

    class MetricElsewhere(Metric[Any]):
        """What other ranks have merged and computed of a metric that this rank lacks."""

        def __init__(self, sent: dict[str, Any], refusal: InvalidStats | None, device: torch.device) -> None:
            super().__init__(device=device)
            result = dict(sent["pairs"]) if "pairs" in sent else sent.get("result")
            self._result, self._refusal = on_device(result, device), refusal
            for name, node in sent["states"].items():
                self._add_state(name, _from_wire(node, device))

        def compute(self) -> Any:
            if self._refusal is not None:
                raise self._refusal
            return self._result

        def update(self, *_: Any, **__: Any) -> Any:
            raise TypeError("this metric is on other ranks: it shows what they have merged, and takes no values here")

        merge_state = update

    return MetricElsewhere


# -- states on the wire -----------------------------------------------------------------------------------------------


def _prepared(metrics: Mapping[str, Any]) -> dict[str, Member]:
    for metric in metrics.values():
        metric._prepare_for_merge_state()
    return {name: _to_wire(metric) for name, metric in metrics.items()}


def _to_wire(metric: Any) -> Member:
    states = {name: _node(state) for name, state in metric.state_dict().items()}
    return [f"{type(metric).__module__}.{type(metric).__qualname__}", states]


def _node(state: Any) -> Any:
    """A dict as its pairs, for its keys may be of many types; numbers without their subclass."""
    if isinstance(state, dict):
        return ("dict", [[key, value] for key, value in state.items()])
    if isinstance(state, int) and type(state) is not bool:
        return int(state)
    return float(state) if isinstance(state, float) else state


def _from_wire(node: Any, device: torch.device) -> Any:
    if isinstance(node, torch.Tensor):
        return node.to(device)
    if isinstance(node, list):
        return [tensor.to(device) for tensor in node]
    return {key: tensor.to(device) for key, tensor in node[1]} if isinstance(node, tuple) else node


# -- do they fit together? --------------------------------------------------------------------------------------------


class _Doubt(NamedTuple):
    """A state that differs in a way that some metrics can merge: where, whose is what, and whether it is a list."""

    path: tuple[str, ...]
    by_rank: dict[int, str]
    is_list: bool


class _Gathered:
    """Every rank's members. What is decided from them alone is decided alike on all ranks."""

    def __init__(self, call: str, group: torch.distributed.ProcessGroup, by_rank: dict[int, dict[str, Member]]) -> None:
        self._call, self._group, self._by_rank = call, group, by_rank
        self._own_rank = torch.distributed.get_rank()

    def others(self, name: str) -> list[Member]:
        return [members[name] for rank, members in self._by_rank.items() if rank != self._own_rank and name in members]

    def doubtful(self) -> dict[str, _Doubt]:
        """The members with a doubtful state, and the first such. Raises `SchemaConflict` where there is no doubt."""
        found: dict[str, _Doubt] = {}
        for name in self.names():
            held = {rank: members[name] for rank, members in self._by_rank.items() if name in members}
            at = () if name == _SINGLE else (name,)
            self._need_one(at, {rank: f"a {member[0]}" for rank, member in held.items()})
            for state in dict.fromkeys(state for member in held.values() for state in member[1]):
                nodes = {rank: member[1].get(state) for rank, member in held.items()}
                self._need_one((*at, state), {rank: _kind(node) for rank, node in nodes.items()})
                for doubt in _doubts((*at, state), nodes):
                    found.setdefault(name, doubt)
        return found

    def names(self) -> list[str]:
        """Of every member that some rank has, in the order in which the ranks list them."""
        return list(dict.fromkeys(name for members in self._by_rank.values() for name in members))

    def shown(self, merged: dict[str, Any], failures: dict[str, Exception], computing: bool) -> dict[str, Any]:
        """What stands for each member that some rank lacks. Collective where there are such."""
        holders = {name: [rank for rank, held in self._by_rank.items() if name in held] for name in self.names()}
        sender = senders(holders, len(self._by_rank))
        if not sender:
            return {}
        mine = [name for name, rank in sender.items() if rank == self._own_rank]
        gathered = gather_trees(
            {name: _shown_by(merged.get(name), failures.get(name)) for name in mine},
            name=f"{self._call}, results",
            group=self._group,
        )
        sent = {name: each for theirs in gathered for name, each in theirs.items()}
        refusals = {
            name: self._refusal(name, holders[name], each["why"]) for name, each in sent.items() if "why" in each
        }
        for name, refusal in refusals.items() if computing else ():
            raise refusal from failures.get(name)
        device = next((metric.device for metric in merged.values()), torch.device("cpu"))
        return {name: _elsewhere()(each, refusals.get(name), device) for name, each in sent.items()}

    def _refusal(self, name: str, ranks: list[int], why: str) -> InvalidStats:
        group = describe_group(self._group)
        holds = f"{ranks_text(ranks)} of {group} {'hold' if len(ranks) > 1 else 'holds'}"
        text = f"{self._call}: member {name!r}, which only {holds}, gives no result: {why}"
        return InvalidStats(text, ranks=ranks, path=str(name), group=group)

    def settle(self, doubtful: dict[str, _Doubt], own_failures: dict[str, str]) -> None:
        """Raise `SchemaConflict` on every rank if a doubtful member could not be merged on some. Collective."""
        everyones = gather_trees(own_failures, name=f"{self._call}, merged", group=self._group)
        for name, doubt in doubtful.items():
            failed = {rank: each[name] for rank, each in zip(self._by_rank, everyones, strict=True) if name in each}
            if failed:
                why = f"merging failed on {ranks_text(failed)}, there with {next(iter(failed.values()))}"
                raise self._conflict(doubt.path, doubt.by_rank, why)

    def _need_one(self, path: tuple[str, ...], by_rank: dict[int, str]) -> None:
        if len(set(by_rank.values())) > 1:
            raise self._conflict(path, by_rank)

    def _conflict(self, path: tuple[str, ...], by_rank: dict[int, str], why: str | None = None) -> SchemaConflict:
        spelled, group = format_path(path) or None, describe_group(self._group)
        lines = [
            f"{self._call}: ranks of {group} hold what cannot be merged{f' under {spelled!r}' if spelled else ''}:"
        ]
        lines += holders_lines(by_rank)
        lines += [why] if why else []
        lines.append(
            "Make the metric with the same class and arguments on all ranks and update it with values of one kind, or "
            "give it another name. Nothing was merged."
        )
        return SchemaConflict("\n".join(lines), ranks=by_rank, path=spelled, group=group)


_KINDS: dict[type, str] = {
    type(None): "no such state",
    torch.Tensor: "a tensor",
    list: "a list of tensors",
    tuple: "a dict of tensors",
}


def _kind(node: Any) -> str:
    return next((text for kind, text in _KINDS.items() if isinstance(node, kind)), "a number")


def _doubts(path: tuple[str, ...], nodes: dict[int, Any]) -> Iterator[_Doubt]:
    """Where tensors under ``path`` differ, be it a tensor state, the values of a dict under one key, or lists."""
    first = next(iter(nodes.values()))
    if isinstance(first, torch.Tensor):
        yield from _doubt(path, nodes, _tensor_text)
    elif isinstance(first, tuple):
        dicts = {rank: dict(node[1]) for rank, node in nodes.items()}
        for key in dict.fromkeys(key for each in dicts.values() for key in each):
            held = {rank: each[key] for rank, each in dicts.items() if key in each}
            yield from _doubt((*path, str(key)), held, _tensor_text)
    elif isinstance(first, list):
        yield from _doubt(path, {rank: node for rank, node in nodes.items() if node}, _list_text)


def _doubt(path: tuple[str, ...], held: dict[int, Any], describe: Callable[[Any], str]) -> Iterator[_Doubt]:
    by_rank = {rank: describe(value) for rank, value in held.items()}
    if len(set(by_rank.values())) > 1:
        yield _Doubt(path, by_rank, describe is _list_text)


def _tensor_text(tensor: torch.Tensor) -> str:
    kinds = ["bool"] * (tensor.dtype == torch.bool) + ["complex"] * tensor.is_complex()
    kind = (kinds or ["float" if tensor.is_floating_point() else "int"])[0]
    return f"a tensor of shape {tuple(tensor.shape)}, {kind}"


def _list_text(tensors: list[torch.Tensor]) -> str:
    dims = sorted({tensor.ndim for tensor in tensors})
    return f"a list of tensors with {' or '.join(map(str, dims))} dimensions"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def _toolkit() -> Any:
    return importlib.import_module("torcheval.metrics.toolkit")
