"""Every rank's tree of tensors, on every rank: what the integrations build on where states are not just averaged."""

from __future__ import annotations

from typing import Any

from ddpstats import _config
from ddpstats._channel import channel_of
from ddpstats._comm import patience_sec
from ddpstats._protocol import GATHER, Call, Counters, Protocol
from ddpstats._tensor_wire import CannotEncode, decode, encode
from ddpstats._wire import Failure

_counters = Counters()


def gather_trees(tree: Any, *, name: str, group: Any = None) -> list[Any]:
    """Every rank's ``tree``, in the order of group ranks; the caller's own one is ``tree`` itself.

    Collective: every rank of ``group`` must call, with the same ``name``. Two collectives in steady state, however
    many tensors there are and however they differ between ranks in number, shape and dtype.

    Args:
        tree: dicts (keys str or int), lists and tuples of dense tensors (any shape, dtype and device), numbers, str,
            None.

    Returns:
        Tensors of other ranks are on the CPU, without grad; tuples and dicts of subclasses are plain ones.

    Raises:
        InvalidStats: some rank's tree holds something else; on every rank.
        ProtocolMismatch, RankMissing: as `ddpstats.StatsReducer`.
    """
    channel, timeout_sec = channel_of(group), _config.timeout_sec(None)
    payload: bytes | Failure
    try:
        payload = encode(tree)
    except CannotEncode as error:  # this rank must still take part
        payload = Failure(error.path, str(error))
    call = Call(GATHER, name, "", patience_sec(timeout_sec))

    def work(protocol: Protocol) -> list[Any]:
        received = protocol.gather(call, payload, _counters)
        return [tree if i == protocol.position else decode(part) for i, part in enumerate(received)]

    return channel.run(work, timeout_sec)
