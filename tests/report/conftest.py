"""A browser for the page's tests, and the verb as a function."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from ddpstats import cli
from tests.report.browser import Browser, browser


class Report(Protocol):
    """Run ``ddpstats report ARGUMENTS``, check its exit status, and return what it printed."""

    def __call__(self, *arguments: str | Path, status: int) -> str: ...


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    def run(*arguments: str | Path, status: int) -> str:
        ended = cli.main(["report", *map(str, arguments)])
        printed = "".join(capsys.readouterr())
        assert ended == status, printed
        return printed

    return run


@pytest.fixture(scope="package")
def shared_chromium() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as directory, browser(Path(directory)) as started:
        yield started


@pytest.fixture
def chromium(shared_chromium: Browser) -> Iterator[Browser]:
    """Yield a browser. A test fails where its page writes an error to the console or asks for any other address."""
    yield shared_chromium
    assert shared_chromium.problems == []
    assert [url for url in shared_chromium.requests if not url.startswith("file:///")] == []
