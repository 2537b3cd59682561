"""Checks of what a user gave: one text for one mistake, whichever class it was given to.

Every DDPSTATS_* environment variable: its name, what it means, and its parsing. Read when used, never at import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

from ddpstats._base.text import holders_lines
from ddpstats.errors import ConfigError

# -- arguments ---------------------------------------------------------------------------------------------------------


def check_choice(name: str, value: object, legal: Sequence[object]) -> None:
    """Raises `ConfigError` for what is not one of ``legal``."""
    if value not in legal:
        raise ConfigError(f"{name}={value!r} is not understood; legal values: {', '.join(map(str, legal))}")


def check_flag(name: str, value: object) -> None:
    """Raises `ConfigError` for what is no bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False")


def check_count(name: str, value: object, least: int) -> None:
    """Raises `ConfigError` for what is no whole number of ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more")


def refuse_differences(told: Mapping[int, Mapping[str, Any]], what: str, advice: str) -> None:
    """Raises `ConfigError` where the settings of ranks differ: no verdict could be the same on all of them.

    Args:
        told: each rank's settings, by name; the same names and the same ranks on every rank, so that all raise alike.
        what: is made with these settings.
        advice: the last sentence of the message.
    """
    first = next(iter(told.values()))
    differing = [name for name in first if any(settings[name] != first[name] for settings in told.values())]
    if differing:
        by_rank = {rank: ", ".join(f"{name}={one[name]!r}" for name in differing) for rank, one in told.items()}
        lines = [f"ranks made their {what} with different settings:", *holders_lines(by_rank), advice]
        raise ConfigError("\n".join(lines), ranks=told)


# -- config ------------------------------------------------------------------------------------------------------------

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


def disabled() -> bool:
    """DDPSTATS_DISABLE=1: ``install()`` of every integration leaves its library as it is; DDPSTATS_GUARD is ignored.

    Explicit calls such as ``reduce_stats`` are not affected: without them the numbers would be one rank's own.
    """
    text = os.environ.get(DISABLE, "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(f"{DISABLE}={text!r} is not understood; legal values: {sorted(_TRUE)} or {sorted(_FALSE)}")


def guard_mode() -> GuardMode:
    """DDPSTATS_GUARD: the mode of a guard that begins when ddpstats is imported; "off" where it is not set."""
    text = os.environ.get(GUARD, "").strip() or "off"
    check_choice(GUARD, text, get_args(GuardMode))
    return cast(GuardMode, text)


def record_dir() -> str | None:
    """DDPSTATS_RECORD_DIR: where that guard writes each rank's collectives; None where it is not set."""
    return os.environ.get(RECORD_DIR) or None


def names_timeout(given: float | None) -> bool:
    """Whether the argument or DDPSTATS_TIMEOUT_SEC says how long to wait."""
    return given is not None or bool(os.environ.get(TIMEOUT_SEC))


def timeout_sec(given: float | None) -> float:
    """The timeout of one reduction in seconds: the argument, else DDPSTATS_TIMEOUT_SEC, else 300."""
    source, value = "timeout_sec", given
    if value is None:
        text = os.environ.get(TIMEOUT_SEC, "")
        source = TIMEOUT_SEC
        try:
            value = float(text) if text else DEFAULT_TIMEOUT_SEC
        except ValueError:
            raise ConfigError(f"{TIMEOUT_SEC}={text!r} is not a number of seconds") from None
    try:
        fits = 0 < value < 1e7
    except TypeError:
        fits = False
    if not fits:
        raise ConfigError(f"{source}={value!r} must be a number of seconds, above 0 and below 1e7")
    return float(value)
