"""The collectives of a dumped step, as entries ``Distributed.{op}.{n}.forward``: what went in, and what came out.

1. Every collective of the process is seen, however it was called, also those of DDP's reducer in a backward pass.
2. Inputs are taken before it runs, for most collectives write over them.
3. Outputs are taken when the program has waited for them. A wait in C++ (DDP's reducer, functional collectives), or
   through a future, is not seen: then they are taken before and after the next call that is recorded, if the work is
   done, see `poll`; those of a backward pass at its end, after DDP has waited.

Nothing here waits, and nothing communicates. A collective that is not done when the step ends has no outputs, and says
``"incomplete": true``; so does one that failed, and one that raised: its entry comes last. Inside a coalescing manager
of NCCL the works of the single messages never say that they are done. Where a signal kills the process, pending
collectives have no entry, for an entry is written when all of it is known: the other ranks' dumps show them.

Each collective has a number in its group (``seq``), a message one among those of its tag between the two ranks, so that
ranks can be matched where an entry is missing. A receive from any rank gets its number when its source is known.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddpstats._observe import collectives
from ddpstats._observe.operators import Collective
from ddpstats._observe.torch_compat import graph_task, queue_callback, source_rank
from ddpstats.dump.msprobe import COLLECTIVE, forward_name
from ddpstats.dump.record.recorder import OpenEntry, Recorder


@dataclass(eq=False)
class _Pending:
    """An issued collective whose outputs are not taken yet. Keeps ``work`` alive, so that its id stays its own."""

    entry: OpenEntry
    outputs: Sequence[Tensor]
    work: Any
    future: Any
    unknown_source: Collective | None = None  # a receive from any rank

    def has_succeeded(self) -> bool | None:
        """Return None while the outputs cannot be read. A work that cannot say so counts as failed.

        A device's future is done when the work is issued, gloo's at its end, a moment before the work says so: DDP
        waits on the future.
        """
        try:
            is_on_host = all(tensor.is_cpu for tensor in self.outputs)
            if not self.work.is_completed() and not (self.future is not None and self.future.done() and is_on_host):
                return None
            if self.future is not None:
                self.future.value()
        except Exception:
            return False
        return True


class CollectiveWatch(collectives.Subscriber):
    """Shows a step's collectives to its recorder, from `start` to `stop`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._issuing: dict[int, tuple[Collective, OpenEntry]] = {}  # by id, and the call kept with it
        self._pending: dict[int, _Pending] = {}
        self._backward = -1  # the last backward pass with a collective in it
        self._is_polling = False

    def start(self) -> None:
        """See collectives from here on. Raises ``ConfigError`` on a torch whose collectives cannot be observed."""
        self._recorder.poll = self.poll
        collectives.subscribe(self)

    def stop(self) -> None:
        """Leave. Outputs of what is done are taken, what is not done gets none. Waits for nothing; idempotent."""
        collectives.unsubscribe(self)
        self.poll()
        with self._recorder.lock:
            unfinished = [entry for _, entry in self._issuing.values()]
            unfinished += [pending.entry for pending in self._pending.values()]
            self.forget()
            for entry in unfinished:
                self._end(entry, None)

    def forget(self) -> None:
        """Drop everything, in a process that was forked from the one that records: its works may not be used here."""
        collectives.unsubscribe(self)
        self._issuing, self._pending = {}, {}

    def poll(self) -> None:
        """Take the outputs of what has completed meanwhile. Cheap where nothing is pending; call it often."""
        if not self._pending:
            return
        with self._recorder.lock:
            if self._is_polling:  # an entry that is written polls: here it is one that this loop has ended
                return
            self._is_polling = True
            try:
                for pending in list(self._pending.values()):
                    has_succeeded = pending.has_succeeded()
                    if has_succeeded is not None:
                        self._take(pending.work, has_succeeded)
            finally:
                self._is_polling = False

    def _take(self, work: Any, has_succeeded: bool) -> None:
        """Take the outputs of ``work``, if that has not been done."""
        pending = self._pending.pop(id(work), None)
        if pending is not None:
            if has_succeeded and pending.unknown_source is not None:
                with self._recorder.safely(pending.entry.name):
                    self._add_source(pending.entry, pending.unknown_source, source_rank(work))
            self._end(pending.entry, pending.outputs if has_succeeded else None)

    def _add_source(self, entry: OpenEntry, call: Collective, source: int) -> None:
        """Add from which rank of its group a message came that was received from any."""
        if 0 <= source < len(call.view.ranks):
            self._describe(entry, {"src": call.view.ranks[source], "seq": self._number(call, source)})

    def _number(self, call: Collective, peer: int | None) -> int:
        message = (call.op, peer, call.tag) if call.operator.is_message else ()
        return self._recorder.next_number((call.view.name, *message))

    def _describe(self, entry: OpenEntry, arguments: dict[str, object]) -> None:
        """Put arguments into an entry, whatever is chosen by ``data_mode``: ranks are matched by them."""
        if entry.is_wanted:
            entry.raw["input_kwargs"].update(self._recorder.leaves_of(entry.name).of(arguments, "input_kwargs"))

    def _end(self, entry: OpenEntry, outputs: Sequence[Tensor] | None) -> None:
        """Write an entry with its outputs; None where they cannot be read."""
        with self._recorder.safely(entry.name):
            if outputs is None:
                entry.raw["incomplete"] = True
            self._recorder.end(entry, list(outputs or ()))

    # -- subscriber of `collectives` -----------------------------------------------------------------------------------

    def before(self, call: Collective) -> None:
        recorder = self._recorder
        with recorder.safely(call.op), recorder.lock:
            base = f"{COLLECTIVE}{call.op}"
            name = forward_name(base, recorder.next_number(base))
            # this polls: a message that has come from any rank gets its number before this one
            entry = recorder.begin(name, list(call.inputs), {})
            arguments = _arguments(call)
            if call.peer is not None or not call.operator.is_message:
                arguments["seq"] = self._number(call, call.peer)
            self._describe(entry, arguments)
            entry.raw["input_kwargs"]["group"] = {
                "type": "torch.ProcessGroup",
                "group_ranks": list(call.view.ranks),
                "group_id": f"{zlib.crc32(call.view.name.encode()):08x}",
            }
            self._issuing[id(call)] = call, entry

    def after(self, call: Collective, work: Any) -> None:
        recorder = self._recorder
        with recorder.safely(call.op), recorder.lock:
            if id(call) not in self._issuing:
                return
            _, entry = self._issuing.pop(id(call))
            if work is None or not call.outputs:
                self._end(entry, call.outputs)
            else:
                unknown = call if call.operator.is_message and call.peer is None else None
                self._pending[id(work)] = _Pending(entry, list(call.outputs), work, _future_of(work), unknown)
                self._poll_after_backward()

    def after_wait(self, work: Any, error: RuntimeError | None) -> None:
        if error is None:
            self._take(work, True)
            self.poll()

    def _poll_after_backward(self) -> None:
        """Poll at the end of the backward pass. DDP asks for its callback after ours, so ours asks once more."""
        task = graph_task()
        if queue_callback is not None and task not in (-1, self._backward):
            self._backward = task
            ask = queue_callback
            ask(lambda: ask(self._backward_ends))

    def _backward_ends(self) -> None:
        """Take what DDP has made the program's stream wait for; another wait costs nothing, and orders our reads."""
        with self._recorder.lock:
            for pending in list(self._pending.values()):
                if pending.future is not None and pending.future.done():
                    with contextlib.suppress(RuntimeError):  # it has failed, which `poll` sees
                        pending.future.wait()
                        self._take(pending.work, True)
            self.poll()


def _future_of(work: Any) -> Any:
    try:
        return work.get_future()
    except RuntimeError:  # messages have none, nor have some backends
        return None


def _arguments(call: Collective) -> dict[str, object]:
    """Return what a collective was called with besides tensors and its group; ranks are global."""
    arguments: dict[str, object] = {}
    if call.reduce_op is not None:
        arguments["op"] = call.reduce_op
    if call.root is not None:
        arguments["dst" if call.operator.to_root else "src"] = call.view.ranks[call.root]
    if call.peer is not None:
        arguments["dst" if "dst" in call.operator.arguments else "src"] = call.view.ranks[call.peer]
    if call.tag is not None:
        arguments["tag"] = call.tag
    return arguments
