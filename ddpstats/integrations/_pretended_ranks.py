"""What a function of the user's tree would give on several ranks, without any: for the thread that tries it.

A function that reduces is tried in a process that may have no process group yet, or one of a thousand ranks. Within
`pretended_ranks` the public functions of torch.distributed answer the calling thread as in a group of ``count`` ranks
that all do what this one does: a sum is ``count`` times the value, a mean, minimum or maximum the value itself. That
tells a sum from a mean and from a maximum, and nothing is sent. Other threads get torch's own functions all the time.

So are the names that the function's own module took out of torch.distributed. A helper in a third module that did so
does not meet these: without a group torch refuses it, and in one it may send, on each rank alike.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

_one_at_a_time = threading.Lock()
_pretending: set[int] = set()  # threads

_NOT_TRIED = (
    *("all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group", "recv"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
)


@contextlib.contextmanager
def pretended_ranks(
    count: int, function: Callable[..., Any] | None = None, peers: float | None = None
) -> Iterator[None]:
    """For this thread, a default group of ``count`` ranks that hold the same, of which it is rank 0. Local.

    ``function`` is what is tried. ``peers``: what the other ranks hold in place of its floating values. Raises
    `RuntimeError` in whatever asks for a collective that is none of all_reduce, reduce, all_gather and barrier.
    """

    def reduced(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> None:
        if async_op or op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.BXOR):
            raise RuntimeError(f"reduces with {'async_op=True' if async_op else op}, which is not tried")
        if op == dist.ReduceOp.SUM:
            tensor.add_(theirs(tensor) * (count - 1))

    def gathered(places: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
        for rank, place in enumerate(places):
            place.copy_(theirs(tensor) if rank else tensor)

    def theirs(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if peers is None or not tensor.is_floating_point() else torch.full_like(tensor, peers)

    answers: dict[str, Callable[..., Any]] = {
        "is_initialized": lambda: True,
        "get_world_size": lambda group=None: count,
        "get_rank": lambda group=None: 0,
        "get_backend": lambda group=None: "gloo",
        "barrier": lambda *args, **kwargs: None,
        "all_gather": gathered,
        "all_reduce": reduced,
        "reduce": lambda tensor, dst=None, *args, **kwargs: reduced(tensor, *args, **kwargs),
        **{name: _refusal(name) for name in _NOT_TRIED},
    }
    with _one_at_a_time:
        me = threading.get_ident()
        ours = {getattr(dist, name): _for_thread(me, answer, getattr(dist, name)) for name, answer in answers.items()}
        namespaces = [vars(dist), *([inspect.unwrap(function).__globals__] if function is not None else [])]
        before = [
            (namespace, {name: value for name, value in namespace.items() if _is_among(value, ours)})
            for namespace in namespaces
        ]
        _pretending.add(me)
        try:
            for namespace, originals in before:
                namespace.update({name: ours[original] for name, original in originals.items()})
            yield
        finally:
            _pretending.discard(me)
            for namespace, originals in before:
                namespace.update(originals)


def has_other_ranks() -> bool:
    """Whether this process has a default group of several ranks, and no pretended one."""
    if threading.get_ident() in _pretending:
        return False
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _is_among(value: Any, functions: Mapping[Callable[..., Any], Any]) -> bool:
    return type(value) is FunctionType and value in functions  # isinstance runs code of some of torch's values


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"calls torch.distributed.{name}, which is not tried")

    return refuse


def _for_thread(thread: int, answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (answer if threading.get_ident() == thread else original)(*args, **kwargs)

    return call
