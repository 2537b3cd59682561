"""One channel per process group: our own gloo group beside it, which all reductions on the group use in turn.

All reducers of a group share its channel, and their calls run in call order (`call_order`). A failed collective closes
the channel: every later call raises the verdict on it.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch.distributed as dist

from ddpstats._base.text import ranks_text
from ddpstats._base.version import __version__
from ddpstats._ranks.agreement import Agreement
from ddpstats._ranks.call_order import CallOrder, Reentered, T, Work
from ddpstats._ranks.codec import PROTOCOL_VERSION, different_versions
from ddpstats._ranks.comm import (
    Comm,
    CommFailed,
    SoloComm,
    Watch,
    describe_group,
    group_ranks,
    group_store,
    have_all_started,
    patience_sec,
    resolve_group,
    slice_sec,
)
from ddpstats._ranks.grid import gloo_comm
from ddpstats._ranks.mailbox import GroupVerdict, Mailbox
from ddpstats._ranks.roster import PROCESS_ID_BYTES, Lost, ProcessId
from ddpstats.errors import ConfigError, DdpstatsError, ProtocolMismatch, RankMissing

# The one message whose size may never change: versions with other buffers must be able to read it.
_HELLO = struct.Struct(f"<8sH32s{PROCESS_ID_BYTES}s")
_MAGIC = b"ddpstats"
_EXIT_SEC = 10.0  # how long a process that ends waits for reductions that nobody collected


Connect = Callable[[float, Watch], Comm]
"""Makes the connection to the other ranks, within so many seconds; raises `CommFailed`, and what its watch raises."""


class Channel(CallOrder):
    """The reductions of one group. Made by `channel_of`."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        group_name: str,
        connect: Connect,
        store: Any = None,
        all_started: bool = False,
    ) -> None:
        super().__init__(group_name)
        self._ranks, self._rank, self._process = {int(member): member for member in ranks}, rank, os.getpid()
        self._connect = connect
        # Alone there is nobody to meet, and nobody to miss.
        self._mailbox: Mailbox | None = None
        if len(ranks) > 1:
            self._mailbox = Mailbox(
                store, rank, ranks, describe_lost=self._verdict_without_store, all_started=all_started
            )
        self._comm: Comm | None = None
        self._agreement: Agreement | None = None
        self._error: RankMissing | None = None
        self.has_abandoned = False  # by this rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(self._ranks.values())

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._rank

    # -- one call -----------------------------------------------------------------------------------------------------

    def _refuse_here(self) -> None:
        super()._refuse_here()
        if self.is_inherited and self._mailbox is not None:
            refuse_in_fork(self._rank)

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that made this channel."""
        return os.getpid() != self._process

    def _perform(self, work: Work[T], timeout_sec: float) -> T:
        if self._error is not None:
            raise self._error.with_traceback(None)
        started = time.monotonic()
        try:
            return work(self._agreement or self._first_use(timeout_sec))
        except CommFailed as error:
            assert self._mailbox is not None
            reason, grace_sec = str(error), 2 * slice_sec(timeout_sec)
            verdict = self._mailbox.decide_verdict(
                self._seq(),
                max(started + timeout_sec, time.monotonic() + grace_sec),
                lambda missing, dead: self._verdict_text(missing, dead, time.monotonic() - started, reason),
            )
        except Reentered as error:  # a signal's handler let it pass: the reduction around it ends in the middle
            self._leave(error)
            raise
        except DdpstatsError:
            raise  # all ranks came to it, and stay in step
        except Exception as error:  # this rank alone: damaged bytes, no memory
            raise self._leave(error) from error
        except BaseException as error:  # an interrupt is the program's own business
            self._leave(error)
            raise
        raise self._broken(verdict)

    def abandon(self, message: str) -> RankMissing | None:
        """This rank takes no further part: every other rank raises ``message``, here and at every later call. Local.

        Returns what they raise: the words of the first rank that did so; None where there is no other rank.
        """
        if self._mailbox is None:
            return None
        self.has_abandoned = True
        verdict = self._mailbox.announce(message)
        if self._error is None:
            self._broken(verdict)
        return self._missing(verdict)

    def abandoned(self) -> RankMissing | None:
        """What the first rank said that called `abandon`; None where none did. Local; never waits for it."""
        announced = None if self._mailbox is None else self._mailbox.announced()
        return None if announced is None else self._missing(announced)

    def _leave(self, error: BaseException) -> BaseException:
        """Something took this rank out of the middle of a call. It is out of step: no one may wait for it any more."""
        if self._mailbox is None:
            return error
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = (
            f"a reduction on {self.group_name} was not completed:\n"
            f"  {self._named([self._rank])}: left in the middle of it ({why})\nReductions on this group are closed."
        )
        return self._broken(self._mailbox.leave(lambda missing, dead: text))

    def _seq(self) -> int:
        """Which collective of this group this rank is in: how ranks tell each other where they wait."""
        return 0 if self._agreement is None else self._agreement.collectives

    def _watch(self) -> None:
        """Between two slices of a wait: is there any point in waiting on?"""
        if self._mailbox is None:
            return
        if self._mailbox.poll_verdict(self._seq()) is not None:
            raise CommFailed("another rank has given up")
        self._look_for_dead()

    def _look_for_dead(self) -> None:
        dead = set() if self._mailbox is None else self._mailbox.gone()
        if dead:
            raise CommFailed(f"the process of {self._named(dead)} is gone")

    def _broken(self, verdict: GroupVerdict) -> RankMissing:
        self._error = self._missing(verdict)
        if self._comm is not None:
            self._comm.close()
        return self._error

    def _missing(self, verdict: GroupVerdict) -> RankMissing:
        return RankMissing(verdict.message, missing_ranks=verdict.missing, group=self.group_name)

    def _named(self, ranks: Iterable[int]) -> str:
        return ranks_text([self._ranks.get(rank, rank) for rank in ranks])

    def _verdict_text(self, missing: tuple[int, ...], dead: tuple[int, ...], waited_sec: float, reason: str) -> str:
        silent = [rank for rank in missing if rank not in dead]
        lines = [f"a reduction on {self.group_name} was not completed after {waited_sec:.1f} s:"]
        if dead:
            lines.append(f"  {self._named(dead)}: the process is gone")
        if silent:
            lines.append(f"  {self._named(silent)}: did not take part")
        if not missing and not dead:
            lines.append("  no rank is known to be missing; the connection between ranks failed")
        lines.append(f"{self._named([self._rank])} waited and saw: {reason}")
        lines.append(
            "Look at the output of the missing ranks first. A rank that is only slow needs a larger timeout_sec (or "
            "DDPSTATS_TIMEOUT_SEC). Reductions on this group are closed."
        )
        return "\n".join(lines)

    def _verdict_without_store(self, lost: Lost) -> str:
        assert self._mailbox is not None
        lines = [f"a reduction on {self.group_name} was not completed:"]
        lines += self._mailbox.roster.told_alone(lost, self._named)
        lines.append("Look at their output and at the network first. Reductions on this group are closed.")
        return "\n".join(lines)

    # -- first use ----------------------------------------------------------------------------------------------------

    def _first_use(self, timeout_sec: float) -> Agreement:
        """Meet all ranks, connect, and prove that all speak one protocol, before a buffer of any layout is sent."""
        deadline = time.monotonic() + timeout_sec
        if self._comm is None:
            if self._mailbox is not None:
                self._meet(self._mailbox, timeout_sec)
            self._comm = self._connect(max(deadline - time.monotonic(), slice_sec(timeout_sec)), self._look_for_dead)
            self._comm.watch = self._watch
        if self._mailbox is not None:
            self._mailbox.roster.met(self._shake_hands(self._comm, timeout_sec))
        self._agreement = Agreement(self._comm, self.group_name)
        return self._agreement

    def _meet(self, mailbox: Mailbox, timeout_sec: float) -> None:
        started = time.monotonic()
        verdict = mailbox.meet(
            timeout_sec - slice_sec(timeout_sec),
            slice_sec(timeout_sec),
            lambda missing, dead: self._verdict_text(
                missing, dead, time.monotonic() - started, "this was the first use of the group, and not all ranks came"
            ),
        )
        if verdict is not None:
            raise self._broken(verdict)

    def _shake_hands(self, comm: Comm, timeout_sec: float) -> dict[int, ProcessId]:
        mine = _HELLO.pack(_MAGIC, PROTOCOL_VERSION, __version__.encode()[:32], ProcessId.mine().pack())
        versions: dict[int, str] = {}
        peers: dict[int, ProcessId] = {}
        for rank, hello in zip(comm.ranks, comm.all_gather(mine, patience_sec(timeout_sec)), strict=True):
            magic, protocol, version, process = _HELLO.unpack(hello)
            text = f"ddpstats {version.rstrip(bytes(1)).decode(errors='replace')}, protocol {protocol}"
            versions[rank] = text if magic == _MAGIC else "no ddpstats"
            peers[int(rank)] = ProcessId.unpack(process)
        if len(set(versions.values())) > 1:
            said = different_versions(self.group_name, versions)
            raise ProtocolMismatch(said, ranks=comm.ranks, group=self.group_name)
        return peers

    def close(self) -> None:
        """Leave the group. Local; calls that follow fail."""
        if self._comm is not None:
            self._comm.close()


# -- which channel ----------------------------------------------------------------------------------------------------

ALONE = object()
"""In place of a group: this process only, whatever groups there are."""

_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
_alone: dict[int, Channel] = {}  # by this process's rank
_lock = threading.Lock()


def _close_all() -> None:
    """At exit: a thread, gloo's or ours, that asks for the GIL while Python ends aborts the process."""
    for channel in list(_channels.values()):
        if not channel.is_inherited and channel.end_worker(_EXIT_SEC):
            channel.close()


atexit.register(_close_all)

_inherited: weakref.ref[dist.ProcessGroup] | None = None
"""The default group of the process that this one was forked from, if there was one."""


def _in_fork() -> None:
    global _inherited
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    _inherited = None if world is None else weakref.ref(world)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


def refuse_in_fork(rank: int) -> NoReturn:
    """Two processes on one connection would take each other's answers: the rank's own reductions would be wrong."""
    raise ConfigError(
        f"this process was forked from rank {rank}, as workers of a DataLoader are: it is no rank of its process "
        "group, and the connections to the other ranks are not its own. Reduce in the rank itself: let the worker "
        "return the values with the batch."
    )


def channel_of(group: Any) -> Channel:
    """The channel of ``group`` (None: the default group); one for this process alone where there is no other rank.

    Raises ``ConfigError`` on a rank that is not a member. Local: ranks meet at the first reduction.
    """
    own = getattr(group, "channel", None)
    if isinstance(own, Channel):  # ranks that are threads (`ddpstats.testing`)
        return own
    resolved = None if group is ALONE else resolve_group(group)
    if resolved is None or resolved.size() == 1:
        return _channel_alone()
    with _lock:
        channel = _channels.get(resolved)
        if channel is None:
            if _inherited is not None and _inherited() is dist.group.WORLD:
                refuse_in_fork(dist.get_rank())
            channel = _channels[resolved] = _new_channel(resolved)
        return channel


def _channel_alone() -> Channel:
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    with _lock:
        if rank not in _alone:
            _alone[rank] = Channel((rank,), rank, "a single process", lambda timeout_sec, watch: SoloComm(rank))
        return _alone[rank]


def _new_channel(group: dist.ProcessGroup) -> Channel:
    reference, store = weakref.ref(group), group_store(group)

    def connect(timeout_sec: float, watch: Watch) -> Comm:
        alive = reference()
        if alive is None:
            raise CommFailed("the process group was destroyed")
        return gloo_comm(alive, store, timeout_sec, watch)

    return Channel(group_ranks(group), dist.get_rank(), describe_group(group), connect, store, have_all_started())
