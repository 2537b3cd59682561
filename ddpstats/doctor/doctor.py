"""``ddpstats doctor``: what differs between the ranks of a job, found before the job runs.

1. Each rank looks at itself (`facts`): versions, libraries, environment, time limits.
2. All ranks meet, and measure what lies between them (`ranks`): store, collectives, clocks, directory.
3. Rank 0 puts side by side what all have told, and marks what differs (`report`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ddpstats._base import config
from ddpstats._base.text import VerbReport
from ddpstats.doctor.report import as_json, as_text, compared

_TIMEOUT_SEC = 120.0


EPILOG = """examples:
  torchrun --nproc-per-node 2 -m ddpstats doctor
  ddpstats doctor --json                      this process alone

exit status: 0 nothing found, 1 something found, 2 it could not run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default=".", help="should be one and the same to all ranks (default: where they run)")
    parser.add_argument(
        "--no-libraries", action="store_true", help="do not try the integrations, which imports their libraries"
    )
    parser.add_argument(
        "--timeout-sec",
        type=float,
        default=_TIMEOUT_SEC,
        metavar="S",
        help=f"how long ranks wait for each other (default: {_TIMEOUT_SEC:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Collective: every rank of the job must call. Only rank 0 prints, and has the exit status.

    Raises:
        RankMissing: a rank did not come, or is gone; on every living rank.
        ConfigError: RANK without the other variables that torchrun sets.
    """
    timeout_sec = config.timeout_sec(args.timeout_sec)
    with _stdout_is_stderr():
        from ddpstats.doctor import facts, ranks  # import torch, which `--help` need not

        directory = Path(args.dir).absolute()
        told = ranks.examine(facts.of_this_rank(directory, not args.no_libraries), directory, timeout_sec)
    if told is None:
        return 0
    rows = compared(told)
    status = int(any(row.is_marked for row in rows))
    return VerbReport(status, lambda: as_text(rows), lambda: as_json(rows), indent=2).show(args.json)


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Libraries write to stdout when they are imported, and so does gloo when it connects (before torch 2.11)."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
