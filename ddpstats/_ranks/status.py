"""What ranks tell each other when the control lanes of a call were not clean, and the errors that follow from it.

Pure functions: each rank runs them on the same statuses and comes to the same end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ddpstats._base.text import ranks_text
from ddpstats._ranks.codec import PROTOCOL_VERSION, Reader, put_optional, put_text, refuse, utf8
from ddpstats.errors import InvalidStats, ProtocolMismatch

GATHER = "gather"
"""The kind of a gather's calls: they have no stats, and a name that says what is gathered."""

ASK = "ask"
"""The kind of calls that ask questions: no stats, and a name that is the call in words."""

AGREED_BYTES = 8
_MAX_ERROR_CHARS = 2000
_SHOWN_FAILURES = 8


@dataclass(frozen=True)
class Failure:
    """Why a rank could not prepare its part: the path at fault ("" for the call as a whole) and what is wrong."""

    path: str
    message: str

    @property
    def extra_bytes(self) -> int:
        """How much longer a status is that tells it."""
        return 4 + len(utf8(self.path)) + len(utf8(self.message[:_MAX_ERROR_CHARS]))


@dataclass(frozen=True)
class Status:
    """What one rank says of one call. Equal on ranks that agree.

    ``agreed``: 8 bytes that stand for what ranks must have in common before the call (a layout, a size).
    ``body``: what calls of this kind tell besides; read only once it is known that all ranks made the same call.
    """

    call: str
    name: str | None
    nonfinite: str
    failure: Failure | None
    stale: bool
    agreed: bytes
    body: bytes
    per_rank: bool = False


Statuses = Sequence[tuple[Status, tuple[int, ...]]]
"""Each distinct status with the global ranks that sent it, in the order of the ranks."""


def encode_status(status: Status) -> bytes:
    out = [struct.pack("<H", PROTOCOL_VERSION)]
    put_text(out, status.call)
    put_optional(out, status.name)
    put_text(out, status.nonfinite)
    out.append(b"\1" if status.per_rank else b"\0")
    put_optional(out, None if status.failure is None else status.failure.path)
    put_text(out, "" if status.failure is None else status.failure.message[:_MAX_ERROR_CHARS])
    out.append(b"\1" if status.stale else b"\0")
    out.append(status.agreed)
    out.append(status.body)
    return b"".join(out)


def decode_status(payload: bytes) -> Status:
    reader = Reader(payload)
    version = int(reader.numbers("H", 1)[0])
    if version != PROTOCOL_VERSION:
        refuse(f"protocol version {version}, this rank speaks {PROTOCOL_VERSION}")
    call, name, nonfinite, per_rank = reader.text(), reader.optional(), reader.text(), reader.flag()
    path, message = reader.optional(), reader.text()
    return Status(
        call=call,
        name=name,
        nonfinite=nonfinite,
        failure=None if path is None else Failure(path, message),
        stale=reader.flag(),
        agreed=reader.take(AGREED_BYTES),
        body=reader.rest(),
        per_rank=per_rank,
    )


def refuse_what_is_wrong(statuses: Statuses, group_name: str) -> None:
    """Raise what is wrong with the call, on every rank alike: different calls, failures, lanes that were damaged."""
    _refuse_different_calls(statuses, group_name)
    _refuse_failures(statuses, group_name)
    if are_in_step(statuses) and not any(status.stale for status, _ in statuses):
        raise ProtocolMismatch(
            f"the control lanes of {_call_text(statuses[0][0])} on {group_name} are damaged although all ranks agree: "
            "another program writes to this group's connections, or memory or network is faulty",
            group=group_name,
        )


def are_in_step(statuses: Statuses) -> bool:
    """Whether all ranks had agreed on the same before; not, where one was interrupted in the middle of a call."""
    return len({status.agreed for status, _ in statuses}) == 1


def _refuse_different_calls(statuses: Statuses, group_name: str) -> None:
    ranks_of: dict[str, list[int]] = {}
    for status, ranks in statuses:
        ranks_of.setdefault(_call_text(status), []).extend(ranks)
    if len(ranks_of) < 2:
        return
    lines = [f"ranks of {group_name} met in one collective with different calls:"]
    lines += [f"  {ranks_text(ranks)}: {text}" for text, ranks in ranks_of.items()]
    lines.append(
        "All ranks must make the same calls in the same order. A rank with one call more or less than the others, "
        "or a call that only some ranks reach, is the usual cause. Nothing was reduced."
    )
    involved = [rank for _, ranks in statuses for rank in ranks]
    raise ProtocolMismatch("\n".join(lines), ranks=involved, group=group_name)


def _call_text(status: Status) -> str:
    if status.call in (GATHER, ASK):
        return str(status.name)
    if status.call not in ("reduce_stats", "StatsWindow.flush"):
        return f"{status.call}()"
    name = "without a name" if status.name is None else f"name={status.name!r}"
    return f"{status.call}, {name}, nonfinite={status.nonfinite!r}" + ", per_rank=True" * status.per_rank


def _refuse_failures(statuses: Statuses, group_name: str) -> None:
    failed = [(status.failure, ranks) for status, ranks in statuses if status.failure is not None]
    if not failed:
        return
    name = statuses[0][0].name
    first, last = {
        GATHER: (f"{name}: values that cannot be gathered:", "Nothing was gathered."),
        ASK: (f"{name} cannot judge the step:", "Nothing of it was judged on any rank."),
    }.get(statuses[0][0].call, ("stats that cannot be reduced:", "Nothing was reduced; the reducer goes on working."))
    lines = [first]
    for failure, ranks in failed[:_SHOWN_FAILURES]:
        where = f" at {failure.path!r}" if failure.path else ""
        lines.append(f"  {ranks_text(ranks)}{where}: {failure.message}")
    if len(failed) > _SHOWN_FAILURES:
        lines.append(f"  and {sum(len(ranks) for _, ranks in failed[_SHOWN_FAILURES:])} more ranks")
    lines.append(last)
    involved = [rank for _, ranks in failed for rank in ranks]
    raise InvalidStats("\n".join(lines), ranks=involved, path=failed[0][0].path or None, group=group_name)
