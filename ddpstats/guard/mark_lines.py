"""Marks as lines of a record: NaN and infinities are written as strings, and what is read back is checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from ddpstats._base.files import LATEST_TIME_SEC
from ddpstats._base.marks import Mark


def mark_as_dict(mark: Mark) -> dict[str, Any]:
    """Return a mark as a line of a record, or of a report, holds it."""
    values = {name: _finite_or_str(value) for name, value in mark.values.items()}
    optional = {"step": mark.step, "ranks": list(mark.ranks), "text": mark.text, "values": values}
    held = {key: value for key, value in optional.items() if value or value == 0}
    return {"mark": mark.kind, "time": mark.time, **held}


def mark_from_dict(content: Mapping[str, Any]) -> Mark:
    """Read what `mark_as_dict` wrote. Raises ValueError for anything that it does not write."""
    kind, text, step = content.get("mark"), content.get("text", ""), content.get("step")
    when: Any = content.get("time")
    ranks, values = content.get("ranks", []), content.get("values", {})
    if not isinstance(kind, str) or not isinstance(text, str) or not isinstance(values, dict):
        raise ValueError("a mark without kind, text or values")
    if type(when) not in (int, float) or not 0 <= when < LATEST_TIME_SEC or type(step) not in (int, type(None)):
        raise ValueError("a mark without time or step")
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise ValueError("a mark without ranks")
    read_values = {name: _read_number(value) for name, value in values.items()}
    return Mark(kind, text, float(when), step, tuple(ranks), read_values)


def _finite_or_str(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _read_number(value: Any) -> float | None:
    if value is None:
        return None
    if value in ("nan", "inf", "-inf") or (type(value) in (float, int, bool) and abs(value) <= sys.float_info.max):
        return float(value)
    raise ValueError("a mark whose value is no number")
