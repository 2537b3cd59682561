"""A divergence of replicas names the ranks to blame and the first suspect, hardware or software."""

from __future__ import annotations

import pytest

from ddpstats.sentinel.replicas import Divergence, Element, Split

ONE_BIT = Element((17, 3), {0: "1.0", 1: "1.5"}, {0: 0x3F800000, 1: 0x3FC00000}, 32)
HELD = {0: 11, 1: 11, 2: -7, 3: 11}


@pytest.mark.parametrize(
    ("held", "groups", "majority", "minority"),
    [
        ({}, (), (), ()),
        ({5: 1}, ((5,),), (), ()),
        ({0: 1, 1: 1}, ((0, 1),), (0, 1), ()),
        ({0: 1, 1: 2}, ((0,), (1,)), (), ()),
        ({0: 1, 1: 1, 2: 2}, ((0, 1), (2,)), (0, 1), (2,)),
        ({2: 1, 1: 2, 0: 2}, ((0, 1), (2,)), (0, 1), (2,)),
        ({0: 1, 1: 2, 2: 3}, ((0,), (1,), (2,)), (), ()),
        ({0: 1, 1: 1, 2: 2, 3: 2}, ((0, 1), (2, 3)), (), ()),
        ({0: 3, 1: 1, 2: 2, 3: 1}, ((1, 3), (0,), (2,)), (1, 3), (0, 2)),
    ],
)
def test_the_one_largest_group_of_two_or_more_is_the_majority(
    held: dict[int, int], groups: object, majority: object, minority: object
) -> None:
    split = Split.of(held)
    assert (split.groups, split.majority, split.minority) == (groups, majority, minority)


def test_many_tensors_are_counted_and_point_at_software() -> None:
    others = [("parameter", f"p{index}", HELD) for index in range(5)] + [("gradient", "g", HELD), ("buffer", "b", HELD)]
    divergence = Divergence("parameter", "first", HELD, others, False, ONE_BIT, 200, 256, False)  # type: ignore[arg-type]
    message = divergence.message
    assert "200 of the 256 elements that were compared around it differ, and other blocks differ, too." in message
    assert "Other tensors that differ (7): parameter p0, parameter p1, parameter p2 and 4 more.\n" in message
    assert "More than one element: software first. Look for noise added after the reduce" in message
    assert "`ignore`" in message
    assert "hardware" not in message


def test_a_difference_that_is_gone_at_the_second_look_blames_a_digest() -> None:
    message = Divergence("parameter", "p", HELD).message
    assert (
        "A second comparison found no difference.\nNo other tensor differs.\nSo a digest was computed wrongly"
        in message
    )


def test_many_ranks_are_capped() -> None:
    held = {rank: int(rank % 3 == 0) for rank in range(60)}
    message = Divergence("parameter", "p", held, (), True).message
    assert "ranks 0, 3, 6, 9, 12, 15, 18, 21 and 12 more" in message
