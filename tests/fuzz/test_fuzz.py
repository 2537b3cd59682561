"""Readers of foreign bytes take honest files, and refuse all others with the error that they document."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from scripts import fuzz
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS

FOUND = fuzz.ROOT / "tests" / "fuzz" / "found.txt"
CASES = {"wire": 1500, "bundle": 25, "dump": 10, "record": 150, "config": 200}
QUICK = [pytest.param(name, marks=[pytest.mark.slow] if name == "dump" else []) for name in TARGETS]


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[None]:
    yield
    targets.leave()


@pytest.mark.parametrize("name", QUICK)
def test_honest_files_are_read(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_changed_bytes_raise_documented_errors_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.by_chance(name, 120.0, seed=7, most=CASES[name]) == 0, capsys.readouterr().out


def test_findings_of_earlier_runs_are_mended() -> None:
    for line in FOUND.read_text().splitlines():
        if line and not line.startswith("#"):
            name, data, *_ = line.split()
            TARGETS[name].run(base64.b64decode(data))


@pytest.mark.slow
def test_finding_is_printed_in_the_form_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def faulty(data: bytes) -> None:
        raise RecursionError("too deep")

    monkeypatch.setitem(TARGETS, "config", TARGETS["config"]._replace(run=faulty, seeds=lambda: [b"x seed"]))
    assert fuzz.by_chance("config", 60.0, seed=1, most=3) == 3
    (line, *_) = capsys.readouterr().out.splitlines()
    name, data, *what = line.split()
    assert (name, base64.b64decode(data)[:1], " ".join(what)) == ("config", b"x", "# RecursionError: too deep")
