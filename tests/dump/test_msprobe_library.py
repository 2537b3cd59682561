"""msprobe and ddpstats dump the same step; whatever differs is a row of the table in docs/dumps.md.

Both ways: msprobe's own ``compare`` reads our dumps, and ours reads a pair of both.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ddpstats.dump.analyze import DumpEntry, DumpLeaf, RankDump, find_ranks
from ddpstats.dump.msprobe import common_names, common_values, parse_name
from tests import programs
from tests.dump.msprobe_runs import LEVELS, TASKS
from tests.dump.verbs import compare_json
from tests.needs import ROOT, needs

needs("msprobe", "einops")
pytestmark = pytest.mark.library

STEP = "step0"
NUMBERS = ("Max", "Min", "Mean", "Norm", "value")


class Difference(NamedTuple):
    """A difference between the two tools in an entry, or in a field of a leaf in it."""

    name: str
    field: str
    theirs: Any
    ours: Any
    path: str = ""
    dtype: str = ""


def is_entry_of(difference: Difference, tool: str, apis: str) -> bool:
    """Return whether one tool alone has this entry, of one of these functions or modules' classes."""
    has_it = difference.theirs if tool == "msprobe" else difference.ours
    name = parse_name(difference.name)
    return difference.field == "entry" and has_it and (name.class_name or name.api) in apis.split()


def is_number(difference: Difference, dtypes: str) -> bool:
    return difference.field in ("Mean", "Norm") and difference.dtype.removeprefix("torch.") in dtypes.split()


MADE = "transpose reshape view detach __getitem__ to half cat neg zeros ones arange tril gru"
INNER = "linear matmul __matmul__ max_pool1d multi_head_attention_forward relu cross_entropy"
Explains = Callable[[Difference], bool]
ROWS: dict[str, list[Explains]] = {
    "files": [
        lambda d: d.field == "directory" and re.fullmatch(r"proc\d+", d.theirs) is not None,
        lambda d: d.field == "data_name" and d.theirs is None,
    ],
    "names": [
        lambda d: d.field == "name" and "__" in d.theirs,
        lambda d: d.field == "name" and parse_name(d.theirs).api == parse_name(d.ours).api in ("add", "add_"),
        lambda d: d.field == "name" and d.theirs.startswith("Module.module"),
    ],
    "entries in ours alone": [
        lambda d: is_entry_of(d, "ddpstats", "Net"),
        lambda d: is_entry_of(d, "ddpstats", MADE),
        lambda d: is_entry_of(d, "ddpstats", "ReLU") and "backward" in d.name,
        lambda d: is_entry_of(d, "ddpstats", "NonDynamicallyQuantizableLinear") and "parameters_grad" in d.name,
        lambda d: is_entry_of(d, "ddpstats", "all_reduce broadcast"),
    ],
    "entries in msprobe's alone": [lambda d: is_entry_of(d, "msprobe", "Identity Dropout") and "backward" in d.name],
    "arguments": [lambda d: d.field in ("paths", "data_name") and "forward" in d.name],
    "gradients": [
        lambda d: "backward" in d.name and d.path.startswith("output") and parse_name(d.name).api in INNER.split(),
        lambda d: d.field in ("paths", "data_name") and "backward" in d.name,
        lambda d: "MultiheadAttention.backward" in d.name,
    ],
    "`Mean`, `Norm`": [
        lambda d: is_number(d, "int64 int32 uint8 float64") and d.theirs is None and d.ours is not None,
        lambda d: is_number(d, "float16 bfloat16") and math.isclose(d.theirs, d.ours, rel_tol=0.01),
    ],
    "order": [lambda d: d.field == "order"],
}


# -- what differs ------------------------------------------------------------------------------------------------------


def differences(theirs: RankDump, ours: RankDump) -> Iterator[Difference]:
    """Yield what differs between two dumps, entry by entry."""
    if theirs.directory.name != ours.directory.name:
        yield Difference("", "directory", theirs.directory.name, ours.directory.name)
    sides = [{entry.name: entry for entry in dump.entries()} for dump in (theirs, ours)]
    a, b = (
        {common.get(name, name): entry for name, entry in side.items()}
        for side, common in zip(sides, common_names(*sides), strict=True)
    )
    assert (len(a), len(b)) == tuple(map(len, sides))
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            yield Difference((a.get(name) or b[name]).name, "entry", name in a, name in b)
            continue
        if a[name].name != b[name].name:
            yield Difference(name, "name", a[name].name, b[name].name)
        yield from leaf_differences(a[name], b[name], theirs, ours)
    for field, is_chosen in (("forward order", "forward"), ("order", "")):
        orders = [[name for name in side if name in a and name in b and is_chosen in name] for side in (a, b)]
        if orders[0] != orders[1]:
            yield Difference("", field, orders[0], orders[1])


def leaf_differences(
    theirs: DumpEntry, ours: DumpEntry, their_dump: RankDump, our_dump: RankDump
) -> Iterator[Difference]:
    if [path for path, _ in theirs.values(nulls=True)] != [path for path, _ in ours.values(nulls=True)]:
        yield Difference(ours.name, "paths", theirs.raw, ours.raw)
    a, b = (common_values(entry) for entry in (theirs, ours))
    for path in dict.fromkeys([*a, *b]):
        if path not in a or path not in b:
            yield Difference(ours.name, "leaf", path in a, path in b, path)
            continue
        yield from file_differences(ours.name, path, (their_dump, a[path]), (our_dump, b[path]))
        for field in a[path].raw.keys() - {"data_name"}:
            value, our_value = a[path].raw[field], b[path].raw.get(field, "no such field")
            if value != our_value and not (field in NUMBERS and is_close(value, our_value)):
                yield Difference(ours.name, field, value, our_value, path, a[path].dtype)


def file_differences(
    name: str, path: str, theirs: tuple[RankDump, DumpLeaf], ours: tuple[RankDump, DumpLeaf]
) -> Iterator[Difference]:
    """Yield the names of files that differ, but for the entry's name at the beginning, and the tensors in them."""
    names = [leaf.data_name for _, leaf in (theirs, ours)]
    tails = [re.sub(r".*\.(forward|backward|parameters_grad)", "", file or "") for file in names]
    if tails[0] != tails[1]:
        yield Difference(name, "data_name", names[0], names[1], path)
    if None not in names:
        a, b = (torch.load(dump.tensor_file(str(leaf.data_name))) for dump, leaf in (theirs, ours))
        if a.shape != b.shape or a.dtype != b.dtype or not torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True):
            yield Difference(name, "tensor", a, b, path)


def is_close(a: Any, b: Any) -> bool:
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return False
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``{tool}-{ranks}/{level}-{task}/step0``, of both tools."""
    root = tmp_path_factory.mktemp("dumps")
    for tool in ("msprobe", "ddpstats"):
        done = programs.run(["-m", "tests.dump.msprobe_runs", tool, str(root)], timeout=240, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_every_difference_between_the_dumps_is_a_row_of_the_table(dumps: Path) -> None:
    used: set[Explains] = set()
    unexplained = []
    for case in [f"{level}-{task}" for level in LEVELS for task in TASKS]:
        for ranks in (1, 2):
            pair = [find_ranks(dumps / f"{tool}-{ranks}" / case) for tool in ("msprobe", "ddpstats")]
            for theirs, ours in zip(*pair, strict=True):
                for difference in differences(theirs, ours):
                    reasons = [explains for row in ROWS.values() for explains in row if explains(difference)]
                    used.update(reasons)
                    if not reasons:
                        unexplained.append((case, ranks, difference))
    assert unexplained == []
    assert [row for row, reasons in ROWS.items() if not used.issuperset(reasons)] == []


def test_table_of_the_page_has_these_rows() -> None:
    page = (ROOT / "docs" / "dumps.md").read_text()
    section = page.partition("## Where msprobe's dumps differ")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:] == list(ROWS)


@pytest.mark.parametrize(("ranks", "case"), [(1, "mix-statistics"), (1, "L1-tensor"), (2, "mix-tensor")])
def test_our_compare_blames_the_gradients_of_inner_operations_alone(dumps: Path, ranks: int, case: str) -> None:
    status, findings = compare_json(*(dumps / f"{tool}-{ranks}" / case for tool in ("msprobe", "ddpstats")))
    assert status == 1
    for comparison in findings["comparisons"]:
        verdicts = [
            (parse_name(row["names"]["B"]), row["verdict"]) for row in comparison["rows"] if "B" in row["names"]
        ]
        blamed = {
            name.api
            for name, verdict in verdicts
            if verdict["result"] in ("Warning", "No") and verdict["message"] != "only the mean, which is near 0"
        }
        assert "cross_entropy" in blamed
        assert blamed <= {*INNER.split(), "attention"}  # a module that takes one tensor three times
    assert len(findings["comparisons"]) == ranks


@pytest.mark.parametrize(("ranks", "case"), [(1, "mix-statistics"), (1, "L1-tensor"), (2, "mix-statistics")])
def test_compare_of_msprobe_reads_our_dumps(dumps: Path, tmp_path: Path, ranks: int, case: str) -> None:
    sides = [dumps / f"{tool}-{ranks}" / case / STEP for tool in ("ddpstats", "msprobe")]
    if ranks == 1:
        sides = [dump.path for side in sides for dump in find_ranks(side)]
    command = ["compare", "--target_path", str(sides[0]), "--golden_path", str(sides[1])]
    main = "import sys; from msprobe.msprobe import main; sys.exit(main())"
    done = programs.run(["-c", main, *command, "--output_path", str(tmp_path)], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    tables = sorted(tmp_path.glob("*.csv"))
    expected = {"Functional.linear.0.forward.output.0", "Functional.conv1d.0.backward.output.1"}
    if ranks > 1:
        expected.add("Distributed.all_reduce.0.forward.output.0")
    for dump, table in zip(find_ranks(sides[0]), tables, strict=True):
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert {f"{entry.name}.{path}" for entry in dump.entries() for path, _ in entry.outputs} <= {
            row["NPU Name"] for row in rows
        }
        assert expected <= {row["NPU Name"] for row in rows if row["Result"] == "pass" and row["Bench Name"] != "N/A"}
