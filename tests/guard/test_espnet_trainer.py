"""espnet's own Trainer, as it is, is stopped by the guard where ranks lack keys, and not where they agree."""

from __future__ import annotations

import pytest

from ddpstats.testing import PerRank, RankPool
from tests.guard import runs
from tests.needs import needs

pytestmark = pytest.mark.library
needs("espnet2")

from tests.integrations.test_espnet import both  # noqa: E402  # it needs espnet itself


def test_unmodified_espnet_trainer_is_stopped_where_ranks_lack_keys(two_ranks: RankPool) -> None:
    scripts = both({"loss": 1.0, "snr_loss": 2.0}, {"loss": 1.0, "l1_loss": 3.0})
    first, second = two_ranks.run(runs.real_espnet, PerRank(scripts)).values()
    two_ranks.restart()
    assert first == second
    assert "'snr_loss'" in first
    assert "'l1_loss'" in first
    assert two_ranks.run(runs.real_espnet, PerRank(both({"loss": 1.0}, {"loss": 2.0}))).values() == ["silent"] * 2
