"""The statuses that ranks send each other when the control lanes of a call were not clean, and their errors.

A status is a line of JSON, then what calls of its kind add, in UTF-8. Whatever `decode_status` reads comes from
another process: `ProtocolMismatch` where it is not what `encode_status` writes. Pure functions: each rank runs them on
the same statuses and comes to the same end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, NoReturn

import msgspec

from ddpstats._base.files import parse_json
from ddpstats._base.paths import Path, format_path
from ddpstats._base.text import holders_lines, ranks_text
from ddpstats.errors import InvalidStats, ProtocolMismatch

PROTOCOL_VERSION = 8

# The kind of a gather's calls: they have no stats, and a name that says what is gathered.
GATHER = "gather"

# The kind of calls that ask questions: no stats, and a name that is the call in words.
ASK = "ask"

AGREED_BYTES = 8
_MAX_ERROR_CHARS, _MAX_PATH_CHARS = 2000, 1000
_SHOWN_FAILURES = 8


def fingerprint(payload: bytes) -> bytes:
    """Return 8 bytes, the same in every process and on every machine (never `hash`, which is salted)."""
    return hashlib.blake2b(payload, digest_size=AGREED_BYTES).digest()


def refuse(what: str) -> NoReturn:
    """Raise for bytes of a peer that are not what it should have sent."""
    raise ProtocolMismatch(
        f"a peer sent {what}; ranks must run the same version of ddpstats (protocol {PROTOCOL_VERSION})"
    )


@dataclass(frozen=True)
class Failure:
    """Why a rank could not prepare its part: the path at fault ("" for the call as a whole) and what is wrong."""

    path: str
    message: str


class InvalidLeaf(Exception):
    """Raised for a value that cannot be reduced, or sent; ``failure`` says where and why."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(format_path(path)[:_MAX_PATH_CHARS], message)


def failure_of(error: Exception, what: str = "") -> Failure:
    """Return what other ranks are to know of an error. ``what``: what failed, where the error names no leaf."""
    if isinstance(error, InvalidLeaf):
        return error.failure
    return Failure("", f"{what}{': ' if what else ''}{type(error).__name__}: {error}")


class Call(NamedTuple):
    """The identity of a call: the same from one call of one call site to the next."""

    kind: str
    name: str | None
    nonfinite: str
    per_rank: bool = False
    """Whether every rank gets every rank's values, at the cost of one more collective; the same on all ranks."""

    @property
    def skips(self) -> bool:
        return self.nonfinite == "skip"

    @property
    def site(self) -> tuple[str, str | None]:
        """The part of a call that names its `Site`."""
        return self[:2]


class Status(NamedTuple):
    """One rank's status in one call. Equal on ranks that agree.

    Attributes:
        agreed: 8 bytes that stand for what ranks must have in common before the call.
        failure: why this rank could not prepare its part.
        body: what calls of this kind add; read only once it is known that all ranks made the same call.
    """

    call: Call
    agreed: Annotated[bytes, msgspec.Meta(min_length=AGREED_BYTES, max_length=AGREED_BYTES)]
    failure: Failure | None = None
    stale: bool = False
    body: str = ""


# Two threads that make msgspec read the fields of a type at the same time end the process by SIGSEGV (msgspec 0.22).
msgspec.json.Decoder(Status)

# Each distinct status with the global ranks that sent it, in the order of the ranks.
Statuses = Sequence[tuple[Status, tuple[int, ...]]]


def encode_status(status: Status) -> bytes:
    """Return the bytes that `decode_status` reads."""
    failure = status.failure
    if failure is not None:
        failure = replace(failure, message=failure.message[:_MAX_ERROR_CHARS])
    head = msgspec.to_builtins(status._replace(failure=failure, body=""), enc_hook=str.__str__)  # of subclasses of str
    return f"{json.dumps(head)}\n{status.body}".encode()


def decode_status(payload: bytes) -> Status:
    """Read the status of another rank. Raises `ProtocolMismatch`."""
    head, _, body = payload.partition(b"\n")
    try:
        return msgspec.convert(parse_json(head), Status)._replace(body=body.decode())
    except ValueError as error:
        refuse(f"a status that it cannot have written ({type(error).__name__})")


def refuse_what_is_wrong(statuses: Statuses, group_name: str) -> None:
    """Raise what is wrong with the call, on every rank: different calls, failures, lanes that were damaged."""
    _refuse_different_calls(statuses, group_name)
    _refuse_failures(statuses, group_name)
    if are_in_step(statuses) and not any(status.stale for status, _ in statuses):
        raise ProtocolMismatch(
            f"the control lanes of {_call_text(statuses[0][0].call)} on {group_name} are damaged although all ranks "
            "agree: another program writes to this group's connections, or memory or network is faulty",
            group=group_name,
        )


def are_in_step(statuses: Statuses) -> bool:
    """Return whether all ranks had agreed on the same before; False if one was interrupted in the middle of a call."""
    return len({status.agreed for status, _ in statuses}) == 1


def _refuse_different_calls(statuses: Statuses, group_name: str) -> None:
    by_rank = {rank: _call_text(status.call) for status, ranks in statuses for rank in ranks}
    if len(set(by_rank.values())) < 2:
        return
    lines = [f"ranks of {group_name} take part in one collective with different calls:", *holders_lines(by_rank)]
    lines.append(
        "All ranks must make the same calls in the same order. A rank with one call more or less than the others, "
        "or a call that only some ranks reach, is the usual cause. Nothing was reduced."
    )
    raise ProtocolMismatch("\n".join(lines), ranks=by_rank, group=group_name)


def _call_text(call: Call) -> str:
    if call.kind in (GATHER, ASK):
        return str(call.name)
    if call.kind not in ("reduce_stats", "StatsWindow.flush"):
        policy = f", nonfinite={call.nonfinite!r}" if call.nonfinite == "skip" else ""
        return (call.kind if call.kind.endswith(")") else f"{call.kind}()") + policy
    name = "without a name" if call.name is None else f"name={call.name!r}"
    return f"{call.kind}, {name}, nonfinite={call.nonfinite!r}" + ", per_rank=True" * call.per_rank


def _refuse_failures(statuses: Statuses, group_name: str) -> None:
    failed = [(status.failure, ranks) for status, ranks in statuses if status.failure is not None]
    if not failed:
        return
    call = statuses[0][0].call
    first, last = {
        "any_rank": ("any_rank() cannot decide:", "Nothing was decided on any rank."),
        "all_ranks": ("all_ranks() cannot decide:", "Nothing was decided on any rank."),
        GATHER: (f"{call.name}: values that cannot be gathered:", "Nothing was gathered."),
        ASK: (f"{call.name} cannot judge the step:", "Nothing of it was judged on any rank."),
    }.get(call.kind, ("stats that cannot be reduced:", "Nothing was reduced; the reducer goes on working."))
    lines = [first]
    for failure, ranks in failed[:_SHOWN_FAILURES]:
        where = f" at {failure.path!r}" if failure.path else ""
        lines.append(f"  {ranks_text(ranks)}{where}: {failure.message}")
    if len(failed) > _SHOWN_FAILURES:
        lines.append(f"  and {sum(len(ranks) for _, ranks in failed[_SHOWN_FAILURES:])} more ranks")
    lines.append(last)
    involved = [rank for _, ranks in failed for rank in ranks]
    raise InvalidStats("\n".join(lines), ranks=involved, path=failed[0][0].path or None, group=group_name)
