"""Process groups: torch's private names for them and for DDP, and how much each was used.

Names of torch are found as in `torch_compat`; names that are read off an object later are looked for there. The count
of a group's collectives is the number that its backend (gloo, NCCL, XCCL, ...) gives them, so nothing is patched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpstats._observe.torch_compat import find, lacking as lacking
from ddpstats._ranks.gloo import OWN_GROUP, gloo_backend, group_around

# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def has_comm_hook(replica: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether the program reduces the gradients of this DDP itself; True where torch does not say."""
    return bool(getattr(replica, "_comm_hooks", True))


def bucket_count(replica: nn.parallel.DistributedDataParallel) -> float:
    """Return how many collectives one of its reductions issues; infinite where torch does not say.

    Only by asking for buckets of zeros can their number be known.
    """
    ask = getattr(replica.reducer, "_get_zeros_like_grad_buckets", None)
    return float("inf") if ask is None else len(ask())


# -- process groups ---------------------------------------------------------------------------------------------------


_NO_WORLD = SimpleNamespace(pg_map={}, pg_names={}, group_count=0)


def _world() -> Any:
    """Return torch's registry of process groups; without ``_world`` all groups count as never used."""
    return getattr(getattr(dist, "distributed_c10d", None), "_world", _NO_WORLD)


def is_registered(group: Any) -> bool:
    """Return whether the program made that group by torch's functions, and has not destroyed it."""
    return group in _world().pg_names


def count_groups() -> int:
    """Return how many groups without a given name torch has made; 0 where it does not say."""
    return int(_world().group_count)


# From an argument or result of a c10d operator to the process group and the work inside it. Without them, and
# without `backend_of`, no collective is observed.
unbox_group: Callable[[Any], Any] = find("distributed.ProcessGroup.unbox")
unbox_work: Callable[[Any], Any] = find("distributed.Work.unbox")

# Whether the reduce op that a c10d operator is given can be read. (Its class is no module of torch's.) Without it that
# of a `Collective` is None.
try:
    operators_name_reduce_op = dist.is_available() and hasattr(torch.classes.c10d.ReduceOp(), "op")
except (AttributeError, RuntimeError):
    operators_name_reduce_op = False
if not operators_name_reduce_op:
    lacking.add("torch.classes.c10d.ReduceOp.op")

# The backend of a group for a kind of device. Raises ``RuntimeError`` where it has none.
backend_of: Callable[[Any, torch.device], Any] = find("distributed.ProcessGroup._get_backend")


def backends_of(group: Any) -> Sequence[Any]:
    """Return its backends, each once. Raises ``AttributeError`` or ``RuntimeError`` where torch does not say."""
    backends = [backend_of(group, device) for device in group._device_types]
    return list({id(backend): backend for backend in backends}.values())


def read_collective_count(issuer: Any) -> int:
    """Return the number of collectives that a group or a backend counts. Raises as `backends_of` where it does not."""
    return int(issuer._get_sequence_number_for_group())


def longest_timeout_sec(group: Any) -> float:
    """Return how long a collective of the group may take, as the program set it; 0 where torch does not say.

    A backend of a plugin need not say it. The program names one timeout for all backends of a group.
    """
    longest_sec = 0.0
    with suppress(AttributeError, RuntimeError):
        for backend in backends_of(group):
            with suppress(AttributeError, RuntimeError):
                longest_sec = max(longest_sec, float(backend.options._timeout.total_seconds()))
    return longest_sec


@contextmanager
def group_of_one(name: str) -> Iterator[list[Any]]:
    """Yield a group of this rank alone, to try on this torch what works: the only entry of a list. Local; milliseconds.

    In a list, for the group has to end before its backend does, which ends without the GIL. torch 2.6's group would end
    it with the GIL, for which gloo's threads may be waiting.
    """
    stores: Any = dist  # whose annotations do not name this class
    backend = gloo_backend(stores.HashStore(), 0, 1, 10.0)
    only = [group_around(backend, stores.HashStore(), 0, 1, name)]
    try:
        yield only
    finally:
        only.clear()


def start_fake_group(rank: int, world_size: int) -> None:
    """Make this process one rank of torch's "fake" backend: for tensors of any device, also of a plugin loaded later.

    Torch's own covers four kinds of devices alone.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which torch 2.6 does not import

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    group: Any = dist.group.WORLD
    for kind in ("privateuseone", "mps", "mtia"):
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, backend_of(group, HOST))
        dist.Backend.backend_capability["fake"].append(kind)  # for groups that the program makes


# -- what is known of a group -----------------------------------------------------------------------------------------

HOST = torch.device("cpu")


@dataclass(eq=False)
class GroupView:
    """One process group; there is one object for each, on which subscribers can keep what they know of it.

    Attributes:
        ranks: global ranks, in the group's order. ``rank``: this process's, among them.
        is_internal: it carries only ddpstats' own collectives.
        group: returns the process group itself, or None once it is gone.
        is_registered: the program made it by torch's functions.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    rank: int
    is_internal: bool
    group: Callable[[], Any] = lambda: None
    is_registered: bool = False

    def is_alive(self) -> bool:
        """Return whether the program may still use it."""
        group = self.group()
        return group is not None and (not self.is_registered or is_registered(group))


_views: dict[int, GroupView] = {}  # by the id of the group, as long as that exists


def view_of(group: Any) -> GroupView:
    """Return the view of a process group; always the same one."""
    view = _views.get(id(group))
    if view is None:
        try:
            ranks = tuple(map(int, dist.get_process_group_ranks(group)))  # who made it may have given numpy's
        except (KeyError, ValueError, RuntimeError):
            ranks = tuple(range(group.size()))  # a group that torch's registry does not know
        forget, number = _views.pop, id(group)
        view = _views[number] = GroupView(
            group.group_name,
            group.group_desc,
            ranks,
            ranks[group.rank()],
            group.group_desc == OWN_GROUP,
            weakref.ref(group, lambda _: forget(number, None)),
            is_registered(group),
        )
    return view


# -- collectives that were issued, by process group --------------------------------------------------------------------

# Process group -> the number of its collectives; None where its backend does not say.
Counts = dict[Any, int | None]


def issued_counts() -> Counts:
    """Return the counts of now, of every group of this process. Local; some microseconds."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return {group: _count(group) for group in _world().pg_map if group.group_desc != OWN_GROUP}


def since(before: Counts) -> Counts:
    """Return the groups with collectives since ``before``, and how many; None where that is not known."""
    more: Counts = {}
    for group, count in issued_counts().items():
        then = before.get(group, 0)
        if count is None or then is None:
            more[group] = None
        elif count != then:
            more[group] = count - then
    return more


def ranks_of(groups: Iterable[Any]) -> tuple[int, ...]:
    """Return the global ranks that are in any of them."""
    return tuple(sorted({int(rank) for group in groups for rank in dist.get_process_group_ranks(group)}))


def _count(group: Any) -> int | None:
    """Return a group's number: those of its backends for each kind of device add up."""
    try:
        return sum(map(read_collective_count, backends_of(group)))
    except (RuntimeError, AttributeError):
        return None
