"""What runs on the ranks of `test_functions`: functions of a user's tree, as they are and with ours in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from ddpstats.integrations import functions
from ddpstats.testing import count_collectives
from tests.integrations import tree_engine, tree_misc
from tests.integrations.on_ranks import failure_of, of_this_rank, on_group
from tests.needs import imported

t = torch.tensor


@contextlib.contextmanager
def installed(install: bool, *modules: Any) -> Iterator[None]:
    """The rank serves other tests afterwards. Installed in a group of several ranks: nothing may be sent for that."""
    with on_group(dist.group.WORLD) as calls:
        if install:
            functions.install(*(modules or (tree_misc, {tree_misc.__name__: ["by_name", "to_main"]})))
    assert calls == []
    try:
        yield
    finally:
        functions.uninstall()


def plain(values: dict[str, torch.Tensor]) -> list[tuple[str, str, Any]]:
    """In their order, with dtypes."""
    assert not any(value.requires_grad for value in values.values())
    return [(name, str(value.dtype).removeprefix("torch."), value.tolist()) for name, value in values.items()]


# -- reduce_dict ------------------------------------------------------------------------------------------------------


def reduce_dict(name: str, by_rank: list[dict[str, float]], install: bool, average: bool = True) -> Any:
    """Call a function of the tree on this rank's losses."""
    losses = {key: t(value, requires_grad=name == "reduce_dict") for key, value in by_rank[dist.get_rank()].items()}
    with installed(install):
        function = getattr(tree_engine if name == "reduce_dict" else tree_misc, name)
        return plain(function(losses, average))


def shapes_and_dtypes() -> Any:
    with installed(True):
        given = {
            "half": t(of_this_rank(1.0, 2.0), dtype=torch.bfloat16),
            "mixed": t(of_this_rank(1.0, 2.0), dtype=of_this_rank(torch.float16, torch.float32)),
            "count": t(of_this_rank(1, 4)),
            "one": t([of_this_rank(1.0, 3.0)]),
            "rows": torch.full((2, 3), of_this_rank(1.0, 3.0)),
            **of_this_rank({}, {"row": t([1.0, 2.0])}),
        }
        return plain(tree_misc.reduce_dict(given))


def two_shapes(shapes: list[list[int]]) -> Any:
    with installed(True):
        return failure_of(tree_misc.reduce_dict, {"a": torch.ones(shapes[dist.get_rank()])})


def collectives() -> Any:
    """On the program's group, and in all: of two calls each, of which the first knows no key."""
    values = {f"loss_{i}": t(1.0) for i in range(40)}
    tracker = tree_misc.MetricsTracker()
    tracker.update(frames=1.0, loss=2.0)
    calls = {
        "reduce_dict": lambda: tree_misc.reduce_dict(values),
        "_parse_losses": lambda: tree_misc.Detector()._parse_losses(values),
        "write_metrics": lambda: tree_misc.Trainer.write_metrics(values, 0.5, 3),
        "reduce": lambda: tracker.reduce(torch.device("cpu")),
    }
    found: dict[str, Any] = {}
    with installed(True), tree_misc.EventStorage(0):
        ddpstats.any_rank(True)  # ranks meet
        for name, call in calls.items():
            for _ in range(2):
                with on_group(dist.group.WORLD) as on_theirs, count_collectives() as issued:
                    call()  # type: ignore[no-untyped-call]
                found.setdefault(name, []).append((on_theirs, issued.total))
    return found


# -- _parse_losses ----------------------------------------------------------------------------------------------------


def parse_losses(install: bool, case: str) -> Any:
    with installed(install):
        weights = t([1.0, 2.0], requires_grad=True)
        losses: dict[str, Any] = {"loss_cls": weights * of_this_rank(1.0, 3.0), "acc": t([of_this_rank(40.0, 60.0)])}
        if case == "other keys":
            losses[of_this_rank("loss_mask", "loss_iou")] = [weights[0] * 2, weights[1]]
        if case == "missing" and dist.get_rank() == 0:
            losses["loss_mask"] = weights.sum()
        if case == "refused" and dist.get_rank() == 0:
            losses["loss_mask"] = "none"
        loss, log_vars = tree_misc.Detector()._parse_losses(losses)
        loss.backward()  # type: ignore[no-untyped-call]
        assert weights.grad is not None
        return loss.item(), type(log_vars).__name__, list(log_vars.items()), weights.grad.tolist()


# -- write_metrics ----------------------------------------------------------------------------------------------------


def write_metrics(install: bool, by_rank: list[dict[str, float]]) -> Any:
    losses = {name: t(value) for name, value in by_rank[dist.get_rank()].items()}
    with installed(install), tree_misc.EventStorage() as storage:
        try:
            tree_misc.Trainer.write_metrics(losses, of_this_rank(0.25, 0.75), 7, prefix="x_")
        except (KeyError, FloatingPointError) as error:
            return f"{type(error).__name__}: {error}"
        return storage.latest()


# -- MetricsTracker.reduce --------------------------------------------------------------------------------------------


def reduce_tracker(install: bool, by_rank: list[dict[str, float]]) -> Any:
    with installed(install):
        tracker = tree_misc.MetricsTracker()
        tracker.update(by_rank[dist.get_rank()])
        tracker.reduce(torch.device("cpu"))
        return dict(tracker)


# -- recursive_average of real packages -------------------------------------------------------------------------------


def recursive(install: bool, module_name: str) -> Any:
    """Another key on each rank, then a local call, then a sum."""
    module = imported(module_name)
    with installed(install, module_name):
        stats = of_this_rank({"l1": t([0.5, 1.5])}, {"snr": t([-2.0, -4.0])})
        weight = t([1.0, 3.0])
        averages, total = module.recursive_average(stats, weight, distributed=True)
        local, own = module.recursive_average(stats, weight)
        summed = module.recursive_sum(stats, weight, True)
        with_nan, _ = module.recursive_average({"a": t(of_this_rank([1.0, 1.0], [torch.nan, 1.0]))}, weight, True)
        return [plain(averages), total.item(), plain(local), own.item(), plain(summed), repr(with_nan["a"].item())]
