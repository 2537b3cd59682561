"""Rank 0 alone calls a reducer object."""

import ddpstats

reducer = ddpstats.StatsReducer()


def f(rank, stats):
    if rank == 0:
        reducer(stats)  # expect: rank-branch
