"""What a norm per gradient says, and when the hooks see them. DDP's part is in tests/capture."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from ddpstats._observe.gradient_norms import NO_GRADIENT, any_bad, measure
from ddpstats._observe.gradients import GradientWatch

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_norm_is_finite_if_and_only_if_every_element_is(dtype: torch.dtype, bad: float) -> None:
    # Squares of these leave the range of the dtype, and of the norm's own
    largest = torch.finfo(dtype).max
    fine = torch.full((3, 5), largest, dtype=dtype)
    spoilt = torch.ones(3, 5, dtype=dtype)
    spoilt[2, 1] = bad
    norms = measure([fine, None, spoilt, torch.zeros(0, dtype=dtype)])
    assert norms.isfinite().tolist() == [True, True, False, True]
    assert norms[1] == NO_GRADIENT
    assert not any_bad([fine, None])
    assert any_bad([fine, spoilt])
    assert any_bad([], [torch.tensor([1.0, bad])])
    assert not any_bad([])


def test_a_norm_is_the_norm() -> None:
    wide, half = torch.tensor([[2.0]], dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)
    assert measure([torch.tensor([3.0, 4.0]), wide, half]).tolist() == [5.0, 2.0, 2.0]


def bad_names(watch: GradientWatch) -> list[str]:
    """Of the last micro-batch."""
    return [watch.names[place] for places in watch.arrivals[-1].bad_places() for place in places]


def watched(module: nn.Module, x: torch.Tensor) -> tuple[GradientWatch, list[str]]:
    watch = GradientWatch(module)
    watch.begin()
    module(x).sum().backward()
    watch.end()
    return watch, bad_names(watch)


def test_names_come_in_the_order_of_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch, names = watched(model, torch.tensor([[NAN, 1.0]]))
    assert names == ["1.weight", "0.weight"]  # the biases' gradients do not depend on the inputs
    assert watch.bad
    watch.forget()
    assert (watch.bad, watch.arrivals) == (False, [])


def test_what_arrives_outside_a_micro_batch_is_not_measured() -> None:
    model = nn.Linear(2, 1)
    watch = GradientWatch(model)
    model(torch.tensor([[NAN, 1.0]])).sum().backward()
    assert not watch.bad
    watch.begin()
    watch.end()
    assert watch.arrivals[0].norms() is None


def test_sparse_gradients_and_parameters_without_one() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    unused = nn.Linear(2, 2)
    module = nn.ModuleList([embedding, unused])
    watch = GradientWatch(module)
    watch.begin()
    (embedding(torch.tensor([1, 1])) * torch.tensor([1.0, NAN, 1.0])).sum().backward()
    watch.end()
    assert bad_names(watch) == ["0.weight"]
    norms = watch.arrivals[0].norms()
    assert norms is not None
    assert norms.tolist()[1:] == [NO_GRADIENT, NO_GRADIENT]


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
    assert [one.tolist() for one in seen] == [[[2.0, 3.0]]]
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


def test_local_gradients_are_kept_only_where_one_is_bad() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fine, _ = watched(model, torch.ones(1, 2))
    assert fine.arrivals[0].local() is None
    model.zero_grad()
    bad, _ = watched(model, torch.tensor([[NAN, 1.0]]))
    local = bad.arrivals[0].local()
    assert local is not None
    for place, gradient in local.items():
        assert torch.equal(gradient.isnan(), bad.parameters[place].grad.isnan())  # type: ignore[union-attr]
