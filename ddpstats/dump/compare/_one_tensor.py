"""Two saved tensors that should be equal: of two runs, or of two places in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpstats._base.report import printable
from ddpstats.dump.compare._columns import runs_dict
from ddpstats.dump.compare._rules import Closeness
from ddpstats.dump.compare._tensor_compare import compare_saved
from ddpstats.dump.format._entries import DumpLeaf
from ddpstats.dump.format._files import RankDump
from ddpstats.errors import DumpError


@dataclass(frozen=True)
class TensorPair:
    """Two tensors, and how close they are."""

    name_a: str
    name_b: str
    leaf_a: DumpLeaf
    leaf_b: DumpLeaf
    close: Closeness


def find_leaf(dump: RankDump, name: str) -> DumpLeaf:
    """The tensor of ``NAME.path``. Raises `DumpError` if there is none, or it was not saved."""
    near: list[str] = []
    for member in dump.members():
        if not name.startswith(f"{member.key}."):
            continue
        for path, leaf in dump.entry(member).leaves():
            if f"{member.key}.{path}" == name:
                return _saved(dump, name, leaf)
            near.append(f"{member.key}.{path}")
    known = f"It has {', '.join(near[:8])}" if near else "A name is that of an entry and of a tensor in it"
    raise DumpError(
        f"{dump.path} has no tensor {name}. {known}, like Functional.linear.0.forward.output.0.", path=str(dump.path)
    )


def _saved(dump: RankDump, name: str, leaf: DumpLeaf) -> DumpLeaf:
    if leaf.data_name is None:
        raise DumpError(
            f"{dump.path}: {name} was not saved. Dump with task tensor, or name it in statistics.tensor_list.",
            path=str(dump.path),
        )
    return leaf


def compare_pair(a: RankDump, name_a: str, b: RankDump, name_b: str) -> TensorPair:
    """Compare a tensor of A with one of B. Raises `DumpError`, also where their shapes differ."""
    leaf_a, leaf_b = find_leaf(a, name_a), find_leaf(b, name_b)
    return TensorPair(name_a, name_b, leaf_a, leaf_b, compare_saved(a, leaf_a, b, leaf_b))


def as_text(pair: TensorPair) -> str:
    close = pair.close
    head = "EQUAL" if close.equal else "DIFFERENT"
    lines = [f"{head}: {close.runs.describe()}"]
    for side, name, leaf in (("A", pair.name_a, pair.leaf_a), ("B", pair.name_b, pair.leaf_b)):
        lines.append(f"  {side} {name}  {leaf.dtype} {list(leaf.shape)}{_place(leaf)}")
    if not close.equal:
        lines.append(
            f"  cosine {close.cosine:.9g}, largest absolute difference {close.max_abs:.6g}, "
            f"{close.one_thousandth:.2%} of the elements within one thousandth"
        )
    return printable(lines)


def _place(leaf: DumpLeaf) -> str:
    """Where the tensor lay, if the dump says."""
    if leaf.data_ptr is None:
        return ""
    stream = "" if leaf.stream is None else f", stream {leaf.stream}"
    return f" at 0x{leaf.data_ptr:x}, storage {leaf.storage_id} of {leaf.storage_bytes or 0:,} bytes{stream}"


def as_json(pair: TensorPair) -> dict[str, Any]:
    close = pair.close
    return {
        "verdict": "nothing different" if close.equal else "different",
        "a": {"name": pair.name_a, **pair.leaf_a.raw},
        "b": {"name": pair.name_b, **pair.leaf_b.raw},
        "cosine": close.cosine,
        "euclidean": close.euclidean,
        "max_abs": close.max_abs,
        "max_relative": close.max_relative,
        "one_thousandth": close.one_thousandth,
        "five_thousandths": close.five_thousandths,
        "runs": runs_dict(close.runs),
    }
