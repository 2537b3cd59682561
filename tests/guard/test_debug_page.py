"""The guard's page in torch's debug server says where each rank waits, and what was found."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from ddpstats.guard.debug_page import page_text
from ddpstats.guard.event import Event, Signature, digest_of
from ddpstats.guard.status import RankStatus
from ddpstats.testing import RankPool
from tests.needs import needs


@pytest.mark.library
def test_page_says_where_a_rank_waits_under_which_label_and_all_alarms(two_ranks: RankPool, tmp_path: Path) -> None:
    needs("aiohttp")  # or requests: by which torch's server asks the ranks
    if importlib.util.find_spec("torch.distributed.debug") is None:
        pytest.skip("this torch has no torch.distributed.debug")
    from tests.guard.debug_page_runs import page_while_rank_0_waits

    _, page = two_ranks.run(page_while_rank_0_waits, str(tmp_path), timeout_sec=120).values()
    assert '<a href="/ddpstats">ddpstats</a>' in page
    assert re.search(
        r"^(.*>)?rank 0: waits in number 2 of group .*; last: number 2 of group .*, all_reduce\(", page, re.M
    )
    assert "rank 1: is elsewhere in its program; last: number 1 of group" in page
    assert "&lt;b&gt;loss" in page
    assert "<b>" not in page
    assert "collective number 2 of the default group of 2 ranks was not completed:" in page
    assert "debug_page_runs.py" in page  # rank 1's stack
    assert "not held any more by rank 1: &#39;&lt;snr&gt;&#39; (name=&#39;page&#39;)" in page
    assert page.count("ALARM: step 0: the gradients of rank 1 are not finite") == 1
    assert page.count("ALARM: step 0, found by the sentinel: [replica digests] replicas differ") == 1


def sent(label: str, waits_in: tuple[str, int] | None = None, count: int = 1) -> tuple[bool, str]:
    signature = Signature("all_reduce", "sum", None, ((),), ("float32",))
    event = Event("0", 1, signature, label, 2 * ord(label[0]), "train.py:7 in f", digest_of(signature))
    status = RankStatus(0, [event], {}, count, waits_in, event.in_full())
    return True, json.dumps({"groups": {"0": ["the default group", status.pack()]}, "not_held": "", "alarms": []})


@pytest.mark.parametrize(
    ("answers", "shown", "absent"),
    [
        ([sent("snr"), sent("l1")], "What differs: the label", "was not completed"),
        ([sent("snr", ("0", 2), count=2), sent("snr")], "collective number 2 of the default group was not", "differs"),
        ([sent("snr", count=2), sent("snr")], "rank 1: is elsewhere", "was not completed"),  # it may be about to come
        ([sent("snr"), (False, "timeout")], "rank 1: does not answer", "was not completed"),
        ([(True, "{}"), (True, "[3]")], "rank 0: no guard is active\nrank 1: no guard is active", "group"),
        ([(True, '{"groups": {"0": ["all", "\\ud800"]}}')], "rank 0: no guard is active", "group"),
        ([(True, '{"groups": {}, "not_held": "", "alarms": 3}')], "rank 0: no guard is active", "ALARM"),
        ([(True, '{"groups": {"0": 3}}'), sent("\x1b[2J")], "\\x1b[2J", "\x1b"),
    ],
)
def test_page_judges_the_answers_of_ranks(answers: list[tuple[bool, str]], shown: str, absent: str) -> None:
    text = page_text(answers)
    assert shown in text
    assert absent not in text
