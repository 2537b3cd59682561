"""The verbs that read dumps, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from ddpstats.cli import main


def run_verb(*words: object) -> tuple[int, str]:
    """Return the exit status of ``ddpstats WORDS``, and all that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main([*map(str, words)])
    return status, printed.getvalue()


def run_json(*words: object) -> tuple[int, dict[str, Any]]:
    """Return the exit status of ``ddpstats WORDS --json``, and the document; NaN and infinity are no JSON."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    status, printed = run_verb(*words, "--json")
    document = json.loads(printed, parse_constant=refuse)
    assert isinstance(document, dict)
    return status, document


def compare(*words: object) -> tuple[int, str]:
    return run_verb("compare", *words)


def compare_json(*words: object) -> tuple[int, dict[str, Any]]:
    return run_json("compare", *words)
