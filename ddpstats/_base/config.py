"""The environment variables (DDPSTATS_*), each read when it is used and never at import, and checks of arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ddpstats.errors import ConfigError

DISABLE = "DDPSTATS_DISABLE"
TIMEOUT_SEC = "DDPSTATS_TIMEOUT_SEC"

DEFAULT_TIMEOUT_SEC = 300.0

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


def is_disabled() -> bool:
    """DDPSTATS_DISABLE=1: nothing of another library is replaced, and nothing begins when ddpstats is imported.

    Explicit calls such as ``reduce_stats`` are not affected: without them the numbers would be one rank's own.
    """
    text = os.environ.get(DISABLE, "").strip().lower()
    if text not in _TRUE | _FALSE:
        raise ConfigError(f"{DISABLE}={text!r} is not understood; legal values: {sorted(_TRUE)} or {sorted(_FALSE)}")
    return text in _TRUE


def choice(variable: str, default: str, legal: Sequence[str]) -> Any:
    """Return what a variable says, which must be ``legal``; ``default`` where it is empty or not set."""
    text = os.environ.get(variable, "").strip() or default
    check_choice(variable, text, legal)
    return text


def has_timeout(argument: float | None) -> bool:
    """Return whether the argument or DDPSTATS_TIMEOUT_SEC sets a timeout."""
    return argument is not None or bool(os.environ.get(TIMEOUT_SEC))


def timeout_sec(argument: float | None) -> float:
    """DDPSTATS_TIMEOUT_SEC: the timeout of one reduction in seconds, unless the argument sets it; 300 by default."""
    value: Any = argument
    if argument is None:
        value = os.environ.get(TIMEOUT_SEC) or DEFAULT_TIMEOUT_SEC
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e7:
        source = TIMEOUT_SEC if argument is None else "timeout_sec"
        raise ConfigError(f"{source}={value!r} must be a number of seconds, above 0 and below 1e7")
    return seconds


def check_choice(name: str, value: object, legal: Sequence[object]) -> None:
    """Raise `ConfigError` for a value that is not ``legal``."""
    if value not in legal:
        raise ConfigError(f"{name}={value!r} is not understood; legal values: {', '.join(map(str, legal))}")


def check_flag(name: str, value: object) -> None:
    """Raise `ConfigError` for a value that is no bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")


def check_count(name: str, value: object, least: int) -> None:
    """Raise `ConfigError` for a value that is no whole number of ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more")
