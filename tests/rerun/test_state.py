"""A module is as it was before a rerun, whatever the rerun changed in it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from ddpstats._rerun.state import place_text, put_back

ONES = torch.ones(3)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.name, self.shape, self.seen = 3, "as it was", (1, (2, None)), [0]
        self.register_buffer("kept", torch.ones(3))


def changed(module: Any) -> None:
    module.calls += 1
    module.name, module.shape = None, ()
    module.made_by_the_rerun = 1
    module.kept += 1


def removed(module: Any) -> None:
    del module.calls, module.name, module.shape, module.kept


def replaced(module: Any) -> None:
    module.kept = torch.zeros(5)
    module.register_buffer("another", torch.zeros(1))


def resized(module: Any) -> None:
    module.kept.resize_(7).zero_()


@pytest.mark.parametrize("change", [changed, removed, replaced, resized])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rerun_did_is_undone(change: Any, fails: bool) -> None:
    outer: Any = nn.Sequential(Counting())
    module = outer[0]
    before, seen, buffer = set(vars(module)), module.seen, module.kept
    try:
        with put_back(outer):
            change(module)
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert set(vars(module)) == before
    assert (module.calls, module.name, module.shape) == (3, "as it was", (1, (2, None)))
    assert module.seen is seen
    assert module.kept is buffer
    assert list(module.state_dict()) == ["kept"]
    assert torch.equal(module.kept, ONES)


def test_the_name_of_a_device_of_any_kind_is_asked_of_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    named = types.SimpleNamespace(get_device_name=lambda device: f"Chip of {device}")
    monkeypatch.setattr(torch, "meta", named, raising=False)
    assert place_text(nn.Linear(1, 1, device="meta")).endswith("device meta (Chip of meta)")
    assert place_text(nn.Linear(1, 1)).endswith("device cpu")
