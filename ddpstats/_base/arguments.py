"""Checks of what a user gave: one text for one mistake, whichever class it was given to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpstats._base.rank_names import holders_lines
from ddpstats.errors import ConfigError


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
