"""Messages between two ranks, and what may differ between ranks: no error, little cost, and words that fit."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddpstats
from ddpstats._base.text import Rank
from ddpstats._ranks.store import BoundedStore
from ddpstats.guard import collective_guard
from ddpstats.guard.diagnosis import Alarm, RankStatus, find, find_unmatched, message_place, what_differs
from ddpstats.guard.event import BY_TORCH, MESSAGES, Event, Signature, digest_of, label_word
from ddpstats.guard.labels import read, trace
from ddpstats.testing import RankPool, run_ranks
from tests.guard.runs import guarded
from tests.guard.tiers import tiers

# -- what runs on the ranks -------------------------------------------------------------------------------------------


def two_stages() -> None:
    """Run two stages of torch's own pipelining, which warm up by sending a 0-d tensor into a 1-d one."""
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = pipeline(model, mb_args=(torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    schedule.step(*([torch.ones(4, 4)] if rank == 0 else []))


def equal_elements() -> None:
    """Ranks pass as many elements of one dtype in other shapes, to all kinds of collectives."""
    rank = dist.get_rank()

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count) if rank == 0 else torch.ones(1, count)

    dist.all_reduce(torch.ones([]) if rank == 0 else torch.ones(1))
    dist.all_reduce(ones(4))
    dist.broadcast(ones(4), src=0)
    dist.all_gather([ones(4), ones(4)], ones(4))
    whole = torch.ones(8) if rank == 0 else torch.ones(2, 4)
    dist.all_gather_into_tensor(whole, ones(4))
    dist.reduce_scatter_tensor(ones(4), whole)
    dist.gather(ones(2), [torch.ones(2), torch.ones(2)] if rank == 0 else None, dst=0)
    dist.scatter(ones(2), [torch.ones(2), torch.ones(2)] if rank == 0 else None, src=0)
    sent = torch.ones(4, 2) if rank == 0 else torch.ones(4, 1, 2)
    dist.all_to_all_single(
        torch.empty_like(sent), sent, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1]
    )
    if rank == 0:
        dist.send(torch.ones([]), 1)
    else:
        dist.recv(torch.zeros(1), 0)


def many_sends(count: int) -> None:
    """The sender waits for none of its messages until all are under way."""
    if dist.get_rank() == 0:
        works: list[Any] = [dist.isend(torch.ones(1), 1) for _ in range(count)]
        dist.barrier()
        for work in works:
            work.wait()
    else:
        dist.barrier()
        for _ in range(count):
            dist.recv(torch.empty(1), 0)


def questions_of_messages(mode: Any, count: int) -> int:
    """Return how often this thread asks the store while it exchanges so many messages."""
    asked = []

    def exchange() -> None:
        for _ in range(count):
            if dist.get_rank() == 0:
                dist.send(torch.ones(1), 1)
            else:
                dist.recv(torch.empty(1), 0)

    def use(store: BoundedStore, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            asked.append(args)
        return original(store, *args, **kwargs)

    original = BoundedStore.use
    with collective_guard(mode, timeout_sec=20):
        dist.barrier()
        exchange()
        with mock.patch.object(BoundedStore, "use", use):
            exchange()
    return len(asked)


def message_of_limited_group(mode: Any, is_sent: bool) -> tuple[str, str]:
    """Rank 1 receives into another dtype, or in vain, in a group whose own timeout is two seconds."""
    group, store = dist.new_group(timeout=timedelta(seconds=2)), dist.distributed_c10d._get_default_store()
    try:
        with collective_guard(mode):
            if dist.get_rank() == 1:
                dist.recv(torch.empty(4, dtype=torch.int32), 0, group=group)
            elif is_sent:
                dist.send(torch.ones(4), 1, group=group)
            else:
                store.wait(["received"], timedelta(seconds=30))
    except Exception as error:
        store.set("received", "")
        return type(error).__name__, f"{error} {getattr(error, '__notes__', '')}"
    return "silent", ""


def labelled_on_one_rank(mode: Any, steps: int) -> int:
    """Return how often all objects of the process were looked at, while ranks train with DDP and one of them labels."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with mock.patch.object(gc, "get_objects", side_effect=gc.get_objects) as objects, collective_guard(mode) as guard:
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            if dist.get_rank() == 0:
                with ddpstats.label("loss"):
                    dist.all_reduce(torch.ones(1))
            else:
                dist.all_reduce(torch.ones(1))
            guard.step()
    return objects.call_count


def evidence_worked_out(mode: Any, directory: str) -> int:
    """Return how often evidence for a label is worked out, where ranks reduce the same two keys ten times."""
    stats = {"loss": torch.ones(1), "acc": torch.ones(1)}
    with mock.patch.object(read, "use_of", side_effect=trace.use_of) as work_out:
        with collective_guard(mode, record_dir=directory if mode == "record" else None) as guard:
            for _ in range(10):
                for key in stats:
                    dist.all_reduce(stats[key])
                guard.step()
        return work_out.call_count


def swapped_lines(mode: Any) -> int:
    """Return how many warnings this rank logs of two pairs of lines that ranks run in another order."""
    with mock.patch("ddpstats.guard.pipeline.log.warning") as warning, collective_guard(mode, timeout_sec=20):
        for _ in range(3):
            metrics = {name: torch.ones(1) for name in ("loss", "accuracy", "first", "second")}
            if dist.get_rank() == 0:
                _reduce_loss(metrics)
                _reduce_accuracy(metrics)
            else:
                _reduce_accuracy(metrics)
                _reduce_loss(metrics)
            if dist.get_rank() == 0:
                dist.all_reduce(metrics["first"]), dist.all_reduce(metrics["second"])
            else:
                dist.all_reduce(metrics["second"]), dist.all_reduce(metrics["first"])
    return warning.call_count


def _reduce_loss(metrics: dict[str, torch.Tensor]) -> None:
    dist.all_reduce(metrics["loss"])


def _reduce_accuracy(metrics: dict[str, torch.Tensor]) -> None:
    dist.all_reduce(metrics["accuracy"])


# -- tests ------------------------------------------------------------------------------------------------------------


MODES = tiers(["strict"], ["step"])


@pytest.mark.library
@pytest.mark.parametrize("mode", ["strict", "step"])
def test_pipelining_of_torch_runs(mode: str) -> None:
    assert run_ranks(guarded, 2, mode, two_stages, timeout_sec=60).values() == ["silent"] * 2


@pytest.mark.parametrize("mode", MODES)
def test_other_shapes_of_as_many_elements_are_legal(two_ranks: RankPool, mode: str) -> None:
    assert two_ranks.run(guarded, mode, equal_elements).values() == ["silent"] * 2


@pytest.mark.parametrize("mode", MODES)
def test_sender_may_have_any_number_of_messages_under_way(two_ranks: RankPool, mode: str) -> None:
    assert two_ranks.run(guarded, mode, many_sends, 1100).values() == ["silent"] * 2


@pytest.mark.parametrize("mode", tiers(["step"], ["strict"]))
def test_messages_do_not_ask_the_store(two_ranks: RankPool, mode: str) -> None:
    assert two_ranks.run(questions_of_messages, mode, 40).values() == [0, 0]


@pytest.mark.parametrize(("mode", "is_sent"), tiers([("strict", True), ("step", False)], [("step", True)]))
def test_timeout_of_the_group_ends_a_message_with_torchs_error_unless_a_mismatch_is_known(
    mode: str, is_sent: bool
) -> None:
    of_sender, of_receiver = run_ranks(message_of_limited_group, 2, mode, is_sent, timeout_sec=60).values()
    if is_sent:
        assert of_sender == of_receiver
        assert of_sender[0] == "CollectiveMismatch"
        assert "What differs: the dtype." in of_sender[1]
    else:
        assert of_sender == ("silent", "")
        assert of_receiver[0] == "RuntimeError"
        assert "recv(int32[4]) from rank 0, tag 0 was not completed in time, at " in of_receiver[1]


def test_objects_of_the_process_are_not_looked_at_where_only_labels_differ(two_ranks: RankPool) -> None:
    assert two_ranks.run(labelled_on_one_rank, "step", 3).values() == [0, 0]


@pytest.mark.parametrize(("mode", "count"), tiers([("step", 0)], [("strict", 0), ("record", 1)]))
def test_evidence_is_worked_out_where_ranks_differ_or_once_for_a_record(
    two_ranks: RankPool, mode: str, count: int, tmp_path: Path
) -> None:
    assert two_ranks.run(evidence_worked_out, mode, str(tmp_path)).values() == [count] * 2


SIGNATURE = Signature("all_reduce", "sum", None, ((4,),), ("float32",))


def event(label: str | None = None, **changes: Any) -> Event:
    signature = replace(SIGNATURE, **changes)
    return Event("0", 1, signature, label, label_word(label), "train.py:3 in step", digest_of(signature))


@pytest.mark.parametrize(
    ("changes", "difference", "words"),
    [
        ({"op": "broadcast", "reduce_op": None}, "the operation", "same order"),
        ({"reduce_op": "max"}, "the reduce op", "op="),
        ({"root": 1}, "the root", "src="),
        ({"shapes": ((5,),)}, "the shape", "one shape"),
        ({"dtypes": ("int32",)}, "the dtype", "one dtype"),
        ({"strides": ((2,),)}, "the memory format: elements", "contiguous"),
        ({}, "the pieces that ranks", "split sizes"),
    ],
)
def test_the_fix_fits_what_differs(changes: dict[str, Any], difference: str, words: str) -> None:
    (first, *more) = what_differs([event(), event(**changes)])
    assert first.words.startswith(difference)
    assert not more
    assert words in first.remedy
    assert "label(" not in first.remedy


def test_all_that_differs_is_named_and_shapes_of_as_many_elements_do_not_differ() -> None:
    differences = what_differs([event("a"), event("b", reduce_op="max", shapes=((2,),))])
    assert [difference.words for difference in differences] == ["the reduce op", "the shape", "the label"]
    (gradients,) = what_differs([event(BY_TORCH), event()])
    assert gradients.words.startswith("the label: one reduces gradients")
    assert "same order" in gradients.remedy
    (labels,) = what_differs([event("a"), event("b", shapes=((2, 2),))])
    assert labels.words.startswith("the label: ")
    assert "label(" in labels.remedy


def text_of(*statuses: RankStatus, overdue: int | None = None, group: str = "0") -> str:
    alarm = Alarm(group, "the default group", tuple(range(4)), overdue or 0, overdue=overdue is not None)
    finding = find(alarm, statuses)
    assert finding is not None
    return finding.message


def test_ranks_have_their_group_ranks_beside_them() -> None:
    alarm = Alarm("1", "group 'model' of ranks 1, 3", (3, 1), 1, overdue=False)
    calls = {rank: replace(event(shapes=((rank,),)), seq=1) for rank in alarm.ranks}
    finding = find(alarm, [RankStatus(rank, [call], count=1) for rank, call in calls.items()])
    assert finding is not None
    assert "  rank 1: all_reduce" in finding.message
    assert "  rank 3 (group rank 0): all_reduce" in finding.message
    unordered = find(replace(alarm, ranks=()), [RankStatus(rank, [call], count=1) for rank, call in calls.items()])
    assert unordered is not None
    assert "group rank" not in unordered.message
    received = replace(event(), signature=replace(event().signature, op="recv"), peer=3)
    advice = find_unmatched(received, Rank(1, 0), "the group", None).message
    assert "  rank 1 (group rank 0): recv" in advice
    assert "dist.send(dst=1, tag=" in advice


def test_rank_that_skipped_a_call_is_named() -> None:
    first, second, third = (replace(event(shapes=((size,),)), seq=seq) for size, seq in ((4, 1), (5, 2), (6, 3)))
    skips = [replace(second, seq=1), replace(third, seq=2)]
    statuses = [RankStatus(rank, skips if rank == 1 else [first, second], 2) for rank in range(3)]
    assert "Likely: rank 1 skipped a call, or ranks 0, 2 made one more.\n" in text_of(*statuses)
    statuses = [RankStatus(rank, skips[:1] if rank == 1 else [first, second], 2) for rank in range(3)]
    assert "Likely: rank 1 skipped a call or makes it later, or ranks 0, 2 made one more.\n" in text_of(*statuses)


def test_calls_that_come_in_another_order_are_so_named() -> None:
    reduced, gathered = event(), event(op="all_gather", reduce_op=None)
    ranks = [[reduced, gathered], [gathered, reduced], [reduced, gathered]]
    statuses = [
        RankStatus(rank, [replace(call, seq=seq) for seq, call in enumerate(calls, 1)], 2)
        for rank, calls in enumerate(ranks)
    ]
    text = text_of(*statuses)
    assert "the order is swapped: ranks 0, 2 and rank 1 run the same two collectives in different order" in text
    assert "skipped" not in text


def message(op: str, peer: int, started: float, tag: int = 0) -> Event:
    call = event(op=op, reduce_op=None)
    return replace(call, group="0" + MESSAGES, peer=peer, tag=tag, started=started)


def waiting(rank: int, *messages: Event) -> RankStatus:
    last = messages[-1]
    return RankStatus(rank, waits_in=(last.group, message_place(last), ""), last=last.in_full(), messages=messages)


def test_message_of_another_tag_is_the_fault_where_both_ranks_wait_to_receive() -> None:
    first = waiting(0, message("recv", 1, 5.0))
    second = waiting(1, message("send", 0, 5.0, tag=9), message("recv", 0, 6.0))
    assert "What differs: the tag." in text_of(first, second, overdue=1, group="0" + MESSAGES)


@pytest.mark.parametrize("op", ["send", "recv"])
def test_where_the_other_end_of_a_message_raised_its_output_is_what_to_look_at(op: str) -> None:
    raised = RankStatus(1, left="left the guard by ValueError: no data")
    text = text_of(waiting(0, message(op, 1, 5.0)), raised, overdue=1, group="0" + MESSAGES)
    assert "rank 1: left the guard by ValueError: no data; " in text
    assert text.endswith("\nLook at the output of rank 1 first.")


def test_two_lines_in_swapped_order_are_warned_of_once(two_ranks: RankPool) -> None:
    assert sorted(two_ranks.run(swapped_lines, "strict").values()) == [0, 2]
