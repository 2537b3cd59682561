"""espnet's own Trainer, as it is, under the guard."""

from __future__ import annotations

from ddpstats.testing import PerRank, RankPool
from tests.guard import runs
from tests.needs import needs

needs("espnet2")

from tests.integrations.test_espnet import both  # noqa: E402  # it needs espnet itself


def test_unmodified_espnet_trainer(two_ranks: RankPool) -> None:
    scripts = both({"loss": 1.0, "snr_loss": 2.0}, {"loss": 1.0, "l1_loss": 3.0})
    told = two_ranks.run(runs.real_espnet, PerRank(scripts)).values()
    two_ranks.restart()
    assert told[0] == told[1]
    assert "'snr_loss'" in told[0]
    assert "'l1_loss'" in told[0]
    assert two_ranks.run(runs.real_espnet, PerRank(both({"loss": 1.0}, {"loss": 2.0}))).values() == ["silent"] * 2
