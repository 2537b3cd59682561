"""Faulty programs, each beside its legal twin: the ranks run them, and `SCENARIOS` says how the guard has to end them.

A scenario is a function of ``bad``: with True the ranks do what a correct program must not, with False the nearest
thing that is legal, on which the guard must stay silent. Most have a counterpart in the MPI Bugs Initiative or in
MPI-CorrBench, named in `SCENARIOS`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from ddpstats._observe import collectives
from ddpstats.guard import collective_guard

Scenario = Callable[[bool], Any]


@dataclass(frozen=True)
class Row:
    """A scenario, and the error and the text of its message that every rank ends a bad run with."""

    play: Scenario
    error: str
    text: str
    counterpart: str
    ranks: int = 2
    in_step: str = ""  # the text in mode step, where it is another
    rank_1: str = ""  # the error of rank 1, where it is another, or "dies"


def rank() -> int:
    return dist.get_rank()


def odd(bad: bool) -> bool:
    return bad and rank() == 1


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (1,)))


# -- labels -----------------------------------------------------------------------------------------------------------


def swap_of_equal_signature(bad: bool) -> None:
    stats = {"snr": ones(), "l1": ones()}
    for key in reversed(stats) if odd(bad) else stats:
        dist.all_reduce(stats[key])


def swap_through_one_recursive_line(bad: bool) -> None:
    stats = {"loss": ones(), "l1_loss" if odd(bad) else "snr_loss": [ones(), ones()]}
    _reduce_tree(stats)


def _reduce_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reduce_tree(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_reduce_tree(inner) for inner in value]
    value = (value * 2).sum()
    dist.all_reduce(value)
    return value


def named_by_the_program(bad: bool) -> None:
    with ddpstats.label("l1" if odd(bad) else "snr"):
        dist.all_reduce(ones())


def experts_of_each_rank(bad: bool) -> None:
    """Legal: modules and tensors under names of the rank's own. Bad: losses of the program's, in another order."""
    losses = {"balance_loss": ones(), "z_loss": ones()}
    for name in reversed(losses) if odd(bad) else losses:
        dist.all_reduce(losses[name])
    experts = {f"expert{rank()}": torch.nn.Linear(1, 1)}
    for expert in experts.values():
        for parameter in expert.parameters():
            dist.all_reduce(parameter.data)
    tokens = {f"expert{rank()}": ones()}
    for tensor in tokens.values():
        dist.all_reduce(tensor)


def named_on_one_rank(bad: bool) -> None:
    """Legal: one rank's code has names for the tensors, the other's has none, or counts them."""
    named, unnamed = {"loss": ones(), "acc": ones()}, [ones(), ones()]
    if rank() == 0:
        for name in named:
            dist.all_reduce(named[name])
        for name in named:
            dist.all_reduce(named[name])
    else:
        dist.all_reduce(ones())
        dist.all_reduce(ones())
        for tensor in unnamed:
            dist.all_reduce(tensor)
    reduce_op(bad)


def shards_of_each_rank(bad: bool) -> None:
    """Legal: what is gathered, scattered or broadcast has another name on each rank."""
    shards, state = {f"shard{rank()}": ones()}, {"w": ones(), "b": ones()}
    for name in shards:
        dist.all_gather_into_tensor(torch.empty(2), shards[name])
    if rank() == 0:
        for name in state:
            dist.broadcast(state[name], src=0)
    else:
        for _ in range(2):
            dist.broadcast(torch.empty(1), src=0)
    received = {"part": torch.empty(1)}
    for tensor in received.values():
        dist.scatter(tensor, [ones(), ones()] if rank() == 0 else None, src=0)
    reduce_op(bad)


# -- what is called ---------------------------------------------------------------------------------------------------


def operation(bad: bool) -> None:
    if odd(bad):
        dist.all_gather_into_tensor(torch.empty(2), ones())
    else:
        dist.all_reduce(ones())


def barrier_against_collective(bad: bool) -> None:
    if odd(bad):
        dist.barrier()
    else:
        dist.all_reduce(ones())


def reduce_op(bad: bool) -> None:
    dist.all_reduce(ones(), op=dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM)


def number_of_dimensions(bad: bool) -> None:
    """Legal: as many elements in another shape."""
    dist.all_reduce(ones(2, 2) if rank() == 1 else ones(5 if bad else 4))


def dtype(bad: bool) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd(bad) else torch.float32))


def shape(bad: bool) -> None:
    dist.all_reduce(ones(300_000) if odd(bad) else ones(100))


def memory_format(bad: bool) -> None:
    tensor = torch.arange(4.0).reshape(2, 2)
    dist.all_reduce(tensor.t() if odd(bad) else tensor)


def root(bad: bool) -> None:
    dist.broadcast(ones(), src=1 if odd(bad) else 0)


def pieces(bad: bool) -> None:
    """all_to_all of uneven pieces is legal as long as what is sent is what is expected."""
    sizes_sent, sizes_received = ([3, 1], [3, 2]) if rank() == 0 else ([2, 2], [1, 2])
    if odd(bad):
        sizes_sent = [1, 3]
    dist.all_to_all_single(torch.empty(sum(sizes_received)), torch.ones(sum(sizes_sent)), sizes_received, sizes_sent)


def coalesced(bad: bool) -> None:
    tensors = [ones(4), ones(2)] if not odd(bad) else [ones(2), ones(4)]
    manager: Any = dist.distributed_c10d._coalescing_manager
    with manager():
        for tensor in tensors:
            dist.all_reduce(tensor)


def extra_call(bad: bool) -> None:
    if odd(bad):
        dist.all_reduce(ones(3))
    dist.all_reduce(ones(2, 2).sum())
    dist.all_reduce(ones(1, 2))
    if not odd(bad):
        dist.all_reduce(ones(3))


def after_many_good_ones(bad: bool) -> None:
    for _ in range(500):
        dist.all_reduce(ones())
    reduce_op(bad)


def in_a_thread(bad: bool) -> None:
    if rank() == 0:  # no line of the program is on that thread's stack
        sums = threading.Thread(target=dist.all_reduce, args=(ones(),))
        sums.start()
        sums.join(30)
    else:
        dist.all_reduce(ones())
    _in_threads([lambda: reduce_op(bad)])


def _in_threads(calls: Sequence[Callable[[], Any]]) -> None:
    """Run each call in its own thread, and raise the error of one of them."""
    with ThreadPoolExecutor(len(calls)) as threads:
        for future in [threads.submit(call) for call in calls]:
            future.result(30)


def asynchronous(bad: bool) -> None:
    work = dist.all_reduce(ones(), op=dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM, async_op=True)
    work.wait()


def many_in_flight(bad: bool) -> None:
    """More than twice the notes that ranks keep for each other: the fourth is proved by those that come after it."""
    works: list[Any] = []
    for number in range(1100):
        op = dist.ReduceOp.MAX if odd(bad) and number == 3 else dist.ReduceOp.SUM
        works.append(dist.all_reduce(ones(), op=op, async_op=True))
    for work in works:
        work.wait()


def waited_for_in_threads(bad: bool) -> None:
    op = dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM
    works: list[Any] = [dist.all_reduce(ones(), op=op, async_op=True) for _ in range(40)]

    def wait(some: list[Any]) -> None:
        for work in some:
            work.wait()

    _in_threads([partial(wait, works[start::8]) for start in range(8)])


_SIGNAL = "scenario goes on"


def _signal() -> None:
    _store().set(_SIGNAL, "")


def _await_signal() -> None:
    """Wait until another rank of this run has called `_signal`."""
    while not _store().check([_SIGNAL]):
        time.sleep(0.01)
    _store().delete_key(_SIGNAL)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def waited_for_with_a_timeout(bad: bool) -> None:
    """Legal: a rank waits several times with a short limit, and the other one comes only after the first wait."""
    if rank() == 0:
        work: Any = dist.all_reduce(ones(), async_op=True)
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(milliseconds=300))
        _signal()
        while not work.is_completed():
            time.sleep(0.01)
    else:
        _await_signal()
        dist.all_reduce(ones())
    reduce_op(bad)


def through_the_group_object(bad: bool) -> None:
    group: Any = dist.group.WORLD
    op = dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM
    group.allreduce([ones()], op).wait()


def functional(bad: bool) -> None:
    funcol: Any = importlib.import_module("torch.distributed._functional_collectives")
    funcol.all_reduce(ones(), "max" if odd(bad) else "sum", dist.group.WORLD).sum().item()
    dist.barrier()


def compiled(bad: bool) -> None:
    funcol: Any = importlib.import_module("torch.distributed._functional_collectives")

    @torch.compile(backend="eager", fullgraph=True)
    def graph(tensor: torch.Tensor, op: str) -> Any:
        return funcol.all_reduce(tensor, op, dist.group.WORLD) + 1

    graph(ones(), "max" if odd(bad) else "sum").sum().item()
    dist.barrier()


def compiled_with_breaks(bad: bool) -> None:
    """Dynamo runs what it does not take into its graph as it is, between two graphs."""

    @torch.compile(backend="eager")
    def step(tensor: torch.Tensor, op: Any) -> Any:
        work: Any = dist.all_reduce(tensor, op=op, async_op=True)
        work.wait()
        dist.barrier()
        return tensor + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(ones(), dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM)


# -- models -----------------------------------------------------------------------------------------------------------


def ddp_comm_hook(bad: bool) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    op = dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM

    def hook(state: Any, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), op=op, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__.update(
        bucket=torch._C._distributed_c10d.GradBucket, **{"return": torch.futures.Future[torch.Tensor]}
    )
    model.register_comm_hook(None, hook)
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


def ddp_extra_collective(bad: bool) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    if odd(bad):
        dist.all_reduce(ones(20))
    model(torch.ones(2, 4)).sum().backward()
    if not odd(bad):
        dist.all_reduce(ones(20))
    dist.barrier()


def ddp_other_parameters(bad: bool) -> None:
    """Ranks use different parameters of a model: legal if DDP looks for unused parameters."""
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, tensor: torch.Tensor) -> Any:
            return self.layers[0](tensor) if rank() == 1 else self.layers[1](self.layers[0](tensor))

    model = torch.nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=not bad)
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


def ddp_of_uneven_inputs(bad: bool) -> None:
    """`Join`: a rank that has no batches left issues from Python what the others issue in their backward pass and their
    optimizer's step."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for _ in range(2 + rank()):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    reduce_op(bad)


def coalesced_count(bad: bool) -> None:
    manager: Any = dist.distributed_c10d._coalescing_manager
    with manager():
        for _ in range(3 if odd(bad) else 2):
            dist.all_reduce(ones(4))


def fsdp2(bad: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(ones(), op=dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM)


# -- groups -----------------------------------------------------------------------------------------------------------


def wrong_group(bad: bool) -> None:
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(ones(), group=b if odd(bad) else a)


def groups_in_different_order(bad: bool) -> None:
    """Blocking, this is a deadlock; asynchronous, it is legal."""
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    order = (a, b) if rank() == 0 else (b, a)
    works = [dist.all_reduce(ones(), group=group, async_op=not bad) for group in order]
    for work in works:
        if work is not None:
            work.wait()


def subgroup_that_others_do_not_use(bad: bool) -> None:
    pair = dist.new_group([0, 1])
    if rank() < 2:
        dist.all_reduce(ones(), op=dist.ReduceOp.MAX if odd(bad) else dist.ReduceOp.SUM, group=pair)
    dist.barrier()


def one_of_three_differs(bad: bool) -> None:
    reduce_op(bad)


# -- legally different ------------------------------------------------------------------------------------------------


def legally_uneven(bad: bool) -> None:
    """Ranks may differ in what only one of them passes, in sizes of objects, and in the lines of their calls."""
    gathered = [torch.empty(2), torch.empty(2)] if rank() == 0 else None
    dist.gather(ones(2), gathered, dst=0)
    dist.scatter(torch.empty(3), [ones(3), ones(3)] if rank() == 0 else None, src=0)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, "x" * (1 + 100 * rank()))
    dist.broadcast_object_list(objects, src=0)
    dist.all_gather([torch.empty(5), torch.empty(5)], ones(5))
    if rank() == 0:
        dist.all_reduce(ones())
    else:
        dist.all_reduce(ones())
    if odd(bad):
        dist.all_reduce(ones(), op=dist.ReduceOp.MIN)
    else:
        dist.all_reduce(ones())


# -- point-to-point ---------------------------------------------------------------------------------------------------


def message_shape(bad: bool) -> None:
    if rank() == 0:
        dist.send(ones(2, 2), dst=1)
    else:
        dist.recv(torch.empty(8) if bad else torch.empty(4), src=0)


def message_dtype(bad: bool) -> None:
    if rank() == 0:
        work: Any = dist.isend(ones(4), dst=1)
    else:
        work = dist.irecv(torch.empty(4, dtype=torch.int32 if bad else torch.float32), src=0)
    work.wait()


def message_tag(bad: bool) -> None:
    if rank() == 0:
        work: Any = dist.isend(ones(), dst=1, tag=5)
        if not bad:
            work.wait()
        else:
            dist.barrier()
    else:
        dist.recv(ones(), src=0, tag=6 if bad else 5)


def message_bytes(bad: bool) -> None:
    if rank() == 0:
        dist.send(ones(1000 if bad else 4), dst=1)
    else:
        dist.recv(torch.empty(4), src=0)


def message_from_anybody(bad: bool) -> None:
    if rank() == 0:
        dist.send(ones(3), dst=1)
        dist.send(ones(5), dst=1)
    else:
        dist.recv(torch.empty(3))
        dist.recv(torch.empty(5), src=0)
    reduce_op(bad)


def message_between_two_of_three(bad: bool) -> None:
    """The third rank never comes to a group in which the other two only send and receive."""
    if rank() == 0:
        dist.send(ones(3), dst=1)
    elif rank() == 1:
        dist.recv(torch.empty(3), src=0)
    if bad:
        reduce_op(bad)


# -- ranks that are not there -----------------------------------------------------------------------------------------


def returns_early(bad: bool) -> None:
    dist.all_reduce(ones())
    if not odd(bad):
        dist.all_reduce(ones())
    if not bad:
        dist.barrier()


def raises(bad: bool) -> None:
    dist.all_reduce(ones())
    if odd(bad):
        raise ZeroDivisionError("a fault of rank 1 alone")
    dist.all_reduce(ones())


def raises_what_sounds_like_gloo(bad: bool) -> None:
    dist.all_reduce(ones())
    if odd(bad):
        raise RuntimeError("DataLoader timed out after 5 seconds")
    dist.all_reduce(ones())


def killed(bad: bool) -> None:
    dist.all_reduce(ones())
    if odd(bad):
        os._exit(7)
    dist.all_reduce(ones())


def late(bad: bool) -> None:
    """Legal: a rank that is slow, but comes within the timeout. Bad: one that comes when the other has given up."""
    if rank() == 1 and bad:
        _await_signal()
    elif rank() == 1:
        time.sleep(1)
    try:
        dist.all_reduce(ones())
    finally:
        if rank() == 0 and bad:
            _signal()


MISMATCH, MISSING = "CollectiveMismatch", "RankMissing"
DIES = "dies"

SCENARIOS: dict[str, Row] = {
    row.play.__name__: row
    for row in [
        Row(swap_of_equal_signature, MISMATCH, "the label", "MBI CollCallOrder", in_step="the order is swapped"),
        Row(swap_through_one_recursive_line, MISMATCH, "lacks key 'snr_loss'", "the seed"),
        Row(named_by_the_program, MISMATCH, "'snr'", "Horovod tensor names"),
        Row(experts_of_each_rank, MISMATCH, "z_loss", "-"),
        Row(named_on_one_rank, MISMATCH, "the reduce op", "-"),
        Row(shards_of_each_rank, MISMATCH, "the reduce op", "-"),
        Row(operation, MISMATCH, "the operation", "MBI CollCallOrder"),
        Row(barrier_against_collective, MISMATCH, "barrier()", "CorrBench MisplacedCall"),
        Row(reduce_op, MISMATCH, "the reduce op", "MBI CollOpMatching"),
        Row(number_of_dimensions, MISMATCH, "the shape", "CorrBench ArgMismatch-Count"),
        Row(dtype, MISMATCH, "the dtype", "MBI CollDataMatching"),
        Row(shape, MISMATCH, "the shape", "CorrBench ArgMismatch-Count"),
        Row(memory_format, MISMATCH, "the memory format", "-"),
        Row(root, MISMATCH, "the root", "MBI CollRootMatching"),
        Row(pieces, MISMATCH, "the pieces", "Horovod alltoall_splits_error"),
        Row(coalesced, MISMATCH, "the shape", "-"),
        Row(extra_call, MISMATCH, "What differs", "MBI CollCallOrder"),
        Row(after_many_good_ones, MISMATCH, "number 501", "-"),
        Row(in_a_thread, MISMATCH, "the reduce op", "MBI CollLocalConcurrency"),
        Row(asynchronous, MISMATCH, "the reduce op", "CorrBench IBcast"),
        Row(many_in_flight, MISMATCH, "number 4 of this group", "-"),
        Row(waited_for_in_threads, MISMATCH, "the reduce op", "MBI CollLocalConcurrency"),
        Row(waited_for_with_a_timeout, MISMATCH, "the reduce op", "-"),
        Row(through_the_group_object, MISMATCH, "the reduce op", "-"),
        Row(functional, MISMATCH, "the reduce op", "-"),
        Row(compiled, MISMATCH, "the reduce op", "-"),
        Row(compiled_with_breaks, MISMATCH, "the reduce op", "-"),
        Row(ddp_comm_hook, MISMATCH, "the reduce op", "-"),
        Row(ddp_extra_collective, MISMATCH, "What differs", "-"),
        Row(ddp_of_uneven_inputs, MISMATCH, "the reduce op", "-"),
        Row(coalesced_count, MISMATCH, "the number of tensors", "-"),
        Row(ddp_other_parameters, MISMATCH, "the operation", "-"),
        Row(fsdp2, MISMATCH, "the reduce op", "-"),
        Row(wrong_group, MISMATCH, "between groups", "MBI CollComMatching"),
        Row(groups_in_different_order, MISMATCH, "between groups", "MBI CollComMatching"),
        Row(subgroup_that_others_do_not_use, MISMATCH, "the reduce op", "-", ranks=3),
        Row(one_of_three_differs, MISMATCH, "look at rank 1 first", "-", ranks=3),
        Row(legally_uneven, MISMATCH, "the reduce op", "MBI CollCorrect"),
        Row(message_shape, MISMATCH, "the shape", "MBI P2PCallMatching"),
        Row(message_dtype, MISMATCH, "the dtype", "MBI P2PCallMatching"),
        Row(message_bytes, MISMATCH, "the shape", "MBI P2PCallMatching"),
        Row(message_from_anybody, MISMATCH, "the reduce op", "MBI P2PCallMatching"),
        Row(message_between_two_of_three, MISMATCH, "the reduce op", "-", ranks=3),
        Row(message_tag, MISSING, "tag 6", "MBI P2PCallMatching"),
        Row(returns_early, MISSING, "rank 1 skipped a call, or rank 0 made one more", "CorrBench MissingCall"),
        Row(raises, MISSING, "ZeroDivisionError", "CorrBench MissingCall", rank_1="ZeroDivisionError"),
        Row(
            raises_what_sounds_like_gloo,
            MISSING,
            "DataLoader timed out",
            "CorrBench MissingCall",
            rank_1="RuntimeError",
        ),
        Row(killed, MISSING, "the process is gone", "-", rank_1=DIES),
        Row(late, MISSING, "did not take part", "-"),
    ]
}


@dataclass(frozen=True)
class Ending:
    """The error that a scenario ended with on a rank: the name of its class, or "silent".

    ``after_sec``: from the begin of the guard.
    """

    error: str
    message: str
    culprits: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    after_sec: float = 0.0


def play_bare(name: str, bad: bool) -> str:
    """Play a scenario without the guard, for comparison: the error's text, or nothing."""
    try:
        SCENARIOS[name].play(bad)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Faulty programs that end when the limit of a wait is over. In the others a wait is for a rank that does come.
_ENDS_BY_LIMIT = {
    *("functional", "compiled_with_breaks", "ddp_comm_hook", "ddp_extra_collective", "ddp_other_parameters"),
    *("wrong_group", "groups_in_different_order", "message_shape", "message_bytes", "message_tag", "returns_early"),
    *("late", "pieces", "message_dtype"),
}


_ENDS_AT_ONCE = {"killed", "raises", "raises_what_sounds_like_gloo"}  # within a second
LIMIT_SEC, LONG_LIMIT_SEC = 2.0, 20.0
COMPILED_LIMIT_SEC = 8.0  # a wait in a compiled graph is in C++, and nothing but the limit ends it


def latest_sec(name: str) -> float:
    """Return when a faulty scenario must have ended: by its limit, or otherwise long before the limit of the others."""
    if name == "compiled":
        return 2 * COMPILED_LIMIT_SEC + 5.0
    if name in _ENDS_AT_ONCE:
        return 2 * 1.0 + 5.0
    return 2 * LIMIT_SEC + 5.0 if name in _ENDS_BY_LIMIT else 0.75 * LONG_LIMIT_SEC


def probe(name: str, mode: Any, bad: bool, record_dir: str | None = None) -> Ending:
    """Play a scenario under the guard on this rank. The guard must leave nothing behind."""
    limit_sec = LIMIT_SEC if bad and name in _ENDS_BY_LIMIT else LONG_LIMIT_SEC
    limit_sec = COMPILED_LIMIT_SEC if bad and name == "compiled" else limit_sec
    if name.startswith("compiled"):  # to import the compiler takes longer than the limit on a busy machine
        torch.compile(torch.neg, backend="eager")(torch.ones(1))
    began = time.monotonic()
    try:
        with collective_guard(mode, timeout_sec=limit_sec, record_dir=record_dir) as guard:
            SCENARIOS[name].play(bad)
            guard.step()
        ending = Ending("silent", "")
    except Exception as error:
        culprits, missing, events = (
            tuple(getattr(error, name, ())) for name in ("culprit_ranks", "missing_ranks", "by_rank")
        )
        after_sec = time.monotonic() - began
        ending = Ending(type(error).__name__, str(error), culprits, missing, events, after_sec)
    assert not collectives._subscribers, "the guard left something behind"
    assert not [t for t in threading.enumerate() if t.name.startswith("ddpstats-guard")], "a thread is left"
    return ending
