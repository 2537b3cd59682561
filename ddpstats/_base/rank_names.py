"""Ranks in messages: global, with the group rank in parentheses where it differs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ddpstats._base.wording import listed

_SHOWN_RANKS = 8


class Rank(int):
    """A global rank that knows its place in the group."""

    group_rank: int

    def __new__(cls, value: int, group_rank: int) -> Rank:
        rank = super().__new__(cls, value)
        rank.group_rank = group_rank
        return rank

    def __reduce__(self) -> tuple[type[Rank], tuple[int, int]]:
        return Rank, (int(self), self.group_rank)

    def __str__(self) -> str:
        return int.__repr__(self) if int(self) == self.group_rank else f"{int(self)} (group rank {self.group_rank})"


def members(global_ranks: Iterable[int]) -> tuple[int, ...]:
    """The global ranks of a group, ascending, each knowing its group rank."""
    return tuple(Rank(rank, place) for place, rank in enumerate(sorted(global_ranks)))


def ranks_text(ranks: Collection[int]) -> str:
    """ "rank 3" or "ranks 0, 1, 2": at most eight are named."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(sorted(ranks), _SHOWN_RANKS)}"


def holders_lines(by_rank: Mapping[int, str]) -> list[str]:
    """One line per distinct thing that ranks hold, in the order in which it first occurs: "  ranks 0, 2: a list"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, what in by_rank.items():
        ranks_of.setdefault(what, []).append(rank)
    return [f"  {ranks_text(ranks)}: {what}" for what, ranks in ranks_of.items()]
