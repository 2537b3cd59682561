"""What a dump sees of the collectives of two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpstats._observe.torch_groups import operators_tell_reduce_op
from ddpstats.dump import StatsDump
from ddpstats.dump.collect._collectives import _Pending
from ddpstats.dump.collect._recorder import OpenEntry
from ddpstats.dump.format._files import find_ranks, open_rank
from ddpstats.dump.origin._first_nan import find_origins
from ddpstats.dump.origin._nan_origin import read
from ddpstats.testing import run_ranks
from tests.dump import collectives_runs as runs
from tests.dump.collecting import data

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module")
def ranks(path: Path) -> Any:
    return run_ranks(runs.both, 2, str(path), timeout_sec=90).values()


@pytest.fixture(scope="module")
def seen(ranks: Any) -> dict[int, dict[str, Seen]]:
    return {rank: found for rank, (found, *_) in enumerate(ranks)}


def brief(seen: Seen) -> list[tuple[Any, ...]]:
    return [(entry["api"], entry["inputs"], entry["outputs"]) for entry in seen]


def test_what_goes_in_is_taken_before_it_is_written_over(seen: dict[int, dict[str, Seen]]) -> None:
    for rank in (0, 1):
        assert brief(seen[rank]["in place"]) == [
            ("all_reduce", [[1.0 + rank]], [[3.0]]),
            ("all_reduce", [[1.0 + rank, 5.0]], [[2.0, 5.0]]),
            ("barrier", [], []),
        ]
        assert [entry.get("op") for entry in seen[rank]["in place"]] == ["sum", "max", None]


def test_what_an_asynchronous_one_gives_is_taken_at_the_wait(seen: dict[int, dict[str, Seen]]) -> None:
    for rank in (0, 1):
        assert brief(seen[rank]["asynchronous"]) == [("all_reduce", [[1.0 + rank]], [[3.0]])]


def test_roots_are_global_ranks(seen: dict[int, dict[str, Seen]]) -> None:
    for rank in (0, 1):
        broadcast, reduce, scatter = seen[rank]["rooted"]
        assert (broadcast["src"], reduce["dst"], reduce["op"], scatter["src"]) == (1, 1, "sum", 0)
        assert broadcast["outputs"] == [[2.0]]
        assert scatter["inputs"] == ([[3.0], [4.0]] if rank == 0 else [])
        assert scatter["outputs"] == [[3.0 + rank]]
    assert seen[1]["rooted"][1]["outputs"] == [[3.0]]


def test_pieces_go_to_where_they_belong(seen: dict[int, dict[str, Seen]]) -> None:
    for rank in (0, 1):
        assert brief(seen[rank]["pieces"]) == [
            ("all_gather_into_tensor", [[1.0 + rank]], [[1.0, 2.0]]),
            ("reduce_scatter_tensor", [[1.0 + rank, 10.0]], [[3.0] if rank == 0 else [20.0]]),
            ("all_to_all_single", [[1.0 + rank, 10.0 + rank]], [[1.0, 2.0] if rank == 0 else [10.0, 11.0]]),
        ]


def test_messages_name_their_peer(seen: dict[int, dict[str, Seen]]) -> None:
    sent, received = seen[0]["messages"]
    assert (sent["api"], sent["dst"], sent["tag"], sent["inputs"], sent["outputs"]) == ("send", 1, 3, [[7.0]], [])
    assert (received["api"], received["src"], received["inputs"], received["outputs"]) == ("recv", 1, [], [[8.0]])
    assert seen[1]["messages"][0]["src"] == 0
    assert seen[1]["messages"][0]["outputs"] == [[7.0]]


def test_the_reducer_of_ddp_is_seen_inside_backward(seen: dict[int, dict[str, Seen]]) -> None:
    op = "sum" if operators_tell_reduce_op else None  # DDP's reducer is C++ code
    for rank in (0, 1):
        last = seen[rank]["reducer"][-1]
        assert (last["api"], last.get("op"), last["inputs"], last["outputs"]) == (
            "all_reduce", op, [[(1.0 + rank) / 2]], [[1.5]],
        )  # fmt: skip


def test_a_group_is_named_by_its_ranks_and_a_checksum_of_its_name(seen: dict[int, dict[str, Seen]]) -> None:
    whole = seen[0]["in place"][0]["group"]
    assert whole == seen[1]["in place"][0]["group"]
    assert whole["type"] == "torch.ProcessGroup"
    assert whole["group_ranks"] == [0, 1]
    assert len(whole["group_id"]) == 8
    assert int(whole["group_id"], 16) >= 0
    for rank in (0, 1):
        alone = next(entry for entry in seen[rank]["subgroup"] if entry["group"]["group_ranks"] == [rank])
        assert alone["outputs"] == [[1.0 + rank]]
        assert alone["group"]["group_id"] != whole["group_id"]
        assert seen[rank]["subgroup"][-1]["group"]["group_id"] not in (whole["group_id"], alone["group"]["group_id"])


def test_what_is_not_done_is_not_waited_for(seen: dict[int, dict[str, Seen]]) -> None:
    assert brief(seen[0]["never waited for"]) == [("recv", [], [])]
    assert seen[0]["never waited for"][0]["incomplete"] is True
    assert seen[1]["never waited for"] == []


@pytest.mark.parametrize("guard", ["inside", "outside"])
def test_a_guard_that_waits_in_the_program_s_place_is_no_hindrance(ranks: Any, guard: str) -> None:
    found = [entry for entry in ranks[0][1][guard] if entry["api"] in ("send", "recv", "all_reduce")]
    assert brief(found)[:3] == [("send", [[7.0]], []), ("recv", [], [[8.0]]), ("all_reduce", [[1.0]], [[3.0]])]


def test_what_fails_in_the_dump_does_not_fail_in_the_program(ranks: Any) -> None:
    for _, _, (told, got), _ in ranks:
        assert got == [2.0, 1.0]
        assert {"where": "broadcast", "error": "begins"} in told
        assert {entry["error"] for entry in told} == {"begins", "ends"}


def test_a_nan_of_one_rank_is_followed_back_through_the_reducer(ranks: Any, path: Path) -> None:
    scans, _ = read(find_ranks(path))
    findings = find_origins(scans)
    assert [(origin.rank, origin.name, origin.kind) for origin in findings.origins] == [
        (1, "Torch.log.0.forward", "computation")
    ]
    assert findings.phase == "between collectives"
    assert findings.unmatched == ()
    assert findings.origins[0].modules == ("Module.root.Dividing.forward.0",)


def test_the_entry_of_a_collective(ranks: Any, path: Path) -> None:
    entries = json.loads((path / "step0" / "rank1" / "dump.json").read_text())["data"]
    names = [name for name in entries if name.startswith("Distributed.")]
    given = entries["Distributed.all_reduce.0.forward"]["input_kwargs"]
    assert names == [f"Distributed.all_reduce.{number}.forward" for number in range(len(names))]
    assert given["group"]["group_ranks"] == [0, 1]
    assert given["op"] == {"type": "str", "value": "sum"}
    last = entries[names[-1]]
    assert last["input_args"][0]["nan_count"] > 0
    assert list(entries).index(names[-1]) < min(
        place for place, name in enumerate(entries) if "clip" in name or "norm" in name.lower()
    )


def test_a_collective_that_raises_has_an_entry_and_the_others_keep_their_numbers(ranks: Any) -> None:
    for *_, raised in ranks:
        assert [(entry["api"], entry["seq"], entry["outputs"], "incomplete" in entry) for entry in raised] == [
            ("all_gather_into_tensor", 0, [], True),
            ("all_reduce", 1, [[2.0]], False),
        ]


def test_a_work_that_cannot_say_whether_it_is_done_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def is_completed(self) -> bool:
            raise RuntimeError("no such thing")

    recorder = runs.Failing()
    watch = runs.watch_for(recorder)
    for key in (1, 2):
        watch._pending[key] = _Pending(Broken(), OpenEntry("name", {}, 0, None), [], None)
    watch.poll()
    assert not watch._pending
    assert [told["error"] for told in recorder.seen].count("no such thing") == 2


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_what_has_no_end_is_said_to_be_incomplete(tmp_path: Path) -> None:
    def body() -> None:
        dist.all_reduce(torch.ones(3))
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND)

    dumped_in(tmp_path, body)
    found = data(tmp_path, 0, "rank0")
    ended, failed = (found[f"Distributed.all_reduce.{number}.forward"] for number in (0, 1))
    assert "incomplete" not in ended
    assert (failed["incomplete"], failed["output"]) == (True, [])
    assert failed["input_args"][0]["Max"] == 1.0


@pytest.mark.usefixtures("one_rank")
def test_the_stack_of_a_collective_begins_in_the_program(tmp_path: Path) -> None:
    dumped_in(tmp_path, lambda: dist.all_reduce(torch.ones(3)))
    first = open_rank(tmp_path / "step0/rank0").stack_of("Distributed.all_reduce.0.forward")[0]
    assert first.startswith(f"File {__file__}, ")


def dumped_in(path: Path, body: Callable[[], object]) -> None:
    dump = StatsDump({"dump_path": str(path)})
    with dump:
        body()
    dump.step()
