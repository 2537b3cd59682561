"""The frames of the program's own code: which of them called a collective or an operation, and its line.

Frames between the program and torch (torch's own Python, this package, the standard library) are skipped. A code object
is classified once. This file imports no torch: torch's modules, private ones too, are known here by their names.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

from ddpstats._base.caches import EmptiedCache

_INTERNAL = ("ddpstats", "torch", "typing_extensions")
# Parts of torch whose collectives no line of the program asks for, whichever thread they run on. (A program may call an
# autograd function of torch's itself.)
_BY_ITSELF = (
    "torch.autograd", "torch.nn.parallel", "torch.distributed.algorithms", "torch.distributed.fsdp",
    "torch.distributed.optim",
)  # fmt: skip
# Where a program's own call of a collective arrives, and our doors, for what it calls on the group itself. Functional
# ones return a new tensor, and overwrite none (but for `all_reduce_inplace` and the like).
_FUNCTIONAL_APIS = "torch.distributed._functional_collectives", "torch.distributed.nn.functional", "torch._ops"
_APIS = "torch.distributed.c10d_logger", "torch.distributed.distributed_c10d", "ddpstats.", *_FUNCTIONAL_APIS
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_LAUNCHERS = _PACKAGE, "<frozen runpy", _STDLIB + "runpy.py"
_OF_A_GRAPH = "<eval_with_key>"  # the file of code that torch.fx makes


@dataclass(frozen=True, slots=True)
class CodePlan:
    """The classification of a code object.

    Attributes:
        internal: it is not the program's own.
        by_itself: torch runs it, and no line of the program asks for the collectives in it.
        is_api: a program's own call of a collective goes through it.
        is_functional: it is such a call, and returns a new tensor.
        begins_thread: a Python thread begins with it.
    """

    code: CodeType
    internal: bool
    by_itself: bool
    is_api: bool
    is_functional: bool
    begins_thread: bool


# By id, and the code object kept with it: its own hash goes over all of its constants, at every look.
_plans: EmptiedCache[int, CodePlan] = EmptiedCache(4096)  # programs may generate code


def plan_of(frame: FrameType) -> CodePlan:
    """Return what is known of the frame's code."""
    code = frame.f_code
    return _plans.get(id(code)) or _plans.keep(id(code), _plan(code, frame.f_globals.get("__name__", "")))


def _plan(code: CodeType, module: str) -> CodePlan:
    internal = any(module == name or module.startswith(name + ".") for name in _INTERNAL)
    internal = internal or (code.co_filename.startswith(_STDLIB) and "-packages" not in code.co_filename)
    # Code of no module, which torch has made for `torch.compile` or from a graph.
    directory = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or _OF_A_GRAPH)
    internal = internal or (not module and code.co_filename.startswith((_OF_A_GRAPH, directory + os.sep)))
    by_itself = module.startswith(_BY_ITSELF) and module != "torch.autograd.function"
    is_api, is_functional = module.startswith(_APIS), module.startswith(_FUNCTIONAL_APIS)
    return CodePlan(code, internal, by_itself, is_api, is_functional, module == "threading")


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the first frame of the program's own code from ``frame`` outwards."""
    while frame is not None and (_plans.get(id(frame.f_code)) or plan_of(frame)).internal:
        frame = frame.f_back
    return frame


# -- stacks -----------------------------------------------------------------------------------------------------------

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_step_callers: set[CodeType] = set()


def calls_step(function: FunctionT) -> FunctionT:
    """Decorate a function that calls a step of the program: frames further out are not the step's."""
    _step_callers.add(function.__code__)
    return function


def step_frames() -> Iterator[FrameType]:
    """Yield the program's frames, innermost first, up to the function that calls the step, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _step_callers:
        if not (_plans.get(id(frame.f_code)) or plan_of(frame)).internal:
            yield frame
        frame = frame.f_back


def main_stack(limit: int) -> str:
    """Return the main thread's innermost frames, one or two lines each, without this package's and `runpy`'s."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    entries = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(_LAUNCHERS)]
    return "\n".join(line for entry in entries[-limit:] for line in _lines_of(entry))


def main_position() -> tuple[int, int] | None:
    """Return where the main thread is: the same value while it stays in one call, or comes back to it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


def _lines_of(entry: traceback.FrameSummary) -> list[str]:
    where = f"{entry.filename}:{entry.lineno} in {entry.name}"
    return [where, "   " + entry.line] if entry.line else [where]


# -- call sites -------------------------------------------------------------------------------------------------------


class CallSite:
    """A line of the user's program; becomes text only when it is read.

    Without code: no frame of the user's is on the stack. C++ called, or the collective is the target of a thread.
    """

    __slots__ = ("code", "line")

    def __init__(self, code: CodeType | None, line: int = 0) -> None:
        self.code, self.line = code, line

    def __str__(self) -> str:
        if self.code is None:
            return "(called by no line of the program: from C++, or as the target of a thread)"
        name = getattr(self.code, "co_qualname", self.code.co_name)
        return f"{self.code.co_filename}:{self.line} in {name}"

    def source(self) -> str:
        """Return the line's text; empty where it cannot be read."""
        return "" if self.code is None else linecache.getline(self.code.co_filename, self.line).strip()


_NO_SITE = CallSite(None)


def calling_frame(depth: int) -> tuple[FrameType | None, bool, bool, bool]:
    """Return the innermost frame of the program's own code, and three facts about the call.

    These are whether torch calls by itself (from autograd, DDP, C++); whether that frame calls a collective itself, not
    a function of torch that issues one; and whether that collective is functional.
    """
    frame = sys._getframe(depth - 1).f_back  # None where C++ calls
    by_torch, outermost = False, None
    while frame is not None:
        plan = _plans.get(id(frame.f_code)) or plan_of(frame)
        if not plan.internal:
            return frame, by_torch, outermost is None or outermost.is_api, bool(outermost and outermost.is_functional)
        by_torch, outermost = plan.by_itself or by_torch, plan
        frame = frame.f_back
    is_target = outermost is not None and outermost.begins_thread  # of a thread, that a program may start itself
    return None, by_torch or not is_target, False, False


def site_of(frame: FrameType | None) -> CallSite:
    """Return the call site of a frame of the program."""
    return _NO_SITE if frame is None else CallSite(frame.f_code, frame.f_lineno)
