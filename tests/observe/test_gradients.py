"""A gradient's norm is finite exactly where its elements are, and hooks measure gradients without keeping anything.

DDP's part is in tests/capture.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from ddpstats._observe.gradient_norms import NO_GRADIENT, any_bad, measure, norms_of
from ddpstats._observe.gradients import GradientWatch

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_norm_is_finite_if_and_only_if_every_element_is(dtype: torch.dtype, bad: float) -> None:
    # Squares of these leave the range of the dtype, and of the norm's own
    largest = torch.finfo(dtype).max
    fine = torch.full((3, 5), largest, dtype=dtype)
    bad_tensor = torch.ones(3, 5, dtype=dtype)
    bad_tensor[2, 1] = bad
    norms = measure([fine, None, bad_tensor, torch.zeros(0, dtype=dtype)])
    assert norms.isfinite().tolist() == [True, True, False, True]
    assert norms[1] == NO_GRADIENT
    assert not any_bad([fine, None])
    assert any_bad([fine, bad_tensor])
    assert any_bad([], [torch.tensor([1.0, bad])])
    assert not any_bad([])


def test_a_norm_is_the_norm() -> None:
    wide, half = torch.tensor([[2.0]], dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)
    assert measure([torch.tensor([3.0, 4.0]), wide, half]).tolist() == [5.0, 2.0, 2.0]


def test_an_empty_shard_of_a_device_has_a_norm() -> None:
    """A parameter smaller than the number of ranks has one; torch refuses the largest magnitude of nothing."""
    assert [norm.shape for norm in norms_of([torch.empty(0, device="meta"), torch.ones(2, device="meta")])] == [()] * 2


def bad_names(watch: GradientWatch) -> list[str]:
    """Return the names of the bad gradients of the last micro-batch."""
    return [watch.names[index] for indices in watch.arrivals[-1].bad_indices() for index in indices]


def watched(module: nn.Module, x: torch.Tensor) -> tuple[GradientWatch, list[str]]:
    watch = GradientWatch(module)
    watch.begin()
    module(x).sum().backward()
    watch.end()
    return watch, bad_names(watch)


def test_a_parameter_that_is_thawed_later_is_seen() -> None:
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    watch, names = watched(model, torch.ones(1, 2))
    assert names == []
    model.weight.requires_grad_(True)
    watch.begin()
    model(torch.tensor([[INF, 1.0]])).sum().backward()
    watch.end()
    assert bad_names(watch) == ["weight"]


def test_the_users_own_hooks_see_what_they_saw() -> None:
    model = nn.Linear(2, 1)
    seen: list[torch.Tensor] = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))  # type: ignore[no-untyped-call]
    watch, _ = watched(model, torch.tensor([[2.0, 3.0]]))
    assert [gradient.tolist() for gradient in seen] == [[[2.0, 3.0]]]
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, seen[0])
    watch.close()
    watch.close()
    assert len(model.weight._post_accumulate_grad_hooks) == 1


def test_hooks_do_not_keep_a_watch_alive() -> None:
    model = nn.Linear(2, 1)
    reference = weakref.ref(watched(model, torch.ones(1, 2))[0])
    gc.collect()
    assert reference() is None
    model(torch.ones(1, 2)).sum().backward()
