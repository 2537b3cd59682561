"""Ranks whose capture or sentinel has other settings than the others' get one error, on every rank."""

from __future__ import annotations

import pytest

from ddpstats._rerun.record import refuse_differences
from ddpstats.errors import ConfigError


def test_ranks_whose_settings_differ_get_one_error_with_each_setting() -> None:
    refuse_differences({0: {"keep": 1, "mode": 2}, 1: {"keep": 1, "mode": 2}}, "Thing", "Use the same.")
    with pytest.raises(ConfigError) as caught:
        refuse_differences({0: {"keep": 1, "mode": 2}, 3: {"keep": 5, "mode": 2}}, "Thing", "Use the same.")
    assert str(caught.value).splitlines() == [
        "ranks made their Thing with different settings:",
        "  rank 0: keep=1",
        "  rank 3: keep=5",
        "Use the same.",
    ]
    assert caught.value.ranks == (0, 3)
