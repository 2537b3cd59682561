"""Rank 0 alone enters the barrier of a project's own module `dist_utils`."""

from myproject.utils import dist_utils


def save(args):
    if args.rank == 0:
        dist_utils.barrier()  # expect: rank-branch
