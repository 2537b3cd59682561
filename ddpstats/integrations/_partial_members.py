"""Members of a metric collection that only some ranks have: what they give is in the result of every rank.

What travels is the result, as tensors and plain values. The metric itself does not: no class is looked up because
another rank named it, so a rank never runs code that its own program did not bring, and metrics of the user's own are
served like the library's.

1. All ranks know from the states that they gathered who has which member.
2. Where each member is on every rank, that is all.
3. Else the first rank that has a member computes it, and one more gather brings its result to the others.

torcheval needs no more than that. A MetricCollection of torchmetrics has stand-ins (`Elsewhere`) for such members while
it computes, which answer with what came: so torchmetrics itself names and flattens the results, as it would if every
rank had every member.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpstats._ranks.gather import CannotEncode, gather_trees
from ddpstats.integrations._torchmetrics_states import Held


def senders(holders: Mapping[str, Collection[int]], size: int) -> dict[str, int]:
    """Member -> the rank that sends its result, for those that not all ``size`` ranks of a group have. Alike on all."""
    return {name: min(ranks) for name, ranks in holders.items() if len(ranks) < size}


def on_device(result: Any, device: torch.device) -> Any:
    """A result that came from another rank, with its tensors on ``device``."""
    if isinstance(result, torch.Tensor):
        return result.to(device)
    if isinstance(result, dict):
        return {key: on_device(value, device) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(on_device(value, device) for value in result)
    return result


# -- in a collection of torchmetrics -----------------------------------------------------------------------------------

Holders = dict[str, list[int]]
"""Member -> the ranks of one group that have it, in the order in which the ranks list their members."""

_NAMING = ("prefix", "postfix", "_from_collection")
"""What a collection reads of a member to name the entries of a dict that it gives."""
_NAMING_AT = ""  # no member can have this name


class Elsewhere(nn.Module):
    """In place of a member that this rank does not have."""

    def __init__(self, result: Any, naming: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__()
        self._result = result
        vars(self).update(naming)

    def compute(self) -> Any:
        return self._result

    def __call__(self, *_: Any) -> Any:
        return self._result

    def _filter_kwargs(self, **_: Any) -> dict[str, Any]:
        return {}


def holders_of(gathered: dict[str, Held]) -> Holders:
    """Who has which member, of the entries of its metrics."""
    found: Holders = {}
    for name, held in gathered.items():
        for rank, entry in held:
            ranks = found.setdefault(entry.get("member", name), [])
            if rank not in ranks:
                ranks.append(rank)
    return found


@contextlib.contextmanager
def everyones_members(
    collection: Any, call: str, by_group: dict[Any, Holders], result_of: Callable[[Any], Any]
) -> Iterator[None]:
    """Inside, the collection has the members of all ranks, in one order. Collective where ranks differ in them.

    Args:
        by_group: who has which member, alike on all ranks of a group.
        result_of: what a member of this rank gives; local. Where it raises, every rank raises `InvalidStats`.
    """
    own = dict(nn.ModuleDict.items(collection))  # a collection's own items() name and copy them
    everyones = _everyones(own, call, by_group, result_of)
    try:
        _fill(collection, everyones)
        yield
    finally:
        _fill(collection, own)


def _everyones(
    own: dict[str, Any], call: str, by_group: dict[Any, Holders], result_of: Callable[[Any], Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group, holders in by_group.items():
        sender = senders(holders, group.size())
        if not sender:
            continue
        found.update(dict.fromkeys(holders))
        mine = {name: own[name] for name, rank in sender.items() if rank == dist.get_rank()}
        for answers in gather_trees(functools.partial(_answers, mine, result_of), name=f"{call}, results", group=group):
            for name, naming in answers[_NAMING_AT].items():
                known = {key: naming[key] for key in _NAMING if key in naming}
                found[name] = Elsewhere(on_device(answers[name], _device_of(own)), known)
    return {**found, **own}  # what this rank has stays its own


def _answers(members: dict[str, Any], result_of: Callable[[Any], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {_NAMING_AT: {}}
    for name, member in members.items():
        try:
            found[name] = result_of(member)
        except Exception as error:
            raise CannotEncode(name, f"{type(error).__name__}: {error}") from error
        found[_NAMING_AT][name] = {key: getattr(member, key) for key in _NAMING if hasattr(member, key)}
    return found


def _device_of(members: dict[str, Any]) -> torch.device:
    """Where this rank's own results are."""
    return next((member.device for member in members.values()), torch.device("cpu"))


def _fill(collection: Any, members: dict[str, Any]) -> None:
    nn.ModuleDict.clear(collection)
    for name, member in members.items():
        nn.Module.add_module(collection, name, member)
