"""The example of the documented scenario on a rank, with its log lines kept."""

from __future__ import annotations

import logging

from examples import silent_fault as example
from tests.training import logged


def silent_fault(mode: int) -> tuple[str, list[str], list[str]]:
    """Return what became of the training, all lines, and the warnings and errors among them."""
    with logged(logging.INFO) as lines, logged() as problems:
        return example.train(mode), lines, problems
