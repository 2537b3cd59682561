"""Where the tests of this folder run: each on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

REASON = "needs a GPU that torch can use: run `scripts/launch.sh test tests/gpu` on a machine that has one"


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """The same body on both: what fails on the GPU alone is the GPU's."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(REASON)
    return str(request.param)


@pytest.fixture
def gpu() -> None:
    """For what says nothing on a CPU."""
    if not torch.cuda.is_available():
        pytest.skip(REASON)
