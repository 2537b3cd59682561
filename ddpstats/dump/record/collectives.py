"""The collectives of a dumped step, as entries ``Distributed.{op}.{n}.forward``: what went in, and what came out.

1. Every collective of the process is seen, however it was called, also those of DDP's reducer in a backward pass.
2. Inputs are taken before it runs, for most collectives write over them.
3. Outputs are taken when the program has waited for them. A wait in C++ (DDP's reducer, functional collectives) is not
   seen: then they are taken at the first opportunity after the work is done, see `poll`; those of a backward pass at
   its end, after DDP has waited.

Nothing here waits, and nothing communicates. A collective that is not done when the step ends has no outputs, and says
``"incomplete": true``; so does one that failed, and one that raised: its entry comes last. Inside a coalescing manager
of NCCL the works of the single messages never say that they are done. Where a signal kills the process, pending
collectives have no entry, for an entry is written when all of it is known: the other ranks' dumps show them.

Each collective has a number in its group (``seq``), a message one between the two ranks, so that ranks can be matched
where an entry is missing.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddpstats._observe import collectives
from ddpstats._observe.operators import Collective
from ddpstats._observe.torch_compat import graph_task, queue_callback
from ddpstats.dump.record.recorder import OpenEntry, Recorder


@dataclass(eq=False)
class _Pending:
    """An issued collective whose outputs are not taken yet. Keeps ``work`` alive, so that its id stays its own."""

    work: Any
    entry: OpenEntry
    outputs: Sequence[Tensor]
    future: Any
    is_broken: bool = False

    def is_done(self) -> bool:
        """Return whether the outputs can be read. A device's future is done when the work is issued, gloo's at its end.

        gloo completes the future, on which DDP waits, a moment before the work says that it is completed.
        """
        if self.work.is_completed():
            return True
        return self.future is not None and self.future.done() and all(tensor.is_cpu for tensor in self.outputs)

    def has_failed(self) -> bool:
        if self.is_broken:
            return True
        try:
            if self.future is not None:
                self.future.value()
        except RuntimeError:
            return True
        return False


class CollectiveWatch:
    """Shows a step's collectives to its recorder, from `start` to `stop`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._issuing: dict[int, OpenEntry] = {}  # of collectives that are just being issued
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.RLock()
        self._backward = -1  # the last backward pass with a collective in it

    def start(self) -> None:
        """Raises ``ConfigError`` on a torch whose collectives cannot be observed."""
        self._recorder.poll = self.poll
        collectives.subscribe(self, self._has_waited)

    def stop(self) -> None:
        """Leave. Outputs of what is done are taken, what is not done gets none. Waits for nothing; idempotent."""
        collectives.unsubscribe(self)
        self.poll()
        with self._lock:
            left = [*self._issuing.values(), *(pending.entry for pending in self._pending.values())]
            self._issuing, self._pending = {}, {}
        for entry in left:
            self._end(entry, (), is_incomplete=True)

    def forget(self) -> None:
        """Drop everything, in a process that was forked from the one that collects: its works may not be used here."""
        self._lock = threading.RLock()  # another thread may have held it
        collectives.unsubscribe(self)
        self._issuing, self._pending = {}, {}

    def poll(self) -> None:
        """Take the outputs of what has completed meanwhile. Cheap where nothing is pending; call it often."""
        if not self._pending:
            return
        with self._lock:
            done = [key for key, pending in self._pending.items() if self._is_done(pending)]
            ended = [self._pending.pop(key) for key in done]
        for pending in ended:
            self._take(pending)

    def _is_done(self, pending: _Pending) -> bool:
        """Return whether it is done. A work that cannot say so counts as failed; the program goes on."""
        try:
            return pending.is_done()
        except Exception as error:
            self._recorder.note_error("whether a collective is done", error)
            pending.is_broken = True
            return True

    # -- subscriber of `collectives` -----------------------------------------------------------------------------------

    def before(self, call: Collective) -> None:
        entry = None
        try:
            self.poll()
            of_group: tuple[object, ...] = (
                (call.view.name, call.op, call.peer) if call.operator.is_message else (call.view.name,)
            )
            with self._lock:
                number = self._recorder.number(of_group)
            about = described(call) | {"seq": _int(number)}
            entry = self._recorder.collective_begins(call.op, list(call.inputs), about)
        except Exception as error:  # what is raised here would stop the collective
            self._recorder.note_error(call.op, error)
        with self._lock:
            raised = self._issuing.pop(id(call), None)  # of one that never came to `after`, and is no more
            if entry is not None:
                self._issuing[id(call)] = entry
        if raised is not None:
            self._end(raised, (), is_incomplete=True)

    def after(self, call: Collective, work: Any) -> None:
        try:
            with self._lock:
                entry = self._issuing.pop(id(call), None)
            self.poll()
            if entry is not None and (work is None or not call.outputs):
                self._end(entry, call.outputs)
            elif entry is not None:
                with self._lock:
                    self._pending[id(work)] = _Pending(work, entry, list(call.outputs), _future_of(work))
                self._poll_after_backward()
        except Exception as error:  # what is raised here would look like the collective's fault
            self._recorder.note_error(call.op, error)

    def waiting(self, work: Any, limited: bool) -> bool:
        return False

    def _has_waited(self, work: Any, error: RuntimeError | None) -> None:
        if error is not None:
            return
        with self._lock:
            pending = self._pending.pop(id(work), None)
        if pending is not None:
            self._end(pending.entry, pending.outputs)
        self.poll()

    def _poll_after_backward(self) -> None:
        """Poll at the end of the backward pass. DDP asks for its callback after ours, so ours asks once more."""
        task = graph_task()
        if queue_callback is not None and task not in (-1, self._backward):
            self._backward = task
            ask = queue_callback
            ask(lambda: ask(self._backward_ends))

    def _backward_ends(self) -> None:
        try:
            self._take_waited()
            self.poll()
        except Exception as error:  # what is raised here would end the program's backward pass
            self._recorder.note_error("collectives of a backward pass", error)

    def _take_waited(self) -> None:
        """Take what DDP has made the program's stream wait for; another wait costs nothing, and orders our reads."""
        with self._lock:
            pending = list(self._pending.items())
        for key, one in pending:
            if one.future is not None and one.future.done() and not all(tensor.is_cpu for tensor in one.outputs):
                one.future.wait()
                with self._lock:
                    self._pending.pop(key, None)
                self._take(one)

    def _take(self, pending: _Pending) -> None:
        has_failed = pending.has_failed()
        self._end(pending.entry, () if has_failed else pending.outputs, is_incomplete=has_failed)

    def _end(self, entry: OpenEntry, outputs: Sequence[Tensor], *, is_incomplete: bool = False) -> None:
        try:
            self._recorder.collective_ends(entry, list(outputs), is_incomplete=is_incomplete)
        except Exception as error:
            self._recorder.note_error("a collective's outputs", error)


def _future_of(work: Any) -> Any:
    try:
        return work.get_future()
    except RuntimeError:  # messages have none, nor have some backends
        return None


def described(call: Collective) -> dict[str, object]:
    """Return what a collective's entry has among its ``input_kwargs``; ranks are global."""
    group = {
        "type": "torch.ProcessGroup",
        "group_ranks": list(call.view.ranks),
        "group_id": f"{zlib.crc32(call.view.name.encode()):08x}",
    }
    found: dict[str, object] = {"group": group}
    if call.reduce_op is not None:
        found["op"] = {"type": "str", "value": call.reduce_op}
    if call.root is not None:
        found["dst" if call.operator.to_root else "src"] = _int(call.view.ranks[call.root])
    if call.peer is not None:
        found["dst" if "dst" in call.operator.arguments else "src"] = _int(call.view.ranks[call.peer])
    if call.tag is not None:
        found["tag"] = _int(call.tag)
    return found


def _int(value: int) -> dict[str, object]:
    return {"type": "int", "value": value}
