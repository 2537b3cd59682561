"""What a caller may say of a step, to a capture and to the sentinel."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats._rerun.micro_batch import checked_step
from ddpstats.errors import ConfigError


class Counted:
    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize(("step", "found"), [(0, 0), (True, 1), (10**15 - 1, 10**15 - 1), (Counted(), 7)])
def test_a_whole_number(step: Any, found: int) -> None:
    assert checked_step(step, "check") == found


@pytest.mark.parametrize("step", [-1, 3.0, "3", None, 10**15])
def test_no_whole_number(step: Any) -> None:
    with pytest.raises(ConfigError, match=r"check\(step=.*\): a whole number, 0 or more"):
        checked_step(step, "check")
