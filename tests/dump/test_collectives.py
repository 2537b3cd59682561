"""A dump has an entry for each collective: its input as it was, its output, operation, root, group and number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpstats._observe.groups import operators_name_reduce_op
from ddpstats.dump import StatsDump
from ddpstats.dump.analyze import open_rank
from ddpstats.testing import RankPool
from tests.capabilities import needs_guard
from tests.dump import collectives_runs as runs
from tests.dump.collecting import data, leaves
from tests.dump.verbs import run_json

Entries = list[tuple[str, dict[str, Any]]]
SUM = "sum" if operators_name_reduce_op else {}
RANKS = pytest.mark.parametrize("rank", [0, 1])


@pytest.fixture(scope="module")
def path(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump")
    two_ranks.run(runs.dump_all, str(path), timeout_sec=90).values()
    return path


def entries(path: Path, program: str, rank: int) -> Entries:
    """Return the name of the function and the entry of each collective that a rank's dump of a program has."""
    dumped = data(path / program, 0, f"rank{rank}")
    return [(name.split(".")[1], entry) for name, entry in dumped.items() if name.startswith("Distributed.")]


def brief(entries: Entries) -> list[tuple[Any, ...]]:
    return [(api, values(entry["input_args"]), values(entry["output"])) for api, entry in entries]


def values(tensors: Any) -> list[list[float]]:
    """Return the elements of tensors that have one, or two in ascending order."""
    return [[leaf["Min"], leaf["Max"]][-leaf["shape"][0] :] for leaf in leaves(tensors)]


def given(entry: dict[str, Any], key: str) -> Any:
    leaf = entry["input_kwargs"].get(key, {})
    return leaf.get("value", leaf)


@RANKS
def test_input_of_a_collective_is_taken_before_it_is_overwritten(path: Path, rank: int) -> None:
    dumped = entries(path, "in place", rank)
    assert brief(dumped) == [
        ("all_reduce", [[1.0 + rank]], [[3.0]]),
        ("all_reduce", [[1.0 + rank, 5.0]], [[2.0, 5.0]]),
        ("barrier", [], []),
    ]
    assert [given(entry, "op") for _, entry in dumped] == ["sum", "max", {}]


@RANKS
def test_output_of_an_asynchronous_collective_is_taken_at_the_wait(path: Path, rank: int) -> None:
    assert brief(entries(path, "asynchronous", rank)) == [("all_reduce", [[1.0 + rank]], [[3.0]])]


@RANKS
def test_output_that_was_waited_for_unseen_is_taken_before_it_is_overwritten(path: Path, rank: int) -> None:
    assert brief(entries(path, "future", rank)) == [("all_reduce", [[1.0 + rank]], [[3.0]])]


@RANKS
def test_collectives_that_end_together_have_an_entry_each(path: Path, rank: int) -> None:
    reduced = sorted(entry for entry in brief(entries(path, "many", rank)) if entry[0] == "all_reduce")
    assert reduced == [("all_reduce", [[float(number)]], [[2.0 * number]]) for number in range(runs.MANY)]


@RANKS
def test_receives_from_any_rank_have_their_source_and_number(path: Path, rank: int) -> None:
    peer = "dst" if rank == 0 else "src"
    numbered = [(given(entry, peer), given(entry, "seq")) for _, entry in entries(path, "any source", rank)]
    assert numbered == [(1 - rank, 0), (1 - rank, 1), (1 - rank, 2)]


@RANKS
def test_group_and_number_are_there_whatever_is_chosen(path: Path, rank: int) -> None:
    dumped = entries(path, "outputs", rank)
    assert [(given(entry, "group")["group_ranks"], given(entry, "seq")) for _, entry in dumped] == [
        ([0, 1], 0), ([0, 1], 1), ([0, 1], 2),
    ]  # fmt: skip
    assert brief(dumped)[0] == ("all_reduce", [], [[3.0]])


@RANKS
def test_roots_are_global_ranks(path: Path, rank: int) -> None:
    broadcast, reduce, scatter = (entry for _, entry in entries(path, "rooted", rank))
    assert (given(broadcast, "src"), given(reduce, "dst"), given(reduce, "op"), given(scatter, "src")) == (
        1, 1, SUM, 0,
    )  # fmt: skip
    assert values(broadcast["output"]) == [[2.0]]
    assert values(scatter["input_args"]) == ([[3.0], [4.0]] if rank == 0 else [])
    assert values(scatter["output"]) == [[3.0 + rank]]
    assert rank == 0 or values(reduce["output"]) == [[3.0]]


@RANKS
def test_inputs_and_outputs_of_collectives_over_pieces(path: Path, rank: int) -> None:
    assert brief(entries(path, "pieces", rank)) == [
        ("all_gather", [[1.0 + rank]], [[1.0], [2.0]]),
        ("all_gather_into_tensor", [[1.0 + rank]], [[1.0, 2.0]]),
        ("reduce_scatter_tensor", [[1.0 + rank, 10.0]], [[3.0] if rank == 0 else [20.0]]),
        ("all_to_all_single", [[1.0 + rank, 10.0 + rank]], [[1.0, 2.0] if rank == 0 else [10.0, 11.0]]),
    ]


@pytest.mark.parametrize(
    "program",
    [
        "messages",
        pytest.param("around a guard", marks=needs_guard),
        pytest.param("inside a guard", marks=needs_guard),
    ],
)
def test_messages_name_their_peer_also_where_a_guard_waits_for_them(path: Path, program: str) -> None:
    of_rank_0 = [entry for entry in entries(path, program, 0) if entry[0] in ("send", "recv")]
    assert brief(of_rank_0) == [("send", [[7.0]], []), ("recv", [], [[8.0]])]
    (_, sent), (_, received) = of_rank_0
    assert (given(sent, "dst"), given(sent, "tag"), given(received, "src")) == (1, 3, 1)
    first = next(entry for api, entry in entries(path, program, 1) if api == "recv")
    assert (given(first, "src"), values(first["output"])) == (0, [[7.0]])


@RANKS
def test_reducer_of_ddp_has_an_entry_of_the_backward_pass(path: Path, rank: int) -> None:
    last = entries(path, "reducer", rank)[-1]
    assert brief([last]) == [("all_reduce", [[(1.0 + rank) / 2]], [[1.5]])]
    assert given(last[1], "op") == SUM


@RANKS
def test_group_is_named_by_its_ranks_and_a_checksum_of_its_name(path: Path, rank: int) -> None:
    whole = entries(path, "in place", rank)[0][1]["input_kwargs"]["group"]
    assert whole == entries(path, "in place", 1 - rank)[0][1]["input_kwargs"]["group"]
    assert (whole["type"], whole["group_ranks"]) == ("torch.ProcessGroup", [0, 1])
    assert len(whole["group_id"]) == 8
    assert int(whole["group_id"], 16) >= 0
    dumped = [entry for _, entry in entries(path, "subgroups", rank)]
    alone = next(entry for entry in dumped if entry["input_kwargs"]["group"]["group_ranks"] == [rank])
    assert values(alone["output"]) == [[1.0 + rank]]
    groups = [whole, alone["input_kwargs"]["group"], dumped[-1]["input_kwargs"]["group"]]
    assert len({group["group_id"] for group in groups}) == 3


def test_collective_that_has_not_ended_is_incomplete_and_not_waited_for(path: Path) -> None:
    (receive,) = entries(path, "unfinished", 0)
    assert brief([receive]) == [("recv", [], [])]
    assert receive[1]["incomplete"] is True
    assert entries(path, "unfinished", 1) == []


@RANKS
def test_collective_that_raises_is_incomplete_and_the_next_has_the_next_number(path: Path, rank: int) -> None:
    dumped = [
        (given(entry, "seq"), api, values(entry["output"]), "incomplete" in entry)
        for api, entry in entries(path, "raising", rank)
    ]
    assert sorted(dumped) == [(0, "all_gather_into_tensor", [], True), (1, "all_reduce", [[2.0]], False)]


def test_nan_of_one_rank_is_traced_back_through_the_reducer(path: Path) -> None:
    status, document = run_json("nan-origin", path / "training")
    assert status == 1
    assert [(origin["rank"], origin["name"], origin["kind"]) for origin in document["origins"]] == [
        (1, "Torch.log.0.forward", "computation")
    ]
    assert document["origins"][0]["after"].startswith("Distributed.")
    assert document["origins"][0]["modules"] == ["Module.root.LogOfNegative.forward.0"]


def test_entry_of_a_collective_is_where_the_collective_ended(path: Path) -> None:
    dumped = data(path / "training", 0, "rank1")
    names = [name for name in dumped if name.startswith("Distributed.")]
    assert names == [f"Distributed.all_reduce.{number}.forward" for number in range(len(names))]
    assert dumped[names[-1]]["input_args"][0]["nan_count"] > 0
    order = list(dumped)
    clipped = next(number for number, name in enumerate(order) if "clip" in name or "norm" in name.lower())
    assert order.index(names[-1]) < clipped


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_stack_of_a_collective_begins_in_the_program(tmp_path: Path) -> None:
    with StatsDump({"dump_path": str(tmp_path)}) as dump:
        dist.all_reduce(torch.ones(3))
    dump.step()
    first = open_rank(tmp_path / "step0/rank0").stack_of("Distributed.all_reduce.0.forward")[0]
    assert first.startswith(f"File {__file__}, ")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("method", ["begin", "end"])
def test_error_of_the_dump_does_not_reach_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise ValueError("made up")

    monkeypatch.setattr(f"ddpstats.dump.record.recorder.Recorder.{method}", fails)
    tensor, model = torch.ones(3), DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with StatsDump({"dump_path": str(tmp_path)}) as dump:
        dist.all_reduce(tensor, async_op=True).wait()
        model(torch.ones(1, 1)).sum().backward()
    with pytest.warns(UserWarning, match="could not be collected"):
        dump.step()
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert [parameter.grad for parameter in model.parameters()] == [torch.ones(1, 1)]
    assert "made up" in (tmp_path / "step0/rank0/dump_error_info.log").read_text()
