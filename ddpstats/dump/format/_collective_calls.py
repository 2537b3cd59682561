"""A collective's entry, read: with whom it was, and which of its tensors are what it takes, and what it gives.

Our own entries have the inputs among the inputs. Other tools record the call's arguments, and the buffers that a
collective writes to are among these: what is in them before is nobody's fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpstats.dump.format._entries import DumpEntry, DumpLeaf
from ddpstats.dump.format._names import Name

MESSAGES = frozenset({"send", "recv", "isend", "irecv"})

_FROM_ROOT, _TO_ROOT = frozenset({"broadcast", "scatter"}), frozenset({"reduce", "gather", "gather_into_tensor"})
_ROOT_PLACE = {"broadcast": 1, "reduce": 1, "gather": 2, "scatter": 2}  # of ``src`` or ``dst`` among the arguments
_PEER_PLACE = 1
_OUTPUTS = {  # as the functions of torch.distributed have them: by place, and by name
    "recv": (0, "tensor"),
    "irecv": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "_all_gather_base": (0, "output_tensor"),
    "reduce_scatter": (0, "output"),
    "reduce_scatter_tensor": (0, "output"),
    "_reduce_scatter_base": (0, "output"),
    "gather": (1, "gather_list"),
    "scatter": (0, "tensor"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
}


@dataclass(frozen=True)
class CollectiveEntry:
    """A collective of one rank: with whom, and what it took and gave. Ranks are global ones.

    Attributes:
        ranks: of the group; empty where the dump does not say.
        sequence: its number in its group (of a message: between these two); None where the dump does not say.
        peer: of a message; None where it has none, or the dump does not say.
        incomplete: it had not ended when the dump did, or it failed.
        taken, made: its tensors that matter on this rank, finite or not.
        bad_inputs, bad_outputs: whether some of these are not finite.
    """

    entry: DumpEntry
    api: str
    number: int
    ranks: tuple[int, ...]
    group: str
    op: str
    sequence: int | None
    peer: int | None
    incomplete: bool
    taken: tuple[tuple[str, DumpLeaf], ...]
    made: tuple[tuple[str, DumpLeaf], ...]
    bad_inputs: bool = False
    bad_outputs: bool = False

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def is_message(self) -> bool:
        return self.api in MESSAGES


def read_collective(entry: DumpEntry, name: Name, me: int) -> CollectiveEntry:
    held = entry.raw.get("input_kwargs")
    given = held if isinstance(held, dict) else {}
    root = _rank(entry, given, "dst" if name.api in _TO_ROOT else "src", _ROOT_PLACE.get(name.api))
    peer = None
    if name.api in MESSAGES:
        peer = _rank(entry, given, "dst" if name.api.endswith("send") else "src", _PEER_PLACE)
    takes = name.api not in _FROM_ROOT or root in (None, me)
    gives = name.api not in _TO_ROOT or root in (None, me)
    group = _group_of(entry)
    return CollectiveEntry(
        entry,
        name.api,
        name.number or 0,
        tuple(rank for rank in group.get("group_ranks") or () if isinstance(rank, int)),
        str(group.get("group_id", "")),
        str(_plain(given.get("op")) or ""),
        _number(given.get("seq")),
        peer,
        entry.raw.get("incomplete") is True,
        tuple(_inputs(entry, name.api)) if takes else (),
        tuple(entry.outputs()) if gives else (),
    )


def _inputs(entry: DumpEntry, api: str) -> Iterator[tuple[str, DumpLeaf]]:
    place, word = _OUTPUTS.get(api, (None, ""))
    buffers = re.compile(rf"(input\.{place}|input_kwargs\.{word})(\.|$)")
    for path, leaf in entry.inputs():
        if leaf.nan_count is not None or place is None or not buffers.match(path):  # the counts are ours alone
            yield path, leaf


def _rank(entry: DumpEntry, given: dict[str, Any], key: str, place: int | None) -> int | None:
    """By name, or else by its place among the arguments."""
    named = _number(given.get(key))
    held = entry.raw.get("input_args")
    if named is not None or place is None or not isinstance(held, list) or place >= len(held):
        return named
    return _number(held[place])


def _group_of(entry: DumpEntry) -> dict[str, Any]:
    """The process group among the arguments, by name or not."""
    for _, leaf in entry.values():
        if leaf.type.endswith("ProcessGroup"):
            return dict(leaf.raw)
    return {}


def _plain(raw: Any) -> Any:
    return raw.get("value") if isinstance(raw, dict) else raw


def _number(raw: Any) -> int | None:
    value = _plain(raw)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
