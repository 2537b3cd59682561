"""Functions for ranks that run the verb itself, in surroundings that differ between them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from ddpstats import cli
from ddpstats.doctor import ranks
from ddpstats.testing import die


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def doctor(*arguments: str, environ: Mapping[str, str] | None = None, cwd: str = ".", path: str = "") -> Ended:
    """``ddpstats doctor``, which makes the process group by itself."""
    dist.destroy_process_group()
    os.environ.update(environ or {})
    os.chdir(cwd)
    if path:
        sys.path.insert(0, path)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["doctor", *arguments])
    return Ended(status, out.getvalue(), err.getvalue())


def doctor_without_rank_1(when: str, *arguments: str) -> Ended:
    """Rank 1 is killed before it comes, or where it would look for the file that rank 0 has made."""
    if dist.get_rank() == 1:
        if when == "at first":
            die()
        vars(ranks)["wait_for"] = lambda condition, limit_sec: die()
    return doctor(*arguments)
