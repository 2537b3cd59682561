"""Where in the program a collective was called, and the name under which the program reached its tensor.

The worst fault shows in nothing but a key: two ranks run the same line with the same shapes, one of them in the turn
of ``snr_loss``, the other in that of ``l1_loss``. `label_of` looks for that key in the calling frames:

1. A frame counts only where it loops. Loop variables are read off the bytecode, once per code object.
2. A key counts only if this very tensor was reached through it: some container of that frame holds, at a loop variable
   or at the place of a loop variable's value, the tensor itself; or, further out, the container found before. A loop
   over modules, stages or file names reaches no tensor this way and stays out, however different it is between ranks.
3. One step may be missing: a function that rebinds its argument, as espnet's ``obj = (obj * weight).sum()`` does,
   reduces a tensor that no container holds. Then the loop value that its caller passed counts instead.

Reading a frame's variables makes Python (before 3.13) keep a copy of them in the frame, which would keep tensors alive
for longer than the program means to; the copy is emptied at once, and frames that might look at it are left alone.
"""

from __future__ import annotations

import dis
import linecache
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_MAX_FRAMES = 40
_MAX_MISSES = 3  # frames without a key before the first one that has
_MAX_GAP = 2  # and between two that have: a function, and the comprehension in it
_MAX_SCAN = 256  # elements of a list that are looked at for a value whose index the loop does not know
_MAX_LABEL_CHARS = 200
_INTERNAL = (  # other wings stand between the program and torch while they watch it
    "ddpstats.guard", "ddpstats._intercept", "ddpstats.dump", "ddpstats.capture", "ddpstats.sentinel", "torch",
    "typing_extensions",
)  # fmt: skip
# Parts of torch whose collectives no line of the program asks for, whichever thread they run on. (A program may call an
# autograd function of torch's itself.)
_BY_ITSELF = ("torch.autograd", "torch.nn.parallel", "torch.distributed.algorithms", "torch.distributed.fsdp")
_STDLIB = os.path.dirname(os.__file__) + os.sep
_LOOKERS = frozenset({"locals", "vars", "eval", "exec", "dir"})
_COMPREHENSIONS = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
_CO_OPTIMIZED = 0x1
_SNAPSHOTS = sys.version_info < (3, 13)
_OWN_REFERENCES = 4  # the frame's, the caller's variable, the parameter, and `getrefcount`'s own
_KEYS = frozenset({str, int})
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, tuple})


# -- what the bytecode tells, once per code object --------------------------------------------------------------------


@dataclass(frozen=True)
class CodePlan:
    """Static facts about a function, so that most frames need no look at all."""

    code: CodeType
    internal: bool
    by_itself: bool
    loop_names: frozenset[str]
    rebound: frozenset[str]
    names: tuple[str, ...]
    readable: bool
    snapshots: bool


# By id, and the code object kept with it: its own hash goes over all of its constants, at every look.
_plans: dict[int, CodePlan] = {}


def plan_of(frame: FrameType) -> CodePlan:
    """The plan of the frame's code."""
    code = frame.f_code
    plan = _plans.get(id(code))
    if plan is None:
        if len(_plans) > 4096:  # programs that generate code
            _plans.clear()
        plan = _plans[id(code)] = _plan(code, frame.f_globals.get("__name__", ""))
    return plan


def _plan(code: CodeType, module: str) -> CodePlan:
    internal = any(module == name or module.startswith(name + ".") for name in _INTERNAL)
    internal = internal or (code.co_filename.startswith(_STDLIB) and "-packages" not in code.co_filename)
    optimized = bool(code.co_flags & _CO_OPTIMIZED)
    loop_names = frozenset() if internal else frozenset(_loop_names(code))
    parameters = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    stored = {name for step in dis.get_instructions(code) for name in _stored(step)} if not internal else set()
    variables = code.co_varnames + code.co_cellvars + code.co_freevars if optimized else code.co_names
    return CodePlan(
        code=code,
        internal=internal,
        by_itself=module.startswith(_BY_ITSELF) and module != "torch.autograd.function",
        loop_names=loop_names,
        rebound=frozenset(parameters & stored),
        names=tuple(dict.fromkeys(variables)),
        readable=not (_LOOKERS & set(code.co_names)) if optimized else True,
        snapshots=optimized and _SNAPSHOTS,
    )


def _stored(step: dis.Instruction) -> tuple[str, ...]:
    """The variables that an instruction sets."""
    if not step.opname.startswith("STORE_") or step.argval is None:
        return ()
    if isinstance(step.argval, tuple):  # two instructions in one, from Python 3.13
        count = step.opname.count("STORE_FAST")
        return step.argval[:count]
    return (step.argval,) if step.opname in _STORES else ()


_STORES = frozenset({"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"})


def _loop_names(code: CodeType) -> Iterator[str]:
    """The variables that ``for`` sets, in statements and comprehensions."""
    after_for = 0
    for step in dis.get_instructions(code):
        if step.opname == "FOR_ITER":
            after_for = 1
        elif after_for and step.opname.startswith("UNPACK_"):
            after_for += step.argval if isinstance(step.argval, int) else 1
        elif after_for and _stored(step):
            yield from _stored(step)
            after_for -= len(_stored(step))
            after_for = max(after_for, 0)
        elif step.opname not in ("CACHE", "EXTENDED_ARG", "NOP", "RESUME"):
            after_for = 0


# -- call sites -------------------------------------------------------------------------------------------------------


class Site:
    """A line of the user's program; spelled out only when somebody reads it."""

    __slots__ = ("code", "line")

    def __init__(self, code: CodeType, line: int) -> None:
        self.code, self.line = code, line

    def __str__(self) -> str:
        name = getattr(self.code, "co_qualname", self.code.co_name)
        return f"{self.code.co_filename}:{self.line} in {name}"

    def source(self) -> str:
        """The line's text; empty where it is not to be had."""
        return linecache.getline(self.code.co_filename, self.line).strip()


class NoSite:
    """C++ called, and no frame of the user's is on this thread's stack."""

    def __str__(self) -> str:
        return "(called from C++)"

    def source(self) -> str:
        return ""


_NO_SITE = NoSite()


def calling_frame(depth: int) -> tuple[FrameType | None, bool]:
    """The innermost frame of the program's own code, and whether torch calls by itself: from autograd, DDP, C++."""
    frame: FrameType | None = sys._getframe(depth)
    by_torch = False
    while frame is not None:
        plan = _plans.get(id(frame.f_code)) or plan_of(frame)
        if not plan.internal:
            break
        by_torch = by_torch or plan.by_itself
        frame = frame.f_back
    return frame, by_torch or frame is None


def site_of(frame: FrameType | None) -> Site | NoSite:
    return _NO_SITE if frame is None else Site(frame.f_code, frame.f_lineno)


# -- labels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    """How a tensor was reached: ``path`` from the outermost container, and the outermost dict's keys."""

    path: str
    keys: tuple[str, ...]


def label_of(tensor: Any, frame: FrameType | None) -> Reached | None:
    """The key path under which the calling frames reached ``tensor``; None where they did not loop to it."""
    steps: list[Any] = []
    target: Any = tensor
    rebound = False
    misses = 0
    for _ in range(_MAX_FRAMES):
        if frame is None or misses >= (_MAX_GAP if steps else _MAX_MISSES):
            break
        plan = _plans.get(id(frame.f_code)) or plan_of(frame)
        if not plan.internal:
            found = _step_in(frame, plan, target, rebound) if plan.loop_names else None
            if found is not None:
                key, target = found
                steps.append(key)
                rebound, misses = False, 0
            else:
                misses += 1
                rebound = not steps and bool(plan.rebound) and _is_rebound(frame, plan, target)
        frame = frame.f_back
    return Reached(_spell(steps), _some_keys(target)) if steps else None


def _step_in(frame: FrameType, plan: CodePlan, target: Any, rebound: bool) -> tuple[Any, Any] | None:
    """(key, container) of the loop in this frame that reached ``target``."""
    loop, containers = _loop_and_containers(frame, plan)
    if not loop:
        return None
    if frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
        containers += _loop_and_containers(frame.f_back, plan_of(frame.f_back))[1]
    if not rebound:
        return _found_in(containers, loop, target)
    kind = type(target)
    for wanted in [value for value in loop if isinstance(value, kind)]:
        found = _found_in(containers, loop, wanted)
        if found is not None:
            return found
    return None


def _loop_and_containers(frame: FrameType, plan: CodePlan) -> tuple[list[Any], list[Any]]:
    """The values of the loop variables, and the containers among the variables that the code mentions."""
    if not plan.readable:
        return [], []
    variables = frame.f_locals
    loop = [variables[name] for name in plan.loop_names if name in variables]
    if not plan.snapshots:
        mentioned = [variables[name] for name in plan.names if name in variables]
        return loop, [value for value in mentioned if type(value) in _CONTAINERS]
    containers = [value for value in variables.values() if type(value) in _CONTAINERS]
    _give_back(variables)
    return loop, containers


def _found_in(containers: list[Any], loop: list[Any], wanted: Any) -> tuple[Any, Any] | None:
    """(key, container) under which the loop has ``wanted``: at a loop variable, or as the loop variable's value."""
    keys = [value for value in loop if type(value) in _KEYS]
    is_value = False
    for value in loop:
        if value is wanted:
            is_value = True
    if not keys and not is_value:
        return None
    for container in containers:
        key = _key_at(container, keys, wanted, is_value)
        if key is not None:
            return key, container
    return None


def _key_at(container: Any, keys: list[Any], wanted: Any, is_value: bool) -> Any:
    """Under which key ``container`` has ``wanted``; None if it is not there, or not reached by the loop."""
    if isinstance(container, dict):
        for key in keys:
            if container.get(key) is wanted:
                return key
    else:
        for index in keys:
            if type(index) is int and 0 <= index < len(container) and container[index] is wanted:
                return index
    if not is_value or len(container) > _MAX_SCAN:  # a loop over values that does not know the keys itself
        return None
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return next((key for key, value in items if value is wanted and type(key) in _KEYS), None)


def _is_rebound(frame: FrameType, plan: CodePlan, target: Any) -> bool:
    """Whether a parameter of this function was set anew, and is ``target`` now."""
    if not plan.rebound or not plan.readable:
        return False
    variables = frame.f_locals
    found = any(variables.get(name) is target for name in plan.rebound)
    if plan.snapshots:
        _give_back(variables)
    return found


def _give_back(variables: dict[str, Any]) -> None:
    """Empty the copy of a frame's variables, unless somebody else has asked for it before, and holds it."""
    if sys.getrefcount(variables) <= _OWN_REFERENCES:
        variables.clear()


def _spell(steps: list[Any]) -> str:
    text = ""
    for step in reversed(steps):
        text += f"[{step}]" if isinstance(step, int) else (f"/{step}" if text else step)
    return text[:_MAX_LABEL_CHARS]


def _some_keys(container: Any) -> tuple[str, ...]:
    return tuple(str(key) for key in list(container)[:64]) if isinstance(container, dict) else ()
