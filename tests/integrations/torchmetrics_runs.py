"""The functions that run on the ranks of `test_torchmetrics`: torchmetrics on states that differ between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics as tm
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, Running

import ddpstats
from ddpstats.integrations import torchmetrics
from ddpstats.testing import count_collectives
from tests.integrations.on_ranks import installed, on_group


class Holder(tm.Metric):
    """One state of any kind under any reduction; `compute` shows it."""

    full_state_update = True
    state: Any

    def __init__(self, default: Any, reduction: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("state", default, dist_reduce_fx=reduction)

    def update(self, value: Any) -> None:
        if isinstance(self.state, list):
            self.state.extend(value)
        else:
            self.state = value

    def compute(self) -> Any:
        return self.state


class OtherHolder(Holder):
    pass


class ByItself(Holder):
    """As MeanAveragePrecision: more to sync than its states."""

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn=dist_sync_fn, process_group=process_group)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, dist.get_rank(), group=process_group)
        self.ranks = ranks


class Words(tm.Metric):
    """A state that is no tensor: stock syncs the others and leaves this one as it is."""

    full_state_update = True
    words: list[str]
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [], dist_reduce_fx=None)
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, words: list[str]) -> None:
        self.words += words
        self.count += len(words)

    def compute(self) -> Any:
        return self.words, self.count


def spread(stacked: Any) -> Any:
    """A custom reduction: gets the stacked tensors, or the list of all items."""
    if isinstance(stacked, list):
        return torch.stack(stacked).max(0).values - torch.stack(stacked).min(0).values
    return stacked.max(0).values - stacked.min(0).values


def plain(value: Any) -> Any:
    """Return (dtype, device, values) of tensors, in dicts and lists, to compare them bit for bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(value.device), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def mean_of(value: float, **kwargs: Any) -> tm.MeanMetric:
    metric = tm.MeanMetric(**kwargs)
    metric.update(value)
    return metric


def held(default: Any, reduction: Any, value: Any, of: type[Holder] = Holder, **kwargs: Any) -> Holder:
    metric = of(default, reduction, **kwargs)
    metric.update(value)
    return metric


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return plain(call())
    except (ddpstats.DdpstatsError, RuntimeError, TypeError, ValueError) as error:
        ranks = getattr(error, "ranks", None), getattr(error, "path", None)
        return type(error).__name__, *ranks, str(error)


# -- the same as stock ------------------------------------------------------------------------------------------------


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.rand(7, 3, generator=generator), torch.randint(0, 3, (7,), generator=generator)


CLASSES: dict[str, Any] = {"num_classes": 3}
BUILDERS: dict[str, Callable[..., Any]] = {
    "mean": tm.MeanMetric,
    "cat": tm.CatMetric,
    "running mean": lambda **k: Running(tm.MeanMetric(**k), window=2),
    "held mean": lambda **k: Holder(torch.zeros(2), "mean", **k),
    "held custom": lambda **k: Holder(torch.zeros(2), spread, **k),
    "held cat": lambda **k: Holder(torch.zeros(2), "cat", **k),
    "held list": lambda **k: Holder([], None, **k),
    "auroc": lambda **k: MulticlassAUROC(**CLASSES, **k),
    "classwise": lambda **k: ClasswiseWrapper(MulticlassAccuracy(average=None, **CLASSES, **k)),
    "pearson": tm.PearsonCorrCoef,
    "sum of two": lambda **k: tm.MeanSquaredError(**k) + tm.MeanAbsoluteError(**k) * 2,
}


def inputs(name: str, step: int) -> tuple[Any, ...]:
    preds, target = batches(step)
    if name.startswith("held"):
        return (list(preds[:2, :2]) if "list" in name else preds[0, :2],)
    if name in ("mean", "cat", "running mean"):
        return (preds[0],)
    if name in ("pearson", "sum of two"):
        return preds[:, 0], preds[:, 1] + preds[:, 0]
    return preds, target


def every_metric(install: bool) -> dict[str, Any]:
    """Return what each metric gives in each way of using it, on inputs that differ but fit together."""
    results: dict[str, Any] = {}
    options: list[dict[str, Any]] = [{}, {"sync_on_compute": False}, {"dist_sync_on_step": True}]
    with installed(torchmetrics, install):
        for name, build in BUILDERS.items():
            for option in options:
                results[f"{name} {option}"] = _used(name, build(**option))
        results["manual"] = _manual_sync()
    return results


def _used(name: str, metric: Any) -> list[Any]:
    seen = []
    for step in range(3):
        if step == 1:
            seen.append(metric(*inputs(name, step)))
        else:
            metric.update(*inputs(name, step))
    seen += [metric.compute(), metric.compute()]
    metric.update(*inputs(name, 3))
    seen.append(metric.compute())
    seen.append(metric.metric_state)  # the rank's own again
    metric.reset()
    metric.update(*inputs(name, 4))
    return [plain(value) for value in [*seen, metric.compute()]]


def _manual_sync() -> list[Any]:
    metric = tm.CatMetric()
    metric.update(batches(0)[0][0])
    metric.sync()
    states = [metric.metric_state]
    metric.unsync()
    states.append(metric.metric_state)
    for should_sync in (True, False):
        with metric.sync_context(should_sync=should_sync):
            states.append(metric.metric_state)

    def own_sync(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        return [tensor * 2]

    metric.sync(dist_sync_fn=own_sync)
    words = Words()
    words.update(["a", "b"])
    own = held(torch.zeros(1), "sum", torch.ones(1), dist_sync_fn=own_sync)
    by_itself = held(torch.zeros(1), "sum", torch.ones(1), of=ByItself)
    return [plain(it) for it in [*states, metric.metric_state, own.compute(), words.compute(), by_itself.compute()]]


def every_collection(install: bool) -> list[Any]:
    """Use collections with a prefix, compute groups found and given, nested, in steps, with results cached."""

    def accuracy(**settings: Any) -> MulticlassAccuracy:
        return MulticlassAccuracy(**CLASSES, **settings)

    def all_kinds() -> dict[str, Any]:
        return {
            "inner": tm.MetricCollection({"x": accuracy()}, postfix="_in"),
            "classwise": ClasswiseWrapper(accuracy(average=None)),
            "minmax": MinMaxMetric(accuracy(average="micro")),
            "product": accuracy() * 2,
            "running": Running(accuracy(), window=2),
            "step": accuracy(dist_sync_on_step=True),
            "wrapped step": ClasswiseWrapper(accuracy(average=None, dist_sync_on_step=True)),
            "alone": accuracy(sync_on_compute=False),
        }

    def grouped() -> dict[str, Any]:
        return {"a": MulticlassAUROC(**CLASSES), "b": MulticlassAUROC(average=None, **CLASSES)}

    makers: list[Callable[[], tm.MetricCollection]] = [
        lambda: tm.MetricCollection([accuracy(), MulticlassConfusionMatrix(**CLASSES)], prefix="val/"),
        lambda: tm.MetricCollection(grouped(), compute_groups=[["a", "b"]]),
        lambda: tm.MetricCollection(all_kinds(), compute_groups=False),
    ]
    results: list[Any] = []
    with installed(torchmetrics, install):
        for make in makers:
            collection = make()
            collection.update(*batches(0))
            collection.update(*batches(1))
            results += [collection.compute(), collection.compute(), collection(*batches(2)), collection.compute()]
            collection.update(*batches(3))
            results += [collection.compute(), collection.clone(prefix="again_").compute()]
            collection.reset()
            collection.update(*batches(4))
            results.append(collection.compute())
    return [plain(value) for value in results]


# -- where stock is wrong ---------------------------------------------------------------------------------------------


def members_differ(install: bool) -> list[Any]:
    """Compute {loss: 1, aa: 100} on rank 0, {loss: 1, zz: 100} on rank 1."""
    with installed(torchmetrics, install):
        name = "zz" if dist.get_rank() else "aa"
        several = tm.MetricCollection({"loss": mean_of(1.0), name: mean_of(100.0)})
        return [{key: float(value) for key, value in several.compute().items()}]


def steps_differ(install: bool) -> list[Any]:
    """Step collections whose members, and their order, differ; then compute them."""
    with installed(torchmetrics, install):
        rank = dist.get_rank()
        several = tm.MetricCollection([tm.SumMetric(dist_sync_on_step=True)])
        several.add_metrics({"only" + str(rank): tm.MaxMetric(dist_sync_on_step=True)})
        for member in [tm.MeanMetric, tm.MinMetric][:: -1 if rank else 1]:
            several.add_metrics([member(dist_sync_on_step=member is tm.MeanMetric)])
        steps = [{key: float(value) for key, value in several(10.0**step + rank).items()} for step in range(2)]
        return [*steps, {key: float(value) for key, value in several.compute().items()}]


def uneven() -> dict[str, Any]:
    """Compute metrics with lists and tensors of other lengths on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    items = [torch.tensor([10.0 * rank + i]) for i in range(2 + rank)]
    retrieval = tm.RetrievalPrecision(top_k=1)
    for part in range(1 + rank):  # 1, 2, 3 list items
        ids = torch.full((2 + rank,), rank + 10 * part)
        retrieval.update(torch.linspace(0, 1, 2 + rank), torch.arange(2 + rank) > 0, ids)
    metrics = {
        "none": held([], None, items),
        "cat": held([], "cat", items),
        "some empty": held([], None, items[: 2 * (rank == 1)]),
        "some empty cat": held([], "cat", [torch.ones(2, 3, dtype=torch.int32)] * (rank == 1)),
        "all empty": held([], None, []),
        "all empty cat": held([], "cat", []),
        "scalars": held([], "cat", [torch.tensor(1.0 + rank)] * rank),
        "retrieval": retrieval,
    }
    bad = held([], "cat", [torch.ones(2, 2), torch.ones(2, 3)] if rank == 1 else [torch.ones(1, 2)])
    values = torch.ones(3, requires_grad=True)
    with installed(torchmetrics):
        results: dict[str, Any] = {name: metric.compute() for name, metric in metrics.items()}
        results["sizes that do not fit on one rank"] = outcome(bad.compute)[0]
        for metric in (held(torch.zeros(3), "sum", values * 2), held([], "cat", [values * 2, values * 3])):
            metric.sync()
            metric.state.sum().backward()
    return {name: plain(value) for name, value in {**results, "grad": values.grad, "size": size}.items()}


def results_cached_on_rank_0() -> list[float]:
    """Compute a collection again whose result rank 0 alone has cached; twice."""
    with installed(torchmetrics):
        sums = tm.MetricCollection({"sum": tm.SumMetric(), "mean": tm.MeanMetric()}, compute_groups=False)
        sums.update(1.0)
        sums.compute()
        if dist.get_rank():
            sums.update(1.0)
        return [float(sums.compute()["sum"]) for _ in range(2)]


def members_of_others() -> dict[str, Any]:
    """Compute collections of which a rank lacks members."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    results: dict[str, Any] = {}
    with installed(torchmetrics):
        mean: dict[str, Any] = {"mean": mean_of(float(rank))}
        if rank == last:

            class Mine(Holder):  # the other ranks have no such class
                pass

            mean["it"] = held([], None, [torch.tensor(1.0), torch.tensor(2.0)], of=Mine)
        several = tm.MetricCollection(mean, prefix="my_", compute_groups=False)
        results["own class"] = [several.compute(), several.compute()]
        results["left as it was"] = set(several.keys(keep_base=True)) == set(mean)
        results["order"] = list(several.compute())
        of_two = {"two": _summed(5.0 * rank)} if rank else {}
        results["of the others"] = tm.MetricCollection({"all": _summed(1.0), **of_two}).compute()
        results["names"] = [
            list(_of_dicts(_all_names(), sync_on_compute=False).compute()),
            list(_of_dicts([_all_names(), _all_names()[:1]][rank != last]).compute()),
        ]
        alike = tm.MetricCollection({"a": _summed(1.0)})
        results["collectives"] = [_steady(alike.compute), _steady(several.compute)]
        several.reset()
        several.update(torch.ones(2)) if rank != last else several["mean"].update(torch.ones(2))
        results["again"] = several.compute()
    return {name: plain(value) for name, value in results.items()}


def _all_names() -> list[str]:
    return ["everyone's", "one rank's", "product"]


def _of_dicts(names: list[str], **kwargs: Any) -> tm.MetricCollection:
    """Members that give dicts, whose keys collide as soon as there are two of them; one is of an inner collection."""

    def accuracy() -> MulticlassAccuracy:
        return MulticlassAccuracy(num_classes=3, average=None, **kwargs)

    members: dict[str, Any] = {
        "everyone's": ClasswiseWrapper(accuracy()),
        "one rank's": tm.MetricCollection({"inner": ClasswiseWrapper(accuracy())}, prefix="in_", postfix="_in"),
        "product": accuracy() * 2,
    }
    several = tm.MetricCollection({name: members[name] for name in names}, prefix="v_", compute_groups=False)
    several.update(*batches(0))
    return several


def _steady(call: Callable[[], Any]) -> int:
    for _ in range(2):
        call()
    with count_collectives() as seen:
        call()
    return seen.total


def members_that_give_nothing() -> dict[str, Any]:
    """Compute where the last rank's member raises, or gives what cannot be sent."""
    last = dist.get_rank() == dist.get_world_size() - 1

    class Raising(Holder):
        def compute(self) -> Any:
            raise ZeroDivisionError("mine")

    class Odd(Holder):
        def compute(self) -> Any:
            return {"x": object()}

    results: dict[str, Any] = {}
    with installed(torchmetrics), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # compute before update
        for name, kind in {"raises": Raising, "odd result": Odd}.items():
            only: dict[str, Any] = {"only": held(torch.zeros(1), "sum", torch.ones(1), of=kind)} if last else {}
            several = tm.MetricCollection({"mean": mean_of(1.0), **only}, compute_groups=False)
            results[name] = outcome(several.compute)
        stepping: dict[str, Any] = {"only": Odd(torch.zeros(1), "sum", dist_sync_on_step=True)} if last else {}
        steps = tm.MetricCollection({"mean": tm.MeanMetric(dist_sync_on_step=True), **stepping}, compute_groups=False)
        results["step"] = outcome(lambda: steps(torch.ones(1)))
        results["afterwards"] = plain(tm.MetricCollection({"mean": mean_of(1.0)}).compute())
    return results


# -- conflicts --------------------------------------------------------------------------------------------------------


def conflicts() -> dict[str, Any]:
    """Return what each call raises; the last one works."""
    rank = dist.get_rank()
    last = rank == dist.get_world_size() - 1
    some = torch.ones(3) if last else torch.ones(2)
    words = Words()
    words.update(["a"])
    metrics: dict[str, Any] = {
        f"shape {reduction}": held(torch.zeros(1), spread if reduction == "spread" else reduction, some)
        for reduction in ("sum", "spread")
    }
    metrics["tensor and list"] = held([] if last else torch.zeros(2), None, [some] if last else some)
    metrics["reduction"] = held(torch.zeros(2), "max" if last else "min", torch.ones(2))
    metrics["cat"] = held([], "cat", [torch.ones(2, 3) if last else torch.ones(2)])
    metrics["states"] = MulticlassAUROC(num_classes=3, thresholds=5 if last else None)
    collections: dict[str, dict[str, Any]] = {
        "member's shape": {"loss": mean_of(1.0), "acc": MulticlassConfusionMatrix(num_classes=3 + last)},
        "member's class": {"a": mean_of(1.0), "b": held(torch.zeros(2), "sum", some, OtherHolder if last else Holder)},
        "words": {"a": mean_of(1.0)} | ({"b": words} if last else {}),
    }
    metrics |= {name: tm.MetricCollection(members, compute_groups=False) for name, members in collections.items()}
    stepping = {"dist_sync_on_step": True}
    steps = tm.MetricCollection({"a": tm.SumMetric(**stepping) if last else tm.MaxMetric(**stepping)})
    metrics["other metric"] = tm.SumMetric() if last else tm.MeanMetric()
    metrics["afterwards"] = mean_of(float(rank))
    with installed(torchmetrics), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # compute before update
        endings = {"steps": outcome(lambda: steps(1.0))}
        # `compute` is looked up here: the stock one, bound before, would stay the stock one
        return endings | {name: outcome(lambda: metric.compute()) for name, metric in metrics.items()}  # noqa: B023


# -- groups and collectives --------------------------------------------------------------------------------------------


def in_groups() -> list[Any]:
    """Compute in the groups of ranks 0 and 2 and of ranks 1 and 2; each rank takes part in its groups."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    value = 10.0**rank
    results: list[Any] = []
    with installed(torchmetrics):
        results.append([float(_summed(value, process_group=group).compute()) for group in groups])
        members = {f"in {i}": _summed(value, process_group=group) for i, group in enumerate(groups)}
        members["all"] = _summed(value)
        if rank == 2:  # in another order, and one more
            members = dict(reversed(members.items())) | {"own": _summed(5.0, process_group=groups[1])}
        several = tm.MetricCollection([])
        for name, member in members.items():  # a dict would be sorted
            several.add_metrics({name: member})
        results.append({name: float(value) for name, value in several.compute().items()})
        bad = held(torch.zeros(1), "sum", torch.ones(rank), process_group=groups[1])
        results.append(outcome(bad.compute)[3:])
    return results


def _summed(value: float, **kwargs: Any) -> tm.SumMetric:
    metric = tm.SumMetric(**kwargs)
    metric.update(value)
    return metric


def _five(**kwargs: Any) -> tm.MetricCollection:
    return tm.MetricCollection({f"m{i}": mean_of(float(i), **kwargs) for i in range(5)}, compute_groups=False)


def collectives() -> list[dict[str, int]]:
    """Count the collectives, all and the user's, of one compute: of stock's five metrics, of five here, and of one."""

    def counted(make: Callable[[], Any]) -> dict[str, int]:
        with count_collectives() as seen, on_group(dist.group.WORLD) as on_users:
            make().compute()
        return {**seen.by_op, "on the user's group": len(on_users)}

    with installed(torchmetrics, False):
        counts = [counted(_five)]
    with installed(torchmetrics):
        for _ in range(2):  # ranks connect
            _five().compute(), mean_of(1.0).compute()
        return [*counts, counted(_five), counted(lambda: mean_of(1.0))]


def alone_in_a_group() -> list[Any]:
    """Return values and collectives, stock and installed, where each rank is alone in a group."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    results = []
    for install in (False, True):
        with installed(torchmetrics, install), count_collectives() as seen:
            listed = held([], None, [torch.ones(1)] * 2, process_group=group)
            values = plain([_five(process_group=group).compute(), listed.compute()])
        results.append([values, dict(seen.by_op)])
    return results
