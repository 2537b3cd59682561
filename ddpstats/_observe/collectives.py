"""The only file that observes the process's collectives; guard, dump and replay subscribe.

torch runs every collective, however it was called (``dist.*``, ``group.allreduce``, DDP's C++ reducer, functional
collectives, DTensor, FSDP, compiled code, any thread), as an operator ``c10d::*``. While somebody is subscribed, each
of these operators has a kernel of ours at the dispatch key BackendSelect, which is tried before the kernels of all
devices and which c10d itself leaves empty, so nothing is overridden and removing ours restores everything. Our kernel

1. reads the arguments into a `Collective` and shows it to the subscribers, who may raise: then nothing has moved;
2. runs the collective: hands the operator on to the kernel of the tensors' device (`kernels`);
3. shows the subscribers the work. `Work.wait` is wrapped, for what has to be settled when the program waits.

To hand an operator's arguments to Python and back costs as much as a small collective. So the one way that matters for
speed, ``dist.all_reduce`` of a plain tensor in host memory, has a door of its own: `_all_reduce` stands in the place of
``ProcessGroup.allreduce``, shows the call, and asks the group's backend, as c10d's own kernel for the CPU would.

The first `subscribe` of a process compares c10d's operators and their arguments with what `operators` knows, and
tries a collective of a group of one: a torch that it would observe by half is refused (``ConfigError``), and where only
the door does not work, all_reduce goes the longer way. Run on gloo, on the versions in docs/compatibility.md; what the
operators of older ones do not tell is noted in `c10d_callers`. The official hooks since torch 2.14
(``ProcessGroup.register_pre_hook``) tell neither reduce op, splits, peer nor tag, so they cannot take the place of
these kernels; they fire below them, and go on working.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddpstats._observe.c10d_callers import CallerNotes, told
from ddpstats._observe.groups import backend_of, group_of_one, operators_tell_reduce_op, unbox_group, unbox_work
from ddpstats._observe.kernels import Kernels, unseen
from ddpstats._observe.operators import (
    HINT,
    HOST,
    OPERATORS,
    Collective,
    Reader,
    arguments_of,
    check_operators,
    lacks_async_op,
    overload,
    reduce_op_name,
    view_of,
)
from ddpstats._observe.torch_compat import (
    dispatch_mode_count,
    hide_from_dynamo,
    keys_of_device,
    next_kernel,
    no_dispatch_no_grad,
    profiler_enabled,
    schema,
)
from ddpstats._ranks.gloo import done_within
from ddpstats.errors import ConfigError


class Subscriber(Protocol):
    """Sees collectives in the thread that issues them."""

    def before(self, call: Collective) -> None:
        """About to run. Whatever this raises, the caller gets, and the collective does not run."""

    def after(self, call: Collective, work: Any) -> None:
        """Issued. May wait for ``work``; that is None for the few operators that return when all is done."""

    def waiting(self, work: Any, limited: bool) -> bool:
        """Some Python code is about to wait for ``work``, under a timeout of its own if ``limited``.

        True: it has been waited for, and must not be once more.
        """


_subscribers: list[Subscriber] = []
_waited: list[tuple[Subscriber, Callable[[Any], None]]] = []
_kernels: Kernels | None = None
_notes: CallerNotes | None = None
_original_wait: Any = None
_original_all_reduce: Any = None
_has_door: bool | None = None  # None: not tried in this process
_lock = threading.Lock()


def subscribe(subscriber: Subscriber, waited: Callable[[Any], None] | None = None) -> None:
    """Show all collectives of this process to ``subscriber`` from now on. Raises ``ConfigError`` on another torch.

    ``waited``: called with each work that Python code has waited for, once that wait has ended well. Who only wants to
    see results needs no wait of its own, and cannot come into conflict with one.
    """
    with _lock:
        if not _subscribers:
            _install()
        _subscribers.append(subscriber)
        if waited is not None:
            _waited.append((subscriber, waited))


def unsubscribe(subscriber: Subscriber) -> None:
    """The last one to leave restores everything. Idempotent."""
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)
            _waited[:] = [entry for entry in _waited if entry[0] is not subscriber]
            if not _subscribers:
                _uninstall()


def is_installed() -> bool:
    return _kernels is not None


# -- installation -----------------------------------------------------------------------------------------------------


def _install() -> None:
    global _kernels, _notes, _original_wait, _has_door
    if not dist.is_available():
        raise ConfigError("this build of torch has no torch.distributed: there are no collectives to observe")
    check_operators()
    known = {name: reader for name, reader in OPERATORS.items() if overload(name) is not None}
    _kernels = Kernels("c10d", "BackendSelect", {name: _kernel(name, reader) for name, reader in known.items()})
    if not operators_tell_reduce_op or any(map(lacks_async_op, known)):
        _notes = CallerNotes()
    _original_wait = vars(dist.Work)["wait"]
    dist.Work.wait = _wait  # type: ignore[method-assign]
    if _has_door is not False:
        _open_door()
    if _has_door is None:
        _try_out()


def _uninstall() -> None:
    global _kernels, _notes
    assert _kernels is not None
    _close_door()
    if _notes is not None:
        _notes.remove()
        _notes = None
    dist.Work.wait = _original_wait  # type: ignore[method-assign]
    _kernels.remove()
    _kernels = None


def _open_door() -> None:
    global _original_all_reduce
    _original_all_reduce = vars(dist.ProcessGroup)["allreduce"]  # the attribute itself, not what it binds to
    dist.ProcessGroup.allreduce = _all_reduce  # type: ignore[method-assign]


def _close_door() -> None:
    global _original_all_reduce
    if _original_all_reduce is not None:
        dist.ProcessGroup.allreduce = _original_all_reduce  # type: ignore[method-assign]
        _original_all_reduce = None


def _try_out() -> None:
    """Whether a collective of a group of one, which is local, is seen: by the kernels, and by the door."""
    global _has_door
    try:
        with group_of_one("ddpstats-probe") as only:
            _has_door = unseen(lambda: _sees(only[0], _AllreduceOptions())) is None
            if not _has_door:
                _close_door()
            why = unseen(lambda: _sees(only[0]))
    except Exception:  # no gloo: nothing to try it on, and nothing in host memory to be quick for
        _close_door()
        _has_door = False
        return
    if why is not None:
        _has_door = None
        _uninstall()
        raise ConfigError(f"torch {torch.__version__} does not show its collectives to the guard ({why}). {HINT}")


def _sees(group: Any, *options: Any) -> bool:
    seen: list[str] = []
    probe = _Probe(seen)
    _subscribers.append(probe)
    try:
        with no_dispatch_no_grad():
            group.allreduce([torch.zeros(1, device="cpu")], *options).wait()
    finally:
        _subscribers.remove(probe)
    by = "sum" if operators_tell_reduce_op or options else None  # without options nobody notes it
    return seen == [f"all_reduce by {by}", "issued", "waited for"]


class _Probe:
    """Sees one collective of this thread begin, and its end waited for."""

    def __init__(self, seen: list[str]) -> None:
        self._seen, self._thread = seen, threading.get_ident()

    def before(self, call: Collective) -> None:
        self._note(f"{call.op} by {call.reduce_op}")

    def after(self, call: Collective, work: Any) -> None:
        self._note("issued")

    def waiting(self, work: Any, limited: bool) -> bool:
        self._note("waited for")
        return False

    def _note(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self._seen.append(what)


def _wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    waited = False
    if not torch.compiler.is_compiling():
        for subscriber in _subscribers:
            waited = subscriber.waiting(self, bool(args or kwargs)) or waited
    result = waited or _original_wait(self, *args, **kwargs)
    if _waited and not torch.compiler.is_compiling():
        for _, listener in tuple(_waited):
            listener(self)
    return result


hide_from_dynamo(_wait)


def wait_once(work: Any, seconds: float) -> None:
    """Wait for a message. Whether it came or not, gloo must not be asked again: a second wait never ends (2.13)."""
    (_original_wait or dist.Work.wait)(work, timedelta(seconds=seconds))


@lru_cache(maxsize=16)
def _timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def wait_within(work: Any, limit: timedelta) -> bool:
    """Wait for a collective; False if it goes on. Raises what the backend raises if it failed."""
    return done_within(work, limit, _original_wait or dist.Work.wait)


# -- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(name: str, reader: Reader) -> Callable[..., Any]:
    redispatch = next_kernel(overload(name))
    names = arguments_of(name)
    group_at = names.index("process_group")
    timeout_at = names.index("timeout") if "timeout" in names else -1
    read = _with_caller(reader, timeout_at) if lacks_async_op(name) else reader
    defaults = [argument.default_value for argument in schema(overload(name)).arguments]

    def kernel(*args: Any) -> Any:
        view = view_of(unbox_group(args[group_at]))
        keys = _keys_of(args[0]) or _keys_of(args[1]) or _CPU
        if view.is_ours:
            return redispatch(keys, *args)
        call = read(*args)
        call.view = view
        for subscriber in _subscribers:
            subscriber.before(call)
        if call.timeout_ms is not None and timeout_at >= 0:
            args = _with_timeout((*args, *defaults[len(args) :]), timeout_at, call.timeout_ms)
        result = redispatch(keys, *args)
        boxed = result[-1] if type(result) is tuple else result
        work = None if boxed is None else unbox_work(boxed)
        for subscriber in _subscribers:
            subscriber.after(call, work)
        return result

    return kernel


def _with_caller(reader: Reader, timeout_at: int) -> Reader:
    """For an operator that has no ``async_op``, which stands before the timeout, or last."""

    def read(*args: Any) -> Collective:
        known = args if timeout_at < 0 else args[:timeout_at]
        return reader(*known, async_op=not told().is_blocking)

    return read


def _with_timeout(args: tuple[Any, ...], at: int, timeout_ms: int) -> tuple[Any, ...]:
    if 0 <= args[at] <= timeout_ms:
        return args
    return (*args[:at], timeout_ms, *args[at + 1 :])


# -- the door for all_reduce ------------------------------------------------------------------------------------------

_AllreduceOptions: Any = getattr(dist, "AllreduceOptions", None)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _all_reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _original_all_reduce.__get__(self)(*args, **kwargs)
    if len(args) != 2 or kwargs or type(args[1]) is not _AllreduceOptions or not _is_plain(args[0]):
        return _original_all_reduce.__get__(self)(*args, **kwargs)
    view = view_of(self)
    if not view.has_host:
        return _original_all_reduce.__get__(self)(*args)
    tensors, options = args
    call = Collective("all_reduce", tensors, tensors)
    call.view, call.reduce_op, call.blocking = view, reduce_op_name(options.reduceOp.op), not options.asyncOp
    for subscriber in _subscribers:
        subscriber.before(call)
    if call.timeout_ms is not None:
        options = _limited(options, _timedelta(call.timeout_ms / 1000))
    work = backend_of(self, HOST).allreduce(tensors, options)
    for subscriber in _subscribers:
        subscriber.after(call, work)
    return work


hide_from_dynamo(_all_reduce)


def _limited(options: Any, limit: timedelta) -> Any:
    """Options with a timeout of at most ``limit``. The caller's own stay as they are; a negative timeout means none."""
    if timedelta(0) <= options.timeout <= limit:
        return options
    limited = _AllreduceOptions()
    limited.reduceOp, limited.asyncOp, limited.timeout = options.reduceOp, options.asyncOp, limit
    return limited


def _is_plain(tensors: Any) -> bool:
    """Whether c10d's kernel for the CPU would get this, and nothing else would see it on its way there."""
    if type(tensors) is not list or len(tensors) != 1 or dispatch_mode_count():
        return False
    tensor = tensors[0]
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not profiler_enabled()
    )


_key_sets: dict[tuple[str, bool], Any] = {}


def _keys_of(given: Any) -> Any:
    """Where the operator goes on, from one of its arguments: a tensor, tensors, or lists of them; None if it has none.

    Who does not receive what is gathered, say, passes no output.
    """
    while type(given) is list or type(given) is tuple:
        if not given:
            return None
        given = given[0]
    if not isinstance(given, torch.Tensor):
        return None
    if given.is_cpu and not given.is_sparse:
        return _CPU
    return _key_set(given.device.type, given.is_sparse)


def _key_set(device: str, is_sparse: bool) -> Any:
    found = _key_sets.get((device, is_sparse))
    if found is None:
        found = _key_sets[device, is_sparse] = keys_of_device(device, is_sparse)
    return found


_CPU = _key_set("cpu", False)
