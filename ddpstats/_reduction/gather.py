"""Every rank's tree of tensors, on every rank: what the integrations build on where states are not just averaged."""

from __future__ import annotations

from typing import Any

from ddpstats._agreement.tree_codec import CannotEncode, decode, encode
from ddpstats._base import config
from ddpstats._reduction.channel import channel_of
from ddpstats._reduction.protocol import GATHER, Call, Counters, Protocol
from ddpstats._reduction.wire import Failure
from ddpstats._transport.comm import patience_sec
from ddpstats.errors import InvalidStats

_counters = Counters()


def gather_trees(tree: Any, *, name: str, group: Any = None, apart: bool = False) -> list[Any]:
    """Every rank's ``tree``, in the order of group ranks; the caller's own one is ``tree`` itself.

    Collective: every rank of ``group`` must call, with the same ``name``. One collective in steady state, two where all
    ranks' trees together take more than 16 kB, however many tensors there are and however ranks differ.

    Args:
        tree: dicts (keys str or int), lists and tuples of dense tensors (any shape and device), numbers, str, None; or
            a function without arguments that returns it, for what may fail on one rank.
        apart: the same on every rank for one ``name``. True for what is gathered rarely, beside calls in every step: it
            takes two collectives, and leaves the buffer of those calls small.

    Returns:
        Tensors of other ranks are on the CPU, without grad; tuples and dicts of subclasses are plain ones.

    Raises:
        InvalidStats: some rank's tree holds something else, or could not be made; on every rank.
        ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`.
    """
    channel, timeout_sec = channel_of(group), config.timeout_sec(None)
    payload, own, cause = _prepared(tree)
    call = Call(GATHER, name, "", patience_sec(timeout_sec), apart)

    def work(protocol: Protocol) -> list[Any]:
        received = protocol.gather(call, payload, _counters)
        return [own if i == protocol.position else decode(part) for i, part in enumerate(received)]

    try:
        return channel.run(work, timeout_sec)
    except InvalidStats as error:
        raise error from cause


def _prepared(tree: Any) -> tuple[bytearray | Failure, Any, Exception | None]:
    """The bytes, the tree and no error; or why there are none. Whatever fails: this rank must still take part."""
    try:
        own = tree() if callable(tree) else tree
        return encode(own), own, None
    except CannotEncode as error:
        return Failure(error.path, str(error)), None, None
    except Exception as error:
        return Failure("", f"{type(error).__name__}: {error}"), None, error
