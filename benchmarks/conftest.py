"""The pools of ranks that tests/ has, for the long runs of this folder (`scripts/launch.sh test --nightly`)."""

from __future__ import annotations

from tests.conftest import three_ranks as three_ranks, two_ranks as two_ranks
from tests.hosts import hosts as hosts
