"""Which entries of a step a configuration asks for, told as they begin, in execution order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpstats._base.text import shorten
from ddpstats.dump.config import DumpConfig

_SHOWN = 8


class DumpSelection:
    """Which entries of one step are wanted. One object per step; ask it about every entry, in execution order."""

    def __init__(self, config: DumpConfig) -> None:
        self._scope, self._modes = config.scope, config.data_mode
        self._patterns = [pattern_of(name) for name in config.names]
        self._inside = [] if config.level == "L1" else [pattern_of(n) for n in config.names if n.startswith("Module.")]
        self._begun, self._ending = config.scope is None, False
        self._names = config.names
        self._unmatched = set(range(len(config.names)))
        self._found: set[str] = set()  # of the scope's two names

    def wants(self, name: str, parents: Sequence[str]) -> bool:
        """Whether to collect ``name``, which runs inside the modules ``parents``.

        Asked of every entry as it begins, wanted or not: a scope opens with one name and closes with another. What
        runs inside the module that closes the scope still belongs to it.
        """
        return self._in_scope(name, parents) and direction_of(name) in self._modes and self._is_listed(name, parents)

    def _in_scope(self, name: str, parents: Sequence[str]) -> bool:
        if self._scope is None:
            return True
        first, last = self._scope
        if name in self._scope and (name == first or self._begun):
            self._found.add(name)
        if self._ending and name != last and last not in parents:
            self._begun = self._ending = False
        self._begun = self._begun or name == first
        self._ending = self._ending or (self._begun and name == last)
        return self._begun

    def _is_listed(self, name: str, parents: Sequence[str]) -> bool:
        if not self._patterns:
            return True
        matched = {place for place, pattern in enumerate(self._patterns) if pattern.search(name)}
        self._unmatched -= matched
        return bool(matched) or any(pattern.search(parent) for pattern in self._inside for parent in parents)

    def problems(self) -> list[str]:
        """What was chosen, and did not come in this step, in a sentence each: a name may be misspelt."""
        found = []
        if self._scope is not None:
            first, last = self._scope
            if first not in self._found:
                found.append(f"scope begins with {first}, which did not come: nothing was collected")
            elif last not in self._found:
                found.append(f"scope ends with {last}, which did not come after {first}: all that came was collected")
        missing = [self._names[place] for place in sorted(self._unmatched)]
        if missing and (self._scope is None or self._found):
            names = shorten(missing, _SHOWN, ", ...")
            found.append(f"list has {names}, which is in no name that came and that scope and data_mode choose")
        return found


def pattern_of(part: str) -> re.Pattern[str]:
    """``part`` anywhere in a name; a number at its end is the whole number: "linear.1" is not in "linear.10"."""
    return re.compile(re.escape(part) + (r"(?!\d)" if part[-1:].isdigit() else ""))


def direction_of(name: str) -> str:
    """ "forward" or "backward"; gradients of parameters belong to "backward"."""
    return "forward" if "forward" in name.split(".")[-2:] else "backward"
