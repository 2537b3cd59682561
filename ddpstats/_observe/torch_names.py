"""Looks for torch's private names: what is there, what is used otherwise, and what is lost where one is missing.

`torch_compat` and `torch_groups` look for theirs when they are imported; versions are never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch

from ddpstats.errors import ConfigError

_lacking: dict[str, str] = {}


def lacking() -> dict[str, str]:
    """Private name that this torch does not have -> what is lost without it."""
    return dict(_lacking)


def note_lack(name: str, lost: str) -> None:
    """This torch does not have ``name``, and ``lost`` is what that costs."""
    _lacking[name] = lost


def find(path: str, lost: str, otherwise: Any = None) -> Any:
    """What torch has at ``path``; ``otherwise`` where there is no such thing, and ``lost`` is what that costs."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            note_lack(f"torch.{path}", lost)
            return otherwise
    return found


def attribute(kind: str, name: str, lost: str, otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Reads attribute ``name`` of objects of a class of torch's; ``otherwise`` where that class has none."""
    return otherwise if find(f"{kind}.{name}", lost) is None else attrgetter(name)


def refuse(what: str) -> NoReturn:
    raise ConfigError(f"torch {torch.__version__} cannot do what ddpstats needs here: {what}")
