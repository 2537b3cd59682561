"""The facts of all ranks, compared: which of them differ, and should not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ddpstats._base.text import count_of, holders_lines, shorten

Facts = dict[str, dict[str, Any]]
"""What one rank reports: sections of names and values, which are texts, or numbers of milliseconds."""

ALL_REDUCE = "all_reduce of 8 bytes"
CLOCK = "clock ahead of rank 0's"
DISTRIBUTIONS = "distributions"
EXISTS = "directory exists"
UNCONNECTED = "no connection"

_MOST_SKEW_MS = 100.0  # hosts that ask a time server are within some milliseconds of each other
_MOST_LINES = 16


def compare(by_rank: Sequence[Facts]) -> dict[str, Any]:
    """Return the report for programs: under section and name "marked", and "value" or, of each rank, "by_rank"."""
    report: dict[str, Any] = {"world_size": len(by_rank), "differences": []}
    for section in dict.fromkeys(chain(*by_rank)):
        held, report[section] = [facts.get(section, {}) for facts in by_rank], {}
        for name in dict.fromkeys(chain(*held)):
            values = [facts.get(name) for facts in held]
            is_marked, is_same = _is_wrong(name, values), len(set(values)) == 1
            report[section][name] = {"marked": is_marked, **({"value": values[0]} if is_same else {"by_rank": values})}
            report["differences"] += [f"{section}: {name}"] if is_marked else []
    return report


def _is_wrong(name: str, values: list[Any]) -> bool:
    if name == CLOCK:
        return any(abs(value) > _MOST_SKEW_MS for value in values)
    if name in (EXISTS, UNCONNECTED):
        return set(values) != {"yes"}
    may_differ = name in ("host", ALL_REDUCE) or name.endswith("_VISIBLE_DEVICES")
    return not may_differ and len(set(values)) > 1


def as_text(report: dict[str, Any]) -> str:
    """Return the report for people."""
    ranks, differences = report["world_size"], report["differences"]
    lines = [f"{count_of(ranks, 'ranks')}. What differs between them, and should not, has a ! before it."]
    for section in list(report)[2:]:
        shown = {name: row for name, row in report[section].items() if row["marked"] or section != DISTRIBUTIONS}
        hidden = len(report[section]) - len(shown)
        lines += ["", section, *chain(*map(_lines, shown, shown.values()))]
        lines += [f"    {hidden} more, which do not differ: --json has them"] if hidden else []
    if ranks == 1:
        last = "To compare ranks: torchrun --nproc-per-node 2 -m ddpstats doctor"
    elif differences:
        last = f"{count_of(len(differences), 'differences')}: {shorten(differences, _MOST_LINES)}"
    else:
        last = "Nothing differs."
    return "\n".join([*lines, "", last])


def _lines(name: str, row: dict[str, Any]) -> list[str]:
    start = f"  {'!' if row['marked'] else ' '} {name}"
    texts = list(map(_text, row.get("by_rank", [row.get("value")])))
    if len(set(texts)) == 1:
        return [f"{start}: {texts[0]}"]
    lines = holders_lines(dict(enumerate(texts)))
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more; --json has all"]
    return [start, *(f"    {line}" for line in lines)]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f} ms"
    return "not there" if value is None else value if value.isprintable() else repr(value)
