"""A program under DDPSTATS_GUARD or ``ddpstats run`` is compared to its end, and one rank prints the verdict."""

from __future__ import annotations

import re
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpstats.errors import CollectiveMismatch
from ddpstats.guard import GuardCounters, printing
from ddpstats.guard.event import EVENT_BYTES, Event, Signature, decode, digest_of, encode
from ddpstats.guard.notes_shm import Exchange
from ddpstats.guard.printing import MESSAGES_SEEN, Tally, in_short, last_line
from ddpstats.guard.record import read_records
from tests import programs
from tests.guard.tiers import tiers
from tests.programs import Ended, alone, by_torchrun, ddpstats, of_torchrun, on_ranks
from tests.report.records import event

LOGS = """
    import logging
    logging.basicConfig(level=logging.INFO)
"""
HEAD = """
    import sys
    import ddpstats, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank, how = dist.get_rank(), sys.argv[1]
"""
FAULTY = """
    stats = {"loss": torch.ones(()), ("l1" if rank else "snr"): torch.ones(())}
    for key in stats:
        dist.all_reduce(stats[key])
"""
LEGAL = """
    for _ in range(5):
        dist.all_reduce(torch.ones(1))
"""
ENDS = """
    if how == "destroy":
        dist.destroy_process_group()
    elif how == "destroy, imported before":
        destroy()
    elif how == "destroy in finally":
        try:
            raise ValueError("of the program")
        finally:
            dist.destroy_process_group()
    elif how == "caught":
        try:
            dist.destroy_process_group()
        except ddpstats.CollectiveMismatch:
            pass
    elif how == "at exit":
        import atexit
        atexit.register(dist.destroy_process_group)
    elif how == "thread":
        import threading
        threading.Thread(target=dist.all_reduce, args=(torch.ones(2),)).start()
    elif how.startswith("exit "):
        sys.exit(int(how[5:]))
    elif how == "raise on rank 1" and rank:
        raise ValueError("of the program")
    elif how == "a moment later" and rank:
        import time
        time.sleep(2)
    elif how == "os._exit on rank 1" and rank:
        import os
        os._exit(0)
    elif how == "destroy on rank 0" and rank == 0:
        dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("run", "how"),
    tiers(
        [(on_ranks, "nothing more"), (on_ranks, "raise on rank 1")],
        [
            (by_torchrun, "exit 3"),
            *((on_ranks, how) for how in ("destroy, imported before", "destroy in finally", "caught", "at exit")),
        ],
    ),
)
def test_mismatch_that_is_left_at_the_end_is_printed_by_one_rank(
    script: Any, run: Callable[..., Ended], how: str
) -> None:
    imported = "from torch.distributed import destroy_process_group as destroy\n"
    done = run(script(imported, HEAD, FAULTY, ENDS), how, DDPSTATS_GUARD="step")
    assert set(done.statuses) == {1}, done.stderr
    assert "'snr'" in done.stderr
    assert "'l1'" in done.stderr
    assert len(re.findall(r"^(?:\[rank0\]: )?What differs", done.stderr, re.MULTILINE)) == 1
    assert done.stderr.count("rank 1: CollectiveMismatch: rank 0: all_reduce(") == 1
    assert "ddpstats/guard" not in done.stderr
    assert ("of the program" in done.stderr) == (how in ("raise on rank 1", "destroy in finally"))
    _assert_printed_once(done)


def _assert_printed_once(done: Ended) -> None:
    """Assert that one rank prints it in full, and torchrun its most important line."""
    printed = done.stderr + done.first
    assert printed.count("The guard cannot tell which rank is right.") == 1, printed
    assert printed.count("Likely: rank 1 lacks key 'snr'") == 1
    line = done.first
    assert re.search(r"rank 0: all_reduce\(float32\[\], sum\) 'snr' at \S*train.py:\d+ in <module>; rank 1: ", line)
    assert "'l1'" in line
    assert "What differs: the label" in line
    assert line.endswith("The output of rank 0 has it in full.")


@pytest.mark.slow
def test_status_that_the_program_asks_for_stays_under_run(script: Any) -> None:
    done = on_ranks("-m", "ddpstats", "run", "--guard", "step", script(HEAD, FAULTY, ENDS), "exit 3")
    assert done.statuses == [3, 3], done.stderr
    _assert_printed_once(done)


CAUGHT = """
    try:
        for key in {"loss": 1, ("l1" if rank else "snr"): 2}:
            with ddpstats.label(key):
                dist.all_reduce(torch.ones(1 if rank and key == "l1" else 2))
    except Exception:
        print("caught")
"""


@pytest.mark.parametrize(
    ("run", "how", "status"),
    tiers([(("-m", "ddpstats", "run"), "nothing more", 0)], [((), "nothing more", 0), ((), "exit 3", 3)]),
)
def test_verdict_that_the_program_has_caught_is_printed_at_its_end(
    script: Any, run: tuple[str, ...], how: str, status: int
) -> None:
    """One rank prints it in full; the status is the program's."""
    done = on_ranks(*run, script(LOGS, HEAD, CAUGHT, ENDS), how, DDPSTATS_GUARD="strict")
    assert (done.statuses, done.stdout.count("caught")) == ([status] * 2, 2), done.stderr
    assert len(re.findall("^What differs: the shape and the label.$", done.stderr, re.MULTILINE)) == 1
    assert done.stderr.count("The guard cannot tell which rank is right.") == 1
    assert done.stderr.count("rank 1: CollectiveMismatch: rank 0: all_reduce(") == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "collective guard, mode strict" in line]
    assert "; its verdict was CollectiveMismatch: rank 0: all_reduce(float32[2], sum) 'snr' at " in line


@pytest.mark.slow
def test_no_daemonic_child_is_left_where_a_verdict_ends_the_process(script: Any) -> None:
    child = """
    import multiprocessing, time
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True)
    child.start()
    print("child", child.pid)
"""
    done = on_ranks(script(HEAD, child, FAULTY), "", DDPSTATS_GUARD="step")
    assert done.statuses == [1, 1], done.stderr
    children = [int(pid) for pid in re.findall(r"^child (\d+)", done.stdout, re.MULTILINE)]
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_runs, children))


def _runs(pid: int) -> bool:
    """Return whether that process runs; one that has ended may wait for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


LATE = """
    import time

    for step in range(3):
        time.sleep(100 * rank * (step == 2))
        try:
            dist.all_reduce(torch.ones(1))
        except ddpstats.RankMissing:
            if how == "raises":
                raise
            sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("run", "how", "status"), [(by_torchrun, "raises", 1), (on_ranks, "exits with 3", 3)])
def test_rank_of_run_ends_with_its_own_status_after_it_gave_up(
    script: Any, run: Callable[..., Ended], how: str, status: int
) -> None:
    """Gloo would wait until the timeout of the process group, and torchrun for the rank.

    This is so also where nothing but the guard's verdict keeps the process group, as without a record.
    """
    began = time.monotonic()
    done = run("-m", "ddpstats", "run", "--guard", "step", "--timeout-sec", "2", script(HEAD, LATE), how)
    assert time.monotonic() < began + 60
    assert status in done.statuses, done.stderr
    assert how != "raises" or "rank 1: did not take part" in done.stderr
    assert how != "raises" or "RankMissing" in done.first


RECORDED = """
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        dist.destroy_process_group()

    main()
"""


@pytest.mark.slow
def test_run_does_not_repeat_what_a_rank_has_printed(script: Any) -> None:
    done = ddpstats("run", "--nproc", "2", "--guard", "step", script(HEAD, FAULTY, RECORDED), "destroy")
    assert done.returncode == 1
    _assert_printed_once(of_torchrun(done))
    assert "left a record" not in done.stderr


def test_rank_of_run_prints_it_once(script: Any) -> None:
    done = on_ranks("-m", "ddpstats", "run", "--guard", "step", script(HEAD, FAULTY, ENDS), "destroy")
    assert set(done.statuses) == {1}
    _assert_printed_once(done)


BEFORE_PRINTING = """
    import os, signal, time

    try:
        dist.destroy_process_group()
    finally:
        if rank == 0 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 0:
            time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "statuses"), [("killed", [-signal.SIGKILL, 1]), ("ended by torchrun", [1, 1])])
def test_what_differs_is_printed_where_the_rank_that_prints_it_is_ended_before(
    script: Any, how: str, statuses: list[int]
) -> None:
    done = on_ranks(script(HEAD, FAULTY, BEFORE_PRINTING), how, DDPSTATS_GUARD="step")
    assert done.statuses == statuses
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rank 1: CollectiveMismatch: rank 0: ")]
    assert "'snr' at " in line
    assert "'l1' at " in line
    assert done.stderr.count("The guard cannot tell which rank is right.") == (how != "killed")


def test_hook_of_a_process_group_that_is_made_after_a_verdict_ends_in_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooked: list[object] = []
    monkeypatch.setattr(printing, "_original_hook", None)
    monkeypatch.setattr(printing, "_newest", None)
    monkeypatch.setattr(sys, "excepthook", lambda *error: hooked.append(error))
    for _ in range(2):
        printing.print_once(CollectiveMismatch("", group="0", seq=1), 0, 0, lambda: False)
        before = sys.excepthook
        monkeypatch.setattr(sys, "excepthook", lambda *error, before=before: before(*error))
    error = ValueError()
    sys.excepthook(ValueError, error, None)
    assert hooked == [(ValueError, error, None)]


@pytest.mark.parametrize(
    ("run", "how"),
    tiers(
        [(on_ranks, "nothing more"), (on_ranks, "os._exit on rank 1")],
        [
            (by_torchrun, "nothing more"),
            *((on_ranks, how) for how in ("exit 0", "a moment later", "destroy on rank 0", "thread")),
        ],
    ),
)
def test_legal_program_ends_as_without_the_guard(script: Any, run: Callable[..., Ended], how: str) -> None:
    done = run(script(LOGS, HEAD, LEGAL, ENDS), how, DDPSTATS_GUARD="step")
    assert not any(done.statuses), done.stderr
    if how == "os._exit on rank 1":
        assert "nothing was compared: rank 1 had ended without a last comparison" in done.stderr
        return
    count = 6 if how == "thread" else 5
    line = (
        f"INFO:ddpstats:collective guard, mode step: {count} collectives seen, {count} compared, 0 not; 2 ranks agree."
    )
    assert done.stderr.count(line) == 1


METERS = """
    values = {"loss": 1.0, "accuracy": 0.5}

    class Meter:
        def __init__(self, total):
            self.count, self.total = 1, total

        def synchronize(self):  # as DETR's
            both = torch.tensor([self.count, self.total])
            dist.all_reduce(both)
            self.count, self.total = both.tolist()

    meters = {key: Meter(values[key]) for key in (reversed(values) if rank else values)}
    for name, meter in meters.items():
        meter.synchronize()
"""


def test_last_line_says_that_names_differed(script: Any) -> None:
    done = on_ranks(script(LOGS, HEAD, METERS, ENDS), "destroy", DDPSTATS_GUARD="step")
    assert not any(done.statuses), done.stderr
    assert "combine values under different names" in done.stderr
    assert done.stderr.count("2 ranks agree. 1 warning of names that differ, which are not compared again.") == 1


SIZES = """
    dist.all_reduce(torch.ones(4))
    if how == "at the same moment":  # neither has seen what the other says
        from ddpstats.guard import notes_shm
        announce = notes_shm.Exchange.announce
        notes_shm.Exchange.announce = lambda *args: announce(*args) and False
    if how == "message":
        if rank:
            dist.send(torch.ones(300), 0)
        else:
            dist.recv(torch.ones(100), 1)
    elif how == "async":
        dist.all_reduce(torch.ones(300_000 if rank else 100), async_op=True).wait()
    else:
        dist.all_reduce(torch.ones(300_000 if rank else 100))
"""


@pytest.mark.parametrize("how", tiers(["blocking"], ["async", "message", "at the same moment"]))
def test_both_calls_are_named_where_sizes_differ(script: Any, how: str) -> None:
    """Without the guard gloo aborts a process, and the other one knows only that it is gone."""
    done = on_ranks(script(HEAD, SIZES), how, DDPSTATS_GUARD="step")
    assert 1 in done.statuses
    assert 0 not in done.statuses
    assert "CollectiveMismatch" in done.stderr, done.stderr
    assert "float32[300" in done.stderr
    assert "float32[100]" in done.stderr
    assert "What differs: the shape" in done.first
    assert "label(" not in done.stderr + done.first


CATCHES_TORCHS_ERROR = """
    import os, signal, sys, time, torch, torch.distributed as dist
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    try:
        for step in range(5):
            if step == 3 and dist.get_rank() == 1:
                if sys.argv[1] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(100)
            model(torch.ones(1, 1)).sum().backward()
    except RuntimeError as error:
        print("caught", error)
        sys.exit(5)
"""


@pytest.mark.parametrize(("how", "words"), tiers([("killed", "the process is gone")], [("hangs", "did not take part")]))
def test_rank_that_is_missing_is_named_where_the_program_catches_torchs_error_and_exits(
    script: Any, how: str, words: str
) -> None:
    """As Hydra's main does: the error is printed, and the program asks for a status."""
    done = on_ranks("-m", "ddpstats", "run", "--guard", "step", script(CATCHES_TORCHS_ERROR), how)
    assert done.statuses[0] == 5, done.stderr
    assert "caught" in done.stdout
    assert "RankMissing" in done.stderr, done.stderr
    assert f"rank 1: {words}" in done.stderr, done.stderr
    assert "ranks agree" not in done.stderr


def test_guard_that_compared_nothing_says_why(script: Any) -> None:
    done = on_ranks(script(HEAD, LEGAL), "", ranks=1, DDPSTATS_GUARD="step")
    assert done.statuses == [0]
    assert "5 collectives seen, nothing was compared: the program runs on one rank" in done.stderr


INITIALIZED = """
    import ddpstats, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


TESTED = """
    import pytest

    def test_group():
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    if __name__ == "__main__":
        pytest.main(["-p", "ddpstats.testing.pytest_plugin", "-p", "no:cacheprovider", __file__])
"""


OF_TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("text", "env", "warns"),
    tiers(
        [("import ddpstats", {}, False), ("import ddpstats", OF_TWO, True), (INITIALIZED, {}, True)],
        [
            *((TESTED, {}, False), (TESTED, OF_TWO, True)),
            ("import ddpstats", {"RANK": "0", "WORLD_SIZE": "1"}, False),
        ],
    ),
)
def test_warning_that_nothing_was_compared_is_for_programs_of_ranks_alone(
    script: Any, text: str, env: dict[str, str], warns: bool
) -> None:
    done = alone(script(text), DDPSTATS_GUARD="step", **env)
    assert done.statuses == [0], done.stderr
    assert ("nothing was compared" in done.stderr) == warns
    assert bool(done.stderr) == warns


@pytest.mark.parametrize("arguments", [("--version",), ("report", "nowhere")])
def test_other_command_of_ddpstats_is_not_guarded(arguments: tuple[str, ...]) -> None:
    done = ddpstats(*arguments, DDPSTATS_GUARD="step", **OF_TWO)
    assert "collective guard" not in done.stderr


@pytest.mark.parametrize("more", tiers([((),)], [(("--nproc", "2"),)]))
def test_script_that_does_not_exist_is_refused_without_traceback(more: tuple[str, ...], tmp_path: Path) -> None:
    done = ddpstats("run", *more, str(tmp_path / "nofile.py"))
    assert done.returncode == 2
    assert "there is no file" in done.stderr
    assert "Give the path of the program" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_run_without_ranks_says_how_to_start_it(script: Any) -> None:
    done = ddpstats("run", script(HEAD), "")
    assert done.returncode == 1
    assert "`ddpstats run --nproc 2 SCRIPT`" in done.stderr
    assert "Traceback" not in done.stderr
    done = ddpstats("run", "--nproc", "2", script(HEAD), TORCHELASTIC_RUN_ID="none")
    assert (done.returncode, "Leave --nproc out" in done.stderr) == (2, True)


@pytest.mark.slow
def test_run_prints_the_last_line_once_and_takes_its_mode_from_the_environment(script: Any) -> None:
    done = ddpstats("run", "--nproc", "2", script(LOGS, HEAD, LEGAL, ENDS), "exit 0", DDPSTATS_GUARD="step")
    assert done.returncode == 0, done.stderr
    line = "ddpstats run: collective guard, mode step: 5 collectives seen, 5 compared, 0 not; 2 ranks agree."
    assert done.stderr.count(line) == done.stderr.count("collective guard, mode") == 1


# -- the pure parts ---------------------------------------------------------------------------------------------------


def test_calls_that_a_rank_published_before_it_died_can_be_read() -> None:
    store: Any = torch._C._distributed_c10d.HashStore()
    with closing(Exchange(store, 0, 2)) as first, closing(Exchange(store, 1, 2)) as second:
        for seq in range(1, 30):
            assert not first.announce(seq, event(seq, "loss").digest, encode(event(seq, "loss")))
        known = decode(second.read_announced(0))
        assert [call.seq for call in known] == list(range(22, 30))
        assert str(known[-1]) == str(event(29, "loss"))
        assert known[-1].source == "dist.all_reduce(stats[key])"
        assert second.read_announced(1) == []
        reduced, gathered = event(30, None), event(30, None, op="all_gather")
        assert not second.announce(29, reduced.digest, encode(event(29, None)))
        assert not first.announce(30, reduced.digest, encode(reduced))
        assert second.announce(30, gathered.digest, encode(gathered)), "the later one sees it"


def test_an_event_of_any_length_has_room() -> None:
    shapes = tuple((number,) for number in range(500))
    long = Signature("all_reduce_coalesced", "sum", None, shapes, ("float32",) * 500)
    event_of_many = Event("0", 1, long, "k" * 5000, 1, "p" * 5000 + "/train.py:3 in step", digest_of(long))
    assert len(encode(event_of_many)) <= EVENT_BYTES
    (known,) = decode([(1, event_of_many.digest, encode(event_of_many))])
    assert known.digest == event_of_many.digest
    assert str(known.site).endswith("/train.py:3 in step")
    assert known.pieces == "500 tensors in all"


def test_last_line_counts_compared_collectives_ranks_that_agree_and_reasons() -> None:
    tally = Tally(3, Counter({"a": 2, "none": 0}), frozenset({0, 1})) + Tally(4, Counter("ab"), frozenset({1, 2}))
    counters = GuardCounters(11, tally.compared, 4, 0, "step", tally.not_compared, len(tally.agreeing))
    assert last_line(counters, "", "") == (
        False,
        "collective guard, mode step: 11 collectives seen, 7 compared, 4 not (3: a; 1: b); 3 ranks agree.",
    )
    messages = GuardCounters(26, 0, 26, 0, "step", {MESSAGES_SEEN: 26}, 0)
    (is_amiss, line) = last_line(messages, "", "")
    assert not is_amiss
    assert line.endswith("nothing was compared: messages between ranks, which are checked as they begin or fail.")
    assert last_line(GuardCounters(0, 0, 0, 0, "step"), "", "")[0]
    assert (
        "its verdict was CollectiveMismatch"
        in last_line(GuardCounters(1, 0, 1, 0, "step"), "", "CollectiveMismatch")[1]
    )


def test_verdict_in_short_has_the_calls_and_what_differs() -> None:
    calls = "  rank 0: all_reduce() 'a'\n      at train.py:3 in f\n  rank 1: all_reduce() 'b'\n      at train.py:4 in f"
    error = CollectiveMismatch(f"ranks differ:\n{calls}\nWhat differs: the label.\nMake all ranks.", group="0", seq=1)
    assert in_short(error) == (
        "CollectiveMismatch: rank 0: all_reduce() 'a' at train.py:3 in f; rank 1: all_reduce() 'b' at train.py:4 in f. "
        "What differs: the label."
    )


def test_stack_of_a_rank_begins_with_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from ddpstats._observe.frames import main_stack\nstack = main_stack(100)\n")
    stack = runpy.run_path(str(program))["stack"]
    assert f"{program}:2 in <module>" in stack
    assert "<frozen runpy>" not in stack
    assert "/runpy.py:" not in stack


def test_record_says_how_the_program_ended(script: Any, tmp_path: Path) -> None:
    """The program runs in a fresh interpreter, which alone knows what it ends with."""
    program = script(INITIALIZED, "    dist.barrier()\n    raise ValueError('of the program')\n")
    environ = {"DDPSTATS_GUARD": "record", "DDPSTATS_RECORD_DIR": str(tmp_path / "records")}
    assert programs.run([program], environ=environ, fresh=True).returncode == 1
    (record,) = read_records(tmp_path / "records")
    assert record.end == "ValueError"
