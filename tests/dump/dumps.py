"""Dumps written by hand, with leaves given by their extremes and collectives by their group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.dump import hand_made

NAN, INF = math.nan, math.inf
WHOLE = {"scope": [], "list": [], "data_mode": ["all"]}


def leaf(
    high: float = 1.0, low: float = -1.0, shape: Sequence[int] = (2, 3), *, ours: bool = True, **more: Any
) -> dict[str, Any]:
    """Return a tensor's leaf, with the fields that only our own dumps have if it is ``ours``."""
    fields: dict[str, Any] = {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": list(shape), "Max": high, "Min": low,
        "Mean": (high + low) / 2, "Norm": abs(high) + abs(low), "requires_grad": False,
    }  # fmt: skip
    if ours:
        bad = [value for value in (high, low) if not math.isfinite(value)]
        fields["nan_count"] = sum(map(math.isnan, bad))
        fields["inf_count"] = len(bad) - fields["nan_count"]
        fields["first_bad"] = [0, 0] if bad else None
    return {**fields, **more}


def forward(*inputs: Any, out: Any = None, **more: Any) -> dict[str, Any]:
    outputs = out if isinstance(out, list) else [] if out is None else [out]
    return {"input_args": list(inputs), "input_kwargs": {}, "output": outputs, **more}


def backward(*inputs: Any, out: Any = None) -> dict[str, Any]:
    return {"input": list(inputs), "output": out if isinstance(out, list) else [] if out is None else [out]}


def collective(
    *inputs: Any, out: Any = None, ranks: Sequence[int] = (0, 1), group: str = "0000aaaa", **kwargs: Any
) -> dict[str, Any]:
    named: dict[str, Any] = {key: {"type": "int", "value": value} for key, value in kwargs.items()}
    named["group"] = {"type": "torch.ProcessGroup", "group_ranks": list(ranks), "group_id": group}
    return {**forward(*inputs, out=out), "input_kwargs": named}


def write(root: Path, entries: dict[str, dict[str, Any]], rank: int | None = 0, **more: Any) -> Path:
    """Write a rank's directory, and return its step's."""
    name = "rank" if rank is None else f"rank{rank}"
    hand_made.write_rank(root / "step0" / name, list(entries.items()), layout=None, **{"header": WHOLE, **more})
    return root / "step0"


def write_lines(root: Path, entries: dict[str, dict[str, Any]], rank: int = 0) -> Path:
    """Write a rank's directory as a killed run leaves it: the last line is broken."""
    hand_made.write_lines(root / "step0" / f"rank{rank}", list(entries.items()), '{"name": "Torch.ad')
    return root / "step0"
