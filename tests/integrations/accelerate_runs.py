"""The functions that run on the ranks of `test_accelerate`: accelerate's own Accelerator on the rank's group."""

from __future__ import annotations

import collections
import contextlib
import enum
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ddpstats
from ddpstats.integrations import accelerate
from ddpstats.testing import count_collectives
from tests.integrations.on_ranks import (
    Failure,
    failure_of,
    installed,
    of_this_rank,
    on_group,
    reset_accelerate,
    write,
)
from tests.integrations.window_adds import added

# accelerate has no types
Accelerator: Any = importlib.import_module("accelerate").Accelerator
tracking: Any = importlib.import_module("accelerate.tracking")
operations: Any = importlib.import_module("accelerate.utils.operations")

t = torch.tensor


class Pair(NamedTuple):
    loss: Any
    acc: Any


class Output(collections.OrderedDict[str, Any]):
    """As transformers' ModelOutput: a dict whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Colour(enum.Enum):
    """Keys that no wire format knows."""

    RED = "red"
    BLUE = "blue"


@contextlib.contextmanager
def accelerator(install: bool = True, **settings: Any) -> Iterator[Any]:
    """Yield an Accelerator with ddpstats, or stock. The rank serves other tests afterwards."""
    reset_accelerate()
    with installed(accelerate, install):
        yield Accelerator(cpu=True, **settings)
    reset_accelerate()


def plain(tree: Any) -> Any:
    """Return a tree as types of containers, keys in their order, dtypes and exact values."""
    if isinstance(tree, dict):
        return (type(tree).__name__, [(key, plain(value)) for key, value in tree.items()])
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, [plain(value) for value in tree])
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype).removeprefix("torch."), tree.tolist())
    return tree


# -- where stock is right ---------------------------------------------------------------------------------------------


def documented(install: bool) -> list[Any]:
    """Run the examples of accelerate's docstrings, and reduce trees of all sorts that ranks share."""
    with accelerator(install) as it:
        rank, size = it.process_index, it.num_processes
        results = [it.gather(t([rank])), it.reduce(torch.arange(size) + 1 + (2 * rank), reduction="sum")]
        loader = it.prepare(DataLoader(range(9), batch_size=5))  # type: ignore[arg-type]
        results += [it.gather_for_metrics(batch) for batch in loader]
        pairs = it.prepare(DataLoader(TensorDataset(torch.arange(9.0), torch.arange(18).reshape(9, 2)), 2))
        for x, y in pairs:
            results.append(it.gather_for_metrics((x, y)))
            results.append(it.gather_for_metrics({"x": x, "more": [y, y[:, 0]], "loss": x.mean()}))
            results.append(it.gather_for_metrics({"x": x}, use_gather_object=True))
            results.append(it.gather_for_metrics(x.tolist()))  # objects, one per sample
        results += _aligned(it, rank)
        results += [
            operations.gather_object([rank]),
            it.pad_across_processes({"x": torch.ones(1 + rank)}),
            it.gather({}),
        ]
    return [plain(result) for result in results]


def _aligned(it: Any, rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    x, half = torch.rand(3, 2, generator=generator), torch.rand(4, generator=generator).to(torch.bfloat16)
    whole = torch.randint(-9, 9, (2,), generator=generator)
    tree = {"x": x, "pair": Pair(half, [whole, (x[0],)]), "out": Output(a=x, b={"c": whole}), (1, "k"): x.sum()}
    floats = {"x": x, "pair": Pair(half, [x[1]]), "scalar": x.sum(), "double": x.double()}
    return [
        *(it.gather(tree), it.reduce(tree, "sum"), it.reduce(tree, "none"), it.reduce(floats, reduction="mean")),
        *(operations.reduce(tensor=floats), operations.gather(tensor=[x, half])),
    ]


# -- where stock is wrong ---------------------------------------------------------------------------------------------


def dicts_that_differ(case: str, install: bool) -> Any:
    with accelerator(install) as it:
        if case == "another order":
            tree = of_this_rank({"a": t(1.0), "b": t(2.0)}, {"b": t(20.0), "a": t(10.0)})
            return [plain(it.reduce(tree)), plain(it.gather(tree))]
        if case == "other keys":
            return plain(it.reduce(of_this_rank({"a": t(1.0), "b": t(2.0)}, {"a": t(10.0), "c": t(30.0)})))
        return plain(it.gather_for_metrics({"loss": 1.0 + dist.get_rank(), "acc": 0.5}))


def keys_that_are_no_texts() -> list[Any]:
    """Gather them in another order on each rank, and one that only rank 1 has."""
    with accelerator() as it:
        tree: dict[Any, Any] = {Colour.RED: t([1.0]), torch.device("cpu"): t([5.0]), Colour.BLUE: t([10.0])}
        if dist.get_rank() == 1:
            tree = {**dict(reversed(list(tree.items()))), Colour: t([7.0])}
        gathered = it.gather(tree)
        lacked = [value.tolist() for key, value in gathered.items() if "<enum 'Colour'>" in str(key)]
        return [gathered[key].tolist() for key in (Colour.RED, torch.device("cpu"), Colour.BLUE)] + lacked


def on_three_ranks() -> dict[str, Any]:
    with accelerator() as it:
        keys = of_this_rank({"z": t(1.0)}, {"y": t(2.0), "z": t(3.0)}, {"x": t(4), "y": t(6.0)})
        numbers = of_this_rank({"n": 1, "f": 0.5, "b": True}, {"n": 2, "b": False}, {"n": 6, "f": 1.5})
        nested = of_this_rank({"d": {"a": t(1.0)}, "l": [t(1.0)]}, {"l": [t(3.0), {"q": 5}]}, {"d": {"b": (t(7.0),)}})
        rows = of_this_rank({"p": torch.ones(2, 3)}, {"p": torch.zeros(0, 3)}, {"p": torch.full((1, 3), 2.0)})
        outputs = of_this_rank(Output(a=t(1.0)), Output(b=t(2.0)), Output(a=t(3.0), b=t(4.0)))
        results = {
            "keys": {kind: it.reduce(keys, kind) for kind in ("sum", "mean", "max")},
            "gathered keys": it.gather(keys),
            "numbers": {kind: it.reduce(numbers, kind) for kind in ("sum", "mean", "max")},
            "gathered numbers": it.gather_for_metrics(numbers),
            "nested": it.reduce(nested),
            "rows": it.gather(rows),
            "no samples": it.gather({"p": of_this_rank(t([]), torch.ones(1, 2, dtype=torch.int64), t([]))}),
            "large": it.reduce({"x": t(2**62 + dist.get_rank())}, "max"),
            "number and tensor": it.reduce({"x": of_this_rank(1, t(2.0), 3.5)}, "sum"),
            "containers": it.reduce(outputs, "mean"),
            "lacked a namedtuple": it.reduce({"p": Pair(t(1.0), 2)} if dist.get_rank() else {}),
            "low precision": it.reduce({"x": torch.full((1,), of_this_rank(256.0, 1.0, 1.0), dtype=torch.bfloat16)}),
        }
        return {name: plain(value) for name, value in results.items()}


def last_batch() -> list[Any]:
    """Gather 9 samples by 2 on 2 processes: the last batch is filled up with a copy."""
    gathered = []
    with accelerator() as it:
        for x in it.prepare(DataLoader(torch.arange(9.0), batch_size=2)):  # type: ignore[arg-type]
            loss = float(x[0])
            tree = of_this_rank({"loss": loss, "x": x, "first": 1}, {"x": x, "loss": loss})
            gathered.append(plain(it.gather_for_metrics(tree)))
    return gathered


def tensors_without_keys(install: bool) -> tuple[list[Any], int, int]:
    """Gather and reduce tensors, lists and tuples; count collectives, in all and on accelerate's group."""
    with accelerator(install) as it, count_collectives() as everywhere, on_group(dist.group.WORLD) as on_accelerates:
        logits, labels = t([float(dist.get_rank())]), t([10 * dist.get_rank()])
        results = [
            it.gather_for_metrics((logits, labels)),
            it.gather([logits, Pair(labels, (logits,))]),
            it.reduce([logits, (labels,)], "sum"),
            it.gather(logits),
            it.reduce(logits),
        ]
    return [plain(result) for result in results], everywhere.total, len(on_accelerates)


def other_objects() -> list[Any]:
    """Reduce a text; then gather it as the error says, and as `gather_for_metrics` does."""
    tree = {"a": f"x{dist.get_rank()}"}
    with accelerator() as it:
        return [
            failure_of(it.reduce, tree),
            operations.gather_object([tree]),
            it.gather_for_metrics(tree, use_gather_object=True),
        ]


def memory_of_results() -> list[Any]:
    """Change the results; return what was passed, and whether the results require a gradient."""
    with accelerator() as it:
        own = f"only{dist.get_rank()}"
        tree = {own: torch.ones(2, dtype=torch.float64), "w": torch.ones(2, requires_grad=True) * 2}
        reduced, gathered = it.reduce(tree), it.gather(tree)
        for value in (*reduced.values(), *gathered.values()):
            value += 1
        return [tree[own].tolist(), reduced["w"].requires_grad, gathered["w"].requires_grad]


# -- conflicts --------------------------------------------------------------------------------------------------------


def conflicts() -> dict[str, Failure]:
    """Return what each call raises, and what one that works gives then."""
    with accelerator() as it:
        cases = {
            "shape": (it.reduce, of_this_rank({"m": {"a": torch.ones(2)}}, {"m": {"a": torch.ones(3)}})),
            "trailing": (it.gather, {"x": [of_this_rank(torch.ones(2, 3), torch.ones(2, 4))]}),
            "leaf": (it.gather, of_this_rank({"a": t(1.0)}, {"a": {"b": t(1.0)}})),
            "object": (it.reduce, {"a": of_this_rank(1, None)}),
            "calls": of_this_rank((it.reduce, {"a": 1}), (it.gather, {"a": 1})),
            "reductions": (of_this_rank(it.reduce, operations.reduce), {"a": 1}),
            "afterwards": (it.reduce, {"a": 1}),
        }
        return {case: failure_of(*call) for case, call in cases.items()}


def conflict_in_debug_mode() -> tuple[str, bool]:
    """Return the text of a conflict in accelerate's debug mode, and whether it is of accelerate's class, too."""
    tree = {"a": of_this_rank(torch.ones(2), torch.ones(3))}
    with accelerator() as it:
        operations.PartialState().debug = True
        try:
            it.reduce(tree)
        except ddpstats.SchemaConflict as conflict:
            return str(conflict), isinstance(conflict, operations.DistributedOperationException)
        finally:
            operations.PartialState().debug = False
    raise AssertionError("nothing was raised")


# -- what goes over the wire ------------------------------------------------------------------------------------------


def counts(install: bool) -> list[tuple[int, int]]:
    """Count collectives in all, and on the user's own group, of a reduce and a gather: of 1 key and of 40."""
    seen = []
    with accelerator(install) as it:
        for size in (1, 40):
            tree = {f"k{i}": t(float(i)) for i in range(size)}
            for _ in range(2):
                it.reduce(tree), it.gather(tree)
            with count_collectives() as everywhere, on_group(dist.group.WORLD) as on_users:
                it.reduce(tree), it.gather(tree)
            seen.append((everywhere.total, len(on_users)))
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


def reduced_for_trackers() -> list[tuple[int, dict[str, float]]]:
    """Reduce a key of each rank, and write the result by the documented line; return what trackers got here."""
    kept, own = Kept(), f"only{dist.get_rank()}"
    with accelerator(False, log_with=kept) as it:
        it.init_trackers("project")
        reduced = ddpstats.reduce_stats({"loss": float(dist.get_rank()), own: 1.0})
        write("accelerate's trackers", accelerator=it, reduced=reduced, step=3)
    return kept.rows


def windowed() -> tuple[list[tuple[int, dict[str, float]]], list[int]]:
    """Train 34 steps of two batches; return the rows of each tenth and the last, and the collectives of each flush."""
    kept, collectives = Kept(), []
    with accelerator(False, log_with=kept, gradient_accumulation_steps=2) as it, ddpstats.StatsWindow() as window:
        it.init_trackers("project")
        model = torch.nn.Linear(1, 1)
        model, optimizer = it.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for index in range(68):
            with it.accumulate(model):
                it.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
            stats = added(dist.get_rank(), index)
            if stats is not None:
                window.add(*stats)
            step = (index + 1) // 2
            if it.sync_gradients and (step % 10 == 0 or step == 34):
                with count_collectives() as seen:
                    write("accelerate's trackers", accelerator=it, reduced=window.flush(), step=step)
                collectives.append(seen.total)
    return kept.rows, collectives
