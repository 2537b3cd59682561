"""Dumps written by hand, entry by entry, for tests of the verbs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Leaf = dict[str, Any]
Entries = Sequence[tuple[str, Mapping[str, Any]]]


def tensor(*values: float, shape: Sequence[int] | None = None, dtype: str = "torch.float32", **more: Any) -> Leaf:
    """A leaf with the statistics of ``values``."""
    statistics = {
        "Max": max(values),
        "Min": min(values),
        "Mean": sum(values) / len(values),
        "Norm": sum(value * value for value in values) ** 0.5,
    }
    sizes = list(shape) if shape is not None else [len(values)]
    return {"type": "torch.Tensor", "dtype": dtype, "shape": sizes, **statistics, "requires_grad": False, **more}


def forward(inputs: Sequence[Any] = (), output: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    return {"input_args": list(inputs), "input_kwargs": {}, "output": list(output), **more}


def backward(inputs: Sequence[Any] = (), output: Sequence[Any] = ()) -> dict[str, Any]:
    return {"input": list(inputs), "output": list(output)}


def document(
    entries: Entries, *, level: str = "mix", task: str = "statistics", header: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    head = {"task": task, "level": level, "framework": "pytorch", "dump_data_dir": None, **(header or {})}
    return {**head, "data": dict(entries)}


def as_lines(whole: Mapping[str, Any]) -> str:
    """Return the text of a dump.json in our layout, one entry a line."""
    head = json.dumps({key: value for key, value in whole.items() if key != "data"})[:-1]
    return (
        head
        + ', "data": {\n'
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in whole["data"].items())
        + "\n}}\n"
    )


def write_rank(
    directory: Path,
    entries: Entries,
    *,
    layout: int | str | None = "lines",
    level: str = "mix",
    task: str = "statistics",
    stacks: Mapping[str, Sequence[str]] | None = None,
    parents: Mapping[str, Any] | None = None,
    header: Mapping[str, Any] | None = None,
) -> Path:
    """Write a rank's directory; ``layout`` is an indent, None for one line, or ``lines``."""
    directory.mkdir(parents=True, exist_ok=True)
    whole = document(entries, level=level, task=task, header=header)
    text = as_lines(whole) if layout == "lines" else json.dumps(whole, indent=layout)
    (directory / "dump.json").write_text(text)
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
    records = [{"name": name, "entry": entry, "stack": [f"at {name}"], "parent": None} for name, entry in entries]
    text = "".join(json.dumps(line) + "\n" for line in [header, *records])
    (directory / "dump.jsonl").write_text(text + "".join(more))
    return directory
