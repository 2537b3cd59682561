"""The guard leaves ordinary programs alone, costs little memory, and refuses bad arguments by name."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from ddpstats import ConfigError, cli, label
from ddpstats._observe import collectives, operators
from ddpstats._ranks.store import StoreSilent, bounded
from ddpstats.guard import collective_guard
from ddpstats.guard.diagnosis import NOTHING, GuardFinding
from ddpstats.guard.guard import _log_once
from ddpstats.guard.notes import NOTES_KEPT, Note, Overrun
from ddpstats.guard.notes_shm import Exchange
from ddpstats.guard.record import diagnose, read_records
from ddpstats.guard.verdicts import Verdicts
from ddpstats.testing import RankDied, RankPool, run_ranks
from tests import programs
from tests.guard import runs
from tests.guard.scenarios import latest_sec
from tests.guard.tiers import tiers
from tests.report.records import event, recording_of

MODES = tiers(["strict"], ["step"])


@pytest.mark.parametrize(
    ("name", "mode"),
    tiers(
        [("reduce_op", "strict"), ("groups_in_different_order", "step"), ("barrier_against_collective", "step")],
        [
            (name, mode)
            for name in ("swap_of_equal_signature", "asynchronous", "many_in_flight", "waited_for_in_threads")
            for mode in ("strict", "step")
        ],
    ),
)
def test_between_hosts_notes_go_through_the_store(two_ranks: RankPool, name: str, mode: str) -> None:
    assert {ending.error for ending in two_ranks.run(runs.over_the_store, name, mode, False).values()} == {"silent"}
    endings = two_ranks.run(runs.over_the_store, name, mode, True).values()
    two_ranks.restart()
    assert {ending.error for ending in endings} == {"CollectiveMismatch"}
    assert endings[0].message == endings[1].message
    assert max(ending.after_sec for ending in endings) < latest_sec(name)


@pytest.mark.parametrize("then", ["step", *tiers([], ["another collective"])])
def test_between_hosts_rank_that_came_through_what_others_wait_in_is_compared_with_them(then: str) -> None:
    for name, text, is_soon in run_ranks(runs.passes_what_others_wait_in, 3, then, timeout_sec=60).values():
        assert (name, is_soon) == ("CollectiveMismatch", True), text
        assert all(part in text for part in ("float32[4]", "float32[5]", "number 2 ")), text


def test_strict_raises_before_anything_is_summed(two_ranks: RankPool) -> None:
    for rank, ends in enumerate(two_ranks.run(runs.values_after_a_mismatch).values()):
        assert ends == dict.fromkeys(("key", "reduce op", "root"), ("CollectiveMismatch", [float(rank)] * 2))


def test_on_mismatch_warn_logs_once_and_goes_on(two_ranks: RankPool) -> None:
    for messages, count in two_ranks.run(runs.warned).values():
        assert len(messages) == 1
        assert "the reduce op" in messages[0]
        assert count == 3
    two_ranks.restart()


@pytest.mark.parametrize(("mode", "expected"), [("strict", "RankMissing"), ("step", "RuntimeError")])
def test_a_rank_that_dies_after_a_warning_brings_no_other_warning(mode: str, expected: str) -> None:
    first, second = run_ranks(runs.warned_and_then_alone, 2, mode)
    assert isinstance(second.error, RankDied)
    messages, error = first.value
    assert len(messages) == 1
    assert error == expected


def test_what_a_rank_concludes_alone_need_not_be_an_error() -> None:
    verdicts = Verdicts.__new__(Verdicts)
    verdicts.ends_by = None
    verdicts.agreement = SimpleNamespace(without_store=lambda *_: GuardFinding(NOTHING, "", "0", 1))  # type: ignore[assignment]
    group: Any = SimpleNamespace(name="0", words="the default group", view=SimpleNamespace(ranks=(0, 1)))
    verdicts.conclude_alone(group, 1, RuntimeError("the store is gone"))


def test_where_a_message_came_from_before_the_guard_the_error_says_that_it_may(two_ranks: RankPool) -> None:
    """A limit, which docs/guard.md names: a guard that is entered between the two ends of a message pairs others."""
    for text in two_ranks.run(runs.message_from_before_the_guard, "strict").values():
        assert "A guard sees no message that was sent before it began: if that is so here, begin it earlier." in text
    two_ranks.restart()


def test_off_touches_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.off).values() == [False, False]


@pytest.mark.slow
def test_memory_is_bounded_by_the_ring() -> None:
    (events, used_bytes), counts_of_rank_1 = run_ranks(runs.many, 2, 11_000, timeout_sec=240).values()
    assert events == counts_of_rank_1[0] == 10_000
    assert 0 < used_bytes < 10 << 20


@pytest.mark.parametrize(
    "arguments",
    [{"mode": "loud"}, {"on_mismatch": "ignore"}, {"check_every": 0}, {"mode": "record"}, {"timeout_sec": -1}],
)
def test_bad_argument_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(reversed(arguments)))):
        collective_guard(**arguments)
    with pytest.raises(ConfigError, match="non-empty"), label(""):
        pass


def test_guard_within_a_guard_does_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _log_once.cache_clear()  # another test of this process may have made it say so
    with collective_guard("strict") as outer:
        for inner in (collective_guard("step"), collective_guard("step"), outer):
            with inner:
                pass
        assert collectives._subscribers
    assert not collectives._subscribers
    nested = [record for record in caplog.messages if "this one does nothing" in record]
    assert nested == ["a collective_guard of mode 'strict' is active: this one does nothing."]


def test_another_torch_is_refused_and_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(operators.OPERATORS["allreduce_"], schema="inout:tensors process_group something_new")
    monkeypatch.setitem(operators.OPERATORS, "allreduce_", changed)
    before = dist.Work.wait
    with pytest.raises(ConfigError, match=r"no c10d::allreduce_\(tensors, process_group, something_new\)"):
        collective_guard("strict").__enter__()
    assert not collectives._subscribers
    assert dist.Work.wait is before


# -- the pure parts ---------------------------------------------------------------------------------------------------


def test_ranks_of_one_host_share_memory_also_where_the_store_was_silent_at_first() -> None:
    store: Any = bounded(HashStore())
    with contextlib.closing(Exchange(store, 0, 2)) as first, contextlib.closing(Exchange(store, 1, 2)) as second:
        with mock.patch.object(type(store), "counted", side_effect=[2, StoreSilent("late")]):
            assert first.look(1) is None
        assert second.look(1) is None
        second.post(1, Note(7))  # into the memory alone
        first.post(1, Note(7))
        assert first.look(1) == [Note(7), Note(7)]


def test_rank_that_writes_into_shared_memory_alone_is_not_absent() -> None:
    store: Any = bounded(HashStore())
    with contextlib.closing(Exchange(store, 0, 2)) as first, contextlib.closing(Exchange(store, 1, 2)) as second:
        assert second.look(1) is None
        second.post(1, Note(7))
        with mock.patch.object(type(store), "find", side_effect=StoreSilent("late")):
            assert first.look(1) is None
        assert first.absent(1) == [0]


def test_notes_that_all_ranks_have_passed_are_deleted_from_the_store() -> None:
    store: Any = bounded(HashStore())
    with runs.without_shared_memory():
        ranks = [Exchange(store, index, 2) for index in range(2)]
    for seq in range(1, NOTES_KEPT + 2):
        for index, rank in enumerate(ranks):
            rank.post(seq, Note(seq, 0, index))  # one has a label, which is no difference
    assert ranks[0].wait(2, lambda: None) == [Note(2, 0, 0), Note(2, 0, 1)]
    with pytest.raises(Overrun):
        ranks[0].wait(1, lambda: None)
    assert not [key for key in ("note/1/0", "note/1/1", "all/1", "posted/1") if store.check([key])]


def test_memory_that_is_gone_is_not_written_to(tmp_path: Path) -> None:
    store: Any = bounded(HashStore())
    Exchange(store, 0, 2).close()
    victims = [(tmp_path / str(number)).open("w+b") for number in range(8)]  # one of them gets the descriptor's number
    for victim in victims:
        victim.write(bytes(1 << 20))
        victim.flush()
    with contextlib.closing(Exchange(store, 1, 2)) as exchange:
        for seq in range(1, 600):
            exchange.post(seq, Note(seq))
    for victim in victims:
        victim.close()
    assert not exchange.is_quick
    assert all((tmp_path / str(number)).read_bytes() == bytes(1 << 20) for number in range(8))


@pytest.mark.parametrize("mode", MODES)
def test_second_default_group_within_one_guard_is_compared(mode: str) -> None:
    first, second = run_ranks(runs.guarded, 2, mode, runs.two_lives).values()
    assert first == second
    assert "What differs: the reduce op" in first


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("failure/0/alarm", "5"),
        ("failure/0/alarm", "[]"),
        ("left/1", "1 [1]"),
        ("left", "1"),
        ("left/1", "9" * 5000 + " x"),
    ],
)
def test_foreign_bytes_in_the_store_do_no_harm(two_ranks: RankPool, key: str, value: str) -> None:
    assert two_ranks.run(runs.foreign_bytes, key, value).values() == ["silent"] * 2


def test_two_guards_of_one_program_share_a_record(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(runs.guarded_twice, str(tmp_path)).values()
    records = read_records(tmp_path)
    assert [len(record.events) for record in records] == [2, 2]
    (finding,) = diagnose(records)
    assert "What differs: the reduce op" in finding.message


def test_records_of_an_older_run_are_left_out(tmp_path: Path) -> None:
    for rank in range(3):
        recording_of(tmp_path, rank, 3, "older").close()
    for rank in range(2):
        recording_of(tmp_path, rank, 2, "newer").close()
    assert [(record.rank, record.world_size) for record in read_records(tmp_path)] == [(0, 2), (1, 2)]


def test_a_record_is_bounded_and_says_that_it_was_cut(tmp_path: Path) -> None:
    writer = recording_of(tmp_path, 0, 1, max_bytes=20_000)
    for seq in range(1, 500):
        writer.write(event(seq, None).as_dict())
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    (record,) = read_records(tmp_path)
    assert not record.complete
    assert record.events[-1].seq == 499
    assert len(record.events) > 40


@pytest.mark.parametrize("mode", MODES)
def test_weak_evidence_is_one_warning_of_rank_0_and_that_call_site_is_not_compared_again(
    two_ranks: RankPool, mode: str
) -> None:
    (messages, verdicts), (of_rank_1, verdicts_of_rank_1) = two_ranks.run(runs.doubted, mode, 20).values()
    assert of_rank_1 == []
    (message,) = messages
    assert "'anna'" in message
    assert "'dora'" in message
    # Ranks may notice another of the first step's three collectives first; the 57 that follow are not compared.
    assert 1 <= verdicts == verdicts_of_rank_1 <= 3


@pytest.mark.parametrize("mode", MODES)
def test_fault_at_another_call_site_raises_after_a_warning(two_ranks: RankPool, mode: str) -> None:
    first, second = two_ranks.run(runs.fault_after_a_doubt, mode).values()
    assert first == second
    assert "'ctc'" in first


def _python(code: str, **variables: str) -> str:
    done = programs.run(["-c", code], environ=variables)
    assert done.returncode == 0, done.stderr
    return programs.without_gloo(done.stdout)


def test_ddpstats_disable_disables_the_guard_which_leaves_sys_exit_alone() -> None:
    code = "import sys; from ddpstats._observe import collectives; print(len(collectives._subscribers), sys.exit)"
    assert _python(code, DDPSTATS_GUARD="step") == "1 <built-in function exit>\n"
    assert _python(code, DDPSTATS_GUARD="step", DDPSTATS_DISABLE="1").startswith("0 ")


def test_first_of_several_guards_that_compare_nothing_says_so() -> None:
    code = (
        "import logging, sys; from ddpstats import collective_guard\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "for _ in range(3):\n"
        "    with collective_guard('step'): pass"
    )
    assert _python(code).count("WARNING:ddpstats:collective guard, mode step: 0 collectives seen, nothing was") == 1


_ONE_RANK = (
    "import gc, logging, sys, ddpstats, torch.distributed as dist; from ddpstats._observe import groups\n"
    "logging.basicConfig(stream=sys.stdout)\n"
    "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
)


@pytest.mark.parametrize(("collectives", "level"), [(1, "INFO"), (0, "WARNING")])
def test_guard_that_only_records_warns_where_it_has_recorded_nothing(
    collectives: int, level: str, tmp_path: Path
) -> None:
    code = f"logging.root.setLevel('INFO')\nfor _ in range({collectives}): dist.barrier()"
    output = _python(_ONE_RANK + code, DDPSTATS_GUARD="record", DDPSTATS_RECORD_DIR=str(tmp_path / "records"))
    assert output.startswith(f"{level}:ddpstats:collective guard, mode record: {collectives} collective")
    assert ("mode 'record' compares nothing while it runs; `ddpstats report DIR` does" in output) == (collectives > 0)


def test_group_that_outlives_the_packages_names_ends_silently() -> None:
    """As where the interpreter ends with a traceback that holds the group."""
    code = (
        "sys.unraisablehook = lambda found: print(found.exc_value)\n"
        "kept = groups.view_of(dist.group.WORLD)\n"
        "groups._views = None\n"
        "dist.destroy_process_group()\n"
        "gc.collect()"
    )
    assert _python(_ONE_RANK + code) == ""


@pytest.mark.parametrize(
    ("mode", "on_mismatch", "limit_sec"),
    tiers([("strict", "warn", 2)], [("strict", "raise", 8), ("step", "raise", 8)]),
)
def test_rank_that_does_not_come_is_missing_after_the_limit_of_the_environment(
    mode: str, on_mismatch: str, limit_sec: int
) -> None:
    """The longer limit shows a verdict that is twice as late."""
    env = {"DDPSTATS_TIMEOUT_SEC": str(limit_sec)}
    error, missing, waited_sec = run_ranks(runs.waits_alone, 2, mode, on_mismatch, env=env, timeout_sec=60).values()[0]
    assert (error, missing) == ("RankMissing", (1,))
    assert limit_sec <= waited_sec < limit_sec + 6.0


@pytest.mark.parametrize(
    ("mode", "how"),
    tiers(
        [("strict", "recv"), ("step", "both send")],
        [("strict", "send"), ("step", "send, slow"), ("step", "isend")],
    ),
)
def test_message_without_its_other_end_names_both_ranks_and_the_call_to_make(mode: str, how: str) -> None:
    messages = run_ranks(runs.unmet, 2, mode, how, timeout_sec=60).values()
    assert messages[1] == messages[0]
    head, did, site, source, peer_line, advice, *before = messages[0].split("\n")
    waits, peer = "0", "1"
    if how == "recv":
        assert head.startswith(f"({peer},) rank {waits} waits for a message from rank {peer}, which has not come (the")
        call = f"send(dst={waits}, tag=7)"
    else:
        assert head.startswith(f"({peer},) rank {waits} sends a message to rank {peer}, which has not received it (the")
        call = f"recv(src={waits}, tag=7)"
    called = f"recv(float32[3]) from rank {peer}" if how == "recv" else f"send(float32[3]) to rank {peer}"
    assert did == f"  rank {waits}: {called}, tag 7"
    assert site.endswith("in unmet")
    assert "dist." in source
    assert "; its last known collective was " in peer_line
    assert (f"  rank {peer}: left the guard;" in peer_line) == (how in ("send", "isend", "recv"))
    assert f"Make rank {peer} call dist.{call} with a tensor of this shape and dtype" in advice
    first, answer = ("receive", "send") if how == "recv" else ("send", "receive")
    assert f"Where both ranks {first} first, let one of them {answer} first." in advice
    begin_earlier = "A guard sees no message that was sent before it began: if that is so here, begin it earlier."
    assert before == ([begin_earlier] if how == "recv" else [])


def test_abandoning_compares_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(runs.abandoned).values() == ["fine"] * 2
    two_ranks.restart()


def test_report_prints_weak_evidence_and_does_not_call_it_a_fault(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(runs.recorded_under_own_names, str(tmp_path))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "'anna'" in capsys.readouterr().out
