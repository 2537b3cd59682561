"""``ddpstats doctor``: what differs between the ranks of a job, found before the job runs.

1. Each rank looks at itself (`facts`): versions, libraries, environment.
2. All ranks meet, and measure what lies between them (`ranks`): store, collectives, clocks, directory.
3. Rank 0 compares what all ranks report, and marks what differs (`report`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ddpstats._base import config
from ddpstats._base.text import VerbReport, stdout_to_stderr
from ddpstats.doctor.report import as_text, compare

_TIMEOUT_SEC = 120.0

EPILOG = """examples:
  torchrun --nproc-per-node 2 -m ddpstats doctor
  ddpstats doctor --json                      this process alone

exit status: 0 nothing found, 1 something found, 2 it could not run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("--dir", default=".", help="should be one and the same to all ranks (default: where they run)")
    waiting = f"how long ranks wait for each other (default: {_TIMEOUT_SEC:g})"
    parser.add_argument("--timeout-sec", type=float, default=_TIMEOUT_SEC, metavar="S", help=waiting)


def run(args: argparse.Namespace) -> int:
    """Collective: every rank of the job must call. Only rank 0 prints, and has the exit status.

    Raises:
        RankMissing: a rank did not come, or is gone; on every living rank.
        ConfigError: RANK without the other variables that torchrun sets.
    """
    timeout_sec = config.timeout_sec(args.timeout_sec)
    with stdout_to_stderr():
        from ddpstats.doctor import facts, ranks  # import torch, which `--help` need not

        directory = Path(args.dir).absolute()
        by_rank = ranks.examine(facts.facts_of_this_rank(directory), directory, timeout_sec)
    if by_rank is None:
        return 0
    report = compare(by_rank)
    status = int(bool(report["differences"]))
    return VerbReport(status, lambda: as_text(report), lambda: report, indent=2).show(args.json)
