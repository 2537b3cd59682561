"""Which entries of a step a configuration asks for, told as they begin, in execution order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ddpstats.dump._config import DumpConfig


class Selection:
    """Which entries of one step are wanted. One object per step; ask it about every entry, in execution order."""

    def __init__(self, config: DumpConfig) -> None:
        self._scope, self._modes = config.scope, config.data_mode
        self._patterns = [_pattern(name) for name in config.names]
        self._inside = [] if config.level == "L1" else [_pattern(n) for n in config.names if n.startswith("Module.")]
        self._begun, self._ending = config.scope is None, False

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
        if self._ending and name != last and last not in parents:
            self._begun = self._ending = False
        self._begun = self._begun or name == first
        self._ending = self._ending or (self._begun and name == last)
        return self._begun

    def _is_listed(self, name: str, parents: Sequence[str]) -> bool:
        if not self._patterns or any(pattern.search(name) for pattern in self._patterns):
            return True
        return any(pattern.search(parent) for pattern in self._inside for parent in parents)


def matches(name: str, wanted: Iterable[str]) -> bool:
    """Whether ``name`` contains one of ``wanted``, as in ``list`` and ``tensor_list``."""
    return any(_pattern(part).search(name) for part in wanted)


def _pattern(part: str) -> re.Pattern[str]:
    """``part`` anywhere in a name; a number at its end is the whole number: "linear.1" is not in "linear.10"."""
    return re.compile(re.escape(part) + (r"(?!\d)" if part[-1:].isdigit() else ""))


def direction_of(name: str) -> str:
    """ "forward" or "backward"; gradients of parameters belong to "backward"."""
    return "forward" if "forward" in name.split(".")[-2:] else "backward"
