"""Variables and arguments that cannot work are refused with their name, value and legal values."""

from __future__ import annotations

from typing import Any

import pytest

from ddpstats._base import config
from ddpstats._base.config import check_choice, check_count, check_flag
from ddpstats.errors import ConfigError


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "1e9"])
def test_timeout_that_is_no_number_of_seconds_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPSTATS_TIMEOUT_SEC", text)
    with pytest.raises(ConfigError, match=rf"^DDPSTATS_TIMEOUT_SEC='{text}' must be a number of seconds, above 0"):
        config.timeout_sec(None)
    with pytest.raises(ConfigError, match=r"^timeout_sec=\[1\] must be a number of seconds"):
        config.timeout_sec([1])  # type: ignore[arg-type]


def test_timeout_comes_from_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (config.timeout_sec(None), config.has_timeout(None)) == (300.0, False)
    monkeypatch.setenv("DDPSTATS_TIMEOUT_SEC", "7.5")
    assert (config.timeout_sec(None), config.has_timeout(None)) == (7.5, True)
    assert config.timeout_sec(2) == 2.0


def test_switch_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_disabled in (("1", True), (" Yes ", True), ("off", False), ("", False)):
        monkeypatch.setenv("DDPSTATS_DISABLE", text)
        assert config.is_disabled() is is_disabled
    monkeypatch.setenv("DDPSTATS_DISABLE", "perhaps")
    with pytest.raises(ConfigError, match=r"DDPSTATS_DISABLE='perhaps'.*'1'"):
        config.is_disabled()


def test_choice_comes_from_the_variable_unless_that_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, chosen in (("step", "step"), (" step ", "step"), ("", "off"), ("  ", "off")):
        monkeypatch.setenv("DDPSTATS_GUARD", text)
        assert config.choice("DDPSTATS_GUARD", "off", ("step", "off")) == chosen
    monkeypatch.setenv("DDPSTATS_GUARD", "on")
    with pytest.raises(ConfigError, match=r"^DDPSTATS_GUARD='on' is not understood; legal values: step, off$"):
        config.choice("DDPSTATS_GUARD", "off", ("step", "off"))


@pytest.mark.parametrize("value", [0, True, 1.0, "1", None])
def test_count_that_is_no_whole_number_from_the_least_on_is_refused(value: Any) -> None:
    check_count("keep", 1, 1)
    with pytest.raises(ConfigError, match=rf"^keep={value!r} must be a whole number, 1 or more$"):
        check_count("keep", value, 1)


@pytest.mark.parametrize("value", [0, 1, "True", None])
def test_flag_that_is_no_bool_is_refused(value: Any) -> None:
    check_flag("per_rank", False)
    with pytest.raises(ConfigError, match=rf"^per_rank={value!r} must be True or False$"):
        check_flag("per_rank", value)


def test_choice_that_is_not_legal_is_refused_with_the_legal_values() -> None:
    check_choice("mode", "step", ("step", "off"))
    with pytest.raises(ConfigError, match=r"^mode='on' is not understood; legal values: step, off$"):
        check_choice("mode", "on", ("step", "off"))
