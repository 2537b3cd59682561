"""What runs on the ranks of `test_accelerate`: accelerate's own Accelerator on the group of the rank."""

from __future__ import annotations

import collections
import contextlib
import enum
import importlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ddpstats
from ddpstats.integrations import accelerate, loggers
from ddpstats.testing import count_collectives
from tests.integrations.watching import on_group
from tests.integrations.window_adds import added

# accelerate has no types
Accelerator: Any = importlib.import_module("accelerate").Accelerator
tracking: Any = importlib.import_module("accelerate.tracking")
operations: Any = importlib.import_module("accelerate.utils.operations")
state: Any = importlib.import_module("accelerate.state")

t = torch.tensor


class Pair(NamedTuple):
    loss: Any
    acc: Any


class Output(collections.OrderedDict[str, Any]):
    """As transformers' ModelOutput: a dict whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Batch(collections.UserDict[str, Any]):
    """As transformers' BatchEncoding: a mapping that is no dict."""


@contextlib.contextmanager
def accelerator(install: bool = True, **settings: Any) -> Iterator[Any]:
    """An Accelerator with ddpstats, or stock. The rank serves other tests afterwards."""
    _reset()
    if install:
        accelerate.install()
    try:
        yield Accelerator(cpu=True, **settings)
    finally:
        accelerate.uninstall()
        _reset()


def _reset() -> None:
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


def plain(tree: Any) -> Any:
    """Types of containers, order of keys, dtypes and exact values."""
    if isinstance(tree, (dict, collections.UserDict)):
        return (type(tree).__name__, [(key, plain(value)) for key, value in tree.items()])
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, [plain(value) for value in tree])
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype).removeprefix("torch."), tree.tolist())
    return tree


def mine(*by_rank: Any) -> Any:
    return by_rank[dist.get_rank()]


# -- where stock is right ---------------------------------------------------------------------------------------------


def documented(install: bool, debug: bool = False) -> list[Any]:
    """The examples of accelerate's docstrings, and aligned trees of all sorts."""
    found: list[Any] = []
    os.environ["ACCELERATE_DEBUG_MODE"] = "1" if debug else "0"
    try:
        with accelerator(install) as one:
            rank, size = one.process_index, one.num_processes
            found.append(one.gather(t([rank])))
            found.append(one.reduce(torch.arange(size) + 1 + (2 * rank), reduction="sum"))
            loader = one.prepare(DataLoader(range(9), batch_size=5))  # type: ignore[arg-type]
            found += [one.gather_for_metrics(batch) for batch in loader]
            pairs = one.prepare(DataLoader(TensorDataset(torch.arange(9.0), torch.arange(18).reshape(9, 2)), 2))
            for x, y in pairs:
                found.append(one.gather_for_metrics((x, y)))
                found.append(one.gather_for_metrics({"x": x, "more": [y, y[:, 0]], "loss": x.mean()}))
                found.append(one.gather_for_metrics({"x": x}, use_gather_object=True))
                found.append(one.gather_for_metrics(x.tolist()))  # objects, one per sample
                found.append(one.gather_for_metrics([{"x": value} for value in x.tolist()]))
            found += _aligned(one, rank)
            found.append(operations.gather_object([rank]))
            found.append(one.pad_across_processes({"x": torch.ones(1 + rank)}))
            one.set_trigger() if rank == 1 else None
            found += [one.check_trigger(), one.check_trigger()]
            found.append(one.gather({}))
    finally:
        del os.environ["ACCELERATE_DEBUG_MODE"]
    return [plain(each) for each in found]


def _aligned(one: Any, rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    x, half = torch.rand(3, 2, generator=generator), torch.rand(4, generator=generator).to(torch.bfloat16)
    whole = torch.randint(-9, 9, (2,), generator=generator)
    tree = {"x": x, "pair": Pair(half, [whole, (x[0],)]), "out": Output(a=x, b=Batch(c=whole)), (1, "k"): x.sum()}
    floats = {"x": x, "pair": Pair(half, [x[1]]), "scalar": x.sum(), "double": x.double()}
    return [
        one.gather(tree),
        one.reduce(tree, "sum"),
        one.reduce(tree, "none"),
        # accelerate 1.13.0 and older ones do not know it, and sum
        *([one.reduce(tree, "max")] if '"max"' in str(operations.reduce.__doc__) else []),
        one.reduce(floats, reduction="mean"),
        operations.reduce(tensor=floats),
        operations.gather(tensor=[x, half]),
    ]


# -- where stock is wrong ---------------------------------------------------------------------------------------------


def another_order(install: bool) -> Any:
    given = mine({"a": t(1.0), "b": t(2.0)}, {"b": t(20.0), "a": t(10.0)})
    with accelerator(install) as one:
        reduced, gathered = one.reduce(given), one.gather(given)
        return [
            {key: float(value) for key, value in reduced.items()},
            {key: value.tolist() for key, value in gathered.items()},
        ]


def other_keys(install: bool) -> Any:
    given = mine({"a": t(1.0), "b": t(2.0)}, {"a": t(10.0), "c": t(30.0)})
    with accelerator(install) as one:
        return {key: float(value) for key, value in one.reduce(given).items()}


def numbers(install: bool) -> Any:
    with accelerator(install) as one:
        return plain(one.gather_for_metrics({"loss": 1.0 + dist.get_rank(), "acc": 0.5}))


def on_three_ranks() -> dict[str, Any]:
    with accelerator() as one:
        keys = mine({"z": t(1.0)}, {"y": t(2.0), "z": t(3.0)}, {"x": t(4), "y": t(6.0)})
        plain_numbers = mine({"n": 1, "f": 0.5, "b": True}, {"n": 2, "b": False}, {"n": 6, "f": 1.5})
        nested = mine({"d": {"a": t(1.0)}, "l": [t(1.0)]}, {"l": [t(3.0), {"q": 5}]}, {"d": {"b": (t(7.0),)}})
        rows = mine({"p": torch.ones(2, 3)}, {"p": torch.zeros(0, 3)}, {"p": torch.full((1, 3), 2.0)})
        dtypes = mine(
            {"i": t([1, 2]), "u": t(200, dtype=torch.uint8)}, {"i": t([0.5, 0.5])}, {"u": t(100, dtype=torch.uint8)}
        )
        nan = float("nan")
        found = {
            "keys": {kind: one.reduce(keys, kind) for kind in ("sum", "mean", "max")},
            "gathered keys": one.gather(keys),
            "numbers": {kind: one.reduce(plain_numbers, kind) for kind in ("sum", "mean", "max")},
            "gathered numbers": one.gather(plain_numbers),
            "metrics": one.gather_for_metrics(plain_numbers),
            "nested": one.reduce(nested),
            "rows": one.gather(rows),
            "no samples": one.gather({"p": mine(t([]), torch.ones(1, 2, dtype=torch.int64), t([]))}),
            "dtypes": one.reduce(dtypes),
            "mean of int tensors": one.reduce({"i": t(dist.get_rank())}, "mean"),
            "number and tensor": one.reduce({"x": mine(1, t(2.0), 3.5)}, "sum"),
            "big": one.reduce({"x": t(2**62 + dist.get_rank())}, "max"),
            "huge": one.reduce({"x": 10**30}, "sum"),
            "nan": [one.reduce({"x": mine(1.0, nan, 2.0), "t": t(mine(nan, 1.0, 2.0))}, "max")],
            "containers": one.reduce(mine(Output(a=t(1.0)), Output(b=t(2.0)), Output(a=t(3.0), b=t(4.0))), "mean"),
            "default": one.reduce(collections.defaultdict(list, mine({"a": 1}, {"a": 2}, {"b": 3}))),
            "batch": one.gather(mine(Batch(a=1), Batch(a=2), Batch())),
            "lacked a namedtuple": one.reduce({"p": Pair(t(1.0), 2)} if dist.get_rank() else {}),
            "lengths": one.reduce(mine([1], [1, 2], [])),
            "low precision": one.reduce({"x": torch.full((1,), mine(256.0, 1.0, 1.0), dtype=torch.bfloat16)}),
        }
        return {name: plain(value) for name, value in found.items()}


def last_batch() -> list[Any]:
    """9 samples by 2 on 2 processes: the last batch is filled up with a copy."""
    with accelerator() as one:
        found = []
        for x in one.prepare(DataLoader(torch.arange(9.0), batch_size=2)):  # type: ignore[arg-type]
            given = {"x": x, "loss": float(x[0])} if dist.get_rank() else {"loss": float(x[0]), "x": x, "first": 1}
            found.append(plain(one.gather_for_metrics(given)))
        return found


def memory_of_its_own() -> list[Any]:
    """Results share nothing with what was passed, and have no grad."""
    with accelerator() as one:
        given = {
            f"only{dist.get_rank()}": torch.ones(2, dtype=torch.float64),
            "w": torch.ones(2, requires_grad=True) * 2,
        }
        reduced, gathered = one.reduce(given), one.gather(given)
        for value in (*reduced.values(), *gathered.values()):
            value += 1
        return [given[f"only{dist.get_rank()}"].tolist(), reduced["w"].requires_grad, gathered["w"].requires_grad]


# -- conflicts --------------------------------------------------------------------------------------------------------


def conflicts() -> dict[str, tuple[str, tuple[int, ...], str | None, str]]:
    """Per case: exception, its ranks, path and text. Then a call that works."""
    found: dict[str, tuple[str, tuple[int, ...], str | None, str]] = {}
    with accelerator() as one:
        cases = {
            "shape": (one.reduce, mine({"m": {"a": torch.ones(2)}}, {"m": {"a": torch.ones(3)}})),
            "number, vector": (one.reduce, mine({"a": 1}, {"a": torch.ones(1)})),
            "trailing": (one.gather, mine([torch.ones(2, 3)], [torch.ones(2, 4)])),
            "leaf": (one.gather, mine({"a": t(1.0)}, {"a": {"b": t(1.0)}})),
            "list": (one.gather_for_metrics, mine({"a": t(1.0)}, [t(1.0)])),
            "fields": (one.reduce, mine((1, 2), Pair(1, 2))),
            "object": (one.reduce, {"a": mine(1, None)}),
            "text": (one.gather_for_metrics, {"a": [mine("x", 1)]}),
            "calls": mine((one.reduce, {"a": 1}), (one.gather, {"a": 1})),
            "reductions": (mine(one.reduce, operations.reduce), {"a": 1}),
        }
        for case, (call, given) in cases.items():
            try:
                call(given)
            except ddpstats.DdpstatsError as error:
                found[case] = (type(error).__name__, error.ranks, error.path, str(error))
        found["afterwards"] = ("", (), None, str(one.reduce({"a": 1})))
    return found


# -- install, and what goes over the wire -----------------------------------------------------------------------------


def counts(install: bool) -> list[tuple[int, int]]:
    """Collectives in all, and on the user's own group, of a reduce and a gather: for 1 and for 40 keys."""
    seen = []
    with accelerator(install) as one:
        for size in (1, 40):
            given = {f"k{i}": t(float(i)) for i in range(size)}
            for _ in range(2):
                one.reduce(given), one.gather(given)
            with count_collectives() as everywhere, on_group(dist.group.WORLD) as own:
                one.reduce(given), one.gather(given)
            seen.append((everywhere.total, len(own)))
    return seen


class Kept(tracking.GeneralTracker):  # type: ignore[misc]  # a class found at run time
    """A tracker that keeps what accelerate gives to trackers."""

    name, requires_logging_directory, tracker = "kept", False, None

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @tracking.on_main_process  # type: ignore[untyped-decorator]  # accelerate has no types
    def log(self, values: dict[str, float], step: int, **named: Any) -> None:
        self.rows.append((step, values))


def windowed() -> tuple[list[tuple[int, dict[str, float]]], list[int]]:
    """34 steps of two batches, each tenth logged, and what is left: the rows, and the collectives of each flush."""
    kept, collectives = Kept(), []
    with accelerator(False, log_with=kept, gradient_accumulation_steps=2) as one, ddpstats.StatsWindow() as window:
        one.init_trackers("project")
        model, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD
        model, optimizer = one.prepare(model, optimizer(model.parameters(), lr=0.1))
        step = 0
        for index in range(68):
            with one.accumulate(model):
                one.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
            stats = added(dist.get_rank(), index)
            if stats is not None:
                window.add(*stats)
            if not one.sync_gradients:
                continue
            step += 1
            if step % 10 == 0 or step == 34:
                with count_collectives() as seen:
                    loggers.write(one, window.flush(), step, prefix="train/")
                collectives.append(seen.total)
    return kept.rows, collectives


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def keys_of_other_types() -> list[Any]:
    """Keys that no wire format knows, in another order on each rank; and one that only rank 1 has."""
    rank = dist.get_rank()
    with accelerator() as one:
        given: dict[Any, Any] = {Colour.RED: t([1.0]), Colour.BLUE: t([10.0]), torch.device("cpu"): t([5.0])}
        if rank == 1:
            given = {**dict(reversed(list(given.items()))), Colour: t([7.0])}
        found = one.gather(given)
        deep: Any = t([float(rank)])
        for _ in range(50):
            deep = {"k": [deep]} if rank > 9 else {"k": deep}
        nested = one.gather(deep)
        for _ in range(50):
            nested = nested["k"]
        own = {key: found[key].tolist() for key in (Colour.RED, Colour.BLUE, torch.device("cpu"))}
        return [list(own.values()), [v.tolist() for k, v in found.items() if "Colour" in str(k)][-1:], nested.tolist()]
