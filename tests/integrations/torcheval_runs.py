"""The functions that run on the ranks of `test_torcheval`: torcheval's toolkit on states that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torcheval import metrics
from torcheval.metrics import Metric, toolkit

import ddpstats
from ddpstats.integrations import torcheval
from ddpstats.testing import count_collectives
from tests.integrations.on_ranks import Failure, failure_of, installed, of_this_rank, on_group


class Totals(Metric[dict[Any, float]]):
    """A dict state that is merged by key."""

    def __init__(self, **totals: float) -> None:
        super().__init__()
        self._add_state("totals", {})
        self.totals: dict[Any, torch.Tensor] = {}
        self.update(totals)

    def update(self, totals: dict[Any, float]) -> Totals:
        self.totals = {key: torch.tensor(value) for key, value in totals.items()}
        return self

    def merge_state(self, others: Iterable[Totals]) -> Totals:
        for metric in others:
            for key, value in metric.totals.items():
                self.totals[key] = self.totals[key] + value if key in self.totals else value
        return self

    def compute(self) -> dict[Any, float]:
        return {key: float(self.totals[key]) for key in sorted(self.totals, key=repr)}


class Holder(Metric[Any]):
    """One state of any kind; merged by ``+``."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._add_state("state", state)
        self.state: Any

    def update(self) -> Holder:
        return self

    def merge_state(self, others: Iterable[Holder]) -> Holder:
        for metric in others:
            self.state = self.state + metric.state
        return self

    def compute(self) -> Any:
        return self.state


class Refusing(Holder):
    """As a metric with a state of a type that torcheval does not know."""

    def state_dict(self) -> Any:
        raise TypeError("no such state")


def mean(*values: float) -> Any:
    metric = metrics.Mean()
    for value in values:
        metric.update(torch.tensor(value))
    return metric


def plain(result: Any) -> Any:
    """Tensors with their dtype and exact values."""
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    if isinstance(result, list):
        return [plain(value) for value in result]
    return (str(result.dtype), result.tolist()) if isinstance(result, torch.Tensor) else result


# -- where stock is right ---------------------------------------------------------------------------------------------


def documented() -> dict[str, Metric[Any]]:
    """Return one metric per kind of state, updated by this rank with its values."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    def label(classes: int, size: int) -> torch.Tensor:
        return torch.randint(0, classes, (size,), generator=generator)

    made: dict[str, Metric[Any]] = {
        "mean": metrics.Mean().update(rand(5), weight=rand(5)),
        "sum": metrics.Sum().update(rand(3)),
        "max": metrics.Max().update(rand(3)),
        "cat": metrics.Cat().update(rand(2 + dist.get_rank())),
        "accuracy": metrics.MulticlassAccuracy(num_classes=4, average=None).update(rand(30, 4), label(4, 30)),
        "auroc": metrics.BinaryAUROC(),
        "throughput": metrics.Throughput().update(64 + dist.get_rank(), 1.5 + dist.get_rank() / 3),
        "window": metrics.WindowedMeanSquaredError(max_num_updates=3),
    }
    for _ in range(3):
        made["auroc"].update(rand(4 + dist.get_rank()), label(2, 4 + dist.get_rank()))
        made["window"].update(rand(4), rand(4))
    return made


def results_of_documented(install: bool) -> dict[str, Any]:
    """Value and synced states of each; alone, and as one collection."""
    with installed(torcheval, install):
        alone = {name: plain(toolkit.sync_and_compute(metric)) for name, metric in documented().items()}
        together = plain(toolkit.sync_and_compute_collection(documented()))
        states = {name: plain(toolkit.get_synced_state_dict(metric)) for name, metric in documented().items()}
        all_states = plain(toolkit.get_synced_state_dict_collection(documented()))
        left = documented()
        toolkit.get_synced_metric_collection(left)
        local = {name: plain(metric.state_dict()) for name, metric in left.items()}
    return {"alone": alone, "together": together, "states": states, "all_states": all_states, "local": local}


# -- where stock is wrong ---------------------------------------------------------------------------------------------


def dict_keys_differ(install: bool) -> tuple[Any, Any]:
    """Sync {a, b} on rank 0 and {a, c} on rank 1: alone and in a collection."""
    totals = of_this_rank({"a": 1.0, "b": 2.0}, {"a": 10.0, "c": 30.0})
    with installed(torcheval, install):
        together = toolkit.sync_and_compute_collection({"x": Totals(**totals)})
        return toolkit.sync_and_compute(Totals(**totals)), together["x"]


def members_differ(install: bool) -> dict[str, float]:
    rank = dist.get_rank()
    members = {"loss": mean(1.0 + 2 * rank), f"acc_{'ab'[rank]}": mean(10.0 + 10 * rank)}
    with installed(torcheval, install):
        return {name: float(value) for name, value in toolkit.sync_and_compute_collection(members).items()}


def members_of_others() -> dict[str, Any]:
    """Sync collections of which a rank lacks members."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    members: dict[str, Any] = {"mean": mean(float(rank))}
    if rank == last:

        class Mine(Totals):  # the other ranks have no such class
            pass

        members["own class"] = Mine().update({(1, "x"): 1.0, "k": 2.0})
        members["list"] = Holder([torch.tensor(5.0)])
        members["pair"] = Pair(1.0)

    def both() -> dict[str, Any]:
        return {"all": mean(1.0), **({"some": mean(float(rank))} if rank else {})}

    with installed(torcheval):
        results = toolkit.sync_and_compute_collection(members)
        answers = {
            "order": list(results),
            "results": results,
            "of the others": toolkit.sync_and_compute_collection(both()),
            "states": toolkit.get_synced_state_dict_collection(both()),
            "collectives": [_steady({"all": mean(1.0)}), _steady(members)],
        }
    return {name: plain(value) for name, value in answers.items()}


class Pair(Holder):
    def compute(self) -> Any:
        return self.state, 2.0


def _steady(members: dict[str, Any]) -> int:
    for _ in range(2):
        toolkit.sync_and_compute_collection(members)
    with count_collectives() as seen:
        toolkit.sync_and_compute_collection(members)
    return seen.total


def members_that_give_nothing() -> list[Any]:
    """Sync where the last rank's member raises, or gives what cannot be sent; then a call works."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    class Raising(Holder):
        def compute(self) -> Any:
            raise ZeroDivisionError("mine")

    class Odd(Holder):
        def compute(self) -> Any:
            return object()

    class Unmergeable(Holder):
        def merge_state(self, others: Any) -> Any:
            raise ZeroDivisionError("mine")

    errors: list[Any] = []
    with installed(torcheval):
        for kind in (Raising, Odd, Unmergeable):
            try:
                toolkit.sync_and_compute_collection({"only": kind(1.0)} if rank == last else {})
            except ddpstats.InvalidStats as error:
                errors.append((type(error).__name__, error.ranks, error.path, str(error)))
        return [*errors, float(toolkit.sync_and_compute(mean(float(rank))))]


def states_that_differ() -> dict[str, Any]:
    """Sync lists of other lengths, metrics without data, and keys of other types."""
    rank = dist.get_rank()
    cat = metrics.Cat()
    for value in ((), (1.0, 2.0, 3.0))[rank]:
        cat.update(torch.tensor([value]))
    untouched = metrics.MeanSquaredError(multioutput="raw_values")
    if rank == 1:
        untouched.update(torch.ones(2, 3), torch.zeros(2, 3))
    keys: dict[Any, float] = of_this_rank({(1, "x"): 1.0, 2.5: 2.0}, {2.5: 3.0, None: 5.0})
    with installed(torcheval):
        return {
            "empty list": plain(toolkit.sync_and_compute(cat)),
            "both empty": plain(toolkit.sync_and_compute(metrics.Cat())),
            "lists": plain(toolkit.sync_and_compute(Holder([torch.ones(n) for n in range(1 + 2 * rank)]))),
            "not updated": plain(toolkit.sync_and_compute(untouched)),
            "int and float": toolkit.sync_and_compute(Holder(of_this_rank(1, 2.5))),
            "no members": plain(toolkit.sync_and_compute_collection({"only": mean(7.0)} if rank else {})),
            "odd keys": toolkit.sync_and_compute(Totals().update(keys)),
        }


def in_subgroups() -> list[Any]:
    """Sync ranks 1 and 2 of three in a group; return what a rank outside gets, and whether one alone gets its own."""
    rank, pair = dist.get_rank(), dist.new_group([1, 2])
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    single = mean(1.0)
    with installed(torcheval):
        is_own = toolkit.get_synced_metric(single, alone) is single
        if not rank:
            try:
                toolkit.sync_and_compute(single, process_group=pair)
            except RuntimeError as error:
                return [is_own, str(error)]
        members = {"mean": mean(float(rank)), f"own{rank}": mean(5.0 * rank)}
        both = toolkit.sync_and_compute_collection(members, process_group=pair)
        some = Holder([torch.tensor(float(rank))] * (rank - 1))  # empty on global rank 1
        return [
            is_own,
            {name: float(value) for name, value in both.items()},
            plain(toolkit.sync_and_compute(some, pair)),
        ]


# -- conflicts --------------------------------------------------------------------------------------------------------


def conflicts() -> dict[str, Failure]:
    """Return what each call raises, and what one that works gives then."""
    rank = dist.get_rank()
    tensor, vector = torch.tensor(1.0), torch.ones(2)
    cases: dict[str, Any] = {
        "tensor, list": Holder(of_this_rank(tensor, [tensor])),
        "list, dict": Holder(of_this_rank([tensor], {"k": tensor})),
        "shape": {"acc": Holder(of_this_rank(torch.ones(2), torch.ones(3))), "fine": mean(1.0)},
        "classes": {"acc": metrics.MulticlassConfusionMatrix(of_this_rank(3, 4))},
        "kind": {"n": metrics.Mean() if rank else _int_mean()},
        "dict value": {"d": Holder(of_this_rank({"k": vector}, {"k": tensor}))},
        "list of other ndim": metrics.Cat().update(of_this_rank(torch.ones(2), torch.ones(2, 2))),
        "metric": {"loss": of_this_rank(metrics.Mean, metrics.Sum)()},
        "states": {"w": metrics.WindowedMeanSquaredError(enable_lifetime=bool(rank))},
        "key": Totals().update({(frozenset({1}) if rank else "k"): 1.0}),
        "own error": of_this_rank(Holder, Refusing)(tensor),
        "other call": of_this_rank({"x": mean(1.0)}, mean(1.0)),
        "afterwards": mean(float(rank)),
    }
    with installed(torcheval):
        return {case: failure_of(_sync, metric) for case, metric in cases.items()}


def _sync(metric: Any) -> Any:
    """Sync a metric, or a collection."""
    if isinstance(metric, dict):
        return toolkit.sync_and_compute_collection(metric)
    return float(toolkit.sync_and_compute(metric))


def _int_mean() -> Any:
    """Return a metric as a program leaves it that assigns to a state."""
    metric: Any = metrics.Mean()
    metric.weighted_sum = torch.tensor(3)
    return metric


# -- what goes over the wire ------------------------------------------------------------------------------------------


def counts(install: bool) -> list[tuple[int, int]]:
    """Count collectives, all and those on the user's group, for 1 and for 40 members, each synced twice before."""
    user = dist.group.WORLD
    seen = []
    with installed(torcheval, install):
        for size in (1, 40):
            members = {f"m{i}": mean(float(i)) for i in range(size)}
            for _ in range(2):
                toolkit.sync_and_compute_collection(members)
            with count_collectives() as everywhere, on_group(user) as own:
                toolkit.sync_and_compute_collection(members)
            seen.append((everywhere.total, len(own)))
    return seen
