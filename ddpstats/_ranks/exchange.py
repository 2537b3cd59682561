"""The statuses that ranks send each other when the control lanes of a call were not clean, and their errors.

A status is a line of JSON, then what calls of its kind say besides, in UTF-8. Whatever `decode_status` reads comes from
another process: `ProtocolMismatch` where it is not what `encode_status` writes. Pure functions: each rank runs them on
the same statuses and comes to the same end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ddpstats._base.files import parse_json
from ddpstats._base.text import holders_lines, ranks_text
from ddpstats.errors import InvalidStats, ProtocolMismatch

if TYPE_CHECKING:
    from ddpstats._ranks.agreement import Call

PROTOCOL_VERSION = 5

GATHER = "gather"
"""The kind of a gather's calls: they have no stats, and a name that says what is gathered."""

ASK = "ask"
"""The kind of calls that ask questions: no stats, and a name that is the call in words."""

AGREED_BYTES = 8
_MAX_ERROR_CHARS = 2000
_SHOWN_FAILURES = 8


def fingerprint(payload: bytes) -> bytes:
    """Return 8 bytes, the same in every process and on every machine (never `hash`, which is salted)."""
    return hashlib.blake2b(payload, digest_size=AGREED_BYTES).digest()


def refuse(what: str) -> NoReturn:
    """Raise for bytes of a peer that are not what it should have sent."""
    raise ProtocolMismatch(
        f"a peer sent {what}; ranks must run the same version of ddpstats (protocol {PROTOCOL_VERSION})"
    )


def different_versions(group_words: str, by_rank: Mapping[int, str]) -> str:
    """Return the message for ranks that cannot understand each other. ``by_rank``: what each runs, in words."""
    advice = "Install the same version of ddpstats on all of them."
    return "\n".join([f"ranks of {group_words} run different versions:", *holders_lines(by_rank), advice])


@dataclass(frozen=True)
class Failure:
    """Why a rank could not prepare its part: the path at fault ("" for the call as a whole) and what is wrong."""

    path: str
    message: str


@dataclass(frozen=True)
class Status:
    """One rank's status in one call. Equal on ranks that agree.

    Attributes:
        call: the kind of the call.
        agreed: 8 bytes that stand for what ranks must have in common before the call.
        body: what calls of this kind say besides; read only once it is known that all ranks made the same call.
    """

    call: str
    name: str | None
    nonfinite: str
    per_rank: bool
    failure: Failure | None
    stale: bool
    agreed: bytes
    body: bytes


Statuses = Sequence[tuple[Status, tuple[int, ...]]]
"""Each distinct status with the global ranks that sent it, in the order of the ranks."""


def status_of(call: Call, agreed: bytes, failure: Failure | None, *, stale: bool = False, body: bytes = b"") -> Status:
    """Return this rank's status; ``body`` where it holds something."""
    return Status(call.kind, call.name, call.nonfinite, call.per_rank, failure, stale, agreed, body)


def encode_status(status: Status) -> bytes:
    """Return the bytes that `decode_status` reads."""
    failure = status.failure
    head = {
        "protocol": PROTOCOL_VERSION,
        "call": status.call,
        "name": status.name,
        "nonfinite": status.nonfinite,
        "per_rank": status.per_rank,
        "failure": None if failure is None else [failure.path, failure.message[:_MAX_ERROR_CHARS]],
        "stale": status.stale,
        "agreed": status.agreed.hex(),
    }
    return json.dumps(head).encode() + b"\n" + status.body


def decode_status(payload: bytes) -> Status:
    """Read the status of another rank. Raises `ProtocolMismatch`."""
    head, newline, body = payload.partition(b"\n")
    try:
        fields: Any = parse_json(head)
        if not newline or not isinstance(fields, dict):
            raise ValueError("a status that is not one")
        if fields.get("protocol") != PROTOCOL_VERSION:
            refuse(f"protocol {str(fields.get('protocol'))[:20]}, this rank speaks {PROTOCOL_VERSION}")
        failure = fields["failure"]
        status = Status(
            call=_checked(fields["call"], str),
            name=_checked(fields["name"], str, type(None)),
            nonfinite=_checked(fields["nonfinite"], str),
            per_rank=_checked(fields["per_rank"], bool),
            failure=None if failure is None else Failure(*(_checked(text, str) for text in _checked(failure, list))),
            stale=_checked(fields["stale"], bool),
            agreed=bytes.fromhex(_checked(fields["agreed"], str)),
            body=body,
        )
    except (KeyError, TypeError, ValueError) as error:
        refuse(f"a status that it cannot have written ({type(error).__name__})")
    if len(status.agreed) != AGREED_BYTES:
        refuse("a fingerprint of another length")
    return status


def _checked(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise ValueError(f"a {type(value).__name__} where {types[0].__name__} is needed")
    return value


def refuse_what_is_wrong(statuses: Statuses, group_name: str) -> None:
    """Raise what is wrong with the call, on every rank: different calls, failures, lanes that were damaged."""
    _refuse_different_calls(statuses, group_name)
    _refuse_failures(statuses, group_name)
    if are_in_step(statuses) and not any(status.stale for status, _ in statuses):
        raise ProtocolMismatch(
            f"the control lanes of {_call_text(statuses[0][0])} on {group_name} are damaged although all ranks agree: "
            "another program writes to this group's connections, or memory or network is faulty",
            group=group_name,
        )


def are_in_step(statuses: Statuses) -> bool:
    """Return whether all ranks had agreed on the same before; False if one was interrupted in the middle of a call."""
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
