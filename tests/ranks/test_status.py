"""The ranks' statuses of a failed call give every rank the same error."""

from __future__ import annotations

import pytest

from ddpstats._ranks.exchange import Call, Failure, Status, are_in_step, refuse_what_is_wrong
from ddpstats.errors import ProtocolMismatch
from tests import programs


def status(
    call: str = "reduce_stats",
    name: str | None = None,
    failure: Failure | None = None,
    stale: bool = True,
    agreed: bytes = bytes(8),
) -> Status:
    return Status(Call(call, name, "propagate"), agreed, failure, stale)


def test_ranks_that_had_not_agreed_on_the_same_are_out_of_step() -> None:
    both = [(status(stale=False), (0,)), (status(stale=False, agreed=b"another."), (1,))]
    assert not are_in_step(both)
    refuse_what_is_wrong(both, "the group")  # raises nothing: they agree again


def test_different_calls_go_before_everything_else() -> None:
    different = status(call="any_rank", failure=Failure("", "x"))
    with pytest.raises(ProtocolMismatch, match=r"name='train'.*\n.*any_rank"):
        refuse_what_is_wrong([(status(name="train"), (0,)), (different, (1,))], "g")


def test_clean_statuses_after_unclean_lanes_are_damage() -> None:
    with pytest.raises(ProtocolMismatch, match="damaged"):
        refuse_what_is_wrong([(status(stale=False), (0, 1))], "g")


FIRST_STATUS = """
import os, sys, threading
from ddpstats._ranks.exchange import Call, Status, decode_status, encode_status
from ddpstats.guard.diagnosis import GuardFinding

status = encode_status(Status(Call("reduce", "x", ""), bytes(8)))
finding = GuardFinding("missing", "", "0", 1).pack().encode()
sys.setswitchinterval(1e-6)


def read_both():
    start = threading.Barrier(8)

    def read():
        start.wait()
        decode_status(status)
        GuardFinding.unpack(finding)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


for _ in range(100):
    child = os.fork()
    if not child:
        read_both()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_threads_that_read_the_first_status_at_the_same_time_do_not_crash() -> None:
    done = programs.run(["-c", FIRST_STATUS])
    assert done.returncode == 0, done.stderr
