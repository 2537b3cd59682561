"""A process group of one process, in which every other rank does and holds what this one does.

1. `echoing` makes it the default group, with the rank and world size of the capture, so that a model that asks for
   them, or makes groups of some ranks, gets the answers it got in the job.
2. A collective is answered at once with this rank's own values: a sum is ``world_size`` times the value, a mean,
   minimum or maximum the value itself, a gathered list the value in every place.
3. It counts the calls: a replay says how many there were, since their results are not those of the job.
4. send and recv are an error: there is no other rank to answer.
5. At the end the group is taken down again, with every group that was made below it.

A group written in Python is registered as torch's own tests do it (``testing/_internal/distributed``): checked on
torch 2.13, where ``Backend.register_backend`` accepts one and ``c10d`` calls the methods that are defined here.
"""

# The stubs spell every overload that torch accepts; these methods take them all.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import collections
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpstats._observe.groups import registered_name
from ddpstats.errors import ConfigError

_BACKEND = "ddpstats_echo"
_SUM, _PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT
_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR)
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

_calls: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def echoing(rank: int, world_size: int) -> Iterator[collections.Counter[str]]:
    """The default group of this process, for a while; yields how often each collective was called.

    The variables that torchrun sets are as they were there, but for LOCAL_RANK: this process is alone on its machine.

    Raises:
        ConfigError: this process has a process group already, or torch is built without c10d.
    """
    if not dist.is_available():
        raise ConfigError("this torch is built without torch.distributed, which a replay needs; install another build")
    if dist.is_initialized():
        raise ConfigError("this process has a process group already; run `ddpstats replay` as a process of its own")
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    hook = sys.excepthook  # torch puts its own there, which writes the rank before each line of a traceback
    with _environment({**variables, "GROUP_RANK": str(rank)}):
        _start(rank, world_size)
        _calls.clear()
        try:
            yield _calls
        finally:
            if dist.is_initialized():  # the user's step may have destroyed it
                dist.destroy_process_group()
            sys.excepthook = hook


def _start(rank: int, world_size: int) -> None:
    try:
        if _BACKEND.upper() not in dist.Backend.__dict__:
            dist.Backend.register_backend(
                _BACKEND, lambda store, rank, size, timeout: EchoGroup(rank, size), devices=["cpu", "cuda"]
            )
        store = dist.HashStore()  # type: ignore[attr-defined]  # exported, but not said to be
        dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=world_size)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"torch {torch.__version__} does not take the process group that stands in for the other ranks: {error}; "
            "checked on torch 2.13"
        ) from error


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _LAUNCH_VARIABLES}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Done(dist.Work):
    """What a collective returns: it is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class EchoGroup(dist.ProcessGroup):
    """See the head of this file. The methods are those that c10d calls, with its arguments."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # the stub lacks this constructor
        self._world_size = world_size

    def size(self) -> int:
        return self._world_size

    def getBackendName(self) -> str:
        return _BACKEND

    @property
    def pg_name(self) -> str:
        return registered_name(self)

    @property
    def group_name(self) -> str:
        return self.pg_name

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank()} of {self._world_size})"

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> Any:
        return self._all_reduced("all_reduce", _listed(tensors), _reduce_op(opts, named))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> Any:
        return self._all_reduced("reduce", _listed(tensors), _reduce_op(opts, named))

    def _all_reduced(self, name: str, tensors: list[torch.Tensor], op: Any) -> Any:
        for tensor in tensors:
            self._reduce_into(tensor, tensor, op)
        return _done(name, tensors)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any, **named: Any) -> Any:
        lists = inputs if isinstance(inputs[0], list) else [inputs]
        for output, parts in zip(_listed(outputs), lists, strict=True):
            self._reduce_into(output, parts[self.rank()], _reduce_op(opts, named))
        return _done("reduce_scatter", outputs)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None, **named: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts, **named)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None, **named: Any) -> Any:
        for output, whole in zip(outputs, inputs, strict=True):
            part = whole.reshape(-1).chunk(self._world_size)[self.rank()].reshape(output.shape)
            self._reduce_into(output, part, _reduce_op(opts, named))
        return _done("reduce_scatter", outputs)

    def _reduce_into(self, output: torch.Tensor, value: torch.Tensor, op: Any) -> None:
        with torch.no_grad():
            if op == _SUM:
                output.copy_(value * self._world_size)
            elif op == _PRODUCT:
                output.copy_(value**self._world_size)
            elif any(op == same for same in _SAME):  # `in` asks the enum's ==, which knows no ReduceOp object
                output.copy_(value)
            else:
                raise ConfigError(f"a replay cannot answer a reduction with {op}: it has one rank only")

    # -- the same for everybody ---------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, *rest: Any, **named: Any) -> Any:
        return _done("broadcast", tensors)

    def barrier(self, *rest: Any, **named: Any) -> Any:
        return _done("barrier", [])

    def allgather(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for places, value in zip(outputs, inputs, strict=True):
            _copy_to_all(places, value)
        return _done("all_gather", outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        for places in outputs:  # one list per rank
            for place, value in zip(places, inputs, strict=True):
                _copy_to_all([place], value)
        return _done("all_gather", outputs)

    def all_gather_single(self, output: Any, input: Any, *rest: Any, **named: Any) -> Any:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        for output, value in zip(outputs, inputs, strict=True):
            _copy_to_all(list(output.reshape(-1).chunk(self._world_size)), value.reshape(-1))
        return _done("all_gather", outputs)

    def gather(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        for places, value in zip(outputs, _listed(inputs), strict=False):  # no outputs where this rank is not the root
            _copy_to_all(places, value)
        return _done("gather", outputs)

    def scatter(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        for output, parts in zip(_listed(outputs), inputs, strict=False):  # elsewhere the output stays as it is
            _copy_to_all([output], parts[self.rank()])
        return _done("scatter", outputs)

    def alltoall(self, outputs: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        _copy_to_all(outputs, inputs[self.rank()])
        return _done("all_to_all", outputs)

    def all_to_all_single(self, output: Any, input: Any, output_sizes: Any = (), input_sizes: Any = (), *_: Any) -> Any:
        given = list(input.split(list(input_sizes)) if input_sizes else input.chunk(self._world_size))
        places = list(output.split(list(output_sizes)) if output_sizes else output.chunk(self._world_size))
        _copy_to_all(places, given[self.rank()])
        return _done("all_to_all", output)

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, *rest: Any, **named: Any) -> Any:
        raise _no_peer("send")

    def recv(self, *rest: Any, **named: Any) -> Any:
        raise _no_peer("recv")

    recv_anysource = recv


def _done(name: str, result: Any) -> _Done:
    _calls[name] += 1
    return _Done(result)


def _no_peer(name: str) -> ConfigError:
    return ConfigError(
        f"the step calls {name}: a replay has one rank only, and nobody to talk to; leave it out of --step"
    )


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _reduce_op(opts: Any, named: dict[str, Any]) -> Any:
    """From an options object (with ``reduceOp``), from ``op=``, or a sum."""
    op = named.get("op", opts)
    op = getattr(named.get("opts", op), "reduceOp", op)
    return _SUM if op is None else op


def _copy_to_all(places: Sequence[torch.Tensor], value: torch.Tensor) -> None:
    """Where the capture's ranks had other sizes, as much as fits: the caller made the room."""
    with torch.no_grad():
        for place in places:
            if place.shape == value.shape:
                place.copy_(value)
            else:
                flat, count = place.reshape(-1) if place.is_contiguous() else place, min(place.numel(), value.numel())
                flat[:count].copy_(value.reshape(-1)[:count])
                flat[count:].zero_()
