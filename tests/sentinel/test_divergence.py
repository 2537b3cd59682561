"""A divergence of replicas names the ranks to blame and the first suspect, hardware or software."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import pytest

from ddpstats.sentinel.replicas import Divergence, Element, Split


def float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def element_of(values: Mapping[int, float], index: tuple[int, ...] = (17, 3)) -> Element:
    return Element(
        index,
        {rank: repr(value) for rank, value in values.items()},
        {rank: float32_bits(value) for rank, value in values.items()},
        32,
    )


ONE_BIT = element_of({0: 1.0, 1: 1.0, 2: 1.5, 3: 1.0})
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


def test_one_flipped_bit_is_named_and_the_hardware_suspected() -> None:
    one = Divergence(
        "parameter",
        "layers.3.weight",
        HELD,
        element=ONE_BIT,
        differing_elements=1,
        block_elements=256,
        alone=True,
        described="float32 [64, 8]",
    )
    assert one.message.splitlines() == [
        "replicas differ, first in parameter layers.3.weight (float32 [64, 8]): rank 2 against ranks 0, 1, 3.",
        "First element [17, 3]:",
        "  ranks 0, 1, 3: 1.0  0x3f800000",
        "  rank 2: 1.5  0x3fc00000",
        "  They differ in bit 22.",
        "No other element of this tensor differs.",
        "No other tensor differs.",
        "One flipped bit: the hardware of rank 2 is the first suspect.",
    ]
    assert one.culprit_ranks == (2,)
    assert one.element is ONE_BIT
    assert ONE_BIT.flipped == (22,)


def test_many_tensors_are_counted_and_point_at_software() -> None:
    others = [("parameter", f"p{place}", HELD) for place in range(5)] + [("gradient", "g", HELD), ("buffer", "b", HELD)]
    one = Divergence("parameter", "first", HELD, others, False, ONE_BIT, 200, 256, False)  # type: ignore[arg-type]
    assert "200 of the 256 elements that were compared around it differ, and other blocks differ, too." in one.message
    assert "Other tensors that differ (7): parameter p0, parameter p1, parameter p2 and 4 more.\n" in one.message
    assert "More than one element: software first. Look for noise added after the reduce" in one.message
    assert "`ignore`" in one.message
    assert "hardware" not in one.message


def test_a_gradient_on_some_ranks_only_points_at_the_loop() -> None:
    held = {0: "float32 [3]", 1: "none"}
    message = Divergence("gradient", "p", held, structural=True).message
    assert "look for a backward pass, zero_grad() or a frozen parameter on some ranks only" in message


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
