"""How many collectives this process has issued, by process group: c10d numbers them itself, so nothing is patched.

Every backend of torch's (gloo, NCCL, XCCL, ...) keeps these numbers. Of one that keeps none nothing is known: it counts
as one that may have been used. Groups of our own are left out. What another thread issues counts as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from ddpstats._observe.torch_groups import backends_of, collectives_issued, process_groups
from ddpstats._ranks.gloo import OWN_GROUP

Counts = dict[Any, int | None]
"""Process group -> the number of its collectives; None where its backend does not say."""

_readers: weakref.WeakKeyDictionary[Any, Callable[[], int] | None] = weakref.WeakKeyDictionary()


def issued() -> Counts:
    """As of now, of every group that this process is in. Local; some microseconds."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return {group: _count(group) for group in process_groups() if group.group_desc != OWN_GROUP}


def since(before: Counts) -> Counts:
    """Groups with collectives after ``before`` was taken, and how many; None where that is not known."""
    found: Counts = {}
    for group, count in issued().items():
        then = before.get(group, 0)
        if count is None or then is None:
            found[group] = None
        elif count != then:
            found[group] = count - then
    return found


def plus(before: Counts, more: Counts) -> Counts:
    """``before``, as if ``more`` had been issued by then."""
    return {**before, **{group: _sum(before.get(group, 0), count) for group, count in more.items()}}


def ranks_of(groups: Iterable[Any]) -> tuple[int, ...]:
    """The global ranks that are in any of them."""
    return tuple(sorted({int(rank) for group in groups for rank in dist.get_process_group_ranks(group)}))


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _count(group: Any) -> int | None:
    if group not in _readers:
        _readers[group] = _reader(group)
    read = _readers[group]
    return None if read is None else read()


def _reader(group: Any) -> Callable[[], int] | None:
    """A group with a backend for each kind of device has no number of its own: theirs count."""
    for candidate in (_of_group, _of_backends):
        read = candidate(weakref.ref(group))
        try:
            read()
        except (RuntimeError, AttributeError):
            continue
        return read
    return None


def _of_group(group: Callable[[], Any]) -> Callable[[], int]:
    return lambda: collectives_issued(group())


def _of_backends(group: Callable[[], Any]) -> Callable[[], int]:
    return lambda: sum(map(collectives_issued, backends_of(group())))
