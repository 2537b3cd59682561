"""The environment variables (DDPSTATS_*), each read when it is used and never at import, and checks of arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from ddpstats.errors import ConfigError

DISABLE = "DDPSTATS_DISABLE"
TIMEOUT_SEC = "DDPSTATS_TIMEOUT_SEC"
GUARD = "DDPSTATS_GUARD"
RECORD_DIR = "DDPSTATS_RECORD_DIR"
SENTINEL_MODE = "DDPSTATS_SENTINEL_MODE"
SENTINEL_UPPER_THRESH = "DDPSTATS_SENTINEL_UPPER_THRESH"
SENTINEL_SIGMA_THRESH = "DDPSTATS_SENTINEL_SIGMA_THRESH"

GuardMode = Literal["strict", "step", "record", "off"]

DEFAULT_TIMEOUT_SEC = 300.0

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


def is_disabled() -> bool:
    """DDPSTATS_DISABLE=1: ``install()`` of every integration leaves its library as it is; DDPSTATS_GUARD is ignored.

    Explicit calls such as ``reduce_stats`` are not affected: without them the numbers would be one rank's own.
    """
    text = os.environ.get(DISABLE, "").strip().lower()
    if text not in _TRUE | _FALSE:
        raise ConfigError(f"{DISABLE}={text!r} is not understood; legal values: {sorted(_TRUE)} or {sorted(_FALSE)}")
    return text in _TRUE


def guard_mode() -> GuardMode:
    """DDPSTATS_GUARD: the mode of a guard that begins when ddpstats is imported; "off" by default."""
    text = os.environ.get(GUARD, "").strip() or "off"
    check_choice(GUARD, text, get_args(GuardMode))
    return cast(GuardMode, text)


def record_dir() -> str | None:
    """DDPSTATS_RECORD_DIR: where that guard writes each rank's collectives; None by default."""
    return os.environ.get(RECORD_DIR) or None


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
