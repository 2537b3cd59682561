"""Grad mode and autocast are switched off around computations of ddpstats, and restored afterwards."""

from __future__ import annotations

import pytest
import torch

from ddpstats._observe.no_dispatch import no_dispatch_no_grad


@pytest.mark.parametrize("had_grad", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_graph_and_no_autocast(had_grad: bool, autocast: bool) -> None:
    with torch.set_grad_enabled(had_grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with no_dispatch_no_grad():
            leaf = torch.ones(2, 2, requires_grad=True)
            assert not (leaf @ leaf).requires_grad
            assert (leaf @ leaf).dtype == torch.float32
        assert torch.is_grad_enabled() == had_grad
        assert torch.is_autocast_enabled("cpu") == autocast
