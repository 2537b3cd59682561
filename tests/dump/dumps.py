"""Dumps written by hand, for what reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAN, INF = math.nan, math.inf
WHOLE = {"scope": [], "list": [], "data_mode": ["all"]}


def leaf(
    high: float = 1.0, low: float = -1.0, shape: Sequence[int] = (2, 3), *, ours: bool = True, **more: Any
) -> dict[str, Any]:
    """A tensor's leaf; ``ours`` has the fields that only our own dumps have."""
    found: dict[str, Any] = {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": list(shape), "Max": high, "Min": low,
        "Mean": (high + low) / 2, "Norm": abs(high) + abs(low), "requires_grad": False,
    }  # fmt: skip
    if ours:
        bad = [value for value in (high, low) if not math.isfinite(value)]
        found["nan_count"] = sum(map(math.isnan, bad))
        found["inf_count"] = len(bad) - found["nan_count"]
        found["first_bad"] = [0, 0] if bad else None
    return {**found, **more}


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


def write(
    root: Path,
    entries: dict[str, dict[str, Any]],
    rank: int | None = 0,
    *,
    level: str = "mix",
    parents: dict[str, str] | None = None,
    stacks: dict[str, list[str]] | None = None,
    header: dict[str, Any] | None = None,
) -> Path:
    directory = root / "step0" / ("rank" if rank is None else f"rank{rank}")
    directory.mkdir(parents=True)
    head: dict[str, Any] = {"task": "statistics", "level": level, "framework": "pytorch", "dump_data_dir": None}
    head |= (header if header is not None else WHOLE) | {"data": entries}
    (directory / "dump.json").write_text(json.dumps(head))
    book = {str(number): [[name], lines] for number, (name, lines) in enumerate((stacks or {}).items())}
    (directory / "stack.json").write_text(json.dumps(book))
    (directory / "construct.json").write_text(json.dumps(parents or {}))
    return root / "step0"


def write_lines(root: Path, entries: dict[str, dict[str, Any]], rank: int = 0) -> Path:
    """As it lies there when the run was killed in the step: the last line is broken."""
    directory = root / "step0" / f"rank{rank}"
    directory.mkdir(parents=True)
    lines = [json.dumps({"task": "statistics", "level": "L1", "dump_data_dir": None, "ddpstats": 1})]
    lines += [json.dumps({"name": name, "entry": raw, "stack": [], "parent": None}) for name, raw in entries.items()]
    (directory / "dump.jsonl").write_text("\n".join(lines) + '\n{"name": "Torch.ad')
    return root / "step0"
