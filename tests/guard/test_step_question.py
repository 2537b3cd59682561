"""The sum with which mode "step" compares all ranks at once is 0 where they agree, and only there."""

from __future__ import annotations

import random

import pytest

from ddpstats.guard.compare import _SHARES
from ddpstats.guard.event import MASK
from ddpstats.guard.notes import Note, agree, share


def total(name: str, notes: list[Note]) -> int:
    return sum(share(name, index, len(notes), note) for index, note in enumerate(notes)) & MASK


def random_notes(drawn: random.Random) -> list[Note]:
    """Return notes of ranks that agree."""
    size, digest, label = drawn.randint(2, 9), drawn.getrandbits(64), drawn.getrandbits(64)
    balances = [drawn.getrandbits(64) for _ in range(size - 1)]
    return [Note(digest, balance, label) for balance in (*balances, -sum(balances) & MASK)]


def test_shares_cancel_out_exactly_where_ranks_agree() -> None:
    drawn = random.Random(0)
    for number in range(2000):
        notes = random_notes(drawn)
        assert agree(notes)
        assert total("0", notes) == 0
        field = drawn.choice(["digest", "balance", "label"])
        for rank in drawn.sample(range(len(notes)), drawn.randint(1, len(notes) - 1)):
            notes[rank] = notes[rank]._replace(**{field: drawn.getrandbits(64)})
        assert total("0", notes) != 0, number


@pytest.mark.parametrize("digests", [(1, 2), (1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 1, 1, 1, 2), (1, 2, 3, 1, 2, 3)])
def test_differences_of_several_ranks_or_groups_do_not_cancel_out(digests: tuple[int, ...]) -> None:
    assert total("0", [Note(digest) for digest in digests]) != 0
    same, differing = [Note(7)] * len(digests), [Note(digest) for digest in digests]
    assert (total("0", differing) + total("1", differing)) & MASK != 0
    assert (total("0", same) + total("1", differing)) & MASK != 0
    assert (total("0", same) + total("1", same)) & MASK == 0


def test_sum_is_not_zero_where_a_rank_lacks_its_share() -> None:
    assert sum(share("0", index, 3, Note(5)) for index in (0, 2)) & MASK != 0
    assert total("0", [Note(5, balance=1), Note(5, balance=1)]) != 0
    assert (total("0", [Note(5, balance=1), Note(5)]) + total("1", [Note(5, balance=MASK), Note(5)])) & MASK != 0


def test_sums_of_float64_are_exact() -> None:
    drawn = random.Random(0)
    for ranks in (1, 2, 3, 1 << 17):
        shares = [drawn.getrandbits(64) for _ in range(ranks - 1)]
        shares.append(-sum(shares) & MASK)
        assert sum(float(share % _SHARES) for share in shares) % _SHARES == 0
        shares[0] = (shares[0] + 1) & MASK
        assert sum(float(share % _SHARES) for share in shares) % _SHARES == 1
