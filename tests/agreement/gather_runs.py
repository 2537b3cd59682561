"""What the ranks of test_gather.py run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ddpstats
from ddpstats._agreement import gather
from ddpstats._agreement.gather import gather_trees


def growing_and_shrinking() -> list[tuple[int, list[int]]]:
    """Per call: collectives, and the number of elements that came from each rank."""
    rank, seen = dist.get_rank(), []
    for size in (1, 2, 1000, 5000, 3, 3, 0, 9000, 9000):
        before = gather._counters.collectives
        trees = gather_trees([torch.arange(size * rank)], name="sizes")
        assert all(torch.equal(tree[0], torch.arange(size * r)) for r, tree in enumerate(trees))
        seen.append((gather._counters.collectives - before, [tree[0].numel() for tree in trees]))
    return seen


def own_tree_comes_back() -> bool:
    mine = {"x": torch.ones(2, requires_grad=True)}
    return gather_trees(mine, name="own")[dist.get_rank()] is mine


def errors_then_success() -> list[str]:
    """What each call raised; a last one that works."""
    rank, found = dist.get_rank(), []

    def attempt(call: Any) -> None:
        try:
            call()
            found.append("fine")
        except ddpstats.DdpstatsError as error:
            found.append(f"{type(error).__name__} {error.ranks} {error.path}: {error}")

    attempt(lambda: gather_trees({"a": [1, object() if rank == 1 else 2]}, name="x"))
    attempt(lambda: gather_trees([torch.empty(0, 2**30, 2**30) if rank == 1 else 2], name="x"))
    attempt(lambda: gather_trees(lambda: 1 / rank, name="x"))
    attempt(lambda: gather_trees(1, name="x" if rank == 0 else "y"))
    attempt(lambda: gather_trees(1, name="x") if rank == 0 else ddpstats.reduce_stats({"a": 1.0}))
    attempt(lambda: gather_trees(1, name="x") if rank == 0 else ddpstats.any_rank(True))
    attempt(lambda: gather_trees({"rank": rank}, name="x"))
    return found


def in_overlapping_groups() -> list[list[int]]:
    """Ranks 0 and 1, then 1 and 2."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    return [gather_trees(rank, name="g", group=group) for i, group in enumerate(groups) if rank in (i, i + 1)]


def buffers_beside_a_gather(apart: bool) -> tuple[list[int], int]:
    """Collectives of each of three gathers, and how many numbers an `any_rank` after them sends more than before."""
    from ddpstats._agreement.channel import channel_of

    ddpstats.any_rank(False)
    agreement = channel_of(None)._agreement
    assert agreement is not None
    before, seen = agreement.buffer.capacity, []
    for size in (300, 300, 100):
        counted = gather._counters.collectives
        trees = gather_trees({"x": torch.arange(size)}, name=f"beside {apart}", dedicated_buffer=apart)
        assert all(len(tree["x"]) == size for tree in trees)
        seen.append(gather._counters.collectives - counted)
    ddpstats.any_rank(False)
    return seen, agreement.buffer.capacity - before
