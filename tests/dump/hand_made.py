"""Dumps written by hand, entry by entry, for tests of the verbs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Leaf = dict[str, Any]
Entries = Mapping[str, Mapping[str, Any]] | Sequence[tuple[str, Mapping[str, Any]]]


def tensor(*values: float, shape: Sequence[int] | None = None, dtype: str = "torch.float32", **more: Any) -> Leaf:
    """Return a tensor's leaf with the statistics of ``values``, and with the fields that every tool writes."""
    statistics = {
        "Max": max(values),
        "Min": min(values),
        "Mean": sum(values) / len(values),
        "Norm": sum(value * value for value in values) ** 0.5,
    }
    sizes = list(shape) if shape is not None else [len(values)]
    return {"type": "torch.Tensor", "dtype": dtype, "shape": sizes, **statistics, "requires_grad": False, **more}


def leaf(
    high: float = 1.0, low: float = -1.0, shape: Sequence[int] = (2, 3), *, ours: bool = True, **more: Any
) -> Leaf:
    """Return a tensor's leaf with these extremes; if it is ``ours``, with the fields that our own dumps alone have."""
    fields: Leaf = {}
    if ours:
        bad = [value for value in (high, low) if not math.isfinite(value)]
        nans = sum(map(math.isnan, bad))
        fields = {"nan_count": nans, "inf_count": len(bad) - nans, "first_bad": [0, 0] if bad else None}
    return {**tensor(high, low, shape=shape), "Max": high, "Min": low, "Norm": abs(high) + abs(low), **fields, **more}


def plain(value: Any, kind: str = "float") -> Leaf:
    """Return the leaf of an argument that is no tensor."""
    return {"type": kind, "value": value}


def listed(out: Any) -> list[Any]:
    return out if isinstance(out, list) else [] if out is None else [out]


def forward(*inputs: Any, out: Any = None, **more: Any) -> dict[str, Any]:
    return {"input_args": list(inputs), "input_kwargs": {}, "output": listed(out), **more}


def backward(*inputs: Any, out: Any = None) -> dict[str, Any]:
    return {"input": list(inputs), "output": listed(out)}


def collective(
    *inputs: Any, out: Any = None, ranks: Sequence[int] = (0, 1), group: str = "0000aaaa", **kwargs: Any
) -> dict[str, Any]:
    """Return an entry of a collective; ``kwargs`` are whole numbers."""
    named = {key: plain(value, "int") for key, value in kwargs.items()}
    named["group"] = {"type": "torch.ProcessGroup", "group_ranks": list(ranks), "group_id": group}
    return forward(*inputs, out=out, input_kwargs=named)


def document(
    entries: Entries, *, level: str = "mix", task: str = "statistics", header: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    head = {"task": task, "level": level, "framework": "pytorch", "dump_data_dir": None, **(header or {})}
    return {**head, "data": dict(entries)}


def as_lines(whole: Mapping[str, Any]) -> str:
    """Return the text of a dump.json in our layout, one entry a line."""
    head = json.dumps({key: value for key, value in whole.items() if key != "data"})[:-1]
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in whole["data"].items()]
    return head + ', "data": {\n' + ",\n".join(lines) + "\n}}\n"


def write_rank(
    directory: Path,
    entries: Entries,
    *,
    layout: int | str = "lines",
    stacks: Mapping[str, Sequence[str]] | None = None,
    parents: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a rank's directory; ``layout`` is an indent or ``lines``, and ``more`` goes to `document`."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = document(entries, **more)
    (directory / "dump.json").write_text(as_lines(whole) if layout == "lines" else json.dumps(whole, indent=layout))
    if stacks is not None:
        shared = {str(index): [[name], list(lines)] for index, (name, lines) in enumerate(stacks.items())}
        (directory / "stack.json").write_text(json.dumps(shared))
    if parents is not None:
        (directory / "construct.json").write_text(json.dumps(parents))
    return directory


def write_lines(directory: Path, entries: Entries, *more: str) -> Path:
    """Write a rank's directory as a run leaves it that was killed in the step; ``more`` follows the entries."""
    directory.mkdir(parents=True)
    header = {"task": "statistics", "level": "L1", "dump_data_dir": None, "ddpstats": 1}
    records = [
        {"name": name, "entry": entry, "stack": [f"at {name}"], "parent": None} for name, entry in dict(entries).items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in [header, *records])
    (directory / "dump.jsonl").write_text(text + "".join(more))
    return directory


# -- pairs of dumps ----------------------------------------------------------------------------------------------------

ONE = [
    ("Functional.linear.0.forward", forward(tensor(1.0, 2.0), out=tensor(3.0, 4.0))),
    ("Torch.relu.0.forward", forward(tensor(3.0, 4.0), out=tensor(3.0, 4.0))),
    ("Torch.relu.0.backward", backward(tensor(1.0, 1.0), out=tensor(1.0, 1.0))),
]


def changed(index: int, **fields: Any) -> list[Any]:
    """Return `ONE` with other fields in the output of one entry."""
    entries = json.loads(json.dumps(ONE))
    entries[index][1]["output"][0].update(fields)
    return [(name, entry) for name, entry in entries]


def two(tmp_path: Path, a: Entries, b: Entries, **more: Any) -> tuple[Path, Path]:
    return write_rank(tmp_path / "a" / "rank0", a, **more), write_rank(tmp_path / "b" / "rank0", b, **more)
