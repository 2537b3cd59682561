"""Rank 0 alone calls a helper of another file, which reduces."""

from .helpers import average


def report(loss, rank):
    if rank == 0:
        average(loss)  # missed: rank-branch
