"""The example of the documented scenario on a rank, with its log lines kept."""

from __future__ import annotations

from examples import silent_fault as example
from tests.sentinel.sentinel_runs import logged


def silent_fault(mode: int) -> tuple[str, list[tuple[str, str]]]:
    """What became of the training, and (level, text) of what was logged."""
    lines: list[tuple[str, str]] = []
    with logged(lines):
        return example.train(mode), lines
