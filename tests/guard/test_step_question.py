"""The pure parts of the guard's question: what ranks add up, and what they come to a verdict on where it is not 0."""

from __future__ import annotations

import random

import pytest

from ddpstats.guard._comparing import Told, alarms_of
from ddpstats.guard._events import MASK
from ddpstats.guard._exchange import agree, share
from ddpstats.guard._step_question import _chunks, _joined
from ddpstats.guard._store_notes import Note


def total(name: str, notes: list[Note]) -> int:
    return sum(share(name, index, len(notes), note) for index, note in enumerate(notes)) & MASK


def random_notes(drawn: random.Random) -> list[Note]:
    """Of ranks that agree."""
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
        for place in drawn.sample(range(len(notes)), drawn.randint(1, len(notes) - 1)):
            notes[place] = notes[place]._replace(**{field: drawn.getrandbits(64)})
        assert total("0", notes) != 0, number


@pytest.mark.parametrize("digests", [(1, 2), (1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 1, 1, 1, 2), (1, 2, 3, 1, 2, 3)])
def test_differences_do_not_cancel_out_among_each_other(digests: tuple[int, ...]) -> None:
    assert total("0", [Note(digest) for digest in digests]) != 0
    same, other = [Note(7)] * len(digests), [Note(digest) for digest in digests]
    assert (total("0", other) + total("1", other)) & MASK != 0
    assert (total("0", same) + total("1", other)) & MASK != 0
    assert (total("0", same) + total("1", same)) & MASK == 0


def test_a_rank_that_lacks_its_share_shows() -> None:
    assert sum(share("0", index, 3, Note(5)) for index in (0, 2)) & MASK != 0
    assert total("0", [Note(5, balance=1), Note(5, balance=1)]) != 0
    assert (total("0", [Note(5, balance=1), Note(5)]) + total("1", [Note(5, balance=MASK), Note(5)])) & MASK != 0


def test_sums_of_float64_are_exact_modulo_2_to_the_64() -> None:
    drawn = random.Random(0)
    for ranks in (1, 2, 3, 1000):
        numbers = [drawn.getrandbits(64) for _ in range(ranks - 1)]
        numbers.append(-sum(numbers) & MASK)
        assert _joined([float(sum(column)) for column in zip(*map(_chunks, numbers), strict=True)]) == 0
        numbers[0] ^= 1
        assert _joined([float(sum(column)) for column in zip(*map(_chunks, numbers), strict=True)]) in (1, MASK)


def told(name: str, ranks: list[int], seq: int, note: Note) -> Told:
    return {f"{name} of {ranks}": [name, f"group {name}", ranks, seq, *note]}


def test_alarms_are_of_the_groups_that_differ_in_one_order() -> None:
    world, some = [0, 1, 2], [0, 2]
    fine = [told("0", world, 4, Note(9)) for _ in world]
    assert alarms_of(fine) == []
    differs = [*fine[:2], told("0", world, 5, Note(8))]
    (alarm,) = alarms_of(differs)
    assert (alarm.group, alarm.ranks, alarm.seq, alarm.doubt, alarm.until) == ("0", (0, 1, 2), 5, False, False)
    assert alarms_of([*fine[:2], {}])[0].ranks == (0, 1, 2)  # rank 2 has done nothing in it
    (doubt,) = alarms_of([*fine[:2], told("0", world, 4, Note(9, label=1))])
    assert doubt.doubt
    assert not alarms_of([*fine[:2], told("0", world, 4, Note(9, balance=1))])[0].doubt
    both = [
        differs[0] | told("1", some, 2, Note(1)),
        differs[1],
        differs[2] | told("1", some, 2, Note(2)),
    ]
    assert [(one.group, one.ranks) for one in alarms_of(both)] == [("0", (0, 1, 2)), ("1", (0, 2))]
    assert alarms_of(reversed(both)) == alarms_of(both)


def test_groups_of_one_name_with_other_ranks_are_told_apart() -> None:
    mine = [told("1", [0, 1], 3, Note(1)), told("1", [0, 1], 3, Note(1))]
    theirs = [told("1", [2, 3], 8, Note(2)), told("1", [2, 3], 8, Note(2))]
    assert alarms_of([*mine, *theirs]) == []
