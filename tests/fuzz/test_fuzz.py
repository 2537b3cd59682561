"""A moment of `scripts/fuzz.py` on seeds and on what it has found before; and that it finds what is there."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from scripts import fuzz
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS

FOUND = fuzz.ROOT / "tests" / "fuzz" / "found.txt"
CASES = {"wire": 1500, "bundle": 25, "dump": 10, "record": 150, "config": 200}


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[None]:
    yield
    targets.leave()


@pytest.mark.parametrize("name", TARGETS)
def test_what_honest_writers_write_is_read(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_that_nobody_wrote(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.by_chance(name, 120.0, seed=7, most=CASES[name]) == 0, capsys.readouterr().out


def test_what_was_found_once_is_found_no_more() -> None:
    for line in FOUND.read_text().splitlines():
        if line and not line.startswith("#"):
            name, data, *_ = line.split()
            TARGETS[name].run(base64.b64decode(data))


def test_a_fault_is_found_and_printed_as_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(data: bytes) -> None:
        raise RecursionError("too deep")

    monkeypatch.setitem(TARGETS, "config", TARGETS["config"]._replace(run=faulty, seeds=lambda: [b"x seed"]))
    assert fuzz.by_chance("config", 60.0, seed=1, most=3) == 3
    (line, *_) = capsys.readouterr().out.splitlines()
    name, data, *what = line.split()
    assert (name, base64.b64decode(data)[:1], " ".join(what)) == ("config", b"x", "# RecursionError: too deep")
