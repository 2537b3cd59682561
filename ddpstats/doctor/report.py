"""What the ranks have told, side by side: which of it differs, as text and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpstats._base.text import count_of, holders_lines, shorten

Told = dict[str, dict[str, Any]]
"""What one rank says: sections of names and values."""

CLOCK = "clock minus rank 0's"
UNCONNECTED = "no connection"
EXISTS = "directory exists"

_MAY_DIFFER = frozenset(
    {"host", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
)
_MOST_SKEW_MS = 100.0  # hosts that ask a time server are within some milliseconds of each other
_MOST_LINES = 16


@dataclass(frozen=True)
class Row:
    """One thing, as every rank has it.

    Attributes:
        by_rank: a text, or None where a rank has no such thing; a number of milliseconds; of a clock, two of them, by
            how much it is ahead and how far that may be wrong.
        is_marked: whether it differs where it should not.
    """

    section: str
    name: str
    by_rank: Sequence[Any]
    is_marked: bool


def compared(told: Sequence[Told]) -> list[Row]:
    """What all ranks told, by section and name, each in the order in which ranks first name it."""
    sections = dict.fromkeys(section for one in told for section in one)
    rows = []
    for section in sections:
        held = [one.get(section, {}) for one in told]
        for name in dict.fromkeys(name for one in held for name in one):
            by_rank = [one.get(name) for one in held]
            rows.append(Row(section, name, by_rank, _is_marked(name, by_rank)))
    return rows


def _is_marked(name: str, by_rank: Sequence[Any]) -> bool:
    if name == CLOCK:
        return bool(_skewed(by_rank))
    if name == UNCONNECTED:
        return True
    if name == EXISTS:
        return set(by_rank) != {"yes"}
    return name not in _MAY_DIFFER and not any(isinstance(one, float) for one in by_rank) and len(set(by_rank)) > 1


def _skewed(by_rank: Sequence[Any]) -> list[int]:
    """The ranks whose clocks are certainly off."""
    return [rank for rank, (ahead, error) in enumerate(by_rank) if abs(ahead) - error > _MOST_SKEW_MS]


# -- for people -------------------------------------------------------------------------------------------------------


def as_text(rows: Sequence[Row]) -> str:
    ranks, marked = len(rows[0].by_rank), [row for row in rows if row.is_marked]
    lines = [f"{count_of(ranks, 'ranks')}. What differs between them, and should not, has a ! before it."]
    for section, held in itertools.groupby(rows, lambda row: row.section):
        lines += ["", section, *(line for row in held for line in _lines(row))]
    if ranks == 1:
        lines += ["", "To compare ranks: torchrun --nproc-per-node 2 -m ddpstats doctor"]
    elif marked:
        names = shorten((f"{row.name} ({row.section})" for row in marked), _MOST_LINES)
        lines += ["", f"{count_of(len(marked), 'differences')}: {names}"]
    else:
        lines += ["", "Nothing differs."]
    return "\n".join(lines)


def _lines(row: Row) -> list[str]:
    texts = _texts(row)
    start = f"  {'!' if row.is_marked else ' '} {row.name}"
    if len(set(texts)) == 1:
        return [f"{start}: {texts[0]}"]
    lines = [f"    {line}" for line in holders_lines(dict(enumerate(texts)))]
    more = [f"      and {len(lines) - _MOST_LINES} more; --json has all"] if len(lines) > _MOST_LINES else []
    return [start, *lines[:_MOST_LINES], *more]


def _texts(row: Row) -> list[str]:
    """Of each rank; numbers that nobody has to compare are one text for all."""
    values = row.by_rank
    if row.name == CLOCK:
        if row.is_marked:
            return [f"{ahead:+.3f} ms, at most {error:.3f} wrong" for ahead, error in values]
        ahead, error = max(values, key=lambda one: abs(one[0]))
        return [f"{ahead:+.3f} ms at most, and that at most {error:.3f} wrong"]
    if any(isinstance(one, float) for one in values):
        numbers = [one for one in values if one is not None]
        return [f"{min(numbers):.3f} to {max(numbers):.3f} ms, most on rank {values.index(max(numbers))}"]
    return ["not there" if one is None else one if one.isprintable() else repr(one) for one in values]


# -- for programs -----------------------------------------------------------------------------------------------------


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "world_size": len(rows[0].by_rank),
        "differences": [f"{row.section}: {row.name}" for row in rows if row.is_marked],
    }
    for row in rows:
        is_one = all(value == row.by_rank[0] for value in row.by_rank)
        what = {"value": row.by_rank[0]} if is_one else {"by_rank": list(row.by_rank)}
        found.setdefault(row.section, {})[row.name] = {"marked": row.is_marked, **what}
    return found
