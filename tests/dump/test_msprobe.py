"""Names and arguments of entries: as msprobe 26.2 writes them in ``msprobe_26/``, and as our own dumps have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpstats.dump.analyze import DumpEntry
from ddpstats.dump.msprobe import Name, common_names, common_values, parse_name, read_collective
from tests.dump.collecting import dumped
from tests.dump.hand_made import backward, forward, plain, tensor
from tests.dump.verbs import compare_json

MSPROBE = Path(__file__).parent / "msprobe_26"
ONE, TWO = MSPROBE / "one/step0/proc4242", MSPROBE / "two/step0/rank0"  # processes


@pytest.mark.parametrize(
    ("full", "parts", "forward_name"),
    [
        ("Functional.linear.5.backward", ("Functional", "linear", "", 5, "backward"), "Functional.linear.5.forward"),
        ("Functional.linear.5.backward.1", ("Functional", "linear", "", 5, "backward"), "Functional.linear.5.forward"),
        ("Functional.linear.5.forward.1", ("", "Functional.linear.5.forward.1", "", None, ""), None),
        ("Tensor.__add__.0.forward", ("Tensor", "__add__", "", 0, "forward"), None),
        (
            "Module.a.backward.L.backward.3.1",
            ("Module", "a.backward", "L", 3, "backward"),
            "Module.a.backward.L.forward.3",
        ),
        ("Module.net.0.fc.Linear.forward.3", ("Module", "net.0.fc", "Linear", 3, "forward"), None),
        ("Module.fc.Linear.parameters_grad", ("Module", "fc", "Linear", None, "parameters_grad"), None),
        ("Distributed.all_reduce.0.forward", ("Distributed", "all_reduce", "", 0, "forward"), None),
        ("a.backward.b", ("", "a.backward.b", "", None, ""), None),
    ],
)
def test_name_is_parsed_into_its_parts_and_gives_that_of_its_forward_pass(
    full: str, parts: Any, forward_name: str | None
) -> None:
    name = parse_name(full)
    assert name == Name(full, *parts)
    assert name.forward == (forward_name or full)
    assert name.is_module == (parts[0] == "Module")
    assert name.is_collective == (parts[0] == "Distributed")


# -- dumps of msprobe and ours -----------------------------------------------------------------------------------------


class Net(nn.Module):
    """The model that ``msprobe_26/`` was dumped from; in ``two/`` it is in DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        self.drop, self.id = nn.Dropout(0.0), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.emb(x))
        h = h + self.id(self.drop(torch.relu(self.fc(h))))
        h = h.add(h * 2)
        out: Tensor = self.out(h).mean(1)
        return out


@pytest.fixture(scope="module")
def ours_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of our own dump of the same step."""
    root = tmp_path_factory.mktemp("ours")
    torch.manual_seed(0)
    model, x, y = Net(), torch.randint(0, 10, (4, 5)), torch.tensor([0, 1, 2, 3])
    dumped(root, lambda: torch.autograd.backward(nn.functional.cross_entropy(model(x), y)), model, "mix")
    return root / "step0/rank"


def entries(rank: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((rank / "dump.json").read_text())["data"]
    return data


def values(full: str, raw: Any) -> dict[str, Any]:
    """Return shapes of tensors, and plain values, by common paths."""
    common = common_values(DumpEntry(full, raw))
    return {path: leaf.shape if leaf.is_tensor else leaf.value for path, leaf in common.items()}


def test_dumps_of_one_spelling_keep_their_names() -> None:
    names = ["Tensor.add.0.forward", "Tensor.__add__.0.forward", "Torch.relu.0.forward", "Module.module.fc.L.forward.0"]
    assert common_names(names, reversed(names)) == ({}, {})
    assert common_names(names[:3], ["Torch.mul.0.forward"]) == ({}, {})


def test_spellings_of_one_function_are_numbered_together() -> None:
    theirs = [
        *("Tensor.__add__.0.forward", "Tensor.add.0.forward", "Tensor.__add__.1.forward"),
        *("Tensor.__iadd__.0.forward", "Torch.relu.0.forward", "Tensor.__add__.1.backward"),
        *("Tensor.add.0.backward.1", "Tensor.__truediv__.3.forward"),
    ]
    ours = [
        *("Tensor.add.0.forward", "Tensor.add.1.forward", "Tensor.add.2.forward"),
        *("Tensor.add_.0.forward", "Functional.relu.0.forward", "Tensor.add.2.backward"),
        *("Tensor.add.1.backward.1", "Tensor.div.3.forward"),
    ]
    of_theirs, of_ours = common_names(theirs, ours)
    assert [of_theirs[full] for full in theirs] == [of_ours.get(full, full) for full in ours]


def test_numbers_of_spellings_go_on_from_calls_that_the_configuration_left_out() -> None:
    theirs = ["Tensor.add.0.forward", "Tensor.__add__.1.forward", "Tensor.add.1.forward", "Tensor.add.1.backward"]
    ours = ["Tensor.add.1.forward", "Tensor.add.2.forward", "Tensor.add.3.forward", "Tensor.add.3.backward"]
    assert [common_names(theirs, ours)[0][full] for full in theirs] == ours


def test_backward_entries_of_several_spellings_are_not_paired_without_their_forward_entries() -> None:
    """The first call is Tensor.add.0 in our dump, and may be either one in that of msprobe."""
    theirs = ["Tensor.add.0.backward", "Tensor.__add__.0.backward", "Torch.relu.0.backward"]
    ours = ["Tensor.add.1.backward", "Tensor.add.0.backward", "Functional.relu.0.backward"]
    for pair in ((theirs, ours), (ours, theirs)):
        a, b = (
            {renamed.get(full, full) for full in names}
            for names, renamed in zip(pair, common_names(*pair), strict=True)
        )
        assert (len(a), len(b)) == (3, 3)
        assert a & b == {"Torch.relu.0.backward"}


@pytest.mark.parametrize(
    ("full", "raw", "paths"),
    [
        (  # by keyword or by position, without what is the default
            "Functional.layer_norm.0.forward",
            {**forward(tensor(1.0), [plain(8, "int")]), "input_kwargs": {"weight": tensor(1.0)}},
            ["input.0", "input.1.0", "input.2"],
        ),
        (
            "Functional.dropout.0.forward",
            forward(tensor(1.0), plain(0.5), plain(False, "bool")),
            ["input.0", "input.2"],
        ),
        (  # a function that torch chooses by an argument
            "Functional.max_pool1d.0.forward",
            {**forward(tensor(1.0)), "input_kwargs": {"kernel_size": plain(2, "int"), "stride": None}},
            ["input.0", "input.1"],
        ),
        (  # not written in Python, or not of torch: as it is
            "Functional.linear.0.forward",
            {**forward(tensor(1.0)), "input_kwargs": {"weight": tensor(1.0), "bias": None}},
            ["input.0", "input_kwargs.weight", "input_kwargs.bias"],
        ),
        ("Functional.__dict__.0.forward", forward(tensor(1.0)), ["input.0"]),
        ("NPU.fused.0.forward", forward(tensor(1.0), None), ["input.0", "input.1"]),
        ("Torch.where.0.backward", backward(tensor(1.0), out=[None, tensor(1.0), [None, tensor(2.0)]]), [
            *("input.0", "output.0", "output.1.1")]),
    ],
)  # fmt: skip
def test_common_path_of_an_argument(full: str, raw: Any, paths: list[str]) -> None:
    assert list(values(full, raw)) == paths


@pytest.mark.parametrize(("rank", "lacking"), [(ONE, {"A": 2, "B": 2}), (TWO, {"B": 6})], ids=["one process", "DDP"])
def test_dump_of_msprobe_compared_with_ours_differs_in_what_msprobe_records_otherwise(
    rank: Path, lacking: dict[str, int], ours_directory: Path
) -> None:
    status, report = compare_json(rank, ours_directory)
    (comparison,) = report["comparisons"]
    assert (status, comparison["lacking"], comparison["entries"]) == (1, lacking, 35 if rank == ONE else 37)
    (swapped,) = compare_json(ours_directory, rank)[1]["comparisons"]
    assert swapped["entries"] == comparison["entries"]
    failed = {
        row["names"]["B"]
        for row in comparison["rows"]
        if "B" in row["names"] and row["verdict"]["result"]
        if row["verdict"]["message"] != "only the mean, which is near 0"  # CPUs round otherwise
    }
    # gradients of an operation inside of the call
    assert failed - {"Module.root.Net.forward.0", "Module.root.Net.backward.0"} == {
        *("Functional.linear.0.backward", "Functional.linear.1.backward", "Functional.cross_entropy.0.backward"),
    }


def test_collectives_of_msprobe_and_ours_have_the_same_paths() -> None:
    group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "a"}
    t = tensor(1.0, 2.0, 3.0, nan_count=0)
    ours = {
        "Distributed.all_reduce.0.forward": forward(t, out=t),
        "Distributed.broadcast.0.forward": forward(t, out=t),
        "Distributed.all_gather.0.forward": forward(t, out=[t, t]),
        "Distributed.send.0.forward": forward(t),
    }
    theirs = entries(TWO)
    for full, raw in ours.items():
        assert values(full, theirs[full]) == values(full, {**raw, "input_kwargs": {"group": group}})


def test_collectives_of_msprobe_are_read() -> None:
    data = entries(TWO)
    calls = {full: read_collective(DumpEntry(full, data[full]), 0) for full in data if "Dist" in full}
    assert [(call.api, call.peer, len(call.inputs), len(call.outputs)) for call in calls.values()] == [
        ("all_reduce", None, 1, 1), ("broadcast", None, 0, 1), ("all_gather", None, 1, 2), ("send", 1, 1, 0),
    ]  # fmt: skip
